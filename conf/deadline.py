"""Calls of services that must not hold up what they are told of, and calls beside a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Returns what a call returns, or leaves it alone when its time is over.

    The time-outs of clients are those of one read: a server that sends a byte now and then would
    hold a caller for ever.

    Args:
        seconds: How long it may take.
        call: What is called, on a thread of its own that ends with the process.

    Raises:
        TimeoutError: It took longer.
        Exception: What it raised.
    """
    found: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="deadline", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not found:
        raise TimeoutError(f"no whole answer within {seconds:g} s")
    return found[0]


@contextmanager
def repeating(seconds: float, call: Callable[[], object]) -> Iterator[None]:
    """Calls a function every so often, on a thread, until the block ends; waits for the last."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            call()

    thread = threading.Thread(target=repeat, name="repeating", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
