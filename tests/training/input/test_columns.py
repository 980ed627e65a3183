from __future__ import annotations

from dataclasses import replace

import pytest

from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.schema import FeatureSpec
from training.input.columns import check_specs, feature_lists, plan_columns, select_features


def test_what_a_feature_becomes(tiny_manifest: Manifest) -> None:
    schema = tiny_manifest.schema
    scalar, padded, ragged = plan_columns(
        tiny_manifest, [schema["user_id"], schema["history"], schema["seen"]]
    )
    assert (scalar.length, scalar.is_dense, scalar.wire.is_list) == (None, True, False)
    assert (padded.length, padded.is_dense, padded.is_ragged) == (8, True, False)
    assert (ragged.is_dense, ragged.is_ragged) == (False, True)
    [left] = plan_columns(tiny_manifest, [schema["history"]], ["history"])
    assert left.is_ragged
    assert not left.is_dense


def test_lists_of_sequence_records(tiny_manifest: Manifest) -> None:
    assert feature_lists(tiny_manifest) == frozenset()
    sequences = replace(tiny_manifest, record_type="SequenceExample")
    assert feature_lists(sequences) == {"history", "genres", "seen"}
    source = replace(sequences.source, config={"output": {"feature_lists": ["history"]}})
    assert feature_lists(replace(sequences, source=source)) == {"history"}


def test_absent_and_padding_values(tiny_manifest: Manifest) -> None:
    specs = [
        FeatureSpec("ids", "int64", "user", vocabulary_size=9),
        FeatureSpec("number", "float32", "user", pad_value=-1.0),
        FeatureSpec("strict", "float32", "user"),
    ]
    ids, number, strict = plan_columns(tiny_manifest, specs)
    assert (ids.absent, ids.pad) == (1, 0)
    assert (number.absent, number.pad) == (-1.0, -1.0)
    assert (strict.absent, strict.pad) == (None, 0.0)


@pytest.mark.parametrize(
    ("change", "both"),
    [
        ({"max_len": 50}, ("max_len 8", "max_len 50")),
        ({"vocabulary_size": 7}, ("42 ids", "7 ids")),
        ({"dtype": "float32", "vocabulary_size": None}, ("int64 of shape", "float32 of shape")),
        ({"shape": (8,), "max_len": None}, (r"shape \(None,\)", r"shape \(8,\)")),
    ],
)
def test_a_feature_that_a_model_does_not_fit(change, both, tiny_manifest: Manifest) -> None:
    other = replace(tiny_manifest.schema["history"], **change)
    with pytest.raises(InputDataError, match=rf"'history'[\s\S]*{both[0]}[\s\S]*{both[1]}"):
        check_specs(tiny_manifest, [other])


def test_a_feature_that_is_gone(tiny_manifest: Manifest) -> None:
    with pytest.raises(InputDataError, match=r"no such feature[\s\S]*histories"):
        check_specs(tiny_manifest, [replace(tiny_manifest.schema["history"], name="histories")])
    assert [spec.name for spec in select_features(tiny_manifest, ["label", "label"])] == ["label"]
