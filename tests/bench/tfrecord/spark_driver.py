"""One Spark measurement in a driver of its own: `python -m … spark_driver JOB_JSON`.

Prints the timed runs as one line of JSON, the last of the standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etl.records.jvm_connector import CONNECTOR_CLASS
from tests.bench.clock import PeakMemory, time_tree
from tests.bench.shapes import SHAPES, spark_expressions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_TASKS_PER_READ = 2


@dataclass(frozen=True)
class SparkJob:
    """What one driver measures.

    Attributes:
        task: Key of `TASKS`.
        shape: Name of the shape.
        rows: Rows of the table; only where it is generated.
        source: `parquet`, `cached` (parquet, cached before the clock starts) or `range`.
        input: Directory that is read.
        output: Directory that is written, anew by each run: none pays for what another left.
        repeats: Timed runs, after the warm-up.
        warm_up: Runs before that.
        warm_up_rows: Rows of the generated table of the warm-up; None for the table itself.
        conf: Further Spark settings.
        master: Where Spark runs.
        driver_memory: Of the JVM.
    """

    task: str
    shape: str
    rows: int
    source: str
    input: str
    output: str
    repeats: int = 3
    warm_up: int = 1
    warm_up_rows: int | None = None
    conf: dict[str, str] = field(default_factory=dict)
    master: str = "local[2]"
    driver_memory: str = "2g"


def generate(spark: SparkSession, shape: str, rows: int, partitions: int) -> DataFrame:
    """Rows of a shape by arithmetic over a range: nothing is read or collected."""
    return spark.range(0, rows, 1, partitions).selectExpr(*spark_expressions(SHAPES[shape]))


def _scan(frame: DataFrame, job: SparkJob) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _hand_over(frame: DataFrame, job: SparkJob) -> None:
    from tests.bench.tfrecord.spark_sources import DropDataSource

    frame.sparkSession.dataSource.register(DropDataSource)
    frame.write.format(DropDataSource.name()).mode("append").save()


def _write_native(frame: DataFrame, job: SparkJob) -> None:
    frame.write.format("sluice").mode("overwrite").save(job.output)


def _write_parquet(frame: DataFrame, job: SparkJob) -> None:
    frame.write.mode("overwrite").parquet(job.output)


def _write_by_connector(frame: DataFrame, job: SparkJob) -> None:
    writer = frame.write.format(CONNECTOR_CLASS).option("recordType", "Example")
    writer.mode("overwrite").save(job.output)


def _read(format_name: str) -> Callable[[DataFrame, SparkJob], None]:
    def read(frame: DataFrame, job: SparkJob) -> None:
        # The table gives the schema; with one given, no reader looks through the files for it.
        reader = frame.sparkSession.read.schema(frame.schema).format(format_name)
        reader.load(job.input).write.format("noop").mode("overwrite").save()

    return read


def _feed(frame: DataFrame, job: SparkJob) -> None:
    from tests.bench.tfrecord.spark_sources import FeedDataSource

    frame.sparkSession.dataSource.register(FeedDataSource)
    reader = frame.sparkSession.read.schema(frame.schema).format(FeedDataSource.name())
    reader = reader.options(shape=job.shape, rows=job.rows, tasks=_TASKS_PER_READ)
    reader.load().write.format("noop").mode("overwrite").save()


TASKS: dict[str, Callable[[DataFrame, SparkJob], None]] = {
    "scan": _scan,
    "hand_over": _hand_over,
    "write_native": _write_native,
    "write_parquet": _write_parquet,
    "write_connector": _write_by_connector,
    "read_feed": _feed,
    "read_native": _read("sluice"),
    "read_connector": _read(CONNECTOR_CLASS),
}


def open_source(spark: SparkSession, job: SparkJob, rows: int) -> DataFrame:
    """The table that a task is given; `rows` of it where it is generated."""
    if job.source == "range":
        return generate(spark, job.shape, rows, spark.sparkContext.defaultParallelism * 4)
    if job.task.startswith("read_"):  # only its schema is wanted
        return generate(spark, job.shape, 0, 1)
    frame = spark.read.parquet(job.input)
    if job.source == "cached":
        frame = frame.cache()
        frame.count()
    return frame


def run_job(job: SparkJob) -> dict[str, Any]:
    """Runs a task: warm-up, then the timed runs.

    Returns:
        `runs` (wall and CPU seconds each), `peak_rss_bytes` by kind of process, `output_bytes`.
    """
    from jobs.support.spark_session import build_session

    config = {"spark.master": job.master, "spark.driver.memory": job.driver_memory, **job.conf}
    spark = build_session(config, "sluice bench")
    try:
        frame, work = open_source(spark, job, job.rows), TASKS[job.task]
        few = frame
        if job.warm_up_rows is not None:
            few = open_source(spark, job, min(job.rows, job.warm_up_rows))
        for _ in range(job.warm_up):
            remove_output(job)
            work(few, job)
        runs = []
        with PeakMemory() as peak:
            for _ in range(job.repeats):
                remove_output(job)
                runs.append(time_tree(lambda: work(frame, job)))
        return {
            "runs": [asdict(times) for times in runs],
            "peak_rss_bytes": peak.bytes,
            "output_bytes": count_bytes(Path(job.output)),
            "spark": spark.version,
        }
    finally:
        with contextlib.suppress(Exception):  # a JVM that died cannot be stopped
            spark.stop()


def remove_output(job: SparkJob) -> None:
    """Removes what a run has written."""
    shutil.rmtree(job.output, ignore_errors=True)


def count_bytes(directory: Path) -> int:
    """Bytes of the data files below a directory."""
    return sum(
        path.stat().st_size
        for path in directory.rglob("*")
        if path.is_file() and path.name[0] not in "._"
    )


def prepare(job: SparkJob) -> dict[str, Any]:
    """Writes the table as Parquet once, and as TFRecord for the readers."""
    from jobs.support.spark_session import build_session

    config = {"spark.master": job.master, "spark.driver.memory": job.driver_memory, **job.conf}
    spark = build_session(config, "sluice bench")
    try:
        partitions = spark.sparkContext.defaultParallelism * 2
        table, records = Path(job.input), Path(job.output)
        shutil.rmtree(table, ignore_errors=True)
        generate(spark, job.shape, job.rows, partitions).write.parquet(str(table))
        spark.read.parquet(str(table)).write.format("sluice").mode("overwrite").save(str(records))
        return {"parquet_bytes": count_bytes(table), "tfrecord_bytes": count_bytes(records)}
    finally:
        spark.stop()


def main(arguments: list[str]) -> int:
    """Runs the job that the command line holds as JSON."""
    job = SparkJob(**json.loads(arguments[0]))
    result = prepare(job) if job.task == "prepare" else run_job(job)
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", str(Path.cwd()))
    raise SystemExit(main(sys.argv[1:]))
