"""A range of calendar days: what a build of dated inputs covers."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from conf.errors import ConfigError


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
