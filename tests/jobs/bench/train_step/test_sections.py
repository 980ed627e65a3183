from __future__ import annotations

import json
import sys

import pytest

from jobs.bench.tfrecord.report import Bar, Measurement, Report
from jobs.bench.train_step.__main__ import main
from jobs.bench.train_step.sections import StepSettings, judge_wall_time, measure_growth


def test_bars_are_judged_by_wall_time() -> None:
    fast = Measurement("s", "x", "fast", wall_s=1.0, cpu_s=4.0, rows=100)
    slow = Measurement("s", "x", "slow", wall_s=6.0, cpu_s=6.0, rows=100)
    gain, cost = judge_wall_time(
        [fast, slow], [Bar("fast", "slow", 5.0), Bar("slow", "fast", 1.2, at_least=False)]
    )
    assert (gain.wall_ratio, gain.ratio, gain.is_met) == (6.0, 1.5, True)
    assert (round(cost.wall_ratio, 6), cost.is_met) == (6.0, False)


def test_a_table_that_does_not_fit_is_skipped_with_its_size() -> None:
    report = Report({})
    settings = StepSettings(8, 4, "adam", 1)
    assert measure_growth(report, settings, 1000, 10**12, 8) == []
    assert "96000.0 GB" in report.skipped[0]


@pytest.mark.slow
def test_prints_all_figures(tmp_path, monkeypatch, capsys) -> None:
    file = tmp_path / "figures.json"
    options = (
        "--batch 16 --length 5 --repeats 1 --small-rows 1000 --large-rows 4000 --rows 1000 --dim 4"
    )
    monkeypatch.setattr(sys, "argv", ["bench", *options.split(), "--json", str(file)])
    main()
    figures = json.loads(file.read_text())
    assert len(figures["measurements"]) == 9
    assert len(figures["verdicts"]) == 6
    assert figures["settings"]["profile"]["ResourceGather"] > 0
    # 1 warm-up of 3 steps and a round of 20, each with new items in every batch.
    assert figures["measurements"][-1]["details"]["rows"] > 23 * 16 * 5 // 10
    assert "Keras fit, Adam" in capsys.readouterr().out
