"""Values and lists of them: what is left to the encoder, converted, refused."""

from __future__ import annotations

import datetime
from decimal import Decimal
from fractions import Fraction
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.tfrecord.types.features import find_wire_kind
from etl.tfrecord.types.type_options import TypeOptions
from etl.tfrecord.types.values import (
    RefusedError,
    UnfitError,
    dates_to_days,
    dates_to_text,
    narrow_doubles,
    narrow_unsigned,
    plan_lists,
    plan_values,
    timestamps_to_integers,
    timestamps_to_text,
)

NATIVE = [
    pa.bool_(), pa.int8(), pa.uint32(), pa.int64(), pa.float16(), pa.float64(),
    pa.decimal128(10, 2), pa.string(), pa.large_binary(), pa.dictionary(pa.int8(), pa.string()),
]  # fmt: skip


@pytest.mark.parametrize("kind", NATIVE)
def test_the_encoder_takes_native_types_as_they_are(kind: pa.DataType) -> None:
    rule = plan_values(kind, TypeOptions())
    assert (rule.target, rule.convert) == (kind, None)


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
    rule = plan_values(values.type, TypeOptions())
    assert rule.target == target.type
    assert rule.convert(values).equals(target)


@pytest.mark.parametrize(
    "kind",
    [pa.date64(), pa.timestamp("ns"), pa.null(), pa.duration("s"), pa.month_day_nano_interval(),
     pa.time64("us"), pa.list_view(pa.int8())],
)  # fmt: skip
def test_other_types_are_refused(kind: pa.DataType) -> None:
    with pytest.raises(UnfitError):
        plan_values(kind, TypeOptions())


INF = float("inf")


def refused(convert, values: pa.Array) -> int:
    """Index of the value that is refused."""
    with pytest.raises(RefusedError) as caught:
        convert(values)
    return caught.value.index


def test_doubles_beyond_the_range_become_infinite() -> None:
    values = pa.array([7.0, 1e300, -1e39, INF, 1.0, None, 0.1]).slice(1)
    wanted = [INF, -INF, INF, 1.0, None, float(np.float32(0.1))]
    assert narrow_doubles(values).to_pylist() == wanted


@given(st.lists(st.none() | st.decimals(-(10**15), 10**15, places=4), max_size=6))
def test_decimals_become_the_nearest_float32(values: list[Decimal | None]) -> None:
    array = pa.array(values, pa.decimal128(38, 4))
    narrowed = plan_values(array.type, TypeOptions(float64="cast")).convert(array)
    for value, got in zip(values, narrowed.to_pylist(), strict=True):
        if value is None:
            assert got is None
            continue
        near = np.float32(got)
        distance = abs(Fraction(got) - Fraction(value))
        for other in (np.nextafter(near, np.float32(INF)), np.nextafter(near, np.float32(-INF))):
            # Half an ulp, up to the rounding of the double between.
            assert distance <= abs(Fraction(float(other)) - Fraction(value)) * (
                1 + Fraction(1, 2**20)
            )


LARGEST = 2**63 - 1
VALUES = pa.array([7, 0, None, LARGEST, 2**63, 2**64 - 1], pa.uint64())


def test_unsigned_integers_beyond_int64_are_refused() -> None:
    narrowed = narrow_unsigned(VALUES.slice(1, 3))
    assert (narrowed.type, narrowed.to_pylist()) == (pa.int64(), [0, None, LARGEST])
    assert refused(narrow_unsigned, VALUES) == 4


@given(st.lists(st.none() | st.dates(), max_size=5))
def test_dates_of_either_width(values: list[datetime.date | None]) -> None:
    days = [None if v is None else (v - datetime.date(1970, 1, 1)).days for v in values]
    text = [None if v is None else v.isoformat() for v in values]
    for kind in (pa.date32(), pa.date64()):
        array = pa.array([datetime.date(2000, 1, 1), *values], kind).slice(1)
        assert dates_to_days(array).to_pylist() == days
        assert dates_to_text(array).to_pylist() == text


