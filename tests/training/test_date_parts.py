"""Parts of dates, compared with Python's own calendar."""

from __future__ import annotations

import datetime as dt

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from training.date_parts import pick_date_part

EPOCH = dt.datetime(1970, 1, 1)
EXPECTED = {
    "hour": lambda t: t.hour,
    "minute": lambda t: t.minute,
    "weekday": lambda t: t.weekday(),
    "is_weekend": lambda t: int(t.weekday() >= 5),
    "day_of_year": lambda t: t.timetuple().tm_yday - 1,
    "month": lambda t: t.month - 1,
    "day": lambda t: t.day - 1,
}
LEAP_DAYS = [dt.datetime(1600, 2, 29), dt.datetime(1900, 2, 28), dt.datetime(2000, 12, 31)]


@given(st.lists(st.datetimes(), min_size=1))
@pytest.mark.parametrize("part", EXPECTED)
def test_parts_of_dates_are_those_of_the_calendar(part, times):
    times += LEAP_DAYS
    days = tf.constant([(time - EPOCH).days for time in times], tf.int64)
    seconds = tf.constant([(time - EPOCH).seconds for time in times], tf.int64)
    assert pick_date_part(part, days, seconds).numpy().tolist() == [
        EXPECTED[part](time) for time in times
    ]
