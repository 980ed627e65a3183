"""Errors of the input, carried through TensorFlow's runtime, which keeps their text alone."""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from conf.errors import SluiceError
from conf.manifest import Manifest
from conf.paths import ReadablePath
from training.reader.damage import explain_error

_MARK = "sluice-input-error-"
_TOKEN = re.compile(_MARK + "([0-9a-f]{32})")
_MOST_KEPT = 64
_KEPT: dict[str, SluiceError] = {}
_LOCK = threading.Lock()


class CarriedError(RuntimeError):
    """Stands for an error of the input inside TensorFlow's runtime, which keeps its text alone."""


def carry(error: SluiceError) -> CarriedError:
    """Returns the error to raise inside a dataset in place of one of Sluice's own."""
    token = uuid.uuid4().hex
    with _LOCK:
        _KEPT[token] = error
        while len(_KEPT) > _MOST_KEPT:
            del _KEPT[next(iter(_KEPT))]
    return CarriedError(f"{_MARK}{token}: {error}")


def is_carried(error: tf.errors.OpError) -> bool:
    """Whether an error of TensorFlow's runtime stands for one of the input."""
    return _TOKEN.search(error.message) is not None


@contextmanager
def input_errors(version_dir: ReadablePath, manifest: Manifest, split: str) -> Iterator[None]:
    """Raises an input's error as what it was before it went through TensorFlow's runtime.

    Iterate datasets of `training.input` inside this context.

    Args:
        version_dir: Directory of the dataset version.
        manifest: Its manifest.
        split: The split that is read.

    Raises:
        InputDataError: A record or a shard is damaged or missing, or does not hold what the
            schema says; names the file and where in it.
    """
    try:
        yield
    except tf.errors.OpError as error:
        found = _TOKEN.search(error.message)
        with _LOCK:
            carried = None if found is None else _KEPT.get(found[1])
        if carried is None:
            raise
        explain_error(carried, version_dir, manifest, split)
        raise carried from error
