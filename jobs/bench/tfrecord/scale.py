"""Growing tables through the writer: time per row and memory per worker must stay as they are.

Each write starts a Python process to plan and one to commit, whatever the number of rows. That is
measured apart, by a table of a few rows. So is a plain write of as many bytes: memory for a file's
pages gets dearer as it gets scarce. Both are taken off before sizes are compared.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from jobs.bench.tfrecord.clock import Times, time_tree
from jobs.bench.tfrecord.report import Measurement
from jobs.bench.tfrecord.shapes import SHAPES, Shape, build_batch
from jobs.bench.tfrecord.spark_driver import SparkJob
from jobs.bench.tfrecord.spark_io import SparkSettings, run_driver

TIME_TOLERANCE = 0.10  # own time per row, against the smallest table's
_START_ROWS = 8
_SMALL_ROWS = 10_000_000  # tables up to this size are written several times
_SAMPLE_ROWS = 256
_DISK_SHARE = 0.8
_WARM_UP_ROWS = 1_000_000
_FILES = 8
_BLOCK = bytes(range(256)) * 1024


def estimate_bytes(shape: Shape, rows: int) -> int:
    """Bytes of the finished TFRecord files."""
    from etl.tfrecord.encode import encode

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
    shape: Shape, rows: int, output: Path, settings: SparkSettings, repeats: int
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
