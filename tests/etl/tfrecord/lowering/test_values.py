"""Value rules put together, and which types hold the same values."""

from __future__ import annotations

import pyarrow as pa
import pytest

from etl.tfrecord.lowering.floats import NarrowDoubles
from etl.tfrecord.lowering.values import Cast, Decode, Keep, chain, holds_same, numbers


def test_chains_leave_out_what_does_nothing() -> None:
    keep, cast = Keep(pa.int64()), Cast(pa.large_string())
    assert chain(keep, cast) is cast
    assert chain(cast, keep) is cast


def test_a_chain_reports_the_refusal_of_either_rule() -> None:
    rule = chain(Decode(pa.float64()), NarrowDoubles("exact"))
    values = pa.array([0.5, 0.1, None]).dictionary_encode()
    assert rule.target == pa.float32()
    assert rule.convert(values)[1].index == 1  # type: ignore[union-attr]
    assert rule.convert(values.slice(2))[0].to_pylist() == [None]


def test_numbers_are_zero_where_null() -> None:
    assert numbers(pa.array([True, None])).tolist() == [True, False]
    assert numbers(pa.array([1.5, None, 2.0]).slice(1)).tolist() == [0.0, 2.0]


TIMES = pa.timestamp("us", "UTC"), pa.timestamp("us", "Etc/UTC")


@pytest.mark.parametrize(
    ("given", "planned", "same"),
    [
        (*TIMES, True),
        (pa.timestamp("us"), TIMES[0], False),
        (pa.timestamp("ms", "UTC"), TIMES[0], False),
        (pa.large_string(), pa.string(), True),
        (pa.binary(), pa.string(), False),
        (pa.list_(TIMES[0]), pa.large_list(TIMES[1]), True),
        (pa.list_(pa.int64()), pa.list_(pa.int32()), False),
        (pa.struct({"a": TIMES[0]}), pa.struct({"a": TIMES[1]}), True),
        (pa.struct({"a": TIMES[0]}), pa.struct({"b": TIMES[0]}), False),
        (pa.struct({"a": TIMES[0]}), pa.struct({"a": TIMES[0], "b": pa.int8()}), False),
        (pa.map_(pa.string(), TIMES[0]), pa.map_(pa.string(), TIMES[1]), True),
        (pa.map_(pa.string(), pa.int64()), pa.map_(pa.string(), pa.int32()), False),
        (pa.decimal128(10, 2), pa.decimal128(10, 3), False),
        (pa.list_(pa.int64(), 2), pa.list_(pa.int64(), 3), False),
    ],
)
def test_same_values_apart_from_zones_nullability_and_width(
    given: pa.DataType, planned: pa.DataType, same: bool
) -> None:
    assert holds_same(given, planned) is same
    assert holds_same(planned, given) is same
