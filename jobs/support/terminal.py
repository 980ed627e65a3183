"""What commands share on a terminal: log formats, common options, a quiet TensorFlow."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from conf.errors import render_event

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

# Packages whose modules log under their own names, as libraries do.
_LOGGING_PACKAGES = ("etl", "training")


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


class _StandardError(logging.StreamHandler[TextIO]):
    """Writes to what is standard error by then: a bar puts itself there while it is shown."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        pass


def setup_logging(log_format: LogFormat | str) -> None:
    """Sends Sluice's log to standard error in the given format; the root logger is left alone."""
    handler = _StandardError()
    if LogFormat(log_format) is LogFormat.JSON:
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(_TextFormatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("sluice")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for name in _LOGGING_PACKAGES:
        logging.getLogger(name).handlers = [handler]
    # It tells of its font cache, which is nothing to act on.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)


CONFIG_HELP = "Preset name, or path of a YAML file."

Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved plan; touch nothing.")]
LogFormatOption = Annotated[LogFormat, typer.Option("--log-format", help="How to log.")]
IdColumn = Annotated[
    str | None, typer.Option("--id", help="Column of the input that names its rows.")
]
ListLength = Annotated[
    int | None, typer.Option(min=1, help="Items per list; default: the run's predict.k.")
]
ListSeparator = Annotated[str, typer.Option(help="Separates the values of a list in CSV.")]
DeclaredSeparator = Annotated[
    str | None,
    typer.Option(help="Separates the values of a list in CSV; default: as in the build, else |."),
]


def list_overrides(overrides: Sequence[str] | None, options: Mapping[str, str | None]) -> list[str]:
    """Returns all overrides of a config: those of options of their own first, which `--set` beats.

    Args:
        overrides: What `--set` gave.
        options: Value by key; None where the option was not given.
    """
    given = [
        f"{key}={json.dumps(value, ensure_ascii=False)}"
        for key, value in options.items()
        if value is not None
    ]
    return [*given, *(overrides or [])]


@contextmanager
def show_progress(
    total: int | None, *columns: str | ProgressColumn
) -> Iterator[Callable[[int], None]]:
    """Shows progress on a terminal's standard error; elsewhere nothing.

    Args:
        total: How much there is to do; None where that is not known.
        columns: What the line shows; by default a bar and the time that is left.

    Yields:
        Called with how much was done since the last call.
    """
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)


TENSORFLOW_LOG_LEVEL_VARIABLE = "TF_CPP_MIN_LOG_LEVEL"


@contextmanager
def quiet_tensorflow() -> Iterator[None]:
    """Hides what native code writes to standard error while TensorFlow is imported.

    TensorFlow writes some notes before it has read its own log level. What was hidden is shown
    when the import fails. A lower log level that the user has set leaves everything as it is.
    """
    hides = os.environ.setdefault(TENSORFLOW_LOG_LEVEL_VARIABLE, "3") == "3"
    if not hides or "tensorflow" in sys.modules:
        yield
        return
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as hidden:
        os.dup2(hidden.fileno(), 2)
        try:
            yield
        except BaseException:
            _restore_stderr(saved)
            hidden.seek(0)
            sys.stderr.write(hidden.read().decode(errors="replace"))
            raise
        _restore_stderr(saved)


def _restore_stderr(saved: int) -> None:
    sys.stderr.flush()
    os.dup2(saved, 2)
    os.close(saved)
