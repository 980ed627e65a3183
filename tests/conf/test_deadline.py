"""Calls of services have a time for all of them, not for each read, and end nothing."""

from __future__ import annotations

import threading

from conf.deadline import call_within


def test_what_is_wrong_with_a_call_is_told_and_no_call_holds_its_caller() -> None:
    told: list[str] = []
    may_end = threading.Event()
    call_within(0.1, lambda: may_end.wait(60), told.append)
    may_end.set()
    call_within(10, lambda: {}["x"], told.append)
    call_within(10, lambda: told.append("called"), told.append)
    assert told == ["no whole answer within 0.1 s", "'x'", "called"]
