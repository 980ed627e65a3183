"""Keeps TensorFlow's start-up notes off the terminal."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

LEVEL_VARIABLE = "TF_CPP_MIN_LOG_LEVEL"


@contextmanager
def quiet_tensorflow() -> Iterator[None]:
    """Hides what native code writes to standard error while TensorFlow is imported.

    TensorFlow writes some notes before it has read its own log level. What was hidden is shown
    when the import fails. A log level that the user has set leaves everything as it is.
    """
    if LEVEL_VARIABLE in os.environ or "tensorflow" in sys.modules:
        yield
        return
    os.environ[LEVEL_VARIABLE] = "3"
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as hidden:
        os.dup2(hidden.fileno(), 2)
        try:
            yield
        except BaseException:
            _restore(saved)
            hidden.seek(0)
            sys.stderr.write(hidden.read().decode(errors="replace"))
            raise
        _restore(saved)


def _restore(saved: int) -> None:
    sys.stderr.flush()
    os.dup2(saved, 2)
    os.close(saved)
