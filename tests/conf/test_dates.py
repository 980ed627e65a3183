"""Ranges of days."""

from __future__ import annotations

from datetime import date, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.dates import DateRange
from conf.errors import ConfigError


@given(st.dates(date(1900, 1, 1), date(2100, 1, 1)), st.integers(0, 400), st.integers(0, 400))
def test_days_are_all_from_first_to_last_and_shift_moves_the_first(first, length, back):
    dates = DateRange(first, first + timedelta(days=length))
    days = dates.days()
    assert (days[0], days[-1], len(set(days))) == (dates.first, dates.last, length + 1)
    assert list(days) == sorted(days)
    earlier = dates.shift(back)
    assert earlier.days()[back:] == days
    assert earlier.last == dates.last


def test_impossible_ranges_are_refused():
    day = date(2026, 1, 2)
    with pytest.raises(ConfigError, match="before the first"):
        DateRange(day, date(2026, 1, 1))
    with pytest.raises(ConfigError, match="negative"):
        DateRange(day, day).shift(-1)
    with pytest.raises(ConfigError, match="calendar"):
        DateRange(day, day).shift(10**7)
