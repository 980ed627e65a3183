"""Units of time, parts of dates and periods that encoders know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

TimeUnit = Literal["s", "ms", "us"]
Part = Literal["minute", "hour", "weekday", "day", "day_of_year", "month", "is_weekend"]
Period = Literal["hour", "day", "week", "year"]

UNITS_PER_SECOND: Mapping[str, int] = {"s": 1, "ms": 1_000, "us": 1_000_000}
PART_SIZES: Mapping[str, int] = {
    "minute": 60,
    "hour": 24,
    "weekday": 7,
    "day": 31,
    "day_of_year": 366,
    "month": 12,
    "is_weekend": 2,
}
"""Number of values of each part of a date."""
PERIOD_SECONDS: Mapping[str, int] = {
    "hour": 3_600,
    "day": 86_400,
    "week": 7 * 86_400,
    "year": 31_556_952,  # the mean year of the Gregorian calendar
}
MONDAY_SECONDS = 3 * 86_400
"""The epoch was a Thursday: what shifts the start of a week to Monday."""
