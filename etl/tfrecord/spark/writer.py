"""`write_tfrecords`: a DataFrame to TFRecord shards, its settings, and the order of its rows."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from conf.errors import ConfigError, did_you_mean
from etl.tfrecord.commit.commit_plan import SaveMode
from etl.tfrecord.commit.output_manifest import OutputManifest
from etl.tfrecord.spark.datasource import find_source
from etl.tfrecord.spark.failures import translate_failure
from etl.tfrecord.spark.options import SAVE_MODES, parse_write_options
from etl.tfrecord.spark.schema import describe_columns, quote_name, to_arrow_schema
from etl.tfrecord.spark.write_job import run_write
from etl.tfrecord.spark.write_plan import WritePlan, build_committer, plan_write
from etl.tfrecord.types.column_policies import ColumnPolicy, option_name
from etl.tfrecord.types.features import RecordType
from etl.tfrecord.types.row_errors import refuse_unknown

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession


@dataclass(frozen=True)
class WriteConfig:
    """How a DataFrame is written.

    Attributes:
        record_type: Record type of the shards.
        compression: `"gzip"`, `"zlib"`, or None for none.
        compression_level: 1 (fast) to 9 (small), or None for zlib's own choice of 6.
        partition_by: Columns whose values become directories.
        replace_partitions: Whether an overwrite replaces only the partitions that are written;
            None: as `spark.sql.sources.partitionOverwriteMode` says.
        shards: Number of files, or None for one per partition of the DataFrame.
        shard_rows: Records per file at most, or None.
        shard_bytes: Bytes per file at most, as stored, or None.
        shuffle_seed: Seed of a global shuffle, or None to keep the rows' order.
        policy: Policies of columns that are not named.
        columns: Policies by column.
        index: Whether side files with the place of every record are written.
        statistics: Whether statistics of each shard go into the manifest.
        deterministic_names: Whether shards are named without the job's id.
        encoders: Directory of fitted encoders to apply, or None.
        storage: How to reach an object store: `endpoint_override`, `region`, `scheme`; never
            credentials, which come from the environment.
    """

    record_type: RecordType = "Example"
    compression: str | None = None
    compression_level: int | None = None
    partition_by: tuple[str, ...] = ()
    replace_partitions: bool | None = None
    shards: int | None = None
    shard_rows: int | None = None
    shard_bytes: int | None = None
    shuffle_seed: int | None = None
    policy: ColumnPolicy = field(default_factory=ColumnPolicy)
    columns: Mapping[str, ColumnPolicy] = field(default_factory=dict)
    index: bool = False
    statistics: bool = False
    deterministic_names: bool = False
    encoders: str | None = None
    storage: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        """Refuses settings that exclude each other.

        Raises:
            ConfigError: A number of files together with partitions or limits, or below 1.
        """
        if isinstance(self.partition_by, str):
            object.__setattr__(self, "partition_by", (self.partition_by,))
        limits = [n for n in ("partition_by", "shard_rows", "shard_bytes") if getattr(self, n)]
        if self.shards is not None and (self.shards < 1 or limits):
            raise ConfigError(
                "bad number of shards",
                received=f"shards={self.shards}" + "".join(f", {name}" for name in limits),
                allowed="1 or more, without partition_by, shard_rows and shard_bytes",
                fix="give either the number of files or their size",
            )

    def to_options(self, path: str, mode: str, job_id: str) -> dict[str, str]:
        """Returns the data source options of a write to a path."""
        given: dict[str, Any] = {
            "path": path,
            "saveMode": mode,
            "jobId": job_id,
            "recordType": self.record_type,
            "compression": self.compression or "none",
            "compressionLevel": self.compression_level,
            "partitionBy": json.dumps(self.partition_by) if self.partition_by else None,
            "maxRecordsPerFile": self.shard_rows,
            "maxBytesPerFile": self.shard_bytes,
            "index": str(self.index).lower(),
            "statistics": str(self.statistics).lower(),
            "deterministicNames": str(self.deterministic_names).lower(),
            "encoders": self.encoders,
            "storage": json.dumps(dict(self.storage)) if self.storage else None,
            **_policy_options(self.policy, ColumnPolicy()),
        }
        if self.partition_by and self.replace_partitions:
            given["partitionOverwriteMode"] = "dynamic"
        if "mapKeys" in given:
            given["mapKeys"] = json.dumps(given["mapKeys"])
        if self.columns:
            policies = {n: _policy_options(p, self.policy) for n, p in self.columns.items()}
            given["columns"] = json.dumps(policies)
        return {name: str(value) for name, value in given.items() if value is not None}


def _policy_options(policy: ColumnPolicy, base: ColumnPolicy) -> dict[str, Any]:
    """Options of the policies that are not as in `base`."""
    return {
        option_name(f.name): getattr(policy, f.name)
        for f in fields(ColumnPolicy)
        if getattr(policy, f.name) != getattr(base, f.name)
    }


_KEY, _SALT = "__sluice_key", "__sluice_salt"
_PARTITIONS = "spark.sql.shuffle.partitions"
_BUCKET_BITS = 16
# A shard this much above or below the mean is as even as anyone needs.
_TOLERANCE = 0.01


def repartition_rows(frame: DataFrame, config: WriteConfig) -> DataFrame:
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
    return frame.sortWithinPartitions(*map(quote_name, order)) if order else frame


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
    arranged = placed.sortWithinPartitions(*map(quote_name, order), _KEY)
    return arranged.select(*map(quote_name, names))


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
    column = F.col(quote_name(name))
    return F.to_json(F.struct(column)) if _has_map(data_type) else column


def _has_map(data_type: DataType) -> bool:
    if isinstance(data_type, ArrayType):
        return _has_map(data_type.elementType)
    if isinstance(data_type, StructType):
        return any(_has_map(field.dataType) for field in data_type.fields)
    return isinstance(data_type, MapType)


_FORMAT = "sluice"  # no JVM connector claims that name
_OVERWRITE_MODE = "spark.sql.sources.partitionOverwriteMode"


def write_tfrecords(
    frame: DataFrame,
    path: str | Path,
    *,
    mode: str = "errorifexists",
    config: WriteConfig | None = None,
    **settings: Any,
) -> OutputManifest:
    """Writes a DataFrame as TFRecord shards with a manifest.

    Args:
        frame: The rows.
        path: Output directory: a local path or `file:` URI that driver and executors share, or
            an `s3://`, `s3a://` or `gs://` URI.
        mode: `append`, `overwrite`, `errorifexists` (or `error`), or `ignore`.
        config: How to write; the defaults if None.
        **settings: Fields of `WriteConfig` that take precedence over `config`.

    Returns:
        The directory's manifest after the write.

    Raises:
        ConfigError: Bad settings, columns that the wire cannot carry (all named), or output that
            the mode protects; nothing was touched.
        InputDataError: A value that the wire or a policy refuses; earlier output is untouched.
        UpstreamNotReadyError: Another job published meanwhile what this one would replace.
    """
    spark = frame.sparkSession
    config = _resolve(spark, config or WriteConfig(), settings)
    plan = _plan(frame, str(path), _parse_mode(mode), config)
    committer = build_committer(plan.options)
    holds_output = committer.check_mode(plan.options.mode)  # refuses early what it protects
    if plan.options.mode == "ignore" and holds_output:
        return committer.read() or plan.job.description
    try:
        manifest = run_write(repartition_rows(frame, config), plan)
    except PySparkException as error:
        cause = translate_failure(error)
        if cause is None:
            raise
        raise cause from error
    return manifest or committer.read() or plan.job.description


def _parse_mode(mode: str) -> SaveMode:
    if mode.lower() not in SAVE_MODES:
        raise ConfigError(
            "unknown save mode",
            received=repr(mode),
            allowed=", ".join(SAVE_MODES),
            fix=did_you_mean(mode, SAVE_MODES),
        )
    return SAVE_MODES[mode.lower()]


def _resolve(spark: SparkSession, config: WriteConfig, settings: dict[str, Any]) -> WriteConfig:
    unknown = [name for name in settings if name not in WriteConfig.__dataclass_fields__]
    refuse_unknown("unknown setting(s)", unknown, WriteConfig.__dataclass_fields__)
    config = replace(config, **settings)
    if config.replace_partitions is None:
        dynamic = str(spark.conf.get(_OVERWRITE_MODE, "static")).lower() == "dynamic"
        config = replace(config, replace_partitions=dynamic)
    return config


def _plan(frame: DataFrame, path: str, mode: SaveMode, config: WriteConfig) -> WritePlan:
    given = config.to_options(path, mode, uuid.uuid4().hex)
    options = parse_write_options(given, mode == "overwrite")
    types = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
    columns = describe_columns(frame.schema, options)
    hooks = find_source(_FORMAT).hooks
    return plan_write(to_arrow_schema(frame.schema), options, types, columns, hooks)
