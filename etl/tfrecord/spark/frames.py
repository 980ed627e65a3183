"""`write_tfrecords` and `read_tfrecords`: DataFrames to and from TFRecord files, with settings."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from pyspark.sql import functions as F
from pyspark.sql import types as T

from etl.tfrecord.commit.commit_plan import refuse_output
from etl.tfrecord.commit.output_directory import OutputManifest, look
from etl.tfrecord.spark.failures import known_failures
from etl.tfrecord.spark.options import option_text, parse_read_options, parse_write_options
from etl.tfrecord.spark.schema import infer_schema, quote_name
from etl.tfrecord.spark.write_job import plan_write, run_write
from etl.tfrecord.types.features import TypeOptions
from etl.tfrecord.types.from_example import find_name
from etl.tfrecord.types.refusals import refuse_unknown

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_FORMAT = "sluice"  # no JVM connector claims that name
_OVERWRITE_MODE = "spark.sql.sources.partitionOverwriteMode"


def write_tfrecords(
    frame: DataFrame,
    path: str | Path,
    *,
    mode: str = "errorifexists",
    shards: int | None = None,
    shuffle_seed: int | None = None,
    types: TypeOptions | None = None,
    **options: object,
) -> OutputManifest:
    """Writes a DataFrame as TFRecord shards with a manifest.

    Args:
        frame: The rows.
        path: Output directory: a local path or `file:` URI that driver and executors share, or
            an `s3://`, `s3a://` or `gs://` URI.
        mode: `append`, `overwrite`, `errorifexists` (or `error`), or `ignore`.
        shards: Number of files, or None for one per partition of the DataFrame.
        shuffle_seed: Seed of a global shuffle, or None to keep the rows' order.
        types: How columns of a type become features; the defaults if None.
        **options: Write options of `format("tfrecord")`, such as `partition_by="date"`; `storage`
            says how to reach an object store: `endpoint_override`, `region`, `scheme`.

    Returns:
        The directory's manifest after the write.

    Raises:
        ConfigError: Bad settings, columns that the wire cannot carry (all named), or output that
            the mode protects; nothing was touched.
        InputDataError: A value that the wire refuses; earlier output is untouched.
        UpstreamNotReadyError: Another job published meanwhile what this one would replace.
    """
    given = {
        "path": str(path),
        "savemode": mode,
        "jobid": uuid.uuid4().hex,
        **_as_texts(options),
        **(types or TypeOptions()).chosen(),
    }
    dynamic = str(frame.sparkSession.conf.get(_OVERWRITE_MODE, "static")).lower() == "dynamic"
    if dynamic and "partitionby" in given:
        given.setdefault("partitionoverwritemode", "dynamic")
    resolved = parse_write_options(given, mode.lower() == "overwrite")
    plan = plan_write(frame.schema, resolved)
    place, written = resolved.storage or Path(resolved.directory), None
    view = look(place, is_lenient=True)
    refuse_output(resolved.directory, view, resolved.mode)
    if resolved.mode != "ignore" or not view.holds_output:
        with known_failures():
            arranged = repartition_rows(frame, resolved.partition_by, shards, shuffle_seed)
            written = run_write(arranged, plan)
    return written or look(place).committed or plan.job.description


def _as_texts(options: Mapping[str, object]) -> dict[str, str]:
    """Options as Spark hands them over, of names in snake case too."""
    return {
        name.replace("_", "").lower(): option_text(value)
        for name, value in options.items()
        if value is not None
    }


_KEY, _SALT = "__sluice_key", "__sluice_salt"
_PARTITIONS = "spark.sql.shuffle.partitions"
_BUCKET_BITS = 16
# A shard this much above or below the mean is as even as anyone needs.
_TOLERANCE = 0.01


def repartition_rows(
    frame: DataFrame, order: Sequence[str], shards: int | None, seed: int | None
) -> DataFrame:
    """Arranges rows in shards, sorted by the partition columns of `order`; the same rows.

    A seeded shuffle orders all rows by xxhash64 of seed and columns: the order depends on the
    rows' content alone, not on how they were partitioned, and shards are ranges of it. Equal rows
    come next to each other, unless there are so many that the shards would be uneven; their order
    then follows their place in the DataFrame too. Rows that are shuffled are counted beforehand.
    """
    if seed is not None:
        shards = shards or int(str(frame.sparkSession.conf.get(_PARTITIONS)))
        return _shuffle(frame, seed, shards, order)
    if shards is not None:
        frame = frame.repartition(shards)
    return frame.sortWithinPartitions(*map(quote_name, order)) if order else frame


def _shuffle(frame: DataFrame, seed: int, shards: int, order: Sequence[str]) -> DataFrame:
    names = frame.columns
    content = list(map(_hashable, frame.schema.fields))
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
    arranged = placed.sortWithinPartitions(*map(quote_name, order), _KEY)
    return arranged.select(*map(quote_name, names))


def _count_buckets(keyed: DataFrame, bucket: Column) -> np.ndarray:
    counts = np.zeros(1 << _BUCKET_BITS, np.int64)
    for row in keyed.groupBy(bucket.alias("bucket")).count().toLocalIterator():
        counts[row["bucket"]] = row["count"]
    return counts


def assign_buckets(counts: np.ndarray, shards: int) -> np.ndarray:
    """Divides consecutive buckets among shards as evenly as whole buckets allow.

    Of rows per bucket, int64 `[buckets]`, the shard of each, int64 `[buckets]`, never falling.
    """
    ends = np.cumsum(counts)
    middles = ends - counts / 2
    return np.minimum((middles * shards / max(1, int(ends[-1]))).astype(np.int64), shards - 1)


def _is_even(counts: np.ndarray, assigned: np.ndarray, shards: int) -> bool:
    rows = np.bincount(assigned, weights=counts, minlength=shards)
    mean = counts.sum() / shards
    return bool(np.abs(rows - mean).max() <= max(1.0, _TOLERANCE * mean))


def _hashable(field: T.StructField) -> Column:
    """Maps have no hash in Spark; their JSON text has."""
    column = F.col(quote_name(field.name))
    has_map = "map<" in field.dataType.simpleString()
    return F.to_json(F.struct(column)) if has_map else column


def read_tfrecords(
    spark: SparkSession,
    path: str | Path | Sequence[str | Path],
    *,
    columns: Sequence[str] | None = None,
    schema: T.StructType | str | None = None,
    where: Mapping[str, Sequence[Any]] | None = None,
    **options: object,
) -> DataFrame:
    """Reads TFRecord files, decoding only some columns and opening only some partitions.

    Spark tells a Python data source neither which columns a query needs nor, unless
    `spark.sql.python.filterPushdown.enabled` is set, which rows; here both are said up front.

    Args:
        spark: Session with the format registered.
        path: Files, directories or glob patterns.
        columns: Columns to read, partition columns among them, in this order, upper or lower case
            as in Spark; None for all.
        schema: Schema to read by; None to take it from the manifest, or to infer it.
        where: Allowed values by partition column, such as `{"date": ["2026-01-01"]}`.
        **options: Read options of `format("tfrecord")`, such as `on_corrupt="skip"`.

    Returns:
        The rows.

    Raises:
        ConfigError: No such column, partition column or path, or a bad option.
        InputDataError: The schema cannot be inferred.
    """
    given = _as_texts(options)
    if where is not None:
        given["where"] = option_text({name: list(values) for name, values in where.items()})
    if isinstance(path, str | Path):
        given["path"] = str(path)
    else:
        given["paths"] = json.dumps([str(p) for p in path])
    if schema is None:
        schema = infer_schema(parse_read_options(given))
    elif isinstance(schema, str):
        schema = cast(T.StructType, T.StructType.fromDDL(schema))
    wanted = schema if columns is None else _select(schema, columns)
    return spark.read.format(_FORMAT).schema(wanted).options(**given).load()


def _select(schema: T.StructType, columns: Sequence[str]) -> T.StructType:
    matches = [find_name(name, schema.names) for name in columns]
    unknown = [name for name, names in zip(columns, matches, strict=True) if len(names) != 1]
    refuse_unknown("no such column(s)", unknown, schema.names)
    return T.StructType([schema[name] for (name,) in matches])
