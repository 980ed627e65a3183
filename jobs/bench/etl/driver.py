"""One measurement of the ETL in a driver of its own: `python -m jobs.bench.etl.driver JOB_JSON`."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window
from pyspark.sql import functions as F

from conf.etl import SparkConfig
from jobs.bench.etl.logs import (
    HISTORY_LEN,
    MIN_DWELL,
    SCHEMAS,
    LogSize,
    build_config,
    write_logs,
)
from jobs.bench.tfrecord.clock import PeakMemory, read_peak_rss, time_tree, tree_cpu_s
from jobs.spark import build_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ROWS_PER_SHARD = 250_000
_WARM_UP = LogSize(2000)


@dataclass(frozen=True)
class EtlJob:
    """What one driver measures.

    Attributes:
        task: `generate`, `build`, `bare` or `by_hand`.
        rows: Events.
        is_skewed: Whether one user has 5 % of them.
        folder: Folder of the logs.
        output: Folder that is written.
        master: Where Spark runs.
        driver_memory: Of the JVM.
        shuffle_partitions: Of every shuffle, in both ways of doing the work.
        conf: Further Spark settings.
    """

    task: str
    rows: int
    is_skewed: bool
    folder: str
    output: str
    master: str
    driver_memory: str
    shuffle_partitions: int
    conf: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> LogSize:
        """Size of the logs."""
        return LogSize(self.rows, self.is_skewed)


class StageTimes(logging.Handler):
    """Wall and CPU seconds of a build's stages, taken when the build logs that they begin and end.

    Attributes:
        stages: `{"wall_s", "cpu_s"}` by stage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stages: dict[str, dict[str, float]] = {}
        self._begun: dict[str, tuple[float, float]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Takes the time where the message is that of a stage."""
        message = record.getMessage()
        now = (time.perf_counter(), tree_cpu_s(os.getpid()))
        if message.endswith(" …"):
            self._begun[message.removesuffix(" …")] = now
            return
        name = message.rpartition(":")[0]
        if name in self._begun:
            wall, cpu = self._begun.pop(name)
            self.stages[name] = {"wall_s": now[0] - wall, "cpu_s": now[1] - cpu}


def run_build(spark: SparkSession, job: EtlJob) -> dict[str, Any]:
    """Builds a dataset version from the logs."""
    from etl.build import build_dataset

    config = build_config(Path(job.folder), Path(job.output), shards=_count_shards(job))
    times = StageTimes()
    logger = logging.getLogger("sluice.build")
    logger.setLevel(logging.INFO)
    logger.addHandler(times)
    result = build_dataset(spark, config)
    logger.removeHandler(times)
    return {
        "stages": times.stages,
        "records": sum(result.manifest.counts.kept.values()),
        "output_bytes": sum(split.bytes for split in result.manifest.splits),
    }


def run_bare(spark: SparkSession, job: EtlJob) -> dict[str, Any]:
    """Reads the same logs by Spark's own reader, joins them, and writes Parquet."""
    frames = _read_frames(spark, job)
    joined = frames["events"].join(frames["users"], "user_id").join(frames["items"], "item_id")
    return _write_parquet(joined, job)


def run_by_hand(spark: SparkSession, job: EtlJob) -> dict[str, Any]:
    """Makes the rows of the build's samples as a hand-written job would, and writes Parquet.

    Histories by a window, the label, both dictionaries, rows spread over as many files by a hash:
    without checks, counts, de-duplication, splits, vocabularies, statistics or encoding.
    """
    frames = _read_frames(spark, job)
    before = Window.partitionBy("user_id").orderBy("ts", "item_id").rowsBetween(-HISTORY_LEN, -1)
    rows = (
        frames["events"]
        .withColumn("history", F.reverse(F.collect_list("item_id").over(before)))
        .withColumn("label", (F.col("dwell") >= MIN_DWELL).cast("float"))
        .join(frames["users"], "user_id")
        .join(frames["items"], "item_id")
        .withColumn("place", F.xxhash64("user_id", "item_id", "ts"))
    )
    shuffled = rows.repartition(_count_shards(job), "place").sortWithinPartitions("place")
    return _write_parquet(shuffled.drop("place"), job)


def _read_frames(spark: SparkSession, job: EtlJob) -> dict[str, DataFrame]:
    return {
        name: spark.read.option("sep", "\t").schema(schema).csv(str(Path(job.folder) / name))
        for name, schema in SCHEMAS.items()
    }


def _write_parquet(rows: DataFrame, job: EtlJob) -> dict[str, Any]:
    target = Path(job.output) / "rows.parquet"
    rows.write.mode("overwrite").parquet(str(target))
    return {"output_bytes": sum(f.stat().st_size for f in target.glob("part-*"))}


def _count_shards(job: EtlJob) -> int:
    return max(2, job.rows // _ROWS_PER_SHARD)


def run_generate(spark: SparkSession, job: EtlJob) -> dict[str, Any]:
    """Writes the logs."""
    return {"input_bytes": write_logs(spark, job.size, Path(job.folder), _count_shards(job))}


TASKS: dict[str, Callable[[SparkSession, EtlJob], dict[str, Any]]] = {
    "generate": run_generate,
    "build": run_build,
    "bare": run_bare,
    "by_hand": run_by_hand,
}


def measure(job: EtlJob) -> dict[str, Any]:
    """Runs a job after a small warm-up of the same kind, which loads and compiles code."""
    spark_config = SparkConfig(
        master=job.master, driver_memory=job.driver_memory, conf=job.conf,
        shuffle_partitions=job.shuffle_partitions,
    )  # fmt: skip
    spark = build_session(spark_config, f"bench etl {job.task}")
    task = TASKS[job.task]
    if job.task != "generate":
        _warm_up(spark, job)
    details: dict[str, Any] = {}
    with PeakMemory() as peak:
        times = time_tree(lambda: details.update(task(spark, job)))
    python = read_peak_rss(os.getpid())
    spark.stop()
    memory = {**peak.bytes, **({} if python is None else {"driver_python": python})}
    return {"wall_s": times.wall_s, "cpu_s": times.cpu_s, "peak_rss_bytes": memory, **details}


def _warm_up(spark: SparkSession, job: EtlJob) -> None:
    folder = Path(job.output) / "warm-up"
    small = EtlJob(
        job.task, _WARM_UP.rows, False, str(folder / "logs"), str(folder / "out"), job.master,
        job.driver_memory, job.shuffle_partitions,
    )  # fmt: skip
    write_logs(spark, _WARM_UP, folder / "logs", 1)
    TASKS[job.task](spark, small)
    shutil.rmtree(folder)


def main() -> None:
    """Runs the job of the command line and prints its figures."""
    job = EtlJob(**json.loads(sys.argv[1]))
    # What libraries print must not get between the caller and the result.
    with contextlib.redirect_stdout(sys.stderr):
        result = measure(job)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
