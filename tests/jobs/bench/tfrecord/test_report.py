"""Ratios are those of the figures, and bars are judged in CPU time."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from jobs.bench.tfrecord.report import (
    Bar,
    Measurement,
    Report,
    build_table,
    build_verdict_table,
    judge,
    print_report,
)


def figure(name: str, wall_s: float, cpu_s: float, rows: int = 100) -> Measurement:
    return Measurement("codec", "ctr", name, wall_s, cpu_s, rows, 1_000_000)


def printed(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_speed_up_compares_rows_per_cpu_second_whatever_the_rows():
    found = [figure("ours", 1.0, 2.0, rows=400), figure("theirs", 1.0, 1.0, rows=100)]
    [verdict] = judge("ctr", found, [Bar("ours", "theirs", 2.0)])
    assert (verdict.ratio, verdict.wall_ratio, verdict.is_met) == (2.0, 4.0, True)


@pytest.mark.parametrize(("cpu_s", "met"), [(1.2, True), (1.4, False)])
def test_a_cost_is_met_from_below(cpu_s, met):
    found = [figure("ours", 1.0, cpu_s), figure("floor", 1.0, 1.0)]
    [verdict] = judge("ctr", found, [Bar("ours", "floor", 1.3, at_least=False)])
    assert verdict.ratio == pytest.approx(cpu_s)
    assert verdict.is_met is met


def test_a_bar_without_its_figures_or_of_another_shape_gives_no_verdict():
    bars = [Bar("ours", "theirs", 2.0)]
    assert judge("ctr", [figure("ours", 1, 1)], bars) == []
    assert judge("history", [figure("ours", 1, 1), figure("theirs", 1, 1)], bars) == []


def test_a_bar_without_goal_is_neither_met_nor_missed():
    found = [figure("ours", 1.0, 1.0), figure("theirs", 1.0, 3.0)]
    [verdict] = judge("ctr", found, [Bar("ours", "theirs", None)])
    assert verdict.is_met is None
    text = printed(build_verdict_table([verdict]))
    assert "3.00x" in text
    assert "yes" not in text


def test_the_table_has_megabytes_and_the_ratio_to_the_first_line():
    text = printed(build_table("t", [figure("base", 2.0, 2.0), figure("fast", 0.5, 0.5)]))
    line = next(line for line in text.splitlines() if "fast" in line)
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells == ["fast", "0.5", "0.5", "200", "200", "2", "4.00"]


def test_the_json_holds_figures_verdicts_and_what_was_skipped(tmp_path):
    report = Report({"rows": 100}, [figure("ours", 1.0, 2.0), figure("theirs", 1.0, 8.0)])
    report.verdicts = judge("ctr", report.measurements, [Bar("ours", "theirs", 6.0)])
    report.skip("no connector")
    report.skip("no connector")
    report.write(tmp_path / "figures.json")
    found = json.loads((tmp_path / "figures.json").read_text())
    assert [m["rows_per_cpu_s"] for m in found["measurements"]] == [50.0, 12.5]
    assert found["verdicts"][0]["ratio"] == 4.0
    assert found["verdicts"][0]["is_met"] is False
    assert found["skipped"] == ["no connector"]
    console = Console(file=io.StringIO(), width=200)
    print_report(report, console)
    assert "skipped: no connector" in console.file.getvalue()  # type: ignore[attr-defined]
