"""Sharding: how many shards a split has, and which record goes into which, in which order.

A record's shard and place follow from a hash of its content, its partition or its time, so they
are the same whatever the number of executors, input blocks or retries.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class PartitionShards:
    """A split, or one partition of it.

    Attributes:
        split: The split.
        key: `__part` of its rows, "" without partitions.
        folder: Folder below the split, `date=2026-01-31` for example, or "".
        start: Spark partition of its first shard.
        count: Number of its shards.
        shard_of_bucket: Shard, counted from `start`, by bucket of the ordering key; empty where
            a record's shard follows from its hash alone.
    """

    split: str
    key: str
    folder: str
    start: int
    count: int
    shard_of_bucket: tuple[int, ...] = ()

    @property
    def files(self) -> ShardRange:
        """Where the shards lie in the version."""
        return ShardRange(str(PurePosixPath(self.split, self.folder)), self.start, self.count)


@dataclass(frozen=True)
class TimeBounds:
    """First and last event time of a partition of a split, milliseconds."""

    low_ms: int
    high_ms: int


@dataclass(frozen=True)
class ShardPlan:
    """All shards.

    Attributes:
        partitions: Partitions of the splits, in the order of their shards.
        bounds: Event times by `(split, key)`, where records are ordered by time.
    """

    partitions: tuple[PartitionShards, ...]
    bounds: Mapping[tuple[str, str], TimeBounds] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Number of shards."""
        return sum(part.count for part in self.partitions)


def declared_count(config: BuildConfig, split: str) -> int:
    """Number of shards that the config gives a split, or each of its partitions."""
    return config.output.shards if split == TRAIN else config.output.eval_shards


def plan_from_config(config: BuildConfig) -> ShardPlan:
    """Plans the shards where the config alone says how many there are."""
    partitions, start = [], 0
    for split in config.record_splits:
        count = declared_count(config, split)
        partitions.append(PartitionShards(split, "", "", start, count))
        start += count
    return ShardPlan(tuple(partitions))


def assign_heaviest_first(counts: np.ndarray, shards: int) -> np.ndarray:
    """Spreads buckets over shards so that the shards become even, whatever the buckets hold.

    The heaviest bucket goes to the lightest shard, and so on (Graham 1969, longest processing time
    first: at most 4/3 of the best possible heaviest shard); ties go to the lowest number.

    Args:
        counts: Rows per bucket, int64 `[buckets]`.
        shards: Number of shards.

    Returns:
        Shard of each bucket, int64 `[buckets]`.
    """
    import heapq

    heap = [(0, shard) for shard in range(shards)]
    assigned = np.zeros(len(counts), np.int64)
    for bucket in np.lexsort((np.arange(len(counts)), -counts)):
        rows, shard = heap[0]
        assigned[bucket] = shard
        heapq.heapreplace(heap, (rows + int(counts[bucket]), shard))
    return assigned


HASH_COLUMN = "__hash"
GROUP_HASH_COLUMN = "__group_hash"
PART_COLUMN = "__part"

_PARTITION_TYPES = ("int64", "string")


def check_partition_columns(config: BuildConfig, column_types: Mapping[str, str]) -> None:
    """Refuses partition columns that are not there or have no safe text form.

    Raises:
        ConfigError: Names the first such column; or records without a time are to be ordered or
            partitioned by it, or records without a user grouped by it.
    """
    output = config.output
    if output.order == "user" and config.events.user is None:
        raise ConfigError(
            "the output is to be grouped by user, but the events have none",
            received="events.user: null",
            fix="declare events.user, or leave out output.order: user",
        )
    for name in output.partition_by:
        if name == DATE_PARTITION and name not in column_types:
            continue
        if column_types.get(name) not in _PARTITION_TYPES:
            raise ConfigError(
                f"output.partition_by names a column that cannot be partitioned by: {name!r}",
                received=column_types.get(name, "no such column"),
                allowed=f"{DATE_PARTITION}, or a declared column of type "
                + " or ".join(_PARTITION_TYPES),
                fix=did_you_mean(name, [DATE_PARTITION, *column_types]),
            )
    needs_time = output.order == "time" or (
        DATE_PARTITION in output.partition_by and DATE_PARTITION not in column_types
    )
    if needs_time and config.events.time is None:
        raise ConfigError(
            "the output is to be ordered or partitioned by time, but the events have none",
            received="events.time: null",
            fix="declare events.time, or leave out output.order and output.partition_by",
        )


