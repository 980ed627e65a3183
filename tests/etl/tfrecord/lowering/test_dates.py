"""Dates and timestamps to numbers and ISO text, at the edges of what they hold."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etl.tfrecord.lowering.dates import (
    DatesToDays,
    DatesToText,
    TimestampsToIntegers,
    TimestampsToText,
)

DAY_MS = 86_400_000


@given(st.lists(st.none() | st.dates(), max_size=5))
def test_dates_of_either_width(values: list[datetime.date | None]) -> None:
    days = [None if v is None else (v - datetime.date(1970, 1, 1)).days for v in values]
    text = [None if v is None else v.isoformat() for v in values]
    for kind in (pa.date32(), pa.date64()):
        array = pa.array([datetime.date(2000, 1, 1), *values], kind).slice(1)
        assert DatesToDays().convert(array)[0].to_pylist() == days
        assert DatesToText().convert(array)[0].to_pylist() == text


@pytest.mark.parametrize(("unit", "expected"), [("s", -2), ("ms", -1_500), ("us", -1_499_999)])
def test_timestamps_round_down(unit: str, expected: int) -> None:
    array = pa.array([0, -1_499_999, None], pa.timestamp("us", "UTC")).slice(1)
    rule = TimestampsToIntegers(unit, "us")  # type: ignore[arg-type]
    assert rule.convert(array)[0].to_pylist() == [expected, None]


def test_finer_units_refuse_overflow() -> None:
    seconds = pa.array([2**33, None, 2**62], pa.timestamp("s"))
    converted, refusal = TimestampsToIntegers("us", "s").convert(seconds.slice(0, 2))
    assert (converted.to_pylist(), refusal) == ([2**33 * 10**6, None], None)
    _, refusal = TimestampsToIntegers("us", "s").convert(seconds)
    assert refusal is not None
    assert refusal.index == 2


def test_iso_text_says_utc_where_there_is_a_zone() -> None:
    ticks = [1_767_323_045_678_901, -1, None]
    for zone, z in ((None, ""), ("UTC", "Z"), ("Asia/Tokyo", "Z")):
        array = pa.array(ticks, pa.timestamp("us", zone))
        assert TimestampsToText(array.type).convert(array)[0].to_pylist() == [
            f"2026-01-02T03:04:05.678901{z}", f"1969-12-31T23:59:59.999999{z}", None
        ]  # fmt: skip


def test_iso_text_refuses_years_that_it_cannot_write() -> None:
    first, end = -719_162, 2_932_897
    dates = pa.array([first, end - 1], pa.int32()).cast(pa.date32())
    assert DatesToText().convert(dates) == (pa.array(["0001-01-01", "9999-12-31"]), None)
    for days in (first - 1, end):
        array = pa.array([0, days], pa.int32()).cast(pa.date32())
        assert DatesToText().convert(array)[1].index == 1  # type: ignore[union-attr]
        for unit, per_day in (("s", 86_400), ("us", 86_400 * 10**6)):
            times = pa.array([0, days * per_day], pa.timestamp(unit))
            assert TimestampsToText(times.type).convert(times)[1].index == 1  # type: ignore[union-attr]


def test_all_nanoseconds_can_be_written() -> None:
    array = pa.array([2**63 - 1, -(2**63) + 1], pa.timestamp("ns"))
    text, refusal = TimestampsToText(array.type).convert(array)
    assert refusal is None
    assert text.to_pylist() == ["2262-04-11T23:47:16.854775807", "1677-09-21T00:12:43.145224193"]
