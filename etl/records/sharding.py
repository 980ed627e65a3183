"""Sharding: how many shards a split has, and which record goes into which, in which order.

A record's shard and place follow from a hash of its content, its partition or its time, so they
are the same whatever the number of executors, input blocks or retries.
"""

from __future__ import annotations

import heapq
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
from pyspark.sql import functions as F

from conf.errors import ConfigError, did_you_mean
from conf.etl.build import BuildConfig
from conf.etl.output import DATE_PARTITION
from conf.splits import EVENT_SPLITS, TRAIN
from etl.events.columns import (
    EVENT_TS_COLUMN,
    POSITION_COLUMN,
    SPLIT_COLUMN,
    identity_columns,
)
from etl.tfrecord.files.data_files import ShardRange, partition_path
from etl.tfrecord.spark.frames import assign_buckets

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

logger = logging.getLogger("sluice.build")

HASH_COLUMN = "__hash"
GROUP_HASH_COLUMN = "__group_hash"
PART_COLUMN = "__part"
_FIRST_SHARD, _SHARDS, _SHARD_OF_BUCKET = "__first_shard", "__shards", "__shard_of_bucket"
_LOW, _HIGH = "__low", "__high"

MAX_PARTITIONS = 10_000
TOLERANCE = 0.05
# Fine enough for thousands of shards; a partition holds fewer of them.
_BUCKETS, _BUCKETS_OF_PARTITION = 1 << 16, 1 << 11
_PARTITION_TYPES = ("int64", "string")


def check_partition_columns(config: BuildConfig, column_types: Mapping[str, str]) -> None:
    """Refuses an order or partitions by what the events do not have, or has no safe text form."""
    output, events = config.output, config.events
    if output.order == "user" and events.user is None:
        raise ConfigError(
            "the output is to be grouped by user, but the events have none",
            received="events.user: null",
            fix="declare events.user, or leave out output.order: user",
        )
    made = {DATE_PARTITION} - {*column_types}
    if events.time is None and (output.order == "time" or made.intersection(output.partition_by)):
        raise ConfigError(
            "the output is to be ordered or partitioned by time, but the events have none",
            received="events.time: null",
            fix="declare events.time, or leave out output.order and output.partition_by",
        )
    for name in output.partition_by:
        if name not in made and column_types.get(name) not in _PARTITION_TYPES:
            raise ConfigError(
                f"output.partition_by names a column that cannot be partitioned by: {name!r}",
                received=column_types.get(name, "no such column"),
                allowed=f"{DATE_PARTITION}, or a column of type {' or '.join(_PARTITION_TYPES)}",
                fix=did_you_mean(name, [DATE_PARTITION, *column_types]),
            )


def add_keys(records: DataFrame, config: BuildConfig) -> DataFrame:
    """Adds `__hash`, of the split and of what tells records apart, `__part`, `__group_hash`."""
    output, user = config.output, config.events.user
    names = (SPLIT_COLUMN, *identity_columns(config))
    seed, identity = F.lit(output.seed), [F.col(name) for name in names]
    keyed = records.withColumn(HASH_COLUMN, F.xxhash64(seed, *identity))
    keyed = keyed.withColumn(PART_COLUMN, _part(keyed, config))
    if output.order != "user" or user is None:
        return keyed
    # Rows of no user (those of the item corpus) are spread as without groups.
    group = F.when(F.col(user).isNotNull(), F.xxhash64(seed, F.col(user).cast("string")))
    return keyed.withColumn(GROUP_HASH_COLUMN, F.coalesce(group, HASH_COLUMN))


def _part(records: DataFrame, config: BuildConfig) -> Column:
    if not config.output.partition_by:
        return F.lit("")
    values = [_partition_value(records, name) for name in config.output.partition_by]
    # JSON leaves nulls out unless they are kept: a null must not look like another value.
    text = F.to_json(F.array(*values), {"ignoreNullFields": "false"})
    return F.when(F.col(SPLIT_COLUMN).isin(*EVENT_SPLITS), text).otherwise(F.lit(""))


