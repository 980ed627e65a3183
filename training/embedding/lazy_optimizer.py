"""Lazy optimizers: one step costs O(rows of the batch), never O(vocabulary).

A rule is applied to the rows that a batch touches; all others keep their values and their state.
Gradients of repeated ids are summed first: applying them one by one would be another, wrong,
optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from training.embedding.distinct_rows import sum_rows
from training.embedding.row_shards import Rows, fill_like, list_variables
from training.embedding.rules import SparseRule
from training.embedding.table import read_rows

LearningRate = float | Callable[[tf.Tensor], tf.Tensor]


def sum_repeated_rows(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Sums the slices of equal indices, so that every index occurs once.

    Args:
        slices: `indices [n]` with repeats, `values [n, dim]`.

    Returns:
        `indices [u]` in order of first occurrence, `values [u, dim]`.
    """
    unique, position = tf.unique(slices.indices)
    summed = sum_rows(slices.values, position, tf.size(unique))
    return tf.IndexedSlices(summed, unique, slices.dense_shape)


class LazyOptimizer(tf.Module):
    """A rule on the rows that gradients name; all other rows keep every bit.

    Build it under the strategy's scope. Call `apply` in a replica context: the gradients of all
    replicas are summed before the update, so R replicas do what one would.

    Args:
        tables: Variables `[vocabulary_size, dim]`, or their shards.
        rule: What is done to a row.
        learning_rate: A number, or a function of the zero-based step.
        clip_value: Largest absolute value of a number of the summed gradient, or None.
    """

    def __init__(
        self,
        tables: Sequence[Rows],
        rule: SparseRule,
        learning_rate: LearningRate,
        *,
        clip_value: float | None = None,
    ) -> None:
        super().__init__(name="lazy_optimizer")
        self._rule, self._learning_rate, self._clip_value = rule, learning_rate, clip_value
        # Lists are tracked in order: a checkpoint finds each table's state by position.
        self.slots = {
            name: [fill_like(table, first, name) for table in tables]
            for name, first in rule.slots.items()
        }
        self.iterations = tf.Variable(0, dtype=tf.int64, trainable=False, name="lazy_iterations")

    def apply(
        self,
        gradients: Sequence[tf.IndexedSlices | None],
        tables: Sequence[tf.Variable],
        *,
        are_unique: bool = False,
        known: Sequence[tf.Tensor | None] | None = None,
    ) -> None:
        """Updates the tables, in a replica context.

        Args:
            gradients: One per variable, in the order of the constructor; ids may repeat. None
                where the loss does not depend on it.
            tables: The variables of the constructor, those of a split table one by one.
            are_unique: Whether one replica runs and its gradients name no id twice.
            known: Rows that the gradients name, per table, or None where they are to be read;
                for unique gradients only.
        """
        # Repeated ids are summed after the reduction, not before: collectives inside a compiled
        # loop must keep their shape from step to step, and the number of unique ids does not.
        context = tf.distribute.get_replica_context()
        rows = [None] * len(tables) if known is None else list(known)
        context.merge_call(
            self._apply_merged, args=(list(gradients), list(tables), are_unique, rows)
        )

    def _apply_merged(
        self,
        strategy: tf.distribute.Strategy,
        gradients: list[tf.IndexedSlices | None],
        tables: list[tf.Variable],
        are_unique: bool,
        known: list[tf.Tensor | None],
    ) -> None:
        pairs = [
            (slices, table, slot)
            for slot, (slices, table) in enumerate(zip(gradients, tables, strict=True))
            if slices is not None
        ]
        reduced = [slices for slices, _, _ in pairs]
        if pairs and strategy.num_replicas_in_sync > 1:
            reduced = strategy.extended.batch_reduce_to(
                tf.distribute.ReduceOp.SUM, [(slices, table) for slices, table, _ in pairs]
            )
        slots = {
            name: [variable for rows in per_table for variable in list_variables(rows)]
            for name, per_table in self.slots.items()
        }
        step = tf.convert_to_tensor(self.iterations)
        rate = self._learning_rate(step) if callable(self._learning_rate) else self._learning_rate
        moment = (tf.cast(rate, tf.float32), tf.cast(step, tf.float32), are_unique)
        for (_, table, slot), slices in zip(pairs, reduced, strict=True):
            state = {name: variables[slot] for name, variables in slots.items()}
            arguments = (slices, state, *moment, known[slot])
            strategy.extended.update(table, self._update_rows, args=arguments)
        strategy.extended.update(self.iterations, lambda variable: variable.assign_add(1))

    def _update_rows(
        self,
        table: tf.Variable,
        slices: tf.IndexedSlices,
        state: dict[str, tf.Variable],
        rate: tf.Tensor,
        step: tf.Tensor,
        are_unique: bool,
        before: tf.Tensor | None,
    ) -> tf.Operation:
        """Updates one replica's copy of a table. Returns an operation: the table is not copied."""
        if not are_unique:
            slices = sum_repeated_rows(slices)
        ids, gradient = slices.indices, slices.values
        if self._clip_value is not None:
            gradient = tf.clip_by_value(gradient, -self._clip_value, self._clip_value)
        slots = {name: read_rows(variable, ids) for name, variable in state.items()}
        before = read_rows(table, ids) if before is None else before
        rows, new = self._rule.update(before, gradient, slots, rate, step)
        # Rows are set, not subtracted from: TensorFlow's scatter_sub takes ten times as long.
        for variable, values in ((table, rows), *((state[name], new[name]) for name in state)):
            variable.scatter_update(tf.IndexedSlices(values, ids))
        return tf.no_op()
