from __future__ import annotations

import pyarrow as pa
import pytest

from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.schema import FeatureSpec
from training.input.columns import plan_columns
from training.input.values import check_binary, fill_absent


@pytest.mark.parametrize(
    ("spec", "given", "kind", "expected"),
    [
        (FeatureSpec("f", "int64", "user", vocabulary_size=9), [3, None], pa.int64(), [3, 1]),
        (FeatureSpec("f", "bytes", "user", pad_value="x"), [None, b"a"], pa.binary(), [b"x", b"a"]),
        (FeatureSpec("f", "float32", "user"), [0.5], pa.float32(), [0.5]),
        (
            FeatureSpec("f", "int64", "user", shape=(None,)),
            [[1], None],
            pa.list_(pa.int64()),
            [[1], []],
        ),
    ],
)
def test_absent_values(spec, given, kind, expected, tiny_manifest: Manifest) -> None:
    [column] = plan_columns(tiny_manifest, [spec])
    assert fill_absent(column, pa.array(given, kind), "here").to_pylist() == expected


@pytest.mark.parametrize(
    ("spec", "given", "kind", "message"),
    [
        (FeatureSpec("f", "float32", "user"), [1.0, None], pa.float32(), "no value in here"),
        (
            FeatureSpec("f", "int64", "user", shape=(2,)),
            [[1, 2], []],
            pa.list_(pa.int64()),
            "a list of 0 in here",
        ),
        (
            FeatureSpec("f", "int64", "user", shape=(2,), vocabulary_size=9),
            [[1, 2, 3], []],
            pa.list_(pa.int64()),
            "a list of 3 in here",
        ),
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
