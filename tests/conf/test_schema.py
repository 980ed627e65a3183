"""Feature specs survive JSON, refuse what is outside the contract, and have a fingerprint."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.errors import InputDataError
from conf.schema import FeatureSchema, FeatureSpec

specs = st.builds(
    FeatureSpec,
    name=st.text(min_size=1, max_size=8),
    dtype=st.sampled_from(["int64", "float32", "bytes"]),
    role=st.sampled_from(["user", "item", "context", "label", "weight", "id"]),
    shape=st.sampled_from([(), (None,), (3,)]),
    max_len=st.none() | st.integers(1, 100),
    vocabulary_size=st.none() | st.integers(2, 2**40),
    shared_embedding=st.none() | st.text(max_size=5),
    pad_value=st.none() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
)


@given(st.lists(specs, max_size=5))
def test_schema_survives_json(features):
    schema = FeatureSchema(tuple(features))
    text = json.dumps(schema.to_json())
    copy = FeatureSchema.from_json(json.loads(text))
    assert copy == schema
    assert copy.fingerprint == schema.fingerprint


def test_fingerprint_changes_with_any_part():
    base = FeatureSpec("a", "int64", "user")
    changed = [
        FeatureSpec("b", "int64", "user"),
        FeatureSpec("a", "float32", "user"),
        FeatureSpec("a", "int64", "item"),
        FeatureSpec("a", "int64", "user", shape=(None,)),
        FeatureSpec("a", "int64", "user", vocabulary_size=7),
    ]
    prints = {FeatureSchema((spec,)).fingerprint for spec in [base, *changed]}
    assert len(prints) == len(changed) + 1


@pytest.mark.parametrize("bad", [{"dtype": "int32"}, {"role": "target"}, {"shape": (None, None)}])
def test_values_outside_the_contract_are_refused(bad):
    with pytest.raises(InputDataError):
        FeatureSpec(**{"name": "a", "dtype": "int64", "role": "user", **bad})


def test_unknown_keys_are_refused():
    with pytest.raises(InputDataError, match="does not fit"):
        FeatureSpec.from_json({"name": "a", "dtype": "int64", "role": "user", "new": 1})


def test_table_is_the_shared_one_or_its_own():
    assert FeatureSpec("history", "int64", "user", shared_embedding="item").table == "item"
    assert FeatureSpec("item", "int64", "item").table == "item"
