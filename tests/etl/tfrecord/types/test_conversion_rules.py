"""The type mapping: what is left to the encoder, what is converted, what is refused."""

from __future__ import annotations

import datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.tfrecord.types.column_policies import ColumnPolicy
from etl.tfrecord.types.conversion_rules import (
    FLOAT32_MAX,
    UnfitError,
    dates_to_days,
    dates_to_text,
    narrow_decimals,
    narrow_doubles,
    narrow_unsigned,
    parse_default,
    plan_value,
    timestamps_to_integers,
    timestamps_to_text,
    value_options,
)
from etl.tfrecord.types.wire_kinds import find_wire_kind

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


INF = float("inf")


@given(st.lists(st.none() | st.floats(), max_size=10))
def test_exact_refuses_the_first_value_that_changes(values: list[float | None]) -> None:
    array = pa.array(values, pa.float64())
    _, refusal = narrow_doubles(array, "exact")
    with np.errstate(over="ignore"):
        changed = [
            v is not None and v == v and float(np.float32(v)) != v for v in values
        ]  # fmt: skip
    assert (None if refusal is None else refusal.index) == (
        changed.index(True) if any(changed) else None
    )


@pytest.mark.parametrize("value", [1e39, -1e300, 16777217.0, 2.0**53 + 2, 1e-60, -5e-324])
def test_error_refuses_gross_changes(value: float) -> None:
    _, refusal = narrow_doubles(pa.array([None, 0.1, value, value]), "error")
    assert refusal is not None
    assert refusal.index == 2


def test_error_rounds_everything_else() -> None:
    values = [0.1, 16777216.0, 16777217.5, INF, -INF, 1e-40, FLOAT32_MAX, None, -0.0]
    narrowed, refusal = narrow_doubles(pa.array(values), "error")
    assert refusal is None
    assert narrowed.to_pylist() == [None if v is None else float(np.float32(v)) for v in values]
    assert np.isnan(narrow_doubles(pa.array([float("nan")]), "exact")[0][0].as_py())


def test_beyond_the_range_casts_to_infinity_and_clips_to_the_largest() -> None:
    values = pa.array([1e300, -1e39, INF, -INF, 1.0, None])
    cast, _ = narrow_doubles(values, "cast")
    clip, _ = narrow_doubles(values, "clip")
    assert cast.to_pylist() == [INF, -INF, INF, -INF, 1.0, None]
    assert clip.to_pylist() == [FLOAT32_MAX, -FLOAT32_MAX, INF, -INF, 1.0, None]


def test_reads_a_slice() -> None:
    values = pa.array([1e300, None, 0.5, 1e300]).slice(1, 2)
    narrowed, refusal = narrow_doubles(values, "exact")
    assert (narrowed.to_pylist(), refusal) == ([None, 0.5], None)


@given(st.lists(st.none() | st.decimals(-(10**15), 10**15, places=4), max_size=6))
def test_decimals_become_the_nearest_float32(values: list[Decimal | None]) -> None:
    array = pa.array(values, pa.decimal128(38, 4))
    narrowed, _ = plan_value(array.type, ColumnPolicy(float64="cast"), False).convert(array)
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


@given(st.lists(st.decimals(-(10**9), 10**9, places=6), min_size=1, max_size=6))
def test_exact_decimals_are_compared_exactly(values: list[Decimal]) -> None:
    array = pa.array([*values, None], pa.decimal128(38, 20))
    _, refusal = narrow_decimals(array)
    changed = [Fraction(float(np.float32(float(v)))) != Fraction(v) for v in values]
    assert (None if refusal is None else refusal.index) == (
        changed.index(True) if any(changed) else None
    )


def test_a_decimal_that_only_its_double_hides_is_refused() -> None:
    close = pa.array([Decimal("1.00000000000000000001")], pa.decimal128(38, 20))
    assert narrow_decimals(close)[1] is not None
    half = pa.array([Decimal("0.5"), Decimal("12345678")], pa.decimal128(38, 20))
    assert narrow_decimals(half)[1] is None


def test_the_connectors_decimal() -> None:
    price = pa.array([Decimal("12.34")], pa.decimal128(10, 2))
    for mode in ("cast", "clip"):
        rule = plan_value(price.type, ColumnPolicy(float64=mode), False)  # type: ignore[arg-type]
        assert rule.convert(price)[0].to_pylist() == [float(np.float32(12.34))]


def test_a_decimal_beyond_float32_is_refused() -> None:
    huge = pa.array([Decimal("1e60")], pa.decimal256(70, 0))
    rule = plan_value(huge.type, ColumnPolicy(), in_place=True)
    assert rule.convert(huge)[1] is not None


LARGEST = 2**63 - 1
VALUES = pa.array([7, 0, None, LARGEST, 2**63, 2**64 - 1], pa.uint64())


def test_what_fits_stays() -> None:
    narrowed, refusal = narrow_unsigned(VALUES.slice(1, 3), "error")
    assert narrowed.type == pa.int64()
    assert (narrowed.to_pylist(), refusal) == ([0, None, LARGEST], None)


