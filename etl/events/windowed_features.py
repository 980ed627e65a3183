"""Windowed features: counts and smoothed rates of the events before an event, by event time.

A window of time is the difference of two running counts, up to the event and up to the window's
start, so that the work per event does not grow with the events inside the window.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from conf.etl.build import BuildConfig
from conf.etl.events import EventConditionConfig, WindowedFeatureConfig
from etl.events.columns import DROP_COLUMN, EVENT_TS_COLUMN, kept, spread_lone
from etl.events.conditions import matches

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_MS_PER_DAY = 86_400_000
_ASKING = "asking"


def add_windowed_features(events: DataFrame, config: BuildConfig) -> DataFrame:
    """Adds every rolling feature to each event: int64 counts, float32 rates.

    Events that are left out do not count. An event with a null key has nothing before it.
    """
    return _add(events, config.rolling, least_age_ms=1)


def count_again(
    rows: DataFrame, log: DataFrame, config: BuildConfig, changed: Collection[str]
) -> DataFrame:
    """Computes the rolling features anew of rows whose keys are no longer those of their event.

    Each row sees what the log holds of its own keys strictly before its own time, and no other
    row: the value that an event with these keys would have had there. `changed` are the columns
    that hold another value than the event's.
    """
    chosen = [rolling for rolling in config.rolling if not set(rolling.keys).isdisjoint(changed)]
    if not chosen:
        return rows
    counted = _ask(rows.drop(*(rolling.name for rolling in chosen)), log, chosen, least_age_ms=1)
    return counted.withColumn(DROP_COLUMN, F.lit(None).cast("string"))


def add_latest_windowed_features(
    rows: DataFrame, log: DataFrame, config: BuildConfig, key: str
) -> DataFrame:
    """Adds to each row the rolling features by `key` alone as they stand at the log's end."""
    chosen = [rolling for rolling in config.rolling if rolling.keys == (key,)]
    if not chosen:
        return rows
    end = F.broadcast(kept(log).agg(F.max(EVENT_TS_COLUMN).alias(EVENT_TS_COLUMN)))
    counted = _ask(rows.crossJoin(end), log, chosen, least_age_ms=0)
    return counted.drop(EVENT_TS_COLUMN, DROP_COLUMN)


def _ask(
    rows: DataFrame, log: DataFrame, chosen: Sequence[WindowedFeatureConfig], least_age_ms: int
) -> DataFrame:
    """Adds to each row what the log holds of its keys at its time; no row counts for another."""
    rates = [rolling.out_of for rolling in chosen]
    wheres = [where for where in (*(rolling.where for rolling in chosen), *rates) if where]
    read = {key for rolling in chosen for key in rolling.keys}
    read |= {EVENT_TS_COLUMN, *(where.column for where in wheres)}
    no_reason = F.lit(None).cast("string").alias(DROP_COLUMN)
    asking = rows.withColumn(DROP_COLUMN, F.lit(_ASKING))
    counted = kept(log).select(*sorted(read), no_reason)
    both = asking.unionByName(counted, allowMissingColumns=True)
    return _add(both, chosen, least_age_ms).where(F.col(DROP_COLUMN) == _ASKING)


def _add(
    events: DataFrame, features: Sequence[WindowedFeatureConfig], least_age_ms: int
) -> DataFrame:
    by_keys: dict[tuple[str, ...], dict[str, Column]] = {}
    for rolling in features:
        count = _counter(events, rolling, least_age_ms)
        by_keys.setdefault(rolling.keys, {})[rolling.name] = _value(rolling, count)
    # One sort per set of keys, whatever the number of its features.
    for columns in by_keys.values():
        events = events.withColumns(columns)
    return events


def windowed_feature_names(config: BuildConfig, key: str) -> set[str]:
    """Returns the features by one key alone: known for its values without an event."""
    return {rolling.name for rolling in config.rolling if rolling.keys == (key,)}


WindowCounter = Callable[[EventConditionConfig | None], "Column"]


def _value(rolling: WindowedFeatureConfig, count: WindowCounter) -> Column:
    """The count, or the rate `(hits + a) / (trials + a + b)`: the mean of a Beta(a, b) prior."""
    hits = count(rolling.where)
    if rolling.rate is None:
        return hits
    a, b = rolling.rate
    return ((hits + F.lit(a)) / (count(rolling.out_of) + F.lit(a + b))).cast("float")


def _counter(events: DataFrame, rolling: WindowedFeatureConfig, least_age_ms: int) -> WindowCounter:
    has_keys = reduce(and_, [F.col(key).isNotNull() for key in rolling.keys])
    by_time = Window.partitionBy(*rolling.keys, spread_lone(~has_keys)).orderBy(EVENT_TS_COLUMN)
    delay_ms = max(least_age_ms, 1000 * (rolling.delay_s or 0))

    def count(where: EventConditionConfig | None) -> Column:
        counts = F.col(DROP_COLUMN).isNull() & matches(events, where)

        def before(age_ms: int) -> Column:
            # By range, not by row: events at one time are peers and never in each other's frame.
            frame = by_time.rangeBetween(Window.unboundedPreceding, -age_ms)
            return F.count_if(counts).over(frame)

        found = before(delay_ms)
        if rolling.window_days:
            found = found - before(round(rolling.window_days * _MS_PER_DAY) + 1)
        return F.when(has_keys, found).otherwise(F.lit(0).cast("bigint"))

    return count
