"""SIGTERM and SIGINT as requests to save and stop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from conf.errors import TrainingCancelledError, TrainingInterruptedError

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopNowError(BaseException):
    """A signal came where nothing has to be finished first.

    No `Exception`: code of one's own that is running may catch those, or is blamed for them.
    """


class StopRequest:
    """Whether a signal has asked training to stop.

    A compiled loop of steps is finished first: its caller looks at `requested` afterwards. The
    second signal does what it would do without all this.
    """

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._immediate = False

    @property
    def requested(self) -> bool:
        """Whether training is to stop."""
        return self._signal is not None

    def request(self, number: int) -> None:
        """Takes note of a signal.

        Raises:
            StopNowError: Inside `immediate`.
        """
        self._signal = signal.Signals(number)
        if self._immediate:
            self._immediate = False
            raise StopNowError

    @contextmanager
    def immediate(self) -> Iterator[None]:
        """Lets a signal end the block at once: for work that changes nothing, as validation.

        Raises:
            StopNowError: A signal has come, before or inside the block.
        """
        self._immediate = True
        try:
            if self.requested:
                raise StopNowError
            yield
        finally:
            self._immediate = False

    def build_error(self, where: str) -> TrainingInterruptedError:
        """Returns the error that ends the run once its state is saved.

        Args:
            where: The position that was saved, in words.
        """
        cancelled = self._signal is signal.SIGINT
        kind = TrainingCancelledError if cancelled else TrainingInterruptedError
        return kind(
            "training was interrupted, and its state is saved",
            received=self._signal.name if self._signal is not None else None,
            fix=f"go on {where} with --resume",
        )


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turns the first SIGTERM or SIGINT inside the block into a request.

    Outside the main thread, where Python allows no handlers, signals do what they did.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, frame: FrameType | None) -> None:
        restore()
        stop.request(number)

    for number in SIGNALS:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        restore()
