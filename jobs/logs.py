"""Logging of the jobs: readable lines, or one JSON object per line for schedulers."""

from __future__ import annotations

import logging
import sys
from enum import StrEnum

from conf.event_lines import render_event

# Packages whose modules log under their own names, as libraries do.
_PACKAGES = ("etl", "training")


class LogFormat(StrEnum):
    """How progress and results are written."""

    TEXT = "text"
    JSON = "json"


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return render_event("log", entry, record.created)


class _TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno < logging.WARNING:
            return text
        # A warning among lines of progress says what it is.
        time, _, message = text.partition(" ")
        return f"{time} {record.levelname.lower()}: {message}"


def setup_logging(log_format: LogFormat | str) -> None:
    """Sends Sluice's log to standard error in the given format; the root logger is left alone."""
    handler = logging.StreamHandler(sys.stderr)
    if LogFormat(log_format) is LogFormat.JSON:
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(_TextFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("sluice")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for name in _PACKAGES:
        logging.getLogger(name).handlers = [handler]
