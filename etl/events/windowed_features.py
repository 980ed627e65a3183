"""Windowed features: counts and smoothed rates of the events before an event, by event time.

A window of time is the difference of two running counts, up to the event and up to the window's
start, so that the work per event does not grow with the events inside the window.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial, reduce
from operator import and_
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from conf.etl.build import BuildConfig
from conf.etl.events import EventConditionConfig, WindowedFeatureConfig
from etl.events.histories import matches
from etl.events.identity import DROP_COLUMN, EVENT_TS_COLUMN, spread_lone

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_MS_PER_DAY = 86_400_000
_ASKING = "asking"


def add_windowed_features(events: DataFrame, config: BuildConfig) -> DataFrame:
    """Adds every rolling feature to each event.

    Args:
        events: Events with `__drop` (those left out do not count) and `__event_ts_ms`.
        config: The build's config.

    Returns:
        The events with a column per feature: int64 counts, float32 rates. An event with a null
        key has nothing before it.
    """
    by_keys: dict[tuple[str, ...], dict[str, Column]] = {}
    for rolling in config.rolling:
        count = _counter(events, rolling)
        by_keys.setdefault(rolling.keys, {})[rolling.name] = _value(rolling, count)
    # One sort per set of keys, whatever the number of its features.
    for columns in by_keys.values():
        events = events.withColumns(columns)
    return events


def count_again(
    rows: DataFrame, log: DataFrame, config: BuildConfig, changed: Collection[str]
) -> DataFrame:
    """Computes the rolling features anew of rows whose keys are no longer those of their event.

    Each row sees what the log holds of its own keys strictly before its own time, and no other
    row: the value that an event with these keys would have had there.

    Args:
        rows: Rows with `__event_ts_ms` and `__drop`.
        log: Every event, those that are left out with their reason in `__drop`: these do not
            count.
        config: The build's config.
        changed: Columns that hold another value than the event's.
    """
    chosen = [rolling for rolling in config.rolling if not set(rolling.keys).isdisjoint(changed)]
    if not chosen:
        return rows
    rates = [rolling.rate.out_of for rolling in chosen if rolling.rate]
    wheres = [where for where in (*(rolling.where for rolling in chosen), *rates) if where]
    read = {key for rolling in chosen for key in rolling.keys}
    read |= {EVENT_TS_COLUMN, *(where.column for where in wheres)}
    no_reason = F.lit(None).cast("string").alias(DROP_COLUMN)
    counted = log.where(F.col(DROP_COLUMN).isNull()).select(*sorted(read), no_reason)
    own = rows.drop(*(rolling.name for rolling in chosen)).withColumn(DROP_COLUMN, F.lit(_ASKING))
    both = own.unionByName(counted, allowMissingColumns=True)
    recounted = add_windowed_features(both, config.model_copy(update={"rolling": tuple(chosen)}))
    return recounted.where(F.col(DROP_COLUMN) == _ASKING).withColumn(
        DROP_COLUMN, F.lit(None).cast("string")
    )


def add_latest_windowed_features(
    rows: DataFrame, log: DataFrame, config: BuildConfig, key: str
) -> DataFrame:
    """Adds to each row the rolling features by one key as they stand at the end of the log.

    Args:
        rows: One row per value of `key`.
        log: Every event, as for `count_again`.
        config: The build's config.
        key: Features by this key alone are added.
    """
    chosen = [rolling for rolling in config.rolling if rolling.keys == (key,)]
    if not chosen:
        return rows
    events = log.where(F.col(DROP_COLUMN).isNull())
    end = F.broadcast(events.agg(F.max(EVENT_TS_COLUMN).alias("__end_ts_ms")))
    timed = events.crossJoin(end).withColumn(
        "__age_ms", F.col("__end_ts_ms") - F.col(EVENT_TS_COLUMN)
    )
    values = {
        rolling.name: _value(rolling, partial(_count_aged, timed, rolling)) for rolling in chosen
    }
    latest = timed.groupBy(key).agg(*[value.alias(name) for name, value in values.items()])
    joined = rows.join(latest, key, "left")
    nothing = {
        rolling.name: _value(rolling, lambda where: F.lit(0).cast("bigint")) for rolling in chosen
    }
    return joined.withColumns(
        {name: F.coalesce(F.col(name), value) for name, value in nothing.items()}
    )


def windowed_feature_names(config: BuildConfig, key: str) -> set[str]:
    """Returns the features by one key alone: known for its values without an event."""
    return {rolling.name for rolling in config.rolling if rolling.keys == (key,)}


WindowCounter = Callable[[EventConditionConfig | None], "Column"]


def _value(rolling: WindowedFeatureConfig, count: WindowCounter) -> Column:
    """The count, or the rate `(hits + a) / (trials + a + b)`: the mean of a Beta(a, b) prior."""
    hits = count(rolling.where)
    if rolling.rate is None:
        return hits
    a, b = rolling.rate.a, rolling.rate.b
    return ((hits + F.lit(a)) / (count(rolling.rate.out_of) + F.lit(a + b))).cast("float")


def _counter(events: DataFrame, rolling: WindowedFeatureConfig) -> WindowCounter:
    has_keys = reduce(and_, [F.col(key).isNotNull() for key in rolling.keys])
    by_time = Window.partitionBy(*rolling.keys, spread_lone(~has_keys)).orderBy(EVENT_TS_COLUMN)
    delay_ms = max(1, 1000 * (rolling.delay_s or 0))

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


def _count_aged(
    events: DataFrame, rolling: WindowedFeatureConfig, where: EventConditionConfig | None
) -> Column:
    age = F.col("__age_ms")
    recent = age >= 1000 * (rolling.delay_s or 0)
    if rolling.window_days:
        recent = recent & (age <= round(rolling.window_days * _MS_PER_DAY))
    return F.count_if(recent & matches(events, where))
