"""A clock for compiled steps that shows what work has been said to take."""

from __future__ import annotations

import tensorflow as tf


class FakeClock:
    """Stands for `tf.timestamp`."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def read(self) -> tf.Tensor:
        """Returns the time, float64 scalar."""
        return tf.ensure_shape(tf.numpy_function(lambda: self._seconds, [], tf.float64), [])

    def spend(self, x: tf.Tensor, seconds: float, stateful: bool = True) -> tf.Tensor:
        """Returns a float32 scalar as it is, and takes some time for that."""

        def work(value: float) -> float:
            self._seconds += seconds
            return value

        found = tf.numpy_function(work, [x], tf.float32, stateful=stateful)
        return tf.ensure_shape(found, [])