def test_what_does_not_is_refused_or_clipped() -> None:
    _, refusal = narrow_unsigned(VALUES, "error")
    assert refusal is not None
    assert (refusal.index, refusal.received) == (4, str(2**63))
    clipped, refusal = narrow_unsigned(VALUES, "clip")
    assert (clipped.to_pylist()[3:], refusal) == ([LARGEST] * 3, None)


DAY_MS = 86_400_000


@given(st.lists(st.none() | st.dates(), max_size=5))
def test_dates_of_either_width(values: list[datetime.date | None]) -> None:
    days = [None if v is None else (v - datetime.date(1970, 1, 1)).days for v in values]
    text = [None if v is None else v.isoformat() for v in values]
    for kind in (pa.date32(), pa.date64()):
        array = pa.array([datetime.date(2000, 1, 1), *values], kind).slice(1)
        assert dates_to_days(array)[0].to_pylist() == days
        assert dates_to_text(array)[0].to_pylist() == text


@pytest.mark.parametrize(("unit", "expected"), [("s", -2), ("ms", -1_500), ("us", -1_499_999)])
def test_timestamps_round_down(unit: str, expected: int) -> None:
    array = pa.array([0, -1_499_999, None], pa.timestamp("us", "UTC")).slice(1)
    converted, _ = timestamps_to_integers(array, unit)  # type: ignore[arg-type]
    assert converted.to_pylist() == [expected, None]


def test_finer_units_refuse_overflow() -> None:
    seconds = pa.array([2**33, None, 2**62], pa.timestamp("s"))
    converted, refusal = timestamps_to_integers(seconds.slice(0, 2), "us")
    assert (converted.to_pylist(), refusal) == ([2**33 * 10**6, None], None)
    _, refusal = timestamps_to_integers(seconds, "us")
    assert refusal is not None
    assert refusal.index == 2


def test_iso_text_says_utc_where_there_is_a_zone() -> None:
    ticks = [1_767_323_045_678_901, -1, None]
    for zone, z in ((None, ""), ("UTC", "Z"), ("Asia/Tokyo", "Z")):
        array = pa.array(ticks, pa.timestamp("us", zone))
        assert timestamps_to_text(array)[0].to_pylist() == [
            f"2026-01-02T03:04:05.678901{z}", f"1969-12-31T23:59:59.999999{z}", None
        ]  # fmt: skip


def test_iso_text_refuses_years_that_it_cannot_write() -> None:
    first, end = -719_162, 2_932_897
    dates = pa.array([first, end - 1], pa.int32()).cast(pa.date32())
    assert dates_to_text(dates) == (pa.array(["0001-01-01", "9999-12-31"]), None)
    for days in (first - 1, end):
        array = pa.array([0, days], pa.int32()).cast(pa.date32())
        assert dates_to_text(array)[1].index == 1  # type: ignore[union-attr]
        for unit, per_day in (("s", 86_400), ("us", 86_400 * 10**6)):
            times = pa.array([0, days * per_day], pa.timestamp(unit))
            assert timestamps_to_text(times)[1].index == 1  # type: ignore[union-attr]


def test_all_nanoseconds_can_be_written() -> None:
    array = pa.array([2**63 - 1, -(2**63) + 1], pa.timestamp("ns"))
    text, refusal = timestamps_to_text(array)
    assert refusal is None
    assert text.to_pylist() == ["2262-04-11T23:47:16.854775807", "1677-09-21T00:12:43.145224193"]


@pytest.mark.parametrize(
    ("default", "kind", "value"),
    [
        (None, pa.int8(), 0), (None, pa.float64(), 0.0), (None, pa.string(), ""),
        (None, pa.binary(), b""), (None, pa.bool_(), False), ("-1", pa.int64(), -1),
        (3.0, pa.int16(), 3), ("1e3", pa.int32(), 1000), ("2.5", pa.float32(), 2.5),
        (1, pa.bool_(), True), ("n/a", pa.large_string(), "n/a"), ("é", pa.binary(), b"\xc3\xa9"),
        (str(2**63 - 1), pa.int64(), 2**63 - 1), ("nan", pa.string(), "nan"),
    ],
)  # fmt: skip
def test_parses(default: Any, kind: pa.DataType, value: Any) -> None:
    assert parse_default(default, kind) == value
    assert type(parse_default(default, kind)) is type(value)


@pytest.mark.parametrize(
    ("default", "kind"),
    [(300, pa.int8()), (0.5, pa.int64()), ("x", pa.int64()), ("x", pa.float32()), (5, pa.string()),
     (2, pa.bool_()), (1e39, pa.float64()), ("nan", pa.int64()), (2**63, pa.int64())],
)  # fmt: skip
def test_refuses_what_is_no_value_of_the_type(default: Any, kind: pa.DataType) -> None:
    with pytest.raises(ValueError, match="is no"):
        parse_default(default, kind)


def test_kinds() -> None:
    types = (pa.bool_(), pa.uint8(), pa.decimal128(3), pa.binary(), pa.uint64(), pa.date32())
    kinds = [found and found.feature for found in map(find_wire_kind, types)]
    assert kinds == ["int64", "int64", "float", "bytes", None, None]
