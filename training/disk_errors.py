"""Errors of writing files, TensorFlow's own included, as errors that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from conf.errors import InternalError


@contextmanager
def disk_errors(what: str, fix: str) -> Iterator[None]:
    """Turns a write that failed inside the block into an error that names what was written.

    TensorFlow raises its own errors, not `OSError`, where a disk is full or a path is not
    writable.

    Args:
        what: What could not be written, one sentence.
        fix: What to do about it.

    Raises:
        InternalError: The disk is full, or there is no permission.
    """
    try:
        yield
    except (tf.errors.OpError, OSError) as error:
        raise InternalError(what, received=describe_error(error), fix=fix) from error


def describe_error(error: Exception) -> str:
    """Returns the first line of an error's message, or its type where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
