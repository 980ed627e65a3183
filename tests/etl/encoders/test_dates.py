"""Parts of dates against Python's calendar."""

from __future__ import annotations

import datetime
import math

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conf.calendar import PART_SIZES
from conf.operations import Cyclical, DatePart
from etl.encoders.dates import CyclicalEncoder, DatePartEncoder

PARTS = {
    "minute": lambda moment: moment.minute,
    "hour": lambda moment: moment.hour,
    "weekday": lambda moment: moment.weekday(),
    "day": lambda moment: moment.day - 1,
    "day_of_year": lambda moment: moment.timetuple().tm_yday - 1,
    "month": lambda moment: moment.month - 1,
    "is_weekend": lambda moment: int(moment.weekday() >= 5),
}
MOMENTS = st.datetimes(datetime.datetime(2, 1, 1), datetime.datetime(9998, 12, 31))


@settings(deadline=None, max_examples=300)
@given(MOMENTS, st.integers(-1440, 1440))
@example(datetime.datetime(2000, 2, 29), 0)
@example(datetime.datetime(1900, 3, 1), -1)
@example(datetime.datetime(1970, 1, 1), -1)
def test_parts_are_those_of_the_calendar(moment, offset):
    epoch = datetime.datetime(1970, 1, 1)
    milliseconds = pa.array([(moment - epoch) // datetime.timedelta(milliseconds=1)])
    local = moment + datetime.timedelta(minutes=offset)
    for part, expected in PARTS.items():
        encoder = DatePartEncoder(DatePart(part, "ms", offset))
        (found,) = encoder.encode(milliseconds).to_pylist()
        assert found == expected(local) + 2, part


def test_every_part_is_known():
    assert PARTS.keys() == PART_SIZES.keys()


def test_null_is_oov_and_extremes_do_not_overflow():
    values = pa.array([None, -(2**63), 2**63 - 1])
    for part, size in PART_SIZES.items():
        null, *others = DatePartEncoder(DatePart(part, "s", 1440)).encode(values).to_pylist()
        assert null == 1
        assert all(2 <= other < 2 + size for other in others)


@pytest.mark.parametrize(
    ("period", "seconds", "share"),
    [("day", 6 * 3600, 0.25), ("week", 4 * 86400, 0.0), ("hour", -900, 0.75)],
)
def test_a_position_within_a_period_is_a_point_of_the_circle(period, seconds, share):
    (found,) = CyclicalEncoder(Cyclical(period, "s")).encode([pa.array([seconds])]).to_pylist()
    angle = 2 * math.pi * share
    assert found == pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-7)
