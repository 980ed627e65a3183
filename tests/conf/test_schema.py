"""Feature specs survive JSON, refuse what is outside the contract, and have a fingerprint."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.artefacts.train_counts import find_counted
from conf.errors import InputDataError
from conf.manifest import DatasetKeys, Manifest
from conf.schema import FeatureSchema, FeatureSpec, PackedSlot
from tests.datasets import build_manifest

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
    changes = [{"name": "b"}, {"dtype": "float32"}, {"role": "item"}, {"shape": (None,)}]
    changed = [replace(base, **change) for change in [*changes, {"vocabulary_size": 7}]]
    prints = {FeatureSchema((spec,)).fingerprint for spec in [base, *changed]}
    assert len(prints) == len(changed) + 1


LENGTHS = [0, -3, 10**12, 2.0, True, "7"]


@pytest.mark.parametrize(
    "bad",
    [{"dtype": "int32"}, {"role": "target"}, {"shape": (None, None)}]
    + [change for n in LENGTHS for change in ({"shape": (n,)}, {"shape": (None,), "max_len": n})],
)
def test_values_outside_the_contract_are_refused(bad):
    with pytest.raises(InputDataError):
        FeatureSpec(**{"name": "a", "dtype": "int64", "role": "user", **bad})


def test_a_manifest_keeps_its_slots():
    assert "spark" not in build_manifest("1").to_json()  # runs name the fingerprint of it
    slots = (PackedSlot("a", "both", 0), PackedSlot("b", "both", 1))
    manifest = replace(build_manifest("1"), slots=slots)
    again = Manifest.loads(manifest.dumps())
    assert again.slots == manifest.slots
    data = json.loads(manifest.dumps())
    data["slots"] = [{"feature": "a"}]
    with pytest.raises(InputDataError, match="not complete"):
        Manifest.loads(json.dumps(data))


def _with_lists(history: str | None, *specs: FeatureSpec, item: FeatureSpec) -> Manifest:
    keys = DatasetKeys("u", item.name, history)
    return replace(build_manifest("1"), schema=FeatureSchema((item, *specs)), keys=keys)


def _ids(name: str, role: str = "user", vocabulary: str = "item", **more: object) -> FeatureSpec:
    made = {"encoding": vocabulary, "vocabulary_size": 9, "shared_embedding": vocabulary, **more}
    return FeatureSpec(name, "int64", role, **{"shape": (None,), **made})


ITEM = _ids("item", "item", shape=())


def test_histories_are_lists_of_the_items_ids_whatever_their_names() -> None:
    """Never by name: `history` below holds categories."""
    lists = (_ids("history", vocabulary="category"), _ids("carts"), _ids("bought"),
             _ids("seen", "id"), _ids("beside", "item"), _ids("shown", "context"))  # fmt: skip
    manifest = _with_lists(None, *lists, item=ITEM)
    assert manifest.histories == ("carts", "bought")
    assert manifest.find_history() is None
    named = _with_lists("bought", *lists, item=ITEM)
    assert (named.histories, named.find_history()) == (("bought", "carts"), "bought")
    of_context = _with_lists("shown", *lists, item=ITEM)
    assert of_context.histories == ("shown", "carts", "bought")
    assert _with_lists(None, _ids("carts"), item=ITEM).find_history() == "carts"
    videos = _with_lists("clicks", _ids("clicks", vocabulary="video"), item=ITEM)
    assert (videos.histories, videos.find_history()) == ((), "clicks")
    assert replace(videos, keys=DatasetKeys("u", None, "clicks")).histories == ()


@pytest.mark.parametrize(
    ("key", "lists", "expected"),
    [
        ("bought", ["carts", "bought"], "bought"),
        (None, ["carts", "bought"], "carts"),
        ("clicks", [], None),
    ],
)
def test_sequences_are_counted_by_the_items_of_their_first_history(key, lists, expected) -> None:
    others = (_ids("clicks", vocabulary="video"), *map(_ids, lists))
    manifest = _with_lists(key, *others, item=ITEM)
    found = find_counted(manifest.keys, manifest.schema, {"train_samples": "last"})
    assert found.history == expected
    assert find_counted(manifest.keys, manifest.schema, {}).history is None


@pytest.mark.parametrize(
    ("encodings", "sizes", "is_history"),
    [
        (("identity", "identity"), (None, None), True),
        (("identity", "identity"), (70, 50), True),  # The largest id of each, plus 1.
        (("key:item", "key:clicks"), (None, None), True),
        (("hash:item", "hash:clicks"), (64, 64), True),
        (("hash:item", "hash:clicks"), (64, 32), False),
        (("hash:item", "identity"), (None, None), False),
    ],
)
def test_keys_and_hashes_are_the_items_where_the_dataset_names_the_history(
    encodings: tuple[str, str], sizes: tuple[int | None, int | None], is_history: bool
) -> None:
    made = [{"encoding": e, "vocabulary_size": s, "shared_embedding": None}
            for e, s in zip(encodings, sizes, strict=True)]  # fmt: skip
    item, clicks = _ids("item", "item", shape=(), **made[0]), _ids("clicks", **made[1])
    assert bool(_with_lists("clicks", clicks, item=item).histories) == is_history
    assert _with_lists(None, clicks, item=item).histories == ()