def add_keys(records: DataFrame, config: BuildConfig) -> DataFrame:
    """Adds `__hash`, `__part` and, for grouped output, `__group_hash`.

    The hash is of the split and of what tells records apart: the same rows have the same keys
    whatever the number of executors, input blocks or retries.
    """
    output, events = config.output, config.events
    names = (SPLIT_COLUMN, *identity_columns(config))
    seed, identity = F.lit(output.seed), [F.col(name) for name in names]
    keyed = records.withColumn(HASH_COLUMN, F.xxhash64(seed, *identity))
    keyed = keyed.withColumn(PART_COLUMN, _part(keyed, config))
    if output.order != "user" or events.user is None:
        return keyed
    group = F.xxhash64(seed, F.coalesce(F.col(events.user).cast("string"), F.lit("")))
    # Rows of no user (those of the item corpus) are spread as without groups.
    return keyed.withColumn(
        GROUP_HASH_COLUMN,
        F.when(F.col(events.user).isNotNull(), group).otherwise(F.col(HASH_COLUMN)),
    )


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


def partition_folder(config: BuildConfig, key: str) -> str:
    """Folder below the split that a `__part` stands for."""
    return partition_path(config.output.partition_by, json.loads(key)) if key else ""


logger = logging.getLogger("sluice.build")

MAX_PARTITIONS = 10_000
TOLERANCE = 0.05
# Fine enough for thousands of shards; a partition holds fewer of them.
_BUCKETS, _BUCKETS_OF_PARTITION = 1 << 16, 1 << 11

SplitPartition = tuple[str, str]


def needs_row_counts(config: BuildConfig) -> bool:
    """Whether the shards depend on what the records hold, not on the config alone."""
    output = config.output
    return bool(
        output.partition_by
        or output.shard_bytes is not None
        or output.shard_rows is not None
        or output.order == "user"
        or output.order == "time"
    )


def bucket_count(config: BuildConfig) -> int:
    """Number of buckets of the ordering key of a split's partition."""
    return _BUCKETS_OF_PARTITION if config.output.partition_by else _BUCKETS


def plan_from_counts(
    keyed: DataFrame, config: BuildConfig, bytes_per_row: Mapping[str, float]
) -> ShardPlan:
    """Plans the shards; scans the records once for the partitions, once more for their buckets.

    What comes to the driver is one row per partition, and one per bucket of the ordering key.

    Raises:
        ConfigError: More partitions than `MAX_PARTITIONS`.
    """
    rows, bounds = _count_partitions(keyed, config)
    counts = {part: _shard_count(config, part, n, bytes_per_row) for part, n in rows.items()}
    assigned = _assign(keyed, config, counts, bounds) if _has_buckets(config) else {}
    partitions, start = [], 0
    for split in config.record_splits:
        for part in sorted((c for c in counts if c[0] == split), key=lambda c: c[1]):
            folder, buckets = partition_folder(config, part[1]), tuple(assigned.get(part, ()))
            partitions.append(PartitionShards(split, part[1], folder, start, counts[part], buckets))
            start += counts[part]
    return ShardPlan(tuple(partitions), bounds if config.output.order == "time" else {})


def _has_buckets(config: BuildConfig) -> bool:
    return config.output.order != "shuffled"


