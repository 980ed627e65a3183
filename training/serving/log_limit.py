"""How much of what clients cause is logged."""

from __future__ import annotations

import logging

KINDS = 1000
"""Kinds of messages that are counted."""
LOGGERS = ("sluice.training.serving", "uvicorn.error", "asyncio")


class LogLimit(logging.Filter):
    """Lets some messages of each kind pass in a while, and counts the others.

    A kind is a message without its arguments. The first message after a while says how many of
    its kind were left out.

    Args:
        most: Messages of a kind that pass in a while.
        seconds: How long a while is.
    """

    def __init__(self, most: int = 10, seconds: float = 10.0) -> None:
        super().__init__()
        self._most, self._seconds = most, seconds
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a message passes."""
        kind = (record.name, str(record.msg)[:200])
        start, count = self._kinds.get(kind, (record.created, 0))
        left_out = 0
        if record.created - start >= self._seconds:
            start, left_out, count = record.created, max(0, count - self._most), 0
        if kind not in self._kinds and len(self._kinds) >= KINDS:
            self._kinds.clear()
        self._kinds[kind] = (start, count + 1)
        if count >= self._most:
            return False
        if left_out:
            record.msg = f"{record.msg} (and {left_out} more of this kind, left out)"
        return True


def limit_log() -> None:
    """Sends uvicorn's log where ours goes, and limits how much of what clients cause is logged."""
    logging.getLogger("uvicorn").handlers = logging.getLogger("sluice").handlers
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(one, LogLimit) for one in logger.filters):
            logger.addFilter(LogLimit())
