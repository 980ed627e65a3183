"""Arranges a DataFrame's rows before a write: number of files, global shuffle, partition order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from etl.tfrecord.write_config import WriteConfig

_KEY, _SALT = "__sluice_key", "__sluice_salt"
_PARTITIONS = "spark.sql.shuffle.partitions"
_BUCKET_BITS = 16
# A shard this much above or below the mean is as even as anyone needs.
_TOLERANCE = 0.01


def arrange_rows(frame: DataFrame, config: WriteConfig) -> DataFrame:
    """Arranges rows as a write asks for them.

    A seeded shuffle orders all rows by xxhash64 of seed and columns: the order depends on the
    rows' content alone, not on how they were partitioned, and shards are ranges of it. Equal rows
    come next to each other, unless there are so many that the shards would be uneven; their order
    then follows their place in the DataFrame too.

    Args:
        frame: The rows; counted once beforehand where they are shuffled.
        config: Number of files, seed and partition columns.

    Returns:
        The same rows and columns.
    """
    order = list(config.partition_by)
    if config.shuffle_seed is not None:
        shards = config.shards or int(str(frame.sparkSession.conf.get(_PARTITIONS)))
        return _shuffle(frame, config.shuffle_seed, shards, order)
    if config.shards is not None:
        frame = frame.repartition(config.shards)
    return frame.sortWithinPartitions(*map(_quote, order)) if order else frame


def _shuffle(frame: DataFrame, seed: int, shards: int, order: Sequence[str]) -> DataFrame:
    names = frame.columns
    content = [_hashable(field.name, field.dataType) for field in frame.schema.fields]
    keyed = frame.withColumn(_KEY, F.xxhash64(F.lit(seed), *content))
    bucket = F.shiftright(_KEY, 64 - _BUCKET_BITS) + (1 << _BUCKET_BITS - 1)
    counts = _count_buckets(keyed, bucket)
    assigned = assign_buckets(counts, shards)
    if not _is_even(counts, assigned, shards):
        keyed = frame.withColumn(_SALT, F.monotonically_increasing_id())
        keyed = keyed.withColumn(_KEY, F.xxhash64(F.lit(seed), _SALT, *content))
        assigned = assign_buckets(np.ones_like(counts), shards)
    # One constant-folded array: a literal per bucket would take seconds to plan.
    table = F.from_json(F.lit(json.dumps(assigned.tolist())), "array<int>")
    placed = keyed.repartitionById(shards, F.element_at(table, (bucket + 1).cast("int")))
    arranged = placed.sortWithinPartitions(*map(_quote, order), _KEY)
    return arranged.select(*map(_quote, names))


def _count_buckets(keyed: DataFrame, bucket: Column) -> np.ndarray:
    counts = np.zeros(1 << _BUCKET_BITS, np.int64)
    for row in keyed.groupBy(bucket.alias("bucket")).count().toLocalIterator():
        counts[row["bucket"]] = row["count"]
    return counts


def assign_buckets(counts: np.ndarray, shards: int) -> np.ndarray:
    """Divides consecutive buckets among shards as evenly as whole buckets allow.

    Args:
        counts: Rows per bucket, int64 `[buckets]`.
        shards: Number of shards.

    Returns:
        Shard of each bucket, int64 `[buckets]`, never falling.
    """
    ends = np.cumsum(counts)
    middles = ends - counts / 2
    return np.minimum((middles * shards / max(1, int(ends[-1]))).astype(np.int64), shards - 1)


def _is_even(counts: np.ndarray, assigned: np.ndarray, shards: int) -> bool:
    rows = np.bincount(assigned, weights=counts, minlength=shards)
    mean = counts.sum() / shards
    return bool(np.abs(rows - mean).max() <= max(1.0, _TOLERANCE * mean))


def _hashable(name: str, data_type: DataType) -> Column:
    """Maps have no hash in Spark; their JSON text has."""
    column = F.col(_quote(name))
    return F.to_json(F.struct(column)) if _has_map(data_type) else column


def _has_map(data_type: DataType) -> bool:
    if isinstance(data_type, ArrayType):
        return _has_map(data_type.elementType)
    if isinstance(data_type, StructType):
        return any(_has_map(field.dataType) for field in data_type.fields)
    return isinstance(data_type, MapType)


def _quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
