"""Measures the whole build against a bare Spark job of the same data, for growing logs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from jobs.bench.driver_process import run_driver_process
from jobs.bench.etl.driver import EtlJob
from jobs.bench.etl.logs import LogSize
from jobs.bench.tfrecord.report import Bar, Measurement

BUILD, BARE = "sluice build", "bare read, join, Parquet"
BY_HAND = "by hand: the same rows, Parquet"
_NAMES = {"bare": BARE, "by_hand": BY_HAND, "build": BUILD}
GOAL = 2.5
BAR = Bar(BUILD, BARE, GOAL, at_least=False)
TIME_TOLERANCE = 0.10
"""Growth of the time per million rows that a decade more rows may bring."""


@dataclass(frozen=True)
class EtlSettings:
    """How the builds are run.

    Attributes:
        work_dir: Folder for logs and versions; what is there is overwritten.
        master: Spark's master.
        driver_memory: Of the JVM.
        shuffle_partitions: Of every shuffle.
        conf: Further Spark settings.
        repeats: Runs of each, of which the fastest by wall time counts.
    """

    work_dir: Path
    master: str
    driver_memory: str
    shuffle_partitions: int
    conf: tuple[tuple[str, str], ...] = ()
    repeats: int = 1


def measure_size(size: LogSize, settings: EtlSettings) -> Iterator[Measurement]:
    """Generates logs and measures the bare job, the one by hand and the build, by turns.

    Yields:
        Their figures in this order; `details` has the build's stages and peak memory.

    Raises:
        RuntimeError: A driver failed.
    """
    folder, output = settings.work_dir / "logs", settings.work_dir / "out"
    generated = _run("generate", size, folder, output, settings)
    runs: dict[str, list[dict[str, Any]]] = {task: [] for task in _NAMES}
    try:
        for _ in range(settings.repeats):
            for task, found in runs.items():
                found.append(_run(task, size, folder, output, settings))
                shutil.rmtree(output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for task, name in _NAMES.items():
        best = min(runs[task], key=lambda run: float(run["wall_s"]))
        yield Measurement(
            "etl", size.name, name, best.pop("wall_s"), best.pop("cpu_s"), size.rows,
            generated["input_bytes"], best,
        )  # fmt: skip


def _run(
    task: str, size: LogSize, folder: Path, output: Path, settings: EtlSettings
) -> dict[str, Any]:
    job = EtlJob(
        task, size.rows, size.is_skewed, str(folder), str(output), settings.master,
        settings.driver_memory, settings.shuffle_partitions, dict(settings.conf),
    )  # fmt: skip
    done = run_driver_process("jobs.bench.etl.driver", asdict(job))
    if done.returncode:
        raise RuntimeError(f"{task} of {size.name} failed:\n{done.errors[-3000:]}")
    return done.value


def build_stage_table(measured: Measurement) -> Table:
    """Where a build's time goes."""
    table = Table(title=f"stages: {measured.shape}", title_justify="left")
    table.add_column("stage")
    for name in ("wall s", "CPU s", "of the wall time"):
        table.add_column(name, justify="right")
    for stage, times in measured.details.get("stages", {}).items():
        share = times["wall_s"] / measured.wall_s
        table.add_row(stage, f"{times['wall_s']:.1f}", f"{times['cpu_s']:.1f}", f"{share:.0%}")
    return table


def build_growth_table(measurements: Sequence[Measurement]) -> Table:
    """Time per million rows and peak memory against the number of rows."""
    table = Table(title="growth", title_justify="left")
    table.add_column("logs")
    for name in ("build, s per M rows", "against the one before", "CPU s per M rows",
                 "bare, s per M rows", "ratio wall", "ratio CPU",
                 "of by hand, CPU", "JVM peak MB", "driver Python peak MB"):  # fmt: skip
        table.add_column(name, justify="right")
    peers = {(m.shape, m.name): m for m in measurements}
    before: Measurement | None = None
    for m in (m for m in measurements if m.name == BUILD):
        other, peak = peers[m.shape, BARE], m.details["peak_rss_bytes"]
        drift = None if before is None else _per_million(m) / _per_million(before) - 1
        mark = " (!)" if drift is not None and drift > TIME_TOLERANCE else ""
        table.add_row(
            m.shape, f"{_per_million(m):.1f}", "" if drift is None else f"{drift:+.1%}{mark}",
            f"{m.cpu_s / m.rows * 1e6:.1f}", f"{_per_million(other):.1f}",
            f"{m.wall_s / other.wall_s:.2f}", f"{m.cpu_s / other.cpu_s:.2f}",
            f"{m.cpu_s / peers[m.shape, BY_HAND].cpu_s:.2f}",
            _megabytes(peak.get("jvm")), _megabytes(peak.get("driver_python")),
        )  # fmt: skip
        before = m
    return table


def _per_million(measured: Measurement) -> float:
    return measured.wall_s / measured.rows * 1e6


def _megabytes(size: int | None) -> str:
    return "" if size is None else f"{size / 1e6:,.0f}"