@pytest.mark.parametrize(("unit", "expected"), [("s", -2), ("ms", -1_500), ("us", -1_499_999)])
def test_timestamps_round_down(unit: str, expected: int) -> None:
    array = pa.array([0, -1_499_999, None], pa.timestamp("us", "UTC")).slice(1)
    assert timestamps_to_integers(unit, array).to_pylist() == [expected, None]


def test_finer_units_refuse_overflow() -> None:
    seconds = pa.array([2**33, None, 2**62], pa.timestamp("s"))
    to_micros = partial(timestamps_to_integers, "us")
    assert to_micros(seconds.slice(0, 2)).to_pylist() == [2**33 * 10**6, None]
    assert refused(to_micros, seconds) == 2


def test_iso_text_says_utc_where_there_is_a_zone() -> None:
    ticks = [1_767_323_045_678_901, -1, None]
    for zone, z in ((None, ""), ("UTC", "Z"), ("Asia/Tokyo", "Z")):
        array = pa.array(ticks, pa.timestamp("us", zone))
        assert timestamps_to_text(array).to_pylist() == [
            f"2026-01-02T03:04:05.678901{z}", f"1969-12-31T23:59:59.999999{z}", None
        ]  # fmt: skip


def test_iso_text_refuses_years_that_it_cannot_write() -> None:
    first, end = -719_162, 2_932_897
    dates = pa.array([first, end - 1], pa.int32()).cast(pa.date32())
    assert dates_to_text(dates).to_pylist() == ["0001-01-01", "9999-12-31"]
    for days in (first - 1, end):
        array = pa.array([0, days], pa.int32()).cast(pa.date32())
        assert refused(dates_to_text, array) == 1
        for unit, per_day in (("s", 86_400), ("us", 86_400 * 10**6)):
            times = pa.array([0, days * per_day], pa.timestamp(unit))
            assert refused(timestamps_to_text, times) == 1


def test_all_nanoseconds_can_be_written() -> None:
    array = pa.array([2**63 - 1, -(2**63) + 1], pa.timestamp("ns"))
    assert timestamps_to_text(array).to_pylist() == [
        "2262-04-11T23:47:16.854775807",
        "1677-09-21T00:12:43.145224193",
    ]


TYPES = [pa.list_(pa.uint64()), pa.large_list(pa.uint64()), pa.list_(pa.uint64(), 2)]


@pytest.mark.parametrize("kind", TYPES)
def test_lists_keep_their_layout(kind: pa.DataType) -> None:
    column = pa.array([[9, 9], [1, 2], None, [3, LARGEST]], kind)
    rule = plan_lists(kind, TypeOptions(), 1)
    assert rule.convert(column.slice(1)).to_pylist() == [[1, 2], None, [3, LARGEST]]
    assert rule.convert(column).type == rule.target


def test_what_lies_below_a_null_is_not_seen() -> None:
    hidden, mask = pa.array([2**63, 5, 6], pa.uint64()), pa.array([True, False, False])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), hidden, mask=mask)
    for column in (lists, pa.FixedSizeListArray.from_arrays(hidden, 1, mask=mask)):
        rule = plan_lists(column.type, TypeOptions(), 1)
        assert rule.convert(column).to_pylist() == [None, [5], [6]]


def test_a_refusal_names_the_row() -> None:
    nested = pa.array([[[1]], None, [[], [2, 2**63]]], pa.list_(pa.list_(pa.uint64())))
    assert refused(plan_lists(nested.type, TypeOptions(), 2).convert, nested) == 2


def test_lists_of_no_length_at_all() -> None:
    column = pa.array([[], None], pa.list_(pa.float64(), 0))
    rule = plan_lists(column.type, TypeOptions(float64="cast"), 1)
    assert rule.convert(column).to_pylist() == [[], None]


def test_kinds() -> None:
    types = (pa.bool_(), pa.uint8(), pa.decimal128(3), pa.binary(), pa.uint64(), pa.date32())
    lanes = [found and found.lane for found in map(find_wire_kind, types)]
    assert lanes == ["int32", "int32", "float64", "binary", None, None]
