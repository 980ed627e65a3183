"""Growing tables through the writer: time per row and memory per worker must stay as they are."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.table import Table

from jobs.bench.tfrecord.report import Measurement
from jobs.bench.tfrecord.shapes import SHAPES, Shape, build_batch
from jobs.bench.tfrecord.spark_driver import SparkJob
from jobs.bench.tfrecord.spark_io import SparkSettings, run_driver

TIME_TOLERANCE = 0.10  # time per row against the smallest table's
_SAMPLE_ROWS = 256
_DISK_SHARE = 0.8
_WARM_UP_ROWS = 1_000_000


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
        One figure per size; `details` has the peak memory per kind of process.
    """
    shape = SHAPES[shape_name]
    output = settings.work_dir / "scale.tfrecord"
    for rows in sorted(sizes):
        needed, free = estimate_bytes(shape, rows), shutil.disk_usage(settings.work_dir).free
        if needed > free * _DISK_SHARE:
            skip(
                f"scale {rows:,} rows: {needed / 1e9:.1f} GB of shards, {free / 1e9:.1f} GB free "
                f"below {settings.work_dir}"
            )
            continue
        yield _measure_size(shape, rows, output, settings)
        shutil.rmtree(output, ignore_errors=True)


def _measure_size(shape: Shape, rows: int, output: Path, settings: SparkSettings) -> Measurement:
    job = SparkJob(
        "write_native", shape.name, rows, "range", "", str(output), repeats=1,
        warm_up_rows=_WARM_UP_ROWS,
        conf=dict(settings.conf), master=settings.master, driver_memory=settings.driver_memory,
    )  # fmt: skip
    result = run_driver(job)
    run = result["runs"][0]
    return Measurement(
        "scale", shape.name, f"write tfrecord, {rows:,} rows", run["wall_s"], run["cpu_s"], rows,
        result["output_bytes"], {"peak_rss_bytes": result["peak_rss_bytes"]},
    )  # fmt: skip


def build_scale_table(measurements: Sequence[Measurement]) -> Table:
    """A table of time per row and memory against the number of rows."""
    table = Table(title=f"scale: {measurements[0].shape}", title_justify="left")
    table.add_column("rows", justify="right")
    for name in ("wall s", "us/row, wall", "us/row, CPU", "against first", "worker peak MB",
                 "JVM peak MB"):  # fmt: skip
        table.add_column(name, justify="right")
    first = measurements[0]
    for m in measurements:
        drift = first.rows_per_cpu_s / m.rows_per_cpu_s - 1
        mark = "" if abs(drift) <= TIME_TOLERANCE else " (!)"
        peak = m.details["peak_rss_bytes"]
        table.add_row(
            f"{m.rows:,}", f"{m.wall_s:,.1f}", f"{m.wall_s / m.rows * 1e6:.2f}",
            f"{m.cpu_s / m.rows * 1e6:.2f}", f"{drift:+.1%}{mark}",
            _megabytes(peak.get("python_worker")), _megabytes(peak.get("jvm")),
        )  # fmt: skip
    return table


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:,.0f}"
