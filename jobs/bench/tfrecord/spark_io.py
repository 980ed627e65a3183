"""Spark end to end: each way of writing and reading in a driver of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jobs.bench.driver_process import run_driver_process
from jobs.bench.tfrecord.peers import Connector, PeerMissingError
from jobs.bench.tfrecord.report import Bar, Measurement
from jobs.bench.tfrecord.shapes import Shape
from jobs.bench.tfrecord.spark_driver import UNAVAILABLE, SparkJob

TITLES = {
    "scan": "scan to noop",
    "hand_over": "hand-over as Arrow, dropped",
    "write_native": "write tfrecord",
    "write_packed": "write tfrecord, packed",
    "write_parquet": "write Parquet (Spark)",
    "write_connector": "write by the JVM connector",
    "read_feed": "feed of ready Arrow batches",
    "read_native": "read tfrecord",
    "read_connector": "read by the JVM connector",
}
_WRITES = (
    "scan", "hand_over", "write_native", "write_packed", "write_parquet", "write_connector"
)  # fmt: skip
_READS = ("read_feed", "read_native", "read_connector")


@dataclass(frozen=True)
class SparkSettings:
    """How the Spark measurements are run.

    Attributes:
        work_dir: Folder for tables and shards; what is there is overwritten.
        rows: Rows of the table.
        repeats: Timed runs per figure, of which the median by CPU time counts.
        master: Spark's master.
        driver_memory: Of the JVM.
        conf: Further Spark settings, for every driver alike.
        connector: The JVM connector, or None to leave it out.
    """

    work_dir: Path
    rows: int
    repeats: int
    master: str = "local[2]"
    driver_memory: str = "2g"
    conf: tuple[tuple[str, str], ...] = ()
    connector: Connector | None = None


def run_driver(job: SparkJob) -> dict[str, Any]:
    """Runs a job in a fresh driver.

    Raises:
        PeerMissingError: What the job needs is not there.
        RuntimeError: The driver failed.
    """
    done = run_driver_process("jobs.bench.tfrecord.spark_driver", asdict(job))
    if done.returncode == UNAVAILABLE:
        raise PeerMissingError(done.value["unavailable"])
    if done.returncode:
        if "unresolved dependency" in done.errors:
            raise PeerMissingError("JVM connector: Spark cannot resolve it from Maven here")
        raise RuntimeError(f"{job.task} on {job.shape} failed:\n{done.errors[-3000:]}")
    return done.value


def spark_bars(shape: Shape, source: str) -> tuple[Bar, ...]:
    """The bars of a shape, by names of measurements as `title` gives them."""
    over_connector = 1.4 if shape.has_lists else 2.0
    bars = (
        ("write_native", "hand_over", 1.3, False),
        ("write_native", "write_parquet", 0.75, False),
        ("write_native", "write_connector", over_connector, True),
        ("write_packed", "write_connector", 3.0, True),
    )
    return tuple(Bar(title(a, source), title(b, source), goal, up) for a, b, goal, up in bars)


READ_BARS = (Bar(TITLES["read_native"], TITLES["read_connector"], 3.0),)


def title(task: str, source: str) -> str:
    """Name of a measurement."""
    return TITLES[task] if task in _READS else f"{TITLES[task]}, {source}"


def measure_spark(
    shape: Shape, settings: SparkSettings, skip: Any, sources: tuple[str, ...]
) -> Iterator[Measurement]:
    """Measures one shape.

    Args:
        shape: Which rows.
        settings: How many, where, how often.
        skip: Called with the reason where something is left out.
        sources: `parquet` (from files to shards) and `cached` (from a cached DataFrame).

    Yields:
        The ways of writing, by source, then those of reading.
    """
    table = settings.work_dir / f"{shape.name}.parquet"
    records = settings.work_dir / f"{shape.name}.tfrecord"
    base = SparkJob(
        "prepare", shape.name, settings.rows, "parquet", str(table), str(records),
        settings.repeats, conf=dict(settings.conf), master=settings.master,
        driver_memory=settings.driver_memory,
    )  # fmt: skip
    sizes = run_driver(base)
    output = str(settings.work_dir / f"{shape.name}.out")
    jobs = [replace(base, task=t, source=s, output=output) for s in sources for t in _WRITES]
    jobs += [replace(base, task=t, input=str(records), output=output) for t in _READS]
    for job in jobs:
        try:
            result = run_driver(_with_connector(job, settings.connector))
        except PeerMissingError as error:
            skip(str(error))
            continue
        size = sizes["tfrecord_bytes"]
        if job.task.startswith("write"):
            size = result["output_bytes"]
        yield _median(job, shape, result, size)


def _with_connector(job: SparkJob, connector: Connector | None) -> SparkJob:
    """Only where it is used: its jar must not change what the other drivers do."""
    if not job.task.endswith("connector"):
        return job
    if connector is None:
        raise PeerMissingError("JVM connector: left out")
    return replace(job, conf={**job.conf, **connector.conf})


def _median(job: SparkJob, shape: Shape, result: dict[str, Any], size: int) -> Measurement:
    runs = sorted(result["runs"], key=lambda run: run["cpu_s"])
    middle = runs[(len(runs) - 1) // 2]
    return Measurement(
        "spark", shape.name, title(job.task, job.source), middle["wall_s"], middle["cpu_s"],
        job.rows, size, {"runs": result["runs"], "peak_rss_bytes": result["peak_rss_bytes"]},
    )  # fmt: skip
