"""What was measured, the bars that it is held against, and how both are shown."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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
class Verdict:
    """A bar and how it came out."""

    shape: str
    bar: Bar
    ratio: float
    wall_ratio: float
    is_met: bool | None


@dataclass
class Report:
    """All figures of one run.

    Attributes:
        settings: What was asked for and where it ran.
        measurements: In the order in which they were taken.
        verdicts: One per bar whose two figures were taken.
        skipped: What was left out, and why.
    """

    settings: dict[str, Any]
    measurements: list[Measurement] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
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
) -> list[Verdict]:  # fmt: skip
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
        verdicts.append(Verdict(shape, bar, ratio, wall, bar.is_met(ratio)))
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


def build_verdict_table(
    verdicts: Sequence[Verdict], title: str = "bars (CPU time per row)"
) -> Table:
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


def print_report(report: Report, console: Console) -> None:
    """Prints the verdicts and what was skipped; the figures were printed as they came."""
    if report.verdicts:
        console.print(build_verdict_table(report.verdicts))
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
        "cores": os.cpu_count(),
        "load_1_min": os.getloadavg()[0],
        "python": platform.python_version(),
    }