def _count_partitions(
    keyed: DataFrame, config: BuildConfig
) -> tuple[dict[SplitPartition, int], dict[SplitPartition, TimeBounds]]:
    counts = (
        keyed.groupBy(SPLIT_COLUMN, PART_COLUMN)
        .agg(
            F.count("*").alias("n"),
            F.min(EVENT_TS_COLUMN).alias("low"),
            F.max(EVENT_TS_COLUMN).alias("high"),
        )
        .limit(MAX_PARTITIONS + 1)
        .collect()
    )
    if len(counts) > MAX_PARTITIONS:
        raise ConfigError(
            "output.partition_by makes too many partitions",
            received=f"more than {MAX_PARTITIONS:,}",
            allowed=f"at most {MAX_PARTITIONS:,}",
            fix="partition by a column of fewer values",
        )
    rows = {(row[SPLIT_COLUMN], row[PART_COLUMN]): row["n"] for row in counts}
    bounds = {
        (row[SPLIT_COLUMN], row[PART_COLUMN]): TimeBounds(row["low"], row["high"])
        for row in counts
        if row["low"] is not None
    }
    return rows, bounds


def _shard_count(
    config: BuildConfig, part: SplitPartition, rows: int, bytes_per_row: Mapping[str, float]
) -> int:
    output = config.output
    if output.shard_rows is not None:
        return max(1, math.ceil(rows / output.shard_rows))
    if output.shard_bytes is None:
        return declared_count(config, part[0])
    return max(1, math.ceil(rows * bytes_per_row[part[0]] / output.shard_bytes))


def bucket_column(config: BuildConfig, low: Column, high: Column) -> Column:
    """Bucket of the ordering key, from 0; `low` and `high`: event times of the row's partition."""
    buckets = bucket_count(config)
    key = F.col(GROUP_HASH_COLUMN if config.output.order == "user" else HASH_COLUMN)
    by_hash = F.shiftrightunsigned(key, 64 - (buckets.bit_length() - 1)).cast("int")
    if config.output.order != "time":
        return by_hash
    # Equal times are told apart by the hash: the bucket grows with (time, hash).
    fraction = F.shiftrightunsigned(F.shiftright(HASH_COLUMN, 1) + F.lit(1 << 62), 31) / float(
        1 << 32
    )
    offset = (F.col(EVENT_TS_COLUMN) - low).cast("double") + fraction
    by_time = F.floor(offset * buckets / (high - low + 1).cast("double")).cast("int")
    return F.coalesce(F.least(by_time, F.lit(buckets - 1)), by_hash)


def _assign(
    keyed: DataFrame,
    config: BuildConfig,
    counts: Mapping[SplitPartition, int],
    bounds: Mapping[SplitPartition, TimeBounds],
) -> dict[SplitPartition, list[int]]:
    """Shard by bucket, for each partition: ranges of time, or whole groups evenly spread."""
    histograms = {part: np.zeros(bucket_count(config), np.int64) for part in counts}
    with_bounds = join_bounds(keyed, bounds) if config.output.order == "time" else keyed
    bucket = bucket_column(config, F.col("__low"), F.col("__high"))
    grouped = with_bounds.groupBy(SPLIT_COLUMN, PART_COLUMN, bucket.alias("bucket")).count()
    for row in grouped.toLocalIterator():
        histograms[row[SPLIT_COLUMN], row[PART_COLUMN]][row["bucket"]] = row["count"]
    assign = assign_buckets if config.output.order == "time" else assign_heaviest_first
    assigned = {}
    for part, histogram in histograms.items():
        shard_of_bucket = assign(histogram, counts[part])
        _warn_uneven(part, histogram, shard_of_bucket, counts[part])
        assigned[part] = shard_of_bucket.tolist()
    return assigned


def join_bounds(keyed: DataFrame, bounds: Mapping[SplitPartition, TimeBounds]) -> DataFrame:
    """Adds the first and last event time of each row's partition as `__low` and `__high`."""
    rows = [(split, key, times.low_ms, times.high_ms) for (split, key), times in bounds.items()]
    schema = f"{SPLIT_COLUMN} string, {PART_COLUMN} string, __low bigint, __high bigint"
    table = keyed.sparkSession.createDataFrame(rows, schema)
    return keyed.join(F.broadcast(table), [SPLIT_COLUMN, PART_COLUMN], "left")


