from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest

from training.monitoring.progress import (
    JsonProgress,
    LineProgress,
    StepStatus,
    TerminalProgress,
    build_progress,
    render_duration,
    render_epoch,
    render_status,
)
from training.monitoring.run_logs import EpochRecord

STATUS = StepStatus(2, 10, 64, 128, 1.25, 12_345.0, 0.07, 75.0, 192, 1280, ("ndcg@10", 0.25))
RECORD = EpochRecord(2, 1.25, 3.0, 640, 213.3, 0.07, {"ndcg@10": 0.4, "mrr": 0.2})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_stream_decides() -> None:
    assert isinstance(build_progress("text", 1, io.StringIO()), LineProgress)
    assert isinstance(build_progress("json", 1, Terminal()), JsonProgress)
    on_terminal = build_progress("text", 1, Terminal())
    assert isinstance(on_terminal, TerminalProgress)
    on_terminal.close()


def test_json_lines_hold_the_figures() -> None:
    stream = io.StringIO()
    progress = JsonProgress(stream, 0.0)
    progress.message("hello", run="r")
    progress.step(STATUS)
    progress.epoch(RECORD, best=True, metric="mrr")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["message", "steps", "epoch"]
    assert lines[0]["run"] == "r"
    assert lines[1]["eta_s"] == 75.0
    assert lines[1]["run_step"] == 192
    assert lines[1]["metric"] == {"name": "ndcg@10", "value": 0.25}
    assert lines[2]["validation"]["ndcg@10"] == 0.4
    assert lines[2]["best"] is True


def test_lines_tell_loss_speed_wait_and_time_left() -> None:
    stream = io.StringIO()
    progress = LineProgress(stream, 0.0)
    progress.step(STATUS)
    progress.epoch(RECORD, best=True, metric="mrr")
    step, epoch = stream.getvalue().splitlines()
    for part in ("2/10", "64/128", "1.2500", "ndcg@10 0.2500", "12,345 examples/s", "7%", "1:15"):
        assert part in step
    for part in ("epoch 2", "ndcg@10 0.4000", "best"):
        assert part in epoch
    assert epoch.index("mrr") < epoch.index("ndcg@10")  # What chooses comes first.


def test_the_metric_that_chooses_is_shown_though_its_name_comes_late() -> None:
    validation = {"auc": 0.6, "gauc": 0.5, "like/auc": 0.7, "log_loss": 0.4}
    record = EpochRecord(2, 1.25, 3.0, 640, 213.3, 0.07, validation)
    assert "loss 1.2500  log_loss 0.4000  auc 0.6000" in render_epoch(record, True, "log_loss")


def test_lines_about_steps_are_rare() -> None:
    stream = io.StringIO()
    progress = LineProgress(stream, 3600.0)
    for _ in range(100):
        progress.step(STATUS)
    assert stream.getvalue() == ""


def test_the_terminal_shows_epochs_above_the_bar() -> None:
    stream = Terminal()
    progress = TerminalProgress(stream)
    progress.step(STATUS)
    progress.message("[not markup]")
    progress.epoch(RECORD, best=False, metric=None)
    progress.close()
    assert "[not markup]" in stream.getvalue()
    assert "ndcg@10 0.4000" in stream.getvalue()


FIGURES = ("2/10", "64/128", "1.2500", "ndcg@10 0.2500", "7%", "ETA 1:15")


@pytest.mark.parametrize("columns", [72, 80, 100, 160])
def test_a_terminal_of_any_width_shows_every_figure(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = TerminalProgress(stream)
    progress.step(STATUS)
    progress.close()
    [line, *_] = [line for line in stream.getvalue().splitlines() if "1.2500" in line]
    line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)
    assert all(part in line for part in (*FIGURES, "12,345" if columns >= 100 else "12345/s"))
    assert columns < 160 or "━" in line  # a bar where there is room


def test_a_long_run_fits_80_columns() -> None:
    long = replace(
        STATUS, metric=("hit_rate@10", 0.25), epoch=12, epochs=20, step=12_345, steps=98_765,
        examples_per_s=1_234_567.0, eta_s=40_000.0,
    )  # fmt: skip
    assert len(render_status(long, 80)) <= 80
    assert render_status(long) == (
        "epoch 12/20  step 12345/98765  loss 1.2500  hit_rate@10 0.2500  1,234,567 examples/s  "
        "input wait 7%  ETA 11:06:40"
    )


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (75.4, "1:15"), (3671, "1:01:11")])
def test_durations(seconds: float, text: str) -> None:
    assert render_duration(seconds) == text
