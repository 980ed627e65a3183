"""A matrix with a row for each key of a key space."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from conf.schema import PAD_ID
from training.embedding.key_index import FIRST_ROW
from training.embedding.key_space import KeySpace, list_copies

_GROWTH = (3, 2)
"""Memory grows by half."""


class GrowingRows(tf.Module):
    """A matrix `[rows, dim]` in a variable that is longer, so that it grows in steps.

    Rows that no key has yet hold the first value in all places, and so does that of padding, which
    nothing trains.

    Args:
        keys: Whose rows they are.
        dim: Length of a row.
        name: Name of the variable.
        fill: First value.
        trainable: Whether the variable has gradients.
    """

    def __init__(
        self, keys: KeySpace, dim: int, name: str, *, fill: float = 0.0, trainable: bool = True
    ) -> None:
        super().__init__(name="growing_rows")
        self.keys, self.dim, self.fill = keys, dim, fill
        self.variable = tf.Variable(
            tf.fill([keys.capacity, dim], fill),
            shape=tf.TensorShape([None, dim]),
            trainable=trainable,
            name=name,
        )
        keys.join(self)

    @property
    def shape(self) -> tf.TensorShape:
        """Shape of the matrix as it is."""
        return tf.TensorShape([self.keys.row_count, self.dim])

    @property
    def dtype(self) -> tf.DType:
        """Type of a number."""
        return self.variable.dtype

    def read_value(self) -> tf.Tensor:
        """Returns the matrix, without the rows that no key has."""
        copy = self._copies[0]
        return tf.gather(copy, tf.range(self.keys.row_count))

    def numpy(self) -> np.ndarray:
        """Returns the matrix."""
        return np.asarray(self.read_value())

    def assign(self, values: tf.Tensor | np.ndarray) -> None:
        """Sets the matrix; the rows of other keys are cut off.

        Args:
            values: float32 `[rows, dim]`; the key space is set to as many rows by itself.
        """
        missing = max(0, self.keys.capacity - len(values))
        padded = np.pad(values, ((0, missing), (0, 0)), constant_values=self.fill)
        for copy in self._copies:
            copy.assign(padded)

    def fill_like(self, value: float, name: str) -> GrowingRows:
        """Returns another matrix of the same keys and row length that is not trained."""
        return GrowingRows(self.keys, self.dim, name, fill=value, trainable=False)

    @property
    def _copies(self) -> tuple[tf.Variable, ...]:
        return list_copies(self.variable)


def read_capacity(matrix: GrowingRows) -> tf.Tensor:
    """Returns the rows that this replica's copy has memory for, int64 scalar."""
    return tf.raw_ops.VariableShape(input=matrix.variable.handle, out_type=tf.int64)[0]


def reserve_rows(matrix: GrowingRows, count: tf.Tensor) -> list[tf.Operation]:
    """Gives this replica's copy of a matrix memory for more rows than it has, in a graph.

    The old memory is given back before the new one is handed over: a variable that rows have been
    scattered into copies what it is assigned.

    Args:
        matrix: The matrix.
        count: Rows that it must have, int64 scalar.
    """
    handle, dtype = matrix.variable.handle, matrix.dtype
    held = read_capacity(matrix)
    ahead = count // _GROWTH[1] * _GROWTH[0]
    if matrix.keys.max_rows is not None:
        ahead = tf.minimum(ahead, matrix.keys.max_rows + FIRST_ROW)
    rows = tf.range(tf.maximum(ahead, count))
    # New rows are copies of that of padding, which holds the first value.
    grown = tf.raw_ops.ResourceGather(
        resource=handle, indices=tf.where(rows < held, rows, PAD_ID), dtype=dtype
    )
    with tf.control_dependencies([grown]):
        emptied = tf.raw_ops.AssignVariableOp(
            resource=handle, value=tf.zeros([0, matrix.dim], dtype), validate_shape=False
        )
    with tf.control_dependencies([emptied]):
        return [tf.raw_ops.AssignVariableOp(resource=handle, value=grown, validate_shape=False)]