def _partition_value(records: DataFrame, name: str) -> Column:
    if name in records.columns:
        # An empty text has no folder name of its own; it goes with null.
        return F.nullif(F.col(name).cast("string"), F.lit(""))
    return F.date_format(F.timestamp_millis(EVENT_TS_COLUMN), "yyyy-MM-dd")


@dataclass(frozen=True)
class Partition:
    """A split, or one partition of it, with its rows and first and last event time."""

    split: str
    key: str  # `__part` of its rows
    rows: int = 0
    low_ms: int | None = None
    high_ms: int | None = None

    def folder(self, config: BuildConfig) -> str:
        """Where its shards lie in the version: `train/date=2026-01-31`, for example."""
        names = config.output.partition_by if self.key else ()
        return str(PurePosixPath(self.split, partition_path(names, json.loads(self.key or "[]"))))


@dataclass(frozen=True)
class PartitionShards:
    """The shards of a partition."""

    part: Partition
    files: ShardRange
    # From the partition's first, by bucket of the ordering key; where the hash decides, empty.
    shard_of_bucket: tuple[int, ...] = ()


def list_partitions(keyed: DataFrame, config: BuildConfig) -> list[Partition]:
    """Returns what is to have shards of its own, in their order.

    The records are counted, in one scan, where shards depend on them and not on the config alone.
    """
    output, splits = config.output, config.record_splits
    has_target = output.shard_bytes is not None or output.shard_rows is not None
    if not (has_target or output.partition_by or output.order != "shuffled"):
        return [Partition(split, "") for split in splits]
    times = F.min(EVENT_TS_COLUMN), F.max(EVENT_TS_COLUMN)
    grouped = keyed.groupBy(SPLIT_COLUMN, PART_COLUMN).agg(F.count("*"), *times)
    found = [Partition(*row) for row in grouped.limit(MAX_PARTITIONS + 1).collect()]
    if len(found) > MAX_PARTITIONS:
        raise ConfigError(
            "output.partition_by makes too many partitions",
            received=f"more than {MAX_PARTITIONS:,}",
            fix="partition by a column of fewer values",
        )
    return sorted(found, key=lambda part: (splits.index(part.split), part.key))


def plan_shards(
    keyed: DataFrame,
    config: BuildConfig,
    parts: Sequence[Partition],
    bytes_per_row: Mapping[str, float],
) -> list[PartitionShards]:
    """Plans the shards of all partitions; ordered records are scanned for their buckets."""
    shards, start = [], 0
    for part in parts:
        count = _count_shards(config, part, bytes_per_row)
        shards.append(PartitionShards(part, ShardRange(part.folder(config), start, count)))
        start += count
    return shards if config.output.order == "shuffled" else _assign(keyed, config, shards)


def _count_shards(config: BuildConfig, part: Partition, bytes_per_row: Mapping[str, float]) -> int:
    output = config.output
    if output.shard_rows is not None:
        return max(1, math.ceil(part.rows / output.shard_rows))
    if output.shard_bytes is not None:
        return max(1, math.ceil(part.rows * bytes_per_row[part.split] / output.shard_bytes))
    return output.shards if part.split == TRAIN else output.eval_shards


def _assign(
    keyed: DataFrame, config: BuildConfig, shards: Sequence[PartitionShards]
) -> list[PartitionShards]:
    """Assigns buckets to shards: ranges of time, or whole groups evenly spread."""
    histograms = {
        (own.part.split, own.part.key): np.zeros(_bucket_count(config), np.int64) for own in shards
    }
    keys = SPLIT_COLUMN, PART_COLUMN, _bucket(config)
    for row in _join_table(keyed, shards).groupBy(*keys).count().toLocalIterator():
        split, key, bucket, rows = row
        histograms[split, key][bucket] = rows
    assign = assign_buckets if config.output.order == "time" else assign_heaviest_first
    assigned = []
    for own, histogram in zip(shards, histograms.values(), strict=True):
        shard_of_bucket = assign(histogram, own.files.count)
        _warn_uneven(own.files, np.bincount(shard_of_bucket, histogram, own.files.count))
        assigned.append(replace(own, shard_of_bucket=tuple(shard_of_bucket.tolist())))
    return assigned


