from __future__ import annotations

import io
import json
import re

import pytest

from training.monitoring.progress import (
    JsonProgress,
    StepStatus,
    TerminalProgress,
    build_progress,
)
from training.monitoring.run_logs import EpochRecord

STATUS = StepStatus(2, 10, 64, 128, 1.25, 12_345.0, 0.07, 75.0, 192, 1280, ("ndcg@10", 0.25))
RECORD = EpochRecord(2, 1.25, 3.0, 640, 213.3, 0.07, {"ndcg@10": 0.4, "mrr": 0.2})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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


@pytest.mark.parametrize("columns", [72, 80, 100, 160])
def test_a_terminal_of_any_width_shows_every_figure(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    progress = build_progress("text", 1, stream)
    progress.step(STATUS)
    progress.message("[not markup]")
    progress.epoch(RECORD, best=False, metric=None)
    progress.close()
    assert isinstance(progress, TerminalProgress)
    assert "[not markup]" in stream.getvalue()
    assert "ndcg@10 0.4000" in stream.getvalue()
    [line, *_] = [line for line in stream.getvalue().splitlines() if "2/10" in line]
    line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)
    speed = "12,345" if columns >= 100 else "12345/s"
    for part in ("64/128", "1.2500", "ndcg@10 0.2500", "7%", "ETA 1:15", speed):
        assert part in line
    assert columns < 160 or "━" in line  # a bar where there is room
