"""Plans a write from its schema and options, so that every fault shows before the first task."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from conf.errors import ConfigError
from etl.tfrecord.commit.commit_plan import JobPlan
from etl.tfrecord.commit.local_commit import LocalCommitter, StagedCommitter
from etl.tfrecord.commit.object_commit import ObjectCommitter
from etl.tfrecord.commit.output_manifest import (
    OutputManifest,
    describe_features,
)
from etl.tfrecord.files.partitions import check_partition_columns
from etl.tfrecord.spark.options import WriteOptions
from etl.tfrecord.spark.schema import describe_columns, to_arrow_schema
from etl.tfrecord.types.arrays import nest_schema
from etl.tfrecord.types.to_example import plan_to_example

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from etl.tfrecord.files.writer import ShardStatistics


class BatchEncoder(Protocol):
    """Turns the rows of a write into those of its records, which have `output_schema`."""

    @property
    def output_schema(self) -> pa.Schema: ...

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch: ...


@dataclass(frozen=True)
class WriteHooks:
    """What others add to a write, for the options that ask for it; pickled by name.

    Attributes:
        open_encoders: Opens the encoders of option `encoders`, a directory.
        build_statistics: Builds the statistics of a shard, from the options, the records' schema
            and the shard's path below the output directory.
    """

    open_encoders: Callable[[str], BatchEncoder] | None = None
    build_statistics: Callable[[WriteOptions, pa.Schema, str], ShardStatistics] | None = None

    def check(self, options: WriteOptions) -> None:
        """Refuses options that nothing here serves."""
        missing = []
        if options.encoders is not None and self.open_encoders is None:
            missing.append("encoders")
        if options.statistics and self.build_statistics is None:
            missing.append("statistics")
        if missing:
            raise ConfigError(
                "this data source writes plain records alone",
                received=", ".join(f"option {name}" for name in missing),
                fix="use format('sluice') or format('tfrecord') as `register_tfrecord` registers "
                "them, or leave the option out",
            )


NO_HOOKS = WriteHooks()


@dataclass(frozen=True)
class WritePlan:
    """A write that has passed all checks.

    `job` says what is published, and how; `source` are the columns of the records before type
    mapping, partition columns left out.
    """

    options: WriteOptions
    job: JobPlan
    source: pa.Schema
    hooks: WriteHooks = NO_HOOKS


def plan_write(
    schema: pa.Schema,
    options: WriteOptions,
    partition_types: dict[str, str] | None = None,
    columns: Mapping[str, Any] | None = None,
    hooks: WriteHooks = NO_HOOKS,
) -> WritePlan:
    """Checks the columns of the rows against the options, and describes what will be written.

    `partition_types` are Spark's simple type names by partition column, `columns` those of the
    manifest.

    Raises:
        ConfigError: Columns that the wire cannot carry or partitions cannot be made of, all of
            them named in one error; options without their hook.
    """
    hooks.check(options)
    check_partition_columns(schema, options.partition_by)
    if options.encoders is not None and hooks.open_encoders is not None:
        encoded = hooks.open_encoders(options.encoders).output_schema
        schema = nest_schema(encoded, options.feature_lists)
    source = pa.schema([field for field in schema if field.name not in options.partition_by])
    to_example = plan_to_example(source, options.record_type, options.type_options)
    description = OutputManifest(
        record_type=options.record_type,
        compression=options.compression,
        features=describe_features(to_example.schema, options.record_type),
        type_options=json.loads(json.dumps(to_example.describe())),
        partition_columns=tuple(
            (name, (partition_types or {})[name]) for name in options.partition_by
        ),
        shards=(),
        columns=columns,
    )
    job_id = options.job_id or uuid.uuid4().hex
    job = JobPlan(job_id, options.mode, options.replaces_partitions, description)
    return WritePlan(options, job, source, hooks)


def plan_frame(schema: StructType, options: WriteOptions, hooks: WriteHooks) -> WritePlan:
    """Plans the write of a DataFrame by its schema; see `plan_write`."""
    types = {field.name: field.dataType.simpleString() for field in schema.fields}
    columns = describe_columns(schema, options)
    return plan_write(to_arrow_schema(schema), options, types, columns, hooks)


def build_committer(options: WriteOptions) -> LocalCommitter | ObjectCommitter:
    """Chooses the protocol by the output directory of a write."""
    if options.shard_ranges:
        return StagedCommitter(options.directory)
    if options.storage is None:
        return LocalCommitter(options.directory)
    return ObjectCommitter(options.storage)
