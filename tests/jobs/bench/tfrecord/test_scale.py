"""Scale: sizes that the disk does not allow are left out, and drift is marked."""

from __future__ import annotations

import io

from rich.console import Console

from etl.tfrecord.encode import encode
from jobs.bench.tfrecord.report import Measurement
from jobs.bench.tfrecord.scale import (
    build_scale_table,
    estimate_bytes,
    measure_scale,
    time_plain_write,
)
from jobs.bench.tfrecord.shapes import SHAPES, build_batch
from jobs.bench.tfrecord.spark_io import SparkSettings


def test_the_estimate_is_close_to_what_is_written():
    shape = SHAPES["narrow"]
    written = encode(build_batch(shape, 5000, seed=9)).size
    assert abs(estimate_bytes(shape, 5000) / written - 1) < 0.02


def test_a_table_beyond_the_disk_is_left_out(tmp_path):
    skipped: list[str] = []
    settings = SparkSettings(tmp_path, 1, 1)
    assert list(measure_scale("ctr", [10**15], settings, skipped.append)) == []
    assert "1,000,000,000,000,000 rows" in skipped[0]


def test_a_plain_write_leaves_nothing_behind(tmp_path):
    times = time_plain_write(tmp_path / "plain", 8 << 20)
    assert times.wall_s > 0
    assert list(tmp_path.iterdir()) == []


def test_the_table_marks_a_drift_beyond_the_tolerance():
    start_s, plain_s = 2.0, 7.0
    figures = [
        Measurement("scale", "narrow", "a", start_s, start_s + plain + cpu, rows, 1,
                    {"peak_rss_bytes": {"python_worker": 300_000_000},
                     "plain_write": {"wall_s": plain, "cpu_s": plain}})
        for rows, cpu, plain in (
            (8, 0.0, 0.0), (10**6, 1.0, plain_s), (10**7, 10.5, plain_s), (10**8, 150.0, plain_s)
        )
    ]  # fmt: skip
    console = Console(file=io.StringIO(), width=200)
    console.print(build_scale_table(figures))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert "start of a write 2.00 s" in lines[0]
    assert "+5.0% " in next(line for line in lines if "10,000,000" in line)
    assert "+50.0% (!)" in next(line for line in lines if "100,000,000" in line)
    assert sum("300" in line for line in lines) == 3