def _warn_uneven(
    part: SplitPartition, histogram: np.ndarray, shard_of_bucket: np.ndarray, shards: int
) -> None:
    rows = np.bincount(shard_of_bucket, weights=histogram, minlength=shards)
    mean = histogram.sum() / shards
    # One row of a small shard is more than the tolerance, and no matter.
    if np.abs(rows - mean).max() > max(TOLERANCE * mean, 1000):
        logger.warning(
            "shards of %s are uneven: %s to %s rows; one user, or one moment, holds that many",
            "/".join(filter(None, part)), f"{int(rows.min()):,}", f"{int(rows.max()):,}",
        )  # fmt: skip


SHARD_COLUMN = "__shard"
_FIRST_SHARD, _SHARDS = "__first_shard", "__shards"
_SHARD_OF_BUCKET = "__shard_of_bucket"


def assign_shards(
    keyed: DataFrame, config: BuildConfig, columns: Sequence[str], shards: ShardPlan
) -> DataFrame:
    """Puts each record into its shard and place by a hash of its content, or by its time.

    The same rows give the same shards in the same order, whatever the number of executors,
    input blocks or retries.

    Returns:
        These columns, partitioned by shard and sorted within.
    """
    placed = _add_shard_column(keyed, config, shards)
    by_shard = placed.repartitionById(shards.total, F.col(SHARD_COLUMN))
    ordered = by_shard.sortWithinPartitions(*_order(config))
    return ordered.select(*[F.col(name) for name in columns])


def _add_shard_column(keyed: DataFrame, config: BuildConfig, shards: ShardPlan) -> DataFrame:
    if all(not part.key and not part.shard_of_bucket for part in shards.partitions):
        shard = F.lit(None).cast("int")
        for part in shards.partitions:
            inside = F.pmod(F.col(HASH_COLUMN), F.lit(part.count)).cast("int") + F.lit(part.start)
            shard = F.when(F.col(SPLIT_COLUMN) == part.split, inside).otherwise(shard)
        return keyed.withColumn(SHARD_COLUMN, shard)
    if shards.bounds:
        keyed = join_bounds(keyed, shards.bounds)
    joined = keyed.join(F.broadcast(_partition_table(keyed, shards)), [SPLIT_COLUMN, PART_COLUMN])
    by_hash = F.pmod(F.col(HASH_COLUMN), F.col(_SHARDS)).cast("int")
    if not any(part.shard_of_bucket for part in shards.partitions):
        return joined.withColumn(SHARD_COLUMN, F.col(_FIRST_SHARD) + by_hash)
    bucket = bucket_column(config, F.col("__low"), F.col("__high"))
    return joined.withColumn(SHARD_COLUMN, F.col(_FIRST_SHARD) + F.get(_SHARD_OF_BUCKET, bucket))


def _partition_table(keyed: DataFrame, shards: ShardPlan) -> DataFrame:
    rows = [
        (part.split, part.key, part.start, part.count, list(part.shard_of_bucket))
        for part in shards.partitions
    ]
    schema = (
        f"{SPLIT_COLUMN} string, {PART_COLUMN} string, {_FIRST_SHARD} int, {_SHARDS} int, "
        f"{_SHARD_OF_BUCKET} array<int>"
    )
    return keyed.sparkSession.createDataFrame(rows, schema)


def _order(config: BuildConfig) -> list[Column]:
    content = [F.col(name) for name in (HASH_COLUMN, *identity_columns(config))]
    user = config.events.user
    if config.output.order == "user" and user is not None:
        return [F.col(GROUP_HASH_COLUMN), F.col(user), F.col(POSITION_COLUMN), *content]
    if config.output.order == "time":
        return [F.col(EVENT_TS_COLUMN), *content]
    return content
