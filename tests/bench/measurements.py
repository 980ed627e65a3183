"""Measurements, the bars that they are held against, tables of both, and the common options."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Measurement:
    """One way of doing the work.

    Attributes:
        section: Part of the benchmark: codec, spark or scale.
        shape: Name of the shape.
        name: What was done.
        wall_s: Wall seconds of the run that counts.
        cpu_s: CPU seconds of it, user and system, of all processes that took part.
        rows: Rows that it handled.
        bytes: Bytes of records or files that it handled; None where that has no meaning.
        details: Further figures, for the JSON.
    """

    section: str
    shape: str
    name: str
    wall_s: float
    cpu_s: float
    rows: int
    bytes: int | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def rows_per_s(self) -> float:
        """Rows per second of wall time."""
        return self.rows / self.wall_s

    @property
    def rows_per_cpu_s(self) -> float:
        """Rows per second of CPU time."""
        return self.rows / max(self.cpu_s, 1e-9)

    @property
    def mb_per_s(self) -> float | None:
        """Megabytes (1e6) per second of wall time."""
        return None if self.bytes is None else self.bytes / self.wall_s / 1e6


@dataclass(frozen=True)
class Bar:
    """A figure that is aimed at: how two ways of doing the work compare in CPU time per row.

    Attributes:
        name: Measurement that is held against the bar.
        reference: Measurement that it is compared with.
        goal: Speed-up wanted (`at_least`), or share of the reference's cost allowed; None to
            print the ratio alone.
        at_least: Whether the goal is a speed-up; otherwise a cost.
    """

    name: str
    reference: str
    goal: float | None
    at_least: bool = True

    def ratio(self, measured: Measurement, reference: Measurement) -> float:
        """Speed-up or share of the cost, in rows per CPU-second."""
        speedup = measured.rows_per_cpu_s / reference.rows_per_cpu_s
        return speedup if self.at_least else 1 / speedup

    def is_met(self, ratio: float) -> bool | None:
        """Whether a ratio reaches the goal; None where there is none."""
        if self.goal is None:
            return None
        return ratio >= self.goal if self.at_least else ratio <= self.goal


@dataclass(frozen=True)
class BarVerdict:
    """A bar and how it came out."""

    shape: str
    bar: Bar
    ratio: float
    wall_ratio: float
    is_met: bool | None


@dataclass
class BenchReport:
    """All figures of one run.

    Attributes:
        settings: What was asked for and where it ran.
        measurements: In the order in which they were taken.
        verdicts: One per bar whose two figures were taken.
        skipped: What was left out, and why.
    """

    settings: dict[str, Any]
    measurements: list[Measurement] = field(default_factory=list)
    verdicts: list[BarVerdict] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def skip(self, reason: str) -> None:
        """Notes once that something was left out."""
        if reason not in self.skipped:
            self.skipped.append(reason)

    def write(self, path: Path) -> None:
        """Writes everything as JSON."""
        rows = [
            {**asdict(m), "rows_per_s": m.rows_per_s, "rows_per_cpu_s": m.rows_per_cpu_s}
            for m in self.measurements
        ]
        content = {
            "settings": self.settings,
            "measurements": rows,
            "verdicts": [asdict(verdict) for verdict in self.verdicts],
            "skipped": self.skipped,
        }
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def judge(
    shape: str, measurements: Sequence[Measurement], bars: Sequence[Bar]
) -> list[BarVerdict]:  # fmt: skip
    """Compares what was measured; a bar of which a figure is missing gives no verdict."""
    by_name = {m.name: m for m in measurements if m.shape == shape}
    verdicts = []
    for bar in bars:
        measured, reference = by_name.get(bar.name), by_name.get(bar.reference)
        if measured is None or reference is None:
            continue
        ratio = bar.ratio(measured, reference)
        speedup = measured.rows_per_s / reference.rows_per_s
        wall = speedup if bar.at_least else 1 / speedup
        verdicts.append(BarVerdict(shape, bar, ratio, wall, bar.is_met(ratio)))
    return verdicts


def build_table(title: str, measurements: Sequence[Measurement]) -> Table:
    """A table of figures; the last column is rows per CPU-second against the first line's."""
    table = Table(title=title, title_justify="left")
    table.add_column("work")
    for column in ("wall s", "CPU s", "rows/s", "rows/CPU-s", "MB/s", "of the first"):
        table.add_column(column, justify="right")
    for m in measurements:
        ratio = m.rows_per_cpu_s / measurements[0].rows_per_cpu_s
        speed = "" if m.mb_per_s is None else f"{m.mb_per_s:,.0f}"
        table.add_row(
            m.name, _seconds(m.wall_s), _seconds(m.cpu_s), f"{m.rows_per_s:,.0f}",
            f"{m.rows_per_cpu_s:,.0f}", speed, f"{ratio:.2f}",
        )  # fmt: skip
    return table


