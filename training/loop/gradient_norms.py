"""Norms of gradients by step: of all variables together, and of each table and network."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from training.loop.gradients import Gradient, as_slices, square_dense, square_rows
from training.models.model import Model

ALL = "all"
"""Name of the norm of all variables together."""


class GradientNorms(tf.Module):
    """The norms of the last steps: steps write them, and the loop reads them after a call.

    A norm is that of the gradient of the whole batch, repeated rows summed, before it is clipped.
    Build it under the strategy's scope; no checkpoint holds it.

    Args:
        groups: Name of the table or network of each variable whose gradient a step has.
        steps: Most steps of a call.

    Attributes:
        names: `all`, then the groups.
    """

    def __init__(self, groups: Sequence[str], steps: int) -> None:
        super().__init__(name="gradient_norms")
        self.names = (ALL, *dict.fromkeys(groups))
        self._groups, self._steps = tuple(groups), steps
        self._norms = _build_variable(tf.zeros([steps, len(self.names)]))
        self._count = _build_variable(tf.zeros([], tf.int64))

    def record(
        self, gradients: Sequence[Gradient], known: Sequence[tf.Tensor | None], factor: tf.Tensor
    ) -> None:
        """Notes the norms of a step, in a replica context.

        Args:
            gradients: This replica's shares, in the order of `groups`.
            known: Per table the rows that its gradient names, each once, or None.
            factor: What the gradients are multiplied by.
        """
        squares = self._sum_squares(gradients, known)
        norms = tf.sqrt(tf.stack([tf.add_n(list(squares.values())), *squares.values()])) / factor
        row = self._count.read_value() % self._steps
        table = tf.tensor_scatter_nd_update(self._norms.read_value(), [[row]], [norms])
        self._norms.assign(table)
        self._count.assign_add(1)

    def read(self, steps: int) -> dict[str, np.ndarray]:
        """Returns the norms of the last steps by name, float32 `[steps]` each."""
        count = int(self._count.read_value())
        rows = np.arange(count - steps, count) % self._steps
        return dict(zip(self.names, self._norms.read_value().numpy()[rows].T, strict=True))

    def _sum_squares(
        self, gradients: Sequence[Gradient], known: Sequence[tf.Tensor | None]
    ) -> dict[str, tf.Tensor]:
        """Squared norms of the groups; those of dense weights are found in one exchange."""
        sums = dict.fromkeys(self.names[1:], tf.zeros([]))
        tables = len(known)
        for group, gradient, rows in zip(self._groups, gradients, known, strict=False):
            slices = as_slices(gradient)
            if slices is not None:
                sums[group] += square_rows(slices, are_unique=rows is not None)
        dense = [
            (group, tf.convert_to_tensor(gradient))
            for group, gradient in zip(self._groups[tables:], gradients[tables:], strict=True)
            if gradient is not None
        ]
        squares = square_dense([gradient for _, gradient in dense])
        for (group, _), square in zip(dense, squares, strict=True):
            sums[group] += square
        return sums


def build_gradient_norms(model: Model, steps: int) -> GradientNorms:
    """Returns the norms of a model's tables and networks.

    Args:
        model: The model.
        steps: Most steps of a call.
    """
    tables = [f"table/{name}" for name in model.trained_tables]
    dense = [f"network/{name.partition('/')[0]}" for name in model.named_weights]
    return GradientNorms([*tables, *dense], steps)


def _build_variable(value: tf.Tensor) -> tf.Variable:
    """Every replica writes its own copy; the first one's is read, as all are equal."""
    return tf.Variable(
        value,
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
    )
