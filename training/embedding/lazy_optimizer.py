"""Lazy Adam: one optimizer step costs O(rows of the batch), never O(vocabulary).

Adam (Kingma & Ba 2015, algorithm 1, with the step size of section 2's last paragraph), applied
to the rows that a batch touches; moments of other rows do not decay. Gradients of repeated ids
are summed first: applying them one by one would be another, wrong, optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

LearningRate = float | Callable[[tf.Tensor], tf.Tensor]


def sum_repeated_rows(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Sums the slices of equal indices, so that every index occurs once.

    Args:
        slices: `indices [n]` with repeats, `values [n, dim]`.

    Returns:
        `indices [u]` in order of first occurrence, `values [u, dim]`.
    """
    unique, position = tf.unique(slices.indices)
    summed = tf.math.unsorted_segment_sum(slices.values, position, tf.size(unique))
    return tf.IndexedSlices(summed, unique, slices.dense_shape)


class LazyAdam(tf.Module):
    """Adam on the rows that gradients name; all other rows keep every bit.

    Build it under the strategy's scope. Call `apply` in a replica context: the gradients of all
    replicas are summed before the update, so R replicas do what one would.

    Args:
        tables: Variables `[vocabulary_size, dim]`.
        learning_rate: A number, or a function of the zero-based step.
        beta_1: Decay of the first moment, in `[0, 1)`.
        beta_2: Decay of the second moment, in `[0, 1)`.
        epsilon: Added to the root of the second moment, as in Keras' Adam.
    """

    def __init__(
        self,
        tables: Sequence[tf.Variable],
        learning_rate: LearningRate,
        *,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
    ) -> None:
        super().__init__(name="lazy_adam")
        self._learning_rate = learning_rate
        self._beta_1, self._beta_2, self._epsilon = beta_1, beta_2, epsilon
        # Plain lists are tracked in order: a checkpoint finds each table's moments by position.
        self.first_moments = [_zeros_like(table, "first_moment") for table in tables]
        self.second_moments = [_zeros_like(table, "second_moment") for table in tables]
        self.iterations = tf.Variable(0, dtype=tf.int64, trainable=False, name="lazy_iterations")

    def apply(
        self, gradients: Sequence[tf.IndexedSlices | None], tables: Sequence[tf.Variable]
    ) -> None:
        """Updates the tables, in a replica context.

        Args:
            gradients: One per table, in the order of the constructor; ids may repeat. None
                where the loss does not depend on the table.
            tables: The variables of the constructor.
        """
        # Repeated ids are summed after the reduction, not before: collectives inside a compiled
        # loop must keep their shape from step to step, and the number of unique ids does not.
        context = tf.distribute.get_replica_context()
        context.merge_call(self._apply_merged, args=(list(gradients), list(tables)))

    def _apply_merged(
        self,
        strategy: tf.distribute.Strategy,
        gradients: list[tf.IndexedSlices | None],
        tables: list[tf.Variable],
    ) -> None:
        pairs = [
            (slices, table, slot)
            for slot, (slices, table) in enumerate(zip(gradients, tables, strict=True))
            if slices is not None
        ]
        reduced = strategy.extended.batch_reduce_to(
            tf.distribute.ReduceOp.SUM, [(slices, table) for slices, table, _ in pairs]
        )
        size, step = self._step_size(), self.iterations
        for (_, table, slot), slices in zip(pairs, reduced, strict=True):
            strategy.extended.update(
                table,
                self._update_rows,
                args=(slices, self.first_moments[slot], self.second_moments[slot], size),
            )
        strategy.extended.update(step, lambda variable: variable.assign_add(1))

    def _step_size(self) -> tf.Tensor:
        """Learning rate with both bias corrections folded in."""
        step = tf.convert_to_tensor(self.iterations)
        rate = self._learning_rate(step) if callable(self._learning_rate) else self._learning_rate
        nth = tf.cast(step + 1, tf.float32)
        unbiased = tf.sqrt(1.0 - tf.pow(self._beta_2, nth)) / (1.0 - tf.pow(self._beta_1, nth))
        return tf.cast(rate, tf.float32) * unbiased

    def _update_rows(
        self,
        table: tf.Variable,
        slices: tf.IndexedSlices,
        first_moment: tf.Variable,
        second_moment: tf.Variable,
        size: tf.Tensor,
    ) -> tf.Operation:
        """Updates one replica's copy of a table. Returns an operation: the table is not copied."""
        slices = sum_repeated_rows(slices)
        ids, gradient = slices.indices, slices.values
        first = self._beta_1 * tf.gather(first_moment, ids) + (1.0 - self._beta_1) * gradient
        second = self._beta_2 * tf.gather(second_moment, ids) + (1.0 - self._beta_2) * tf.square(
            gradient
        )
        change = size * first / (tf.sqrt(second) + self._epsilon)
        updates = (
            (first_moment.scatter_update, first),
            (second_moment.scatter_update, second),
            (table.scatter_sub, change),
        )
        for scatter, rows in updates:
            scatter(tf.IndexedSlices(rows, ids))
        return tf.no_op()


def _zeros_like(table: tf.Variable, name: str) -> tf.Variable:
    return tf.Variable(tf.zeros(table.shape), trainable=False, name=f"{name}")
