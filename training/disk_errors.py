"""Errors of writing files, TensorFlow's own included, as errors that say what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from conf.errors import InternalError

# What TensorFlow writes around the words of an error: the node before, the operation after.
_NODE = re.compile(r"^\{\{[^}]*\}\}\s*|\s*\[Op:\w+\]")


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
    lines = str(error).splitlines()
    return (lines and _NODE.sub("", lines[0])) or type(error).__name__