def _seconds(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def build_verdict_table(verdicts: Sequence[BarVerdict], title: str) -> Table:
    """A table of the bars: ratio in CPU time, the same in wall time, and whether it is met."""
    table = Table(title=title, title_justify="left")
    for column in ("shape", "work", "against", "goal", "CPU ratio", "wall ratio", "met"):
        table.add_column(column, justify="right" if "ratio" in column else "left")
    for v in verdicts:
        sign = "≥" if v.bar.at_least else "≤"
        goal = "" if v.bar.goal is None else f"{sign} {v.bar.goal:g}x"
        table.add_row(
            v.shape, v.bar.name, v.bar.reference, goal, f"{v.ratio:.2f}x", f"{v.wall_ratio:.2f}x",
            {None: "", True: "yes", False: "[bold red]no[/bold red]"}[v.is_met],
        )  # fmt: skip
    return table


def print_report(
    report: BenchReport, console: Console, title: str = "bars (CPU time per row)"
) -> None:
    """Prints the verdicts and what was skipped; the figures were printed as they came."""
    if report.verdicts:
        console.print(build_verdict_table(report.verdicts, title))
    for reason in report.skipped:
        console.print(f"skipped: {reason}")


def describe_machine() -> dict[str, Any]:
    """Processor, cores and load of this machine; figures mean little without them."""
    model = None
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text(encoding="utf-8"))
        model = found[1] if found else None
    return {
        "processor": model or platform.processor(),
        "gpus": _list_gpus(),
        "cores": os.cpu_count(),
        "load_1_min": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def _list_gpus() -> list[str]:
    """Names of NVIDIA's devices; none where their driver's tool is not there."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return []
    command = [tool, "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    return found.stdout.splitlines() if found.returncode == 0 else []


class WritableReport(Protocol):
    """Figures that can be written as JSON."""

    def write(self, path: Path) -> None:
        """Writes all of them."""


def build_bench_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of `python -m tests.bench.NAME`, with what all of them take."""
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.bench.{name}", description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    return parser


def check_positive(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, names: Iterable[str]
) -> None:
    """Ends with a message where one of these arguments is not 1 or more."""
    for name in names:
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")


def run_bench(
    parser: argparse.ArgumentParser,
    check_arguments: Callable[[argparse.ArgumentParser, argparse.Namespace], None],
    run: Callable[[argparse.Namespace, Console], WritableReport],
) -> None:
    """Parses the command line, runs, and writes the report where `--json` asks for it."""
    arguments = parser.parse_args()
    check_arguments(parser, arguments)
    # Before minutes of measuring, not after them.
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        parser.error(f"--json: no folder {arguments.json.absolute().parent}")
    # A pipe or file has no width of its own, and the tables are wide.
    report = run(arguments, Console(width=None if sys.stdout.isatty() else 160))
    if arguments.json is not None:
        report.write(arguments.json)


def describe_arguments(arguments: argparse.Namespace) -> dict[str, object]:
    """Returns the arguments as JSON values."""
    return {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()}
