"""The type mapping: what is left to the encoder, what is converted, what is refused."""

from __future__ import annotations

import pyarrow as pa
import pytest

from etl.tfrecord.lowering.types import UnfitError, plan_value, value_options
from etl.tfrecord.policies import ColumnPolicy

NATIVE = [
    pa.bool_(), pa.int8(), pa.uint32(), pa.int64(), pa.float16(), pa.float64(),
    pa.decimal128(10, 2), pa.string(), pa.large_binary(), pa.dictionary(pa.int8(), pa.string()),
]  # fmt: skip


@pytest.mark.parametrize("kind", NATIVE)
def test_the_encoder_takes_native_types_as_they_are(kind: pa.DataType) -> None:
    rule = plan_value(kind, ColumnPolicy(), in_place=False)
    assert rule.is_identity
    assert rule.target == kind


@pytest.mark.parametrize(
    ("values", "target"),
    [
        (pa.array(["a", None], pa.string_view()), pa.array(["a", None], pa.large_string())),
        (pa.array([b"a"], pa.binary_view()), pa.array([b"a"], pa.large_binary())),
        (pa.array([b"ab"], pa.binary(2)), pa.array([b"ab"], pa.binary())),
        (pa.array([1, None], pa.uint64()).dictionary_encode(), pa.array([1, None])),
    ],
)
def test_other_layouts_are_converted(values: pa.Array, target: pa.Array) -> None:
    rule = plan_value(values.type, ColumnPolicy(), in_place=False)
    assert rule.target == target.type
    assert rule.convert(values)[0].equals(target)


def test_in_place_leaves_nothing_to_the_encoder() -> None:
    for kind in (pa.float64(), pa.decimal128(5, 1), pa.dictionary(pa.int8(), pa.float64())):
        assert plan_value(kind, ColumnPolicy(), in_place=True).target == pa.float32()


@pytest.mark.parametrize(
    ("kind", "advice"),
    [(pa.date64(), "dates=days"), (pa.timestamp("ns"), "timestamps=s"), (pa.null(), "no Arrow"),
     (pa.duration("s"), "seconds"), (pa.month_day_nano_interval(), "months"),
     (pa.time64("us"), "text"), (pa.list_view(pa.int8()), "cast it")],
)  # fmt: skip
def test_refusals_say_what_would_fit(kind: pa.DataType, advice: str) -> None:
    with pytest.raises(UnfitError, match=advice):
        plan_value(kind, ColumnPolicy(), in_place=False)


def test_options_that_mean_something() -> None:
    assert value_options(pa.list_(pa.dictionary(pa.int8(), pa.uint64()))) == {"integers"}
    assert value_options(pa.int64()) == set()
