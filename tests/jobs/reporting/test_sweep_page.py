from __future__ import annotations

import re
from pathlib import Path

import pytest

from jobs.reporting.sweep_page import render_sweep, write_sweep_page
from tests.jobs.reporting.test_page import Page
from training.sweep.runner import SweepResult, TrialRecord


def build_result(directory: Path, metric: str = "ndcg@10") -> SweepResult:
    trials = []
    for number, value in enumerate((0.25, 0.5, None)):
        run = directory / "trials" / f"{number:04d}" / "runs" / "a b"
        run.mkdir(parents=True)
        (run / "report.html").write_text("a report")
        state, detail = ("complete", str(run)) if value else ("fail", "<script>diverged</script>")
        trials.append(TrialRecord(number, state, {"a": "[64]", "b": 1e-5}, value, 3.0, detail))
    best = trials[1] if metric == "ndcg@10" else trials[0]
    return SweepResult(directory, metric, tuple(trials), best)


@pytest.mark.parametrize(("metric", "order"), [("ndcg@10", ["1", "0", "2"]), ("loss", list("012"))])
def test_the_best_trial_comes_first_and_leads_to_its_report(
    metric: str, order: list[str], tmp_path: Path
) -> None:
    text = write_sweep_page(build_result(tmp_path, metric)).read_text()
    rows = text.partition("<tbody>")[2].split("<tr>")[1:]
    assert [re.search(r">(\d)<", row).group(1) for row in rows] == order
    links = re.findall(r'href="(trials/[^"]+)"', text)
    assert links == [f"trials/000{number}/runs/a%20b/report.html" for number in order[:2]]
    assert f"Trial {order[0]} is the best of 2" in " ".join(Page(text).text)


def test_what_ended_a_trial_is_told_and_escaped(tmp_path: Path) -> None:
    text = render_sweep(build_result(tmp_path))
    assert "<script>" not in text
    assert "fail: &lt;script&gt;diverged" in text


def test_a_report_that_is_not_there_is_not_led_to(tmp_path: Path) -> None:
    result = build_result(tmp_path)
    (result.trials[1].run / "report.html").unlink()
    assert len(re.findall(r'href="trials/', render_sweep(result))) == 1


def test_a_sweep_without_trials_says_so(tmp_path: Path) -> None:
    text = " ".join(Page(render_sweep(SweepResult(tmp_path, "mrr", (), None))).text)
    assert "No trial is complete." in text
    assert "No trial has begun." in text
