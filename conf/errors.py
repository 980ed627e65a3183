"""Errors that say what was wrong and how to fix it, exit codes, and the JSON lines of a log.

The name that Sluice is installed by stands here too: errors tell what to install.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

# The name to install by; `sluice` on the package index is another project.
DISTRIBUTION = "sluice-recsys"
UNKNOWN_VERSION = "unknown"
_SOURCES = Path(__file__).parents[1]


def install_hint(extra: str) -> str:
    """Returns the command that installs an extra, for the Python that runs.

    By the distribution's name where it is installed: pip then looks for the extra's packages alone.
    Sources that are run as they are name their folder, as no index need have them.
    """
    found = shutil.which("pip")
    is_own = found is not None and Path(found).parent == Path(sys.executable).parent
    pip = "pip" if is_own else f"{shlex.quote(sys.executable)} -m pip"
    what = f"{DISTRIBUTION}[{extra}]"
    if read_code_version() == UNKNOWN_VERSION and (_SOURCES / "pyproject.toml").is_file():
        what = f"{_SOURCES}[{extra}]"
    return f"{pip} install {shlex.quote(what)}"


def read_code_version() -> str:
    """Returns the version of this code; sources that are not installed carry none."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return UNKNOWN_VERSION


class ExitCode(IntEnum):
    """Process exit codes, the same for every job (documented in the README)."""

    OK = 0
    FAILED = 1
    CONFIG = 2
    INPUT_REFUSED = 3
    NOT_READY = 4
    DIVERGED = 5
    GATE_FAILED = 6
    # What a shell reports of a process that a signal ended: 128 + its number.
    INTERRUPTED = 130
    TERMINATED = 143


class SluiceError(Exception):
    """Base of every error that is reported to the user without a stack trace.

    Args:
        what: What was wrong, one sentence.
        received: The offending value, as the user wrote it or as it was found.
        allowed: What would have been accepted.
        fix: What to do about it.
    """

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(
        self,
        what: str,
        *,
        received: object = None,
        allowed: object = None,
        fix: str | None = None,
    ) -> None:
        self.what = what
        self.received = received
        self.allowed = allowed
        self.fix = fix
        super().__init__(self.render())

    def render(self) -> str:
        """Returns the message, one labelled line per part that is known."""
        lines = [self.what]
        if self.received is not None:
            lines.append(f"  received: {self.received}")
        if self.allowed is not None:
            lines.append(f"  allowed:  {self.allowed}")
        if self.fix is not None:
            lines.append(f"  fix:      {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        """Keeps the parts when the error crosses a process border."""
        return _rebuild, (type(self), self.what, self.received, self.allowed, self.fix)


class InternalError(SluiceError):
    """The environment failed (disk full, no permission); nothing the config could mend."""

    exit_code = ExitCode.FAILED


class ConfigError(SluiceError):
    """The command line or a config is wrong; nothing was touched."""

    exit_code = ExitCode.CONFIG


class OwnCodeError(SluiceError):
    """User code has failed: as it was imported, built, tried, or later in a step."""

    exit_code = ExitCode.CONFIG


class LaterLogError(ConfigError):
    """A run was trained on a log that ends later than the version that it is to be measured on."""


class InputDataError(SluiceError):
    """Input data was refused; the last good output is untouched."""

    exit_code = ExitCode.INPUT_REFUSED


class TooFewRowsError(InputDataError):
    """The data is sound, and the config asks for more rows than it leaves of them."""


class UpstreamNotReadyError(SluiceError):
    """Something that this job waits for is not there yet, or is being written right now."""

    exit_code = ExitCode.NOT_READY


class TrainingDivergedError(SluiceError):
    """The loss left the finite numbers; the last good checkpoint is untouched."""

    exit_code = ExitCode.DIVERGED


class TrainingInterruptedError(SluiceError):
    """A signal ended training (SIGTERM) after its state was saved: `--resume` goes on."""

    exit_code = ExitCode.TERMINATED


class TrainingCancelledError(TrainingInterruptedError):
    """As above, by Ctrl-C (SIGINT)."""

    exit_code = ExitCode.INTERRUPTED


def was_interrupted(error: BaseException) -> bool:
    """Whether an error is of Ctrl-C, or came up while one was dealt with."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, KeyboardInterrupt):
        found = found.__cause__ or found.__context__
    return found is not None


def _rebuild(
    cls: type[SluiceError], what: str, received: object, allowed: object, fix: str | None
) -> SluiceError:
    return cls(what, received=received, allowed=allowed, fix=fix)


def nearest(name: str, valid: Iterable[str]) -> str | None:
    """Returns the valid name closest to a misspelt one, or None where none is close."""
    matches = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return matches[0] if matches else None


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Returns a hint for an unknown name: the nearest valid one, or the whole list."""
    valid = sorted(valid)
    if not valid:
        return "there is none to choose from"
    close = nearest(name, valid)
    return f"did you mean {close!r}?" if close else f"use one of: {', '.join(valid)}"


def render_event(event: str, fields: Mapping[str, Any], time_s: float | None = None) -> str:
    """Returns one line, without its end.

    Args:
        event: What happened, such as `log` or `error`.
        fields: More of it by name; what JSON does not know is written as text.
        time_s: When it happened, in seconds since 1970; None: now.
    """
    moment = time.time() if time_s is None else time_s
    return json.dumps({"event": event, "time": round(moment, 3), **fields}, default=str)
