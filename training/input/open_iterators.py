"""Iterators of TensorFlow that are let go of before Python ends."""

from __future__ import annotations

import atexit
import functools
import gc

import tensorflow as tf


@functools.cache
def close_iterators_at_exit() -> None:
    """Has iterators that are still open let go of before the interpreter finalizes.

    To be called where a dataset that calls Python is built. Threads of TensorFlow read such a
    dataset ahead. A finalizing interpreter stops each thread that wants to run Python, and an
    iterator that is let go of after that waits for its stopped thread for ever.
    """
    atexit.register(close_iterators)


def close_iterators() -> None:
    """Lets all iterators of this process go of what they read; none can be used any more."""
    is_iterator: dict[type, bool] = {}
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in is_iterator:
            is_iterator[kind] = issubclass(kind, tf.data.Iterator)
        if is_iterator[kind]:
            vars(thing).clear()
