from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest

from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.schema import FeatureSpec
from training.reader.feature_columns import (
    check_binary,
    check_specs,
    fill_absent,
    plan_columns,
    select_features,
)


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


@pytest.mark.parametrize(
    ("change", "both"),
    [
        ({"max_len": 50}, ("max_len 8", "max_len 50")),
        ({"vocabulary_size": 7}, ("42 ids", "7 ids")),
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


INTS = pa.list_(pa.int64())


@pytest.mark.parametrize(
    ("spec", "given", "kind", "expected"),
    [
        (FeatureSpec("f", "bytes", "user", pad_value="x"), [None, b"a"], pa.binary(), [b"x", b"a"]),
        (FeatureSpec("f", "float32", "user"), [0.5], pa.float32(), [0.5]),
        (FeatureSpec("f", "int64", "user", (None,)), [[1], None], INTS, [[1], []]),
    ],
)
def test_absent_values(spec, given, kind, expected, tiny_manifest: Manifest) -> None:
    [column] = plan_columns(tiny_manifest, [spec])
    assert fill_absent(column, pa.array(given, kind), "here").to_pylist() == expected


LIST = FeatureSpec("f", "int64", "user", (2,))
NUMBER = FeatureSpec("f", "float32", "user")


@pytest.mark.parametrize(
    ("spec", "given", "kind", "message"),
    [
        (NUMBER, [1.0, None], pa.float32(), "no value in here"),
        (LIST, [[1, 2], []], INTS, "a list of 0 in here"),
        (replace(LIST, vocabulary_size=9), [[1, 2, 3], []], INTS, "a list of 3 in here"),
    ],
)
def test_what_does_not_fit_is_named(spec, given, kind, message, tiny_manifest: Manifest) -> None:
    [column] = plan_columns(tiny_manifest, [spec])
    with pytest.raises(InputDataError, match=rf"'f'[\s\S]*{message}"):
        fill_absent(column, pa.array(given, kind), "here")


def test_labels_are_0_or_1() -> None:
    check_binary("y", pa.array([0.0, 1.0]), "here")
    for bad in (2.0, -1.0, float("nan")):
        with pytest.raises(InputDataError, match=r"'y'[\s\S]*in here[\s\S]*0 or 1"):
            check_binary("y", pa.array([0.0, bad]), "here")
