"""Plans shards from counts of the records: by partition, size, group or time."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from pyspark.sql import functions as F

from conf.errors import ConfigError
from conf.etl import BuildConfig
from etl.arrangement.keys import (
    GROUP_HASH_COLUMN,
    HASH_COLUMN,
    PART_COLUMN,
    TIME_COLUMN,
    partition_folder,
)
from etl.arrangement.plan import (
    ShardCell,
    ShardPlan,
    TimeBounds,
    assign_heaviest_first,
    declared_count,
)
from etl.split import SPLIT_COLUMN, record_splits
from etl.tfrecord.spark.arrangement import assign_buckets

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

logger = logging.getLogger("sluice.build")

MAX_PARTITIONS = 10_000
TOLERANCE = 0.05
# Fine enough for thousands of shards; a partition holds fewer of them.
_BUCKETS, _BUCKETS_OF_PARTITION = 1 << 16, 1 << 11

Cell = tuple[str, str]


def needs_survey(config: BuildConfig) -> bool:
    """Whether the shards depend on what the records hold, not on the config alone."""
    output = config.output
    return bool(
        output.partition_by
        or output.shard_bytes is not None
        or output.group_by is not None
        or output.order == "time"
    )


def bucket_count(config: BuildConfig) -> int:
    """Buckets that the ordering key of a cell is divided into."""
    return _BUCKETS_OF_PARTITION if config.output.partition_by else _BUCKETS


def plan_by_survey(
    keyed: DataFrame, config: BuildConfig, bytes_per_row: Mapping[str, float]
) -> ShardPlan:
    """Plans the shards; scans the records once for the cells, and once more for their buckets.

    What comes to the driver is one row per partition, and one per bucket of the ordering key.

    Args:
        keyed: Records with their keys (`add_keys`); only the keys are read.
        config: The build's config.
        bytes_per_row: Encoded bytes per record by split, where shards have a target size.

    Raises:
        ConfigError: More partitions than `MAX_PARTITIONS`.
    """
    rows, bounds = _survey_cells(keyed, config)
    counts = {cell: _shard_count(config, cell, n, bytes_per_row) for cell, n in rows.items()}
    tables = _assign(keyed, config, counts, bounds) if _has_buckets(config) else {}
    cells, start = [], 0
    for split in record_splits(config):
        for cell in sorted((c for c in counts if c[0] == split), key=lambda c: c[1]):
            folder, table = partition_folder(config, cell[1]), tuple(tables.get(cell, ()))
            cells.append(ShardCell(split, cell[1], folder, start, counts[cell], table))
            start += counts[cell]
    return ShardPlan(tuple(cells), bounds if config.output.order == "time" else {})


def _has_buckets(config: BuildConfig) -> bool:
    return config.output.group_by is not None or config.output.order == "time"


def _survey_cells(
    keyed: DataFrame, config: BuildConfig
) -> tuple[dict[Cell, int], dict[Cell, TimeBounds]]:
    found = (
        keyed.groupBy(SPLIT_COLUMN, PART_COLUMN)
        .agg(
            F.count("*").alias("n"),
            F.min(TIME_COLUMN).alias("low"),
            F.max(TIME_COLUMN).alias("high"),
        )
        .limit(MAX_PARTITIONS + 1)
        .collect()
    )
    if len(found) > MAX_PARTITIONS:
        raise ConfigError(
            "output.partition_by makes too many partitions",
            received=f"more than {MAX_PARTITIONS:,}",
            allowed=f"at most {MAX_PARTITIONS:,}",
            fix="partition by a column of fewer values",
        )
    rows = {(row[SPLIT_COLUMN], row[PART_COLUMN]): row["n"] for row in found}
    bounds = {
        (row[SPLIT_COLUMN], row[PART_COLUMN]): TimeBounds(row["low"], row["high"])
        for row in found
        if row["low"] is not None
    }
    return rows, bounds


def _shard_count(
    config: BuildConfig, cell: Cell, rows: int, bytes_per_row: Mapping[str, float]
) -> int:
    target = config.output.shard_bytes
    if target is None:
        return declared_count(config, cell[0])
    return max(1, int(np.ceil(rows * bytes_per_row[cell[0]] / target)))


def bucket_column(config: BuildConfig, low: Column, high: Column) -> Column:
    """Bucket of the ordering key, from 0.

    Args:
        config: The build's config.
        low: First event time of the row's cell, null where it has none.
        high: Last event time of the row's cell.
    """
    buckets = bucket_count(config)
    key = F.col(GROUP_HASH_COLUMN if config.output.group_by else HASH_COLUMN)
    by_hash = F.shiftrightunsigned(key, 64 - (buckets.bit_length() - 1)).cast("int")
    if config.output.order != "time":
        return by_hash
    # Equal times are told apart by the hash: the bucket grows with (time, hash).
    fraction = F.shiftrightunsigned(F.shiftright(HASH_COLUMN, 1) + F.lit(1 << 62), 31) / float(
        1 << 32
    )
    offset = (F.col(TIME_COLUMN) - low).cast("double") + fraction
    by_time = F.floor(offset * buckets / (high - low + 1).cast("double")).cast("int")
    return F.coalesce(F.least(by_time, F.lit(buckets - 1)), by_hash)


def _assign(
    keyed: DataFrame,
    config: BuildConfig,
    counts: Mapping[Cell, int],
    bounds: Mapping[Cell, TimeBounds],
) -> dict[Cell, list[int]]:
    """Shard by bucket, for each cell: ranges of time, or whole groups evenly spread."""
    histograms = {cell: np.zeros(bucket_count(config), np.int64) for cell in counts}
    with_bounds = join_bounds(keyed, bounds) if config.output.order == "time" else keyed
    bucket = bucket_column(config, F.col("__low"), F.col("__high"))
    grouped = with_bounds.groupBy(SPLIT_COLUMN, PART_COLUMN, bucket.alias("bucket")).count()
    for row in grouped.toLocalIterator():
        histograms[row[SPLIT_COLUMN], row[PART_COLUMN]][row["bucket"]] = row["count"]
    assign = assign_buckets if config.output.order == "time" else assign_heaviest_first
    tables = {}
    for cell, histogram in histograms.items():
        table = assign(histogram, counts[cell])
        _warn_uneven(cell, histogram, table, counts[cell])
        tables[cell] = table.tolist()
    return tables


def join_bounds(keyed: DataFrame, bounds: Mapping[Cell, TimeBounds]) -> DataFrame:
    """Adds the first and last event time of each row's cell as `__low` and `__high`."""
    rows = [(split, key, times.low_ms, times.high_ms) for (split, key), times in bounds.items()]
    schema = f"{SPLIT_COLUMN} string, {PART_COLUMN} string, __low bigint, __high bigint"
    table = keyed.sparkSession.createDataFrame(rows, schema)
    return keyed.join(F.broadcast(table), [SPLIT_COLUMN, PART_COLUMN], "left")


def _warn_uneven(cell: Cell, histogram: np.ndarray, table: np.ndarray, shards: int) -> None:
    rows = np.bincount(table, weights=histogram, minlength=shards)
    mean = histogram.sum() / shards
    # One row of a small shard is more than the tolerance, and no matter.
    if np.abs(rows - mean).max() > max(TOLERANCE * mean, 1000):
        logger.warning(
            "shards of %s are uneven: %s to %s rows; one user, or one moment, holds that many",
            "/".join(filter(None, cell)), f"{int(rows.min()):,}", f"{int(rows.max()):,}",
        )  # fmt: skip
