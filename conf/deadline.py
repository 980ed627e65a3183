"""Calls of services that must not hold up what they are told of, and calls beside a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def call_within(seconds: float, call: Callable[[], object], tell: Callable[[str], object]) -> None:
    """Calls a service that may fail or never answer: nothing is raised, what is wrong is told.

    The time-outs of clients are those of one read: a server that sends a byte now and then would
    hold a caller for ever. So the call has a thread, which ends with the process.
    """
    failed = [f"no whole answer within {seconds:g} s"]

    def run() -> None:
        try:
            call()
            failed.clear()
        except Exception as error:  # Clients and their plugins raise what they like.
            failed[:] = [str(error)[:200]]

    thread = threading.Thread(target=run, name="deadline", daemon=True)
    thread.start()
    thread.join(seconds)
    for why in failed:
        tell(why)


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
