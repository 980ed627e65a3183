"""A run with dates makes samples of its own days only; earlier events serve the histories."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.dates import DateRange
from etl.events import EventCounts
from etl.split import SPLIT_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

OUTSIDE_DATES = "outside_dates"
_TIME = "__event_ts_ms"
_DAY_MS = 24 * 3600 * 1000
_EPOCH = datetime.date(1970, 1, 1)


def is_inside(dates: DateRange) -> Column:
    """Whether an event's UTC day is one of the run's; events without a time are."""
    first = (dates.first - _EPOCH).days * _DAY_MS
    end = ((dates.last - _EPOCH).days + 1) * _DAY_MS
    time = F.col(_TIME)
    return time.isNull() | ((time >= first) & (time < end))


def count_outside(events: DataFrame, dates: DateRange) -> dict[str, int]:
    """Counts the kept events outside the run's days, by split."""
    rows = events.where(~is_inside(dates)).groupBy(SPLIT_COLUMN).count().collect()
    return {row[SPLIT_COLUMN]: row["count"] for row in rows}


def leave_out(counts: EventCounts, outside: Mapping[str, int]) -> EventCounts:
    """Accounts for events outside the run's days as left out, for that reason."""
    total = sum(outside.values())
    if not total:
        return counts
    splits = {split: n - outside.get(split, 0) for split, n in counts.splits.items()}
    return replace(
        counts,
        splits={split: n for split, n in splits.items() if n},
        dropped=dict(sorted({**counts.dropped, OUTSIDE_DATES: total}.items())),
    )
