"""Features that are counted over the log: in windows of time before an event, and by item.

A window of time is the difference of two running counts, up to the event and up to the window's
start, so that the work per event does not grow with the events inside the window.

Lists of what stands most often beside each item are a dictionary that a version makes of its own
train split, `encoders/<name>.most_frequent.parquet`. Days that are built later take it over.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import reduce
from operator import and_
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from conf.etl.build import BuildConfig
from conf.etl.events import EventConditionConfig, MostFrequentConfig, WindowedFeatureConfig
from conf.splits import TRAIN
from conf.storage.atomic_output import atomic_file
from etl.events.columns import DROP_COLUMN, EVENT_TS_COLUMN, SPLIT_COLUMN, kept, spread_lone
from etl.events.conditions import matches

_MS_PER_DAY = 86_400_000
_ASKING = "asking"
_VALUE, _COUNT, _RANK = "__value", "__count", "__rank"


def add_windowed_features(events: DataFrame, config: BuildConfig) -> DataFrame:
    """Adds every rolling feature to each event: int64 counts, float32 rates.

    Events that are left out do not count. An event with a null key has nothing before it.
    """
    return _add(events, config.rolling, least_age_ms=1)


def count_again(
    rows: DataFrame, log: DataFrame, config: BuildConfig, changed: Collection[str]
) -> DataFrame:
    """Computes the rolling features anew of rows whose `changed` columns are not their event's.

    Each row gets what an event with its keys and its time would have had.
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
    wheres = [where for rolling in chosen for where in (rolling.where, rolling.out_of) if where]
    read = {EVENT_TS_COLUMN, *(where.column for where in wheres)}
    read |= {key for rolling in chosen for key in rolling.keys}
    no_reason = F.lit(None).cast("string").alias(DROP_COLUMN)
    asking = rows.withColumn(DROP_COLUMN, F.lit(_ASKING))
    counted = kept(log).select(*sorted(read), no_reason)
    both = asking.unionByName(counted, allowMissingColumns=True)
    return _add(both, chosen, least_age_ms).where(F.col(DROP_COLUMN) == _ASKING)


def _add(
    events: DataFrame, features: Sequence[WindowedFeatureConfig], least_age_ms: int
) -> DataFrame:
    # One sort per set of keys, whatever the number of its features.
    for keys in dict.fromkeys(rolling.keys for rolling in features):
        same = [rolling for rolling in features if rolling.keys == keys]
        events = events.withColumns({r.name: _value(events, r, least_age_ms) for r in same})
    return events


def windowed_feature_names(config: BuildConfig, key: str) -> set[str]:
    """Returns the features by one key alone: known for its values without an event."""
    return {rolling.name for rolling in config.rolling if rolling.keys == (key,)}


def _value(events: DataFrame, rolling: WindowedFeatureConfig, least_age_ms: int) -> Column:
    """The count, or the rate `(hits + a) / (trials + a + b)`: the mean of a Beta(a, b) prior."""
    has_keys = reduce(and_, [F.col(key).isNotNull() for key in rolling.keys])
    by_time = Window.partitionBy(*rolling.keys, spread_lone(~has_keys)).orderBy(EVENT_TS_COLUMN)
    delay_ms = max(least_age_ms, 1000 * (rolling.delay_s or 0))

    def count(where: EventConditionConfig | None) -> Column:
        counts = F.count_if(F.col(DROP_COLUMN).isNull() & matches(events, where))

        def before(age_ms: int) -> Column:
            # By range, not by row: events at one time are peers and never in each other's frame.
            return counts.over(by_time.rangeBetween(Window.unboundedPreceding, -age_ms))

        found = before(delay_ms)
        if rolling.window_days:
            found = found - before(round(rolling.window_days * _MS_PER_DAY) + 1)
        return F.when(has_keys, found).otherwise(F.lit(0).cast("bigint"))

    hits = count(rolling.where)
    if rolling.rate is None:
        return hits
    a, b = rolling.rate
    return ((hits + F.lit(a)) / (count(rolling.out_of) + F.lit(a + b))).cast("float")


def fit_most_frequent(events: DataFrame, config: BuildConfig, directory: Path) -> None:
    """Counts the lists on the kept events of the train split, and writes them to `encoders`."""
    train = events.where(F.col(SPLIT_COLUMN) == TRAIN)
    for counted in config.most_frequent:
        lists = _rank_values(train, config.events.item or "", counted)
        # Only one row per item comes to the driver, as Arrow, like a vocabulary.
        table = lists.toArrow().sort_by(config.events.item or "")
        with atomic_file(_path(directory, counted)) as unfinished:
            pq.write_table(table, unfinished)


def _rank_values(events: DataFrame, item: str, config: MostFrequentConfig) -> DataFrame:
    """One row per item that has a value: the item, and its list in column `name`."""
    pairs = events.select(F.col(item), F.col(config.column).alias(_VALUE)).dropna()
    counts = pairs.groupBy(item, _VALUE).agg(F.count("*").alias(_COUNT))
    order = Window.partitionBy(item).orderBy(F.desc(_COUNT), F.asc(_VALUE))
    ranked = counts.withColumn(_RANK, F.row_number().over(order))
    entries = F.sort_array(F.collect_list(F.struct(_RANK, _VALUE)))
    return ranked.where(F.col(_RANK) <= config.max_len).groupBy(item).agg(
        entries[_VALUE].alias(config.name)
    )  # fmt: skip


def add_most_frequent(records: DataFrame, config: BuildConfig, directory: Path) -> DataFrame:
    """Adds the list of each record's item, empty where it has none, from a version's `encoders`."""
    item = config.events.item or ""
    for counted in config.most_frequent:
        lists = records.sparkSession.read.parquet(str(_path(directory, counted)))
        records = records.join(lists, item, "left")
    names = [counted.name for counted in config.most_frequent]
    none = {name: F.array().cast(records.schema[name].dataType) for name in names}
    return records.withColumns({name: F.coalesce(name, none[name]) for name in names})


def _path(directory: Path, counted: MostFrequentConfig) -> Path:
    return directory / f"{counted.name}.most_frequent.parquet"