def assign_heaviest_first(counts: np.ndarray, shards: int) -> np.ndarray:
    """Spreads buckets over shards so that the shards become even, whatever the buckets hold.

    The heaviest bucket goes to the lightest shard, and so on (Graham 1969, longest processing time
    first: at most 4/3 of the best possible heaviest shard); ties go to the lowest number.

    Takes the rows and gives the shard of each bucket, int64 `[buckets]`.
    """
    heap = [(0, shard) for shard in range(shards)]
    assigned = np.zeros(len(counts), np.int64)
    for bucket in np.lexsort((np.arange(len(counts)), -counts)):
        rows, shard = heap[0]
        assigned[bucket] = shard
        heapq.heapreplace(heap, (rows + int(counts[bucket]), shard))
    return assigned


def _bucket_count(config: BuildConfig) -> int:
    return _BUCKETS_OF_PARTITION if config.output.partition_by else _BUCKETS


def _bucket(config: BuildConfig) -> Column:
    """Bucket of a row's ordering key, from 0."""
    buckets = _bucket_count(config)
    key = F.col(GROUP_HASH_COLUMN if config.output.order == "user" else HASH_COLUMN)
    by_hash = F.shiftrightunsigned(key, 64 - (buckets.bit_length() - 1)).cast("int")
    if config.output.order != "time":
        return by_hash
    # Equal times are told apart by the hash: the bucket grows with (time, hash).
    fraction = F.shiftrightunsigned(F.shiftright(HASH_COLUMN, 1) + F.lit(1 << 62), 31) / 2.0**32
    offset = (F.col(EVENT_TS_COLUMN) - F.col(_LOW)).cast("double") + fraction
    span = (F.col(_HIGH) - F.col(_LOW) + 1).cast("double")
    by_time = F.floor(offset * buckets / span).cast("int")
    return F.coalesce(F.least(by_time, F.lit(buckets - 1)), by_hash)


def _warn_uneven(files: ShardRange, rows: np.ndarray) -> None:
    # One row of a small shard is more than the tolerance, and no matter.
    if np.abs(rows - rows.mean()).max() > max(TOLERANCE * rows.mean(), 1000):
        logger.warning(
            "shards of %s are uneven: %s to %s rows; one user, or one moment, holds that many",
            files.folder, f"{rows.min():,.0f}", f"{rows.max():,.0f}",
        )  # fmt: skip


def _join_table(keyed: DataFrame, shards: Sequence[PartitionShards]) -> DataFrame:
    """Adds to each row the shards and the times of its partition."""
    rows = [
        (*astuple(own.part), own.files.start, own.files.count, list(own.shard_of_bucket))
        for own in shards
    ]
    schema = (
        f"{SPLIT_COLUMN} string, {PART_COLUMN} string, __rows bigint, {_LOW} bigint, "
        f"{_HIGH} bigint, {_FIRST_SHARD} int, {_SHARDS} int, {_SHARD_OF_BUCKET} array<int>"
    )
    table = keyed.sparkSession.createDataFrame(rows, schema)
    return keyed.join(F.broadcast(table), [SPLIT_COLUMN, PART_COLUMN])


def assign_shards(
    keyed: DataFrame,
    config: BuildConfig,
    columns: Sequence[str],
    shards: Sequence[PartitionShards],
) -> DataFrame:
    """Partitions these columns of records by shard, and sorts them within."""
    inside = F.pmod(F.col(HASH_COLUMN), F.col(_SHARDS)).cast("int")
    if config.output.order != "shuffled":
        inside = F.get(_SHARD_OF_BUCKET, _bucket(config))
    total = sum(own.files.count for own in shards)
    by_shard = _join_table(keyed, shards).repartitionById(total, F.col(_FIRST_SHARD) + inside)
    ordered = by_shard.sortWithinPartitions(*_order(config))
    return ordered.select(*[F.col(name) for name in columns])


def _order(config: BuildConfig) -> list[Column]:
    content = [F.col(name) for name in (HASH_COLUMN, *identity_columns(config))]
    user = config.events.user
    if config.output.order == "user" and user is not None:
        return [F.col(GROUP_HASH_COLUMN), F.col(user), F.col(POSITION_COLUMN), *content]
    if config.output.order == "time":
        return [F.col(EVENT_TS_COLUMN), *content]
    return content
