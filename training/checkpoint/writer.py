"""Runs one write at a time, in a thread of its own or in the caller's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundWriter:
    """Runs writes one after the other; what one raises is raised by the next call.

    Args:
        asynchronous: Whether writes run in a thread while the caller goes on.
    """

    def __init__(self, asynchronous: bool) -> None:
        self._executor = (
            ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if asynchronous else None
        )
        self._pending: Future[None] | None = None

    def submit(self, write: Callable[[], None]) -> None:
        """Starts a write, after the one before has ended.

        Raises:
            Exception: What the one before raised, or this one where it runs in the caller.
        """
        self.wait()
        if self._executor is None:
            write()
        else:
            self._pending = self._executor.submit(write)

    def check(self) -> None:
        """Raises what a write that has ended raised; does not wait."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Waits for the write under way, and raises what it raised."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits for the write under way and ends the thread; raises nothing."""
        self._pending = None
        if self._executor is not None:
            self._executor.shutdown(wait=True)
