"""A write as one Spark job: planned in full, then tasks write files, which the driver publishes.

Spark's own writer (`etl.tfrecord.spark.datasource`) starts a process each to look the format up, to
plan the write and to commit it, one after another; `run_write` needs none of them.
"""

from __future__ import annotations

import gc
import json
import pickle
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
from pyspark import SparkContext, TaskContext

from conf.storage.processes import find_this_process
from etl.tfrecord.commit.commit_plan import JobPlan, TaskResult
from etl.tfrecord.commit.local_commit import LocalCommitter, StagedCommitter
from etl.tfrecord.commit.object_commit import ObjectCommitter
from etl.tfrecord.commit.output_directory import OutputManifest, describe_features
from etl.tfrecord.files.data_files import check_partition_columns, find_stem
from etl.tfrecord.spark.options import WriteOptions
from etl.tfrecord.spark.schema import to_arrow_schema
from etl.tfrecord.types.to_example import plan_to_example

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from etl.tfrecord.files.writer import ShardStatistics

_RESULT = "result"


class WriteHooks(Protocol):
    """What a build adds to a write: records made of its rows, statistics of each shard; picklable.

    Statistics are built from the records' schema and the shard's path below the output directory.
    """

    @property
    def output_schema(self) -> pa.Schema: ...

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch: ...

    def build_statistics(self, schema: pa.Schema, path: str) -> ShardStatistics: ...


@dataclass(frozen=True)
class WritePlan:
    """A write that has passed all checks.

    `job` says what is published, and how; `source` are the columns of the records before type
    mapping, partition columns left out.
    """

    options: WriteOptions
    job: JobPlan
    source: pa.Schema
    hooks: WriteHooks | None = None


def plan_write(
    rows: StructType, options: WriteOptions, hooks: WriteHooks | None = None
) -> WritePlan:
    """Checks the columns of the rows against the options, and describes what will be written.

    Raises:
        ConfigError: Columns that do not fit, all of them named.
    """
    schema = to_arrow_schema(rows)
    check_partition_columns(schema, options.partition_by)
    if hooks is not None:
        schema = hooks.output_schema
    source = pa.schema([field for field in schema if field.name not in options.partition_by])
    to_example = plan_to_example(source, options.record_type, options.type_options)
    columns: dict[str, Any] | None = None  # where the records hold them, and no payload
    if hooks is None and options.record_type != "ByteArray":
        fields = [f.jsonValue() for f in rows.fields if f.name not in options.partition_by]
        columns = {"type": "struct", "fields": fields}
    description = OutputManifest(
        record_type=options.record_type,
        compression=options.compression,
        features=describe_features(to_example.schema, options.record_type),
        type_options=json.loads(json.dumps(to_example.describe())),
        partition_columns=tuple((n, rows[n].dataType.simpleString()) for n in options.partition_by),
        shards=(),
        columns=columns,
    )
    job_id = options.job_id or uuid.uuid4().hex
    job = JobPlan(job_id, options.mode, options.replaces_partitions, description)
    return WritePlan(options, job, source, hooks)


def build_committer(options: WriteOptions) -> LocalCommitter | ObjectCommitter:
    """Chooses the protocol by the output directory of a write."""
    if options.shard_ranges:
        return StagedCommitter(options.directory)
    if options.storage is None:
        return LocalCommitter(options.directory)
    return ObjectCommitter(options.storage)


def write_partition(plan: WritePlan, batches: Iterator[pa.RecordBatch]) -> TaskResult:
    """Writes a Spark partition's rows to files of this attempt; runs in a task.

    The protocol: `etl.tfrecord.commit.local_commit`.
    """
    from etl.tfrecord.spark.write_task import WriteTask  # compiled

    context = TaskContext.get()
    if context is None:
        raise RuntimeError("write_partition runs inside a Spark task only")
    options, job_id = plan.options, plan.job.job_id
    partition = context.partitionId()
    name = f"part-{partition:05d}"
    attempt = f"{name}-attempt-{context.taskAttemptId()}"
    stem = name if options.deterministic_names else f"{name}-{job_id}"
    if options.shard_ranges:
        stem = find_stem(options.shard_ranges, partition)
    with build_committer(options).hold_attempt(job_id, attempt) as root:
        sink = WriteTask(root, stem, options, plan.source, plan.hooks)
        shards = sink.write_all(batches, f"Spark partition {partition}")
    freeze_loaded_code()
    return TaskResult(partition, attempt, shards)


def run_write(rows: DataFrame, plan: WritePlan) -> OutputManifest | None:
    """Writes rows, columns as planned, and publishes the files; a failed job leaves no trace.

    Returns the manifest of the directory; None where the mode is `ignore` and another job was
    faster. Raises UpstreamNotReadyError where another published what this one would replace.
    """
    use_own_python()
    committer = build_committer(plan.options)
    committer.begin(plan.job, find_this_process())

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({_RESULT: [pickle.dumps(write_partition(plan, batches))]})

    try:
        results = rows.mapInArrow(write, f"{_RESULT} binary").collect()
        return committer.publish(plan.job, [pickle.loads(r[0]) for r in results])  # noqa: S301
    except BaseException:
        committer.discard(plan.job.job_id)
        raise


def use_own_python() -> None:
    """Lets tasks on this machine run in this process's Python, where nobody has named one.

    Spark would start the `python3` of the path: another one, if the environment is not active.
    """
    context = SparkContext._active_spark_context
    is_local = context is not None and (context.master or "").startswith("local")
    if context is not None and is_local and context.pythonExec == "python3":  # PySpark's default
        context.pythonExec = sys.executable


_PLANNERS = "pyspark.sql.worker."  # what the modules of Spark's planner processes are called by


_frozen: list[int] = []


def freeze_planner() -> None:
    """Freezes what a planner process of Spark has loaded; nothing in a user's own process."""
    if any(name.startswith(_PLANNERS) for name in sys.modules):
        freeze_loaded_code()


def freeze_loaded_code() -> None:
    """Keeps what is loaded out of later garbage collections, once for the same modules.

    After every task Spark's worker collects garbage in full, which looks at each object of NumPy,
    Arrow, Numba and PySpark again: 30 ms and more. To be called at the end of a task.
    """
    if _frozen != [len(sys.modules)]:
        _frozen[:] = [len(sys.modules)]
        gc.collect()
        gc.freeze()
