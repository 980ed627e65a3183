"""Dates: the range of days of a build, durations, and the units and parts that encoders know."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from conf.errors import ConfigError

_EPOCH = datetime.date(1970, 1, 1)
_DAY_MS = 86_400_000


@dataclass(frozen=True)
class DateRange:
    """Days from `first` to `last`, both included.

    Raises:
        ConfigError: `last` is before `first`.
    """

    first: datetime.date
    last: datetime.date

    def __post_init__(self) -> None:
        """Refuses a range that ends before it begins."""
        if self.last < self.first:
            raise ConfigError(
                "the last day of a date range is before the first",
                received=f"{self.first} to {self.last}",
                allowed="first <= last",
            )

    def days(self) -> tuple[datetime.date, ...]:
        """Returns every day of the range, in order."""
        count = (self.last - self.first).days + 1
        return tuple(self.first + datetime.timedelta(days=k) for k in range(count))

    @property
    def span_ms(self) -> tuple[int, int]:
        """First millisecond of the range and the first one after it, since 1970, UTC."""
        first, last = ((day - _EPOCH).days * _DAY_MS for day in (self.first, self.last))
        return first, last + _DAY_MS

    def shift(self, back_days: int) -> DateRange:
        """Returns the range with its first day moved back: a lookback window before the run.

        Args:
            back_days: Days of lookback, 0 or more.

        Raises:
            ConfigError: `back_days` is negative, or leads before the first day of the calendar.
        """
        if back_days < 0:
            raise ConfigError("a lookback is negative", received=back_days, allowed="0 or more")
        try:
            return DateRange(self.first - datetime.timedelta(days=back_days), self.last)
        except OverflowError as error:
            raise ConfigError(
                "a lookback leads before the first day of the calendar", received=back_days
            ) from error


TimeUnit = Literal["s", "ms", "us"]
Part = Literal["minute", "hour", "weekday", "day", "day_of_year", "month", "is_weekend"]
Period = Literal["hour", "day", "week", "year"]

UNITS_PER_SECOND: Mapping[str, int] = {"s": 1, "ms": 1_000, "us": 1_000_000}
UNIT_WORDS: Mapping[str, str] = {
    "s": "seconds",
    "ms": "milliseconds",
    "us": "microseconds",
    "ns": "nanoseconds",
}
PER_SECOND: Mapping[str, int] = {**UNITS_PER_SECOND, "ns": 1_000_000_000}
"""How many of each unit a second has; what is written in nanoseconds is recognised, not read."""
FIRST_DATE_S = 315_532_800
"""1980-01-01. A number from here to `LAST_DATE_S` is a date in seconds."""
LAST_DATE_S = 4_102_444_800
"""2100-01-01. A date is a number of another magnitude in each unit: the ranges do not overlap."""
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


_DURATION = re.compile(r"([1-9][0-9]{0,4}) (hour|day|week)s?")


def read_duration(text: str) -> datetime.timedelta:
    """Reads a duration: a number of hours, days or weeks, such as `1 day`.

    Raises:
        ValueError: It is written in another way.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text!r} is no duration: write a number of hours, days or weeks, such as `1 day`"
        )
    return datetime.timedelta(**{f"{match[2]}s": int(match[1])})


def find_date_unit(value: float) -> str | None:
    """Returns the unit in which a number is a date between 1980 and 2100; None: in none."""
    for unit, per_second in PER_SECOND.items():
        if FIRST_DATE_S * per_second <= value < LAST_DATE_S * per_second:
            return unit
    return None


def show_time(value: float, unit: str) -> str:
    """Returns a time since 1970 as a date, or as a year where no calendar reaches."""
    seconds = value / PER_SECOND[unit]
    try:
        epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
        return str((epoch + datetime.timedelta(seconds=seconds)).date())
    except OverflowError:
        return f"the year {1970 + round(seconds / PERIOD_SECONDS['year']):,}"


def show_span(low: float, high: float, unit: str) -> str:
    """Returns two times since 1970 as dates, or as one where both are the same."""
    first, last = show_time(low, unit), show_time(high, unit)
    return first if first == last else f"{first} to {last}"
