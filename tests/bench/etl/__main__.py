"""`python -m tests.bench.etl`: the whole build against a bare Spark job, on growing logs."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.clock import run_driver_process
from tests.bench.etl.driver import EtlJob, LogSize
from tests.bench.measurements import (
    Bar,
    BenchReport,
    Measurement,
    build_bench_parser,
    build_table,
    check_positive,
    describe_arguments,
    describe_machine,
    judge,
    print_report,
    run_bench,
)

BUILD, BARE = "sluice build", "bare read, join, Parquet"
BY_HAND = "by hand: the same rows, Parquet"
_NAMES = {"bare": BARE, "by_hand": BY_HAND, "build": BUILD}
GOAL = 2.5
BY_HAND_GOAL = 1.8
BAR = Bar(BUILD, BARE, GOAL, at_least=False)
BY_HAND_BAR = Bar(BUILD, BY_HAND, BY_HAND_GOAL, at_least=False)
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
    done = run_driver_process("tests.bench.etl.driver", asdict(job))
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


# Logs, the version, its shuffle files, and the bare job's Parquet, per event.
_BYTES_PER_ROW = 1200
_DISK_SHARE = 0.8


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = build_bench_parser("etl", __doc__)
    add = parser.add_argument
    add("--rows", type=int, nargs="+", default=[1_000_000], metavar="ROWS",
        help="events of each log, e.g. 1000000 10000000")  # fmt: skip
    add("--skewed-rows", type=int, nargs="*", default=[], metavar="ROWS",
        help="the same with one user who has 5 %% of the events")  # fmt: skip
    add("--repeats", type=int, default=1, help="runs of each, the fastest counts")
    add("--master", default="local[2]", help="Spark's master")
    add("--driver-memory", default="2g")
    add("--shuffle-partitions", type=int, default=8)
    add("--conf", action="append", default=[], metavar="KEY=VALUE", help="further Spark setting")
    add("--work-dir", type=Path, help="folder for logs and versions; a temporary one if not given")
    return parser


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends with a message where a value makes no sense."""
    if any(rows < 1000 for rows in (*arguments.rows, *arguments.skewed_rows)):
        parser.error("--rows and --skewed-rows take numbers from 1000 on")
    check_positive(parser, arguments, ("repeats", "shuffle_partitions"))
    if any("=" not in setting for setting in arguments.conf):
        parser.error("--conf takes KEY=VALUE")


def run(arguments: argparse.Namespace, console: Console) -> BenchReport:
    """Measures what the command line asks for and prints it."""
    report = BenchReport({**describe_arguments(arguments), **describe_machine()})
    sizes = [LogSize(rows) for rows in sorted(arguments.rows)]
    skewed = [LogSize(rows, is_skewed=True) for rows in sorted(arguments.skewed_rows)]
    with tempfile.TemporaryDirectory(prefix="sluice-bench-") as folder:
        work_dir = arguments.work_dir or Path(folder)
        work_dir.mkdir(parents=True, exist_ok=True)
        etl = EtlSettings(
            work_dir.resolve(), arguments.master, arguments.driver_memory,
            arguments.shuffle_partitions, tuple(tuple(s.split("=", 1)) for s in arguments.conf),
            arguments.repeats,
        )  # fmt: skip
        for size in (*sizes, *skewed):
            _measure(size, etl, report, console)
    for group in (sizes, skewed):
        names = {size.name for size in group}
        found = [m for m in report.measurements if m.shape in names]
        if found:
            console.print(build_growth_table(found))
    print_report(report, console)
    return report


def _measure(size: LogSize, settings: EtlSettings, report: BenchReport, console: Console) -> None:
    free = shutil.disk_usage(settings.work_dir).free
    needed = size.rows * _BYTES_PER_ROW
    if needed > free * _DISK_SHARE:
        report.skip(f"{size.name}: about {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")
        return
    found = list(measure_size(size, settings))
    report.measurements += found
    report.verdicts += judge(size.name, found, (BAR, BY_HAND_BAR))
    console.print(build_table(size.name, found))
    console.print(build_stage_table(next(m for m in found if m.name == BUILD)))


def main() -> None:
    """Parses the command line and runs."""
    run_bench(build_parser(), check_arguments, run)


if __name__ == "__main__":
    main()
