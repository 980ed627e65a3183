from __future__ import annotations

import threading

import pytest

from training.checkpoint.writer import BackgroundWriter


def fail() -> None:
    raise ValueError("lost")


def test_in_a_thread_the_caller_goes_on_and_writes_are_in_order() -> None:
    writer, go_on, done = BackgroundWriter(True), threading.Event(), []

    def first() -> None:
        go_on.wait(10)
        done.append(1)

    writer.submit(first)
    writer.check()
    assert done == []
    go_on.set()
    writer.submit(lambda: done.append(2))
    writer.wait()
    assert done == [1, 2]
    writer.close()


def test_in_the_caller_it_is_done_at_once() -> None:
    writer = BackgroundWriter(False)
    names: list[str] = []
    writer.submit(lambda: names.append(threading.current_thread().name))
    assert names == [threading.current_thread().name]
    with pytest.raises(ValueError, match="lost"):
        writer.submit(fail)


@pytest.mark.parametrize("call", ["wait", "check", "submit"])
def test_a_failure_is_raised_by_the_next_call_and_once(call: str) -> None:
    writer = BackgroundWriter(True)
    writer.submit(fail)
    assert writer._pending is not None
    writer._pending.exception()  # ended
    with pytest.raises(ValueError, match="lost"):
        getattr(writer, call)(*([fail] if call == "submit" else []))
    writer.wait()
    writer.close()


def test_closing_raises_nothing() -> None:
    writer = BackgroundWriter(True)
    writer.submit(fail)
    writer.close()
