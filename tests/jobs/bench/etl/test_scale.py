"""The comparison with the bare job: measured by turns, the fastest counts, growth is marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from jobs.bench.driver_process import DriverResult
from jobs.bench.etl import scale
from jobs.bench.etl.logs import LogSize
from jobs.bench.etl.scale import BAR, BARE, BUILD, BY_HAND, EtlSettings
from jobs.bench.tfrecord.report import judge


def fake_driver(calls: list[str], seconds_per_row: dict[int, float]):
    def run(module: str, job: dict[str, Any]) -> DriverResult:
        calls.append(job["task"])
        Path(job["output"]).mkdir(exist_ok=True)
        wall = job["rows"] * seconds_per_row[job["rows"]] * (2 if job["task"] == "build" else 1)
        stages = '"stages": {"read sources": {"wall_s": 1, "cpu_s": 2}}'
        text = (
            f'noise\n{{"wall_s": {wall + len(calls)}, "cpu_s": {wall}, "input_bytes": 7, '
            f'"peak_rss_bytes": {{"jvm": 5000000}}, {stages}}}'
        )
        return DriverResult(0, text, "")

    return run


def render(table: Any) -> str:
    console = Console(width=200, record=True)
    console.print(table)
    return console.export_text()


def test_turns_bars_stages_and_growth(tmp_path, monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(scale, "run_driver_process", fake_driver(calls, {1000: 1.0, 10_000: 1.5}))
    settings = EtlSettings(tmp_path, "local[2]", "2g", 4, repeats=2)
    found = [m for rows in (1000, 10_000) for m in scale.measure_size(LogSize(rows), settings)]
    assert calls[:5] == ["generate", "bare", "by_hand", "build", "bare"]
    first = [m for m in found if m.shape == "1,000 rows"]
    assert {m.name: m.wall_s for m in first} == {BARE: 1002, BY_HAND: 1003, BUILD: 2004}
    (verdict,) = judge("1,000 rows", first, (BAR,))
    assert (verdict.ratio, verdict.is_met) == (2.0, True)
    assert "read sources" in render(scale.build_stage_table(first[-1]))
    growth = render(scale.build_growth_table(found))
    assert "(!)" in growth  # half as much again per row is more than a tenth
    assert "1,000 rows" in growth
    assert not list(tmp_path.glob("logs"))
