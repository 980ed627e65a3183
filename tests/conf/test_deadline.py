"""Calls of services have a time for all of them, not for each read."""

from __future__ import annotations

import threading

import pytest

from conf.deadline import call_within


def test_a_call_that_takes_too_long_is_left_alone() -> None:
    may_end = threading.Event()
    with pytest.raises(TimeoutError, match=r"0\.1 s"):
        call_within(0.1, lambda: may_end.wait(60))
    may_end.set()


def test_what_a_call_returns_or_raises_comes_through() -> None:
    assert call_within(10, lambda: [1]) == [1]
    with pytest.raises(KeyError):
        call_within(10, lambda: {}["x"])
