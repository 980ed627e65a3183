from __future__ import annotations

import json
import time
from pathlib import Path

from conf.event_lines import render_event


def test_a_line_is_one_object_whatever_its_fields_hold() -> None:
    line = render_event("log", {"message": 'two\nlines, "quoted"', "file": Path("a/b")}, 1.23456)
    assert "\n" not in line
    assert json.loads(line) == {
        "event": "log",
        "time": 1.235,
        "message": 'two\nlines, "quoted"',
        "file": "a/b",
    }


def test_an_event_happens_now_if_no_time_is_told() -> None:
    before = time.time()
    told = json.loads(render_event("steps", {}))["time"]
    assert before - 0.001 <= told <= time.time() + 0.001
