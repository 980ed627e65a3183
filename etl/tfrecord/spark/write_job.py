"""A write as one Spark job: tasks write files and tell of them, the driver publishes them.

Spark's own writer (`etl.tfrecord.spark.datasource`) starts a process each to look the format up, to
plan the write and to commit it, one after another. Who has planned a write needs none of them.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import SparkContext, TaskContext

from conf.manifest import ShardInfo
from conf.storage.processes import find_this_process
from etl.tfrecord.commit.commit_plan import TaskResult
from etl.tfrecord.commit.output_manifest import OutputManifest
from etl.tfrecord.files.data_files import WrittenShard, find_stem
from etl.tfrecord.spark.write_plan import build_committer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from etl.tfrecord.spark.write_plan import WritePlan

_RESULT = "result"


def write_partition(plan: WritePlan, batches: Iterator[pa.RecordBatch]) -> TaskResult:
    """Writes a Spark partition's rows to files of this attempt; runs in a task.

    Returns the attempt, for the commit; the protocol: `etl.tfrecord.commit.local_commit`.

    Raises:
        InputDataError: A value that the wire cannot carry; the attempt's files are removed.
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

    Returns:
        The manifest of the directory; None where the mode is `ignore` and another job was faster.

    Raises:
        PySparkException: A task failed.
        UpstreamNotReadyError: Another job published meanwhile what this one would replace.
    """
    use_own_python()
    committer = build_committer(plan.options)
    committer.begin(plan.job, find_this_process())

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        result = write_partition(plan, batches)
        yield pa.RecordBatch.from_pydict({_RESULT: [json.dumps(asdict(result))]})

    try:
        results = rows.mapInArrow(write, f"{_RESULT} string").collect()
        return committer.publish(plan.job, [_read_result(json.loads(r[0])) for r in results])
    except BaseException:
        committer.discard(plan.job.job_id)
        raise


def _read_result(data: dict[str, Any]) -> TaskResult:
    return TaskResult(data["partition"], data["attempt"], tuple(map(_read_shard, data["shards"])))


def _read_shard(data: dict[str, Any]) -> WrittenShard:
    info, offsets = ShardInfo(**data["info"]), tuple(data["split_offsets"])
    return WrittenShard(**{**data, "info": info, "split_offsets": offsets})


def use_own_python() -> None:
    """Lets tasks on this machine run in this process's Python, where nobody has named one.

    Spark would start the `python3` of the path: another one, if the environment is not active.
    """
    context = SparkContext._active_spark_context
    if context is None or not (context.master or "").startswith("local"):
        return
    if context.pythonExec == "python3":  # PySpark's default
        context.pythonExec = sys.executable


_PLANNERS = "pyspark.sql.worker."  # what the modules of Spark's planner processes are called by


class _Frozen:
    modules = 0


def freeze_planner() -> None:
    """Freezes what a planner process of Spark has loaded; nothing in a user's own process."""
    if any(name.startswith(_PLANNERS) for name in sys.modules):
        freeze_loaded_code()


def freeze_loaded_code() -> None:
    """Keeps what is loaded out of later garbage collections, once for the same modules.

    After every task Spark's worker collects garbage in full, which looks at each object of NumPy,
    Arrow, Numba and PySpark again: 30 ms and more. To be called at the end of a task, when all that
    tasks of its kind use has been loaded.
    """
    if len(sys.modules) == _Frozen.modules:
        return
    _Frozen.modules = len(sys.modules)
    gc.collect()
    gc.freeze()
