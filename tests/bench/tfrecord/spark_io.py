"""Spark end to end, each way of writing and reading in a driver of its own, and growing tables.

Each write starts a Python process to plan and one to commit, whatever the number of rows. With
growing tables that is measured apart, by a table of a few rows, and so is a plain write of as
many bytes: memory for a file's pages gets dearer as it gets scarce. Both are taken off before
sizes are compared.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from tests.bench.clock import Times, run_driver_process, time_tree
from tests.bench.measurements import Bar, Measurement
from tests.bench.shapes import SHAPES, RowShape, build_batch
from tests.bench.tfrecord.peers import Connector, PeerMissingError
from tests.bench.tfrecord.spark_driver import SparkJob

TITLES = {
    "scan": "scan to noop",
    "hand_over": "hand-over as Arrow, dropped",
    "write_native": "write tfrecord",
    "write_parquet": "write Parquet (Spark)",
    "write_connector": "write by the JVM connector",
    "read_feed": "feed of ready Arrow batches",
    "read_native": "read tfrecord",
    "read_connector": "read by the JVM connector",
}
_WRITES = ("scan", "hand_over", "write_native", "write_parquet", "write_connector")
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
    done = run_driver_process("tests.bench.tfrecord.spark_driver", asdict(job))
    if done.returncode:
        if "unresolved dependency" in done.errors:
            raise PeerMissingError("JVM connector: Spark cannot resolve it from Maven here")
        raise RuntimeError(f"{job.task} on {job.shape} failed:\n{done.errors[-3000:]}")
    return done.value


def spark_bars(shape: RowShape, source: str) -> tuple[Bar, ...]:
    """The bars of a shape, by names of measurements as `title` gives them."""
    over_connector = 1.4 if shape.has_lists else 2.0
    bars = (
        ("write_native", "hand_over", 1.3, False),
        ("write_native", "write_parquet", 0.75, False),
        ("write_native", "write_connector", over_connector, True),
    )
    return tuple(Bar(title(a, source), title(b, source), goal, up) for a, b, goal, up in bars)


READ_BARS = (Bar(TITLES["read_native"], TITLES["read_connector"], 3.0),)


def title(task: str, source: str) -> str:
    """Name of a measurement."""
    return TITLES[task] if task in _READS else f"{TITLES[task]}, {source}"


def measure_spark(
    shape: RowShape, settings: SparkSettings, skip: Any, sources: tuple[str, ...]
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


def _median(job: SparkJob, shape: RowShape, result: dict[str, Any], size: int) -> Measurement:
    runs = sorted(result["runs"], key=lambda run: run["cpu_s"])
    middle = runs[(len(runs) - 1) // 2]
    return Measurement(
        "spark", shape.name, title(job.task, job.source), middle["wall_s"], middle["cpu_s"],
        job.rows, size, {"runs": result["runs"], "peak_rss_bytes": result["peak_rss_bytes"]},
    )  # fmt: skip


TIME_TOLERANCE = 0.10  # own time per row, against the smallest table's
_START_ROWS = 8
_SMALL_ROWS = 10_000_000  # tables up to this size are written several times
_SAMPLE_ROWS = 256
_DISK_SHARE = 0.8
_WARM_UP_ROWS = 1_000_000
_FILES = 8
_BLOCK = bytes(range(256)) * 1024


def estimate_bytes(shape: RowShape, rows: int) -> int:
    """Bytes of the finished TFRecord files."""
    from etl.tfrecord.codec.encode import encode

    return encode(build_batch(shape, _SAMPLE_ROWS)).size * rows // _SAMPLE_ROWS


def measure_scale(
    shape_name: str, sizes: Sequence[int], settings: SparkSettings, skip: Callable[[str], None]
) -> Iterator[Measurement]:
    """Writes tables of several sizes, generated in the same stage: nothing else grows with them.

    Args:
        shape_name: Which rows.
        sizes: Rows, in rising order.
        settings: Where and by which Spark; its rows and repeats do not count.
        skip: Called with the reason where a size is left out.

    Yields:
        The start of a write first, then one figure per size; `details` has the peak memory per
        kind of process.
    """
    shape, fitting = SHAPES[shape_name], []
    output = settings.work_dir / "scale.tfrecord"
    for rows in sorted(sizes):
        needed, free = estimate_bytes(shape, rows), shutil.disk_usage(settings.work_dir).free
        if needed <= free * _DISK_SHARE:
            fitting.append(rows)
            continue
        skip(
            f"scale {rows:,} rows: {needed / 1e9:.1f} GB of shards, {free / 1e9:.1f} GB free "
            f"below {settings.work_dir}"
        )
    for rows in [_START_ROWS, *fitting] if fitting else []:
        repeats = settings.repeats if rows <= _SMALL_ROWS else 1
        yield _measure_size(shape, rows, output, settings, repeats)
        shutil.rmtree(output, ignore_errors=True)


def _measure_size(
    shape: RowShape, rows: int, output: Path, settings: SparkSettings, repeats: int
) -> Measurement:
    job = SparkJob(
        "write_native", shape.name, rows, "range", "", str(output), repeats=repeats,
        warm_up_rows=_WARM_UP_ROWS if rows > _START_ROWS else None,
        conf=dict(settings.conf), master=settings.master, driver_memory=settings.driver_memory,
    )  # fmt: skip
    result = run_driver(job)
    wall_s, cpu_s = (min(run[key] for run in result["runs"]) for key in ("wall_s", "cpu_s"))
    shutil.rmtree(output, ignore_errors=True)
    plain = time_plain_write(settings.work_dir / "plain", result["output_bytes"])
    return Measurement(
        "scale", shape.name, f"write tfrecord, {rows:,} rows", wall_s, cpu_s, rows,
        result["output_bytes"],
        {"peak_rss_bytes": result["peak_rss_bytes"], "plain_write": asdict(plain)},
    )  # fmt: skip


def time_plain_write(directory: Path, size: int) -> Times:
    """Times what no writer can do without: as many bytes into as many files, and their sync.

    Args:
        directory: Made for it, and removed again.
        size: Bytes in all.
    """
    directory.mkdir(parents=True)

    def write(number: int) -> None:
        with (directory / str(number)).open("wb", buffering=0) as file:
            for start in range(0, size // _FILES, len(_BLOCK)):
                file.write(memoryview(_BLOCK)[: size // _FILES - start])
            os.fsync(file.fileno())

    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return time_tree(lambda: list(pool.map(write, range(_FILES))))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def build_scale_table(measurements: Sequence[Measurement]) -> Table:
    """A table of time per row and memory against the number of rows.

    Args:
        measurements: As `measure_scale` yields them: the start of a write, then the sizes.
    """
    start, *sizes = measurements
    title = f"scale: {start.shape}; start of a write {start.wall_s:.2f} s, {start.cpu_s:.2f} CPU s"
    table = Table(title=title, title_justify="left")
    table.add_column("rows", justify="right")
    for name in ("wall s", "CPU s", "plain write, wall s", "plain write, CPU s",
                 "own CPU us/row: without both", "against first",
                 "worker peak MB", "JVM peak MB"):  # fmt: skip
        table.add_column(name, justify="right")
    own = [_own_us_per_row(m, start) for m in sizes]
    for m, us_per_row in zip(sizes, own, strict=True):
        peak, plain = m.details["peak_rss_bytes"], m.details["plain_write"]
        table.add_row(
            f"{m.rows:,}", f"{m.wall_s:,.1f}", f"{m.cpu_s:,.1f}",
            f"{plain['wall_s']:,.1f}", f"{plain['cpu_s']:,.1f}",
            f"{us_per_row:.2f}", _mark(us_per_row / own[0] - 1 if own[0] else 0.0),
            _megabytes(peak.get("python_worker")), _megabytes(peak.get("jvm")),
        )  # fmt: skip
    return table


def _own_us_per_row(size: Measurement, start: Measurement) -> float:
    """CPU time per row without what a write costs at any size, and what its bytes cost."""
    own = size.cpu_s - start.cpu_s - size.details["plain_write"]["cpu_s"]
    return max(own, 0.0) / size.rows * 1e6


def _mark(drift: float) -> str:
    """A drift as text, marked where time per row grew by more than is tolerated."""
    return f"{drift:+.1%}" + (" (!)" if drift > TIME_TOLERANCE else "")


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:,.0f}"
