"""Time scan: magnitudes of time columns, counted in the pass that counts a source's rows.

A date between 1980 and 2100 is a number of another magnitude in each unit: its seconds since 1970
are 3.2e8 to 4.1e9, its milliseconds 3.2e11 to 4.1e12, and so on. The ranges do not overlap, so a
column of dates tells its own unit. Smaller numbers may count from anywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from conf.dates import FIRST_DATE_S, LAST_DATE_S, PER_SECOND, show_time
from etl.sources.source import REASON_COLUMN, Source

if TYPE_CHECKING:
    from pyspark.sql import Column

OTHER_UNIT = "other_unit"
"""Reason of a bad row whose time is of another unit than the others of its column."""

_EARLY_S = 94_694_400  # 1973-01-01
_LEAST = 2  # 0 and 1 often mean "always"
_TOO_LARGE_S = (2**63 - 1) // 1000  # no int64 holds the milliseconds
_DAY_S = 86_400


@dataclass(frozen=True)
class Span:
    """Some values: how many, the least and the greatest."""

    count: int = 0
    low: float = 0
    high: float = 0

    def __add__(self, other: Span) -> Span:
        """Returns the values of both."""
        parts = [part for part in (self, other) if part.count]
        if len(parts) < 2:
            return parts[0] if parts else Span()
        low, high = min(part.low for part in parts), max(part.high for part in parts)
        return Span(self.count + other.count, low, high)

    def show(self, unit: str) -> str:
        """Returns the range as dates."""
        low, high = show_time(self.low, unit), show_time(self.high, unit)
        return low if low == high else f"{low} to {high}"


@dataclass(frozen=True)
class TimeScan:
    """Which columns of a source are counted by magnitude.

    Attributes:
        columns: Time columns; of a list its greatest value counts.
        now_ms: The present, milliseconds since 1970.
    """

    columns: Sequence[str]
    now_ms: int

    @property
    def edges(self) -> tuple[int, ...]:
        """What values are told apart by: the bounds of what `TimeValues` is asked for."""
        bounds_s = (_EARLY_S, FIRST_DATE_S, self.tomorrow_s, LAST_DATE_S)
        dates = {bound_s * per_second for bound_s in bounds_s for per_second in PER_SECOND.values()}
        return tuple(sorted({_LEAST, _TOO_LARGE_S} | dates))

    @property
    def tomorrow_s(self) -> int:
        """Start of the future in seconds since 1970, whatever the clock that wrote a time."""
        return self.now_ms // 1000 + _DAY_S

    def bucket(self, source: Source, column: str) -> Column:
        """Returns how many edges a value has reached."""
        reached = [(self.value(source, column) >= F.lit(edge)).cast("int") for edge in self.edges]
        return reduce(add, reached)

    def value(self, source: Source, column: str) -> Column:
        """Returns the value that counts."""
        is_list = source.rows.schema[column].dataType.typeName() == "array"
        return F.array_max(column) if is_list else F.col(column)


@dataclass(frozen=True)
class TimeValues:
    """The values of a time column, by magnitude.

    Attributes:
        scan: What they were counted by.
        spans: Values by the number of edges that they have reached.
    """

    scan: TimeScan
    spans: Mapping[int, Span]

    def between(self, start: int | None, end: int | None) -> Span:
        """Returns the values from one edge on and below another; None: no bound."""
        edges = self.scan.edges
        first = 0 if start is None else edges.index(start) + 1
        last = len(edges) if end is None else edges.index(end)
        return sum((s for n, s in self.spans.items() if first <= n <= last), Span())

    @property
    def all(self) -> Span:
        """All values."""
        return self.between(None, None)

    @property
    def told(self) -> Span:
        """All but those below 2, which may mean "always"."""
        return self.between(_LEAST, None)

    def dates(self, unit: str) -> Span:
        """Returns the values that are dates between 1980 and 2100 in a unit."""
        return self.between(FIRST_DATE_S * PER_SECOND[unit], LAST_DATE_S * PER_SECOND[unit])

    def small(self) -> Span:
        """Returns the values that are dates in no unit, as they are below the dates in seconds."""
        return self.between(_LEAST, FIRST_DATE_S)

    def early(self, unit: str) -> Span:
        """Returns the values before 1973 in a unit: numbers that count from somewhere else."""
        return self.between(_LEAST, _EARLY_S * PER_SECOND[unit])

    def strays(self, unit: str) -> Span:
        """Returns the values that `is_stray` tells from the others."""
        others = _other_units(unit, are_dates=self.dates(unit).count > 0)
        if unit != "s":
            return sum(map(self.dates, others), Span())
        # Dates in nanoseconds are among what is too large.
        too_large = self.between(_TOO_LARGE_S, None)
        return sum((self.dates(other) for other in others if other != "ns"), too_large)

    def future(self, unit: str) -> Span:
        """Returns the values more than a day after the present."""
        return self.between(self.scan.tomorrow_s * PER_SECOND[unit], None)

    def has_dates(self, unit: str) -> bool:
        """Whether most values are dates in a unit."""
        return self.dates(unit).count * 2 > self.told.count

    def counts_from_elsewhere(self, unit: str) -> bool:
        """Whether values are no dates: they differ, and most lie before 1973."""
        early = self.early(unit)
        is_most = early.count * 2 > self.told.count and not self.dates(unit).count
        return is_most and early.low < early.high


def read_spans(scan: TimeScan, column: str, rows: Iterable[Any]) -> TimeValues:
    """Sums the groups of rows that `time_groups` and `time_aggregates` made."""
    spans: dict[int, Span] = {}
    for row in rows:
        bucket = row[_bucket(column)]
        if bucket is not None:
            span = Span(row["__n"], row[f"__low_{column}"], row[f"__high_{column}"])
            spans[bucket] = spans.get(bucket, Span()) + span
    return TimeValues(scan, spans)


def time_groups(scan: TimeScan, source: Source) -> list[Column]:
    """Returns what rows are grouped by: the magnitude of each of their times."""
    return [scan.bucket(source, name).alias(_bucket(name)) for name in scan.columns]


def time_aggregates(scan: TimeScan, source: Source) -> list[Column]:
    """Returns the least and the greatest value of each time column."""
    values = {name: scan.value(source, name) for name in scan.columns}
    lows = [F.min(value).alias(f"__low_{name}") for name, value in values.items()]
    return lows + [F.max(value).alias(f"__high_{name}") for name, value in values.items()]


def _bucket(column: str) -> str:
    return f"__bucket_{column}"


def is_stray(value: Column, unit: str, *, are_dates: bool) -> Column:
    """Whether a time is a date in another unit, or larger than milliseconds can be.

    Args:
        value: The time.
        unit: The unit of its column.
        are_dates: Whether the column holds dates in its unit. Without them a date in a coarser
            unit may as well be a number that counts from 0.
    """
    stray = value >= F.lit(_TOO_LARGE_S) if unit == "s" else F.lit(False)
    for other in _other_units(unit, are_dates=are_dates):
        first, end = (F.lit(bound * PER_SECOND[other]) for bound in (FIRST_DATE_S, LAST_DATE_S))
        stray = stray | ((value >= first) & (value < end))
    return stray


def _other_units(unit: str, *, are_dates: bool) -> list[str]:
    own = PER_SECOND[unit]
    return [u for u, n in PER_SECOND.items() if n > own or (are_dates and n < own)]


def mark_strays(source: Source, strays: Mapping[str, Column]) -> Source:
    """Makes the rows bad rows whose time is of another unit than the others.

    Args:
        source: The source.
        strays: By column whether its time is one.
    """
    reason = F.col(REASON_COLUMN)
    for name, stray in strays.items():
        other = F.when(F.coalesce(stray, F.lit(False)), F.lit(f"{OTHER_UNIT}:{name}"))
        reason = F.coalesce(reason, other)
    return replace(source, rows=source.rows.withColumn(REASON_COLUMN, reason))
