"""Gradients before they are applied: sums over parts and replicas, clipping, loss scaling.

Micikevicius et al. 2018, "Mixed precision training", section 3.2: the loss is multiplied by a
scale, its gradients are divided by it; a step whose gradients overflow is left out and halves
the scale, which doubles again after many finite steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import keras
import tensorflow as tf

from training.embedding.lazy_optimizer import sum_repeated_rows

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices | None


def as_slices(gradient: Gradient) -> tf.IndexedSlices | None:
    """Returns a table's gradient as rows; one of the whole table names all of them."""
    if gradient is None or isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows = tf.range(tf.shape(gradient, tf.int64)[0], dtype=tf.int64)
    return tf.IndexedSlices(gradient, rows, tf.shape(gradient))


def widen_slices(
    slices: tf.IndexedSlices | None, table: tf.Variable, l2: tf.Tensor
) -> tf.IndexedSlices:
    """Returns the gradient of all rows of a table, with that of `l2` times their squared norms.

    Args:
        slices: Gradient of some rows, which may repeat; None: of none.
        table: The table.
        l2: Weight in the loss, scalar.
    """
    count = int(table.shape[0])
    gradient = tf.convert_to_tensor(table.read_value()) * (2.0 * l2)
    if slices is not None:
        gradient += tf.math.unsorted_segment_sum(slices.values, slices.indices, count)
    return tf.IndexedSlices(gradient, tf.range(count, dtype=tf.int64), tf.shape(gradient))


def add_parts(parts: Sequence[Sequence[Gradient]]) -> list[Gradient]:
    """Sums the gradients of a batch's parts, variable by variable.

    Rows of tables are put one behind the other, repeats included: a sum of whole tables would
    cost as much as the vocabulary is long.

    Args:
        parts: Per part the gradients of the same variables.
    """
    return [_add([g for g in column if g is not None]) for column in zip(*parts, strict=True)]


def clip_global_norm(
    tables: Sequence[tf.IndexedSlices | None],
    dense: Sequence[tf.Tensor],
    clip_norm: float,
    *,
    are_unique: bool = False,
) -> tuple[list[tf.IndexedSlices | None], list[tf.Tensor]]:
    """Scales gradients so that their sum over replicas has at most a given norm.

    The norm is that of the reduced gradient, with repeated rows summed: what one replica would
    see. Each replica's share is scaled by the same factor, so the sum stays right.

    Args:
        tables: Gradients of tables; ids may repeat.
        dense: Gradients of dense weights.
        clip_norm: Above 0.
        are_unique: Whether one replica runs and its tables' gradients name no id twice.
    """
    of_tables = [square_rows(s, are_unique=are_unique) for s in tables if s is not None]
    norm = tf.sqrt(tf.add_n([*square_dense(dense), *of_tables]))
    factor = clip_norm / tf.maximum(norm, clip_norm)
    scaled = [
        None if s is None else tf.IndexedSlices(s.values * factor, s.indices, s.dense_shape)
        for s in tables
    ]
    return scaled, [keras.ops.multiply(gradient, factor) for gradient in dense]


def square_dense(gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the squared norm of each gradient of a dense weight, summed over replicas first."""
    summed = [tf.cast(gradient, tf.float32) for gradient in _sum_replicas(gradients)]
    return [tf.reduce_sum(tf.square(gradient)) for gradient in summed]


def square_rows(slices: tf.IndexedSlices, *, are_unique: bool) -> tf.Tensor:
    """Returns the squared norm of a table's gradient, summed over replicas and repeated rows first.

    Args:
        slices: This replica's share.
        are_unique: Whether one replica runs and no id is named twice.
    """
    merged = slices if are_unique else sum_repeated_rows(_gather_slices(slices))
    return tf.reduce_sum(tf.square(merged.values))


def clip_dense_values(gradients: Sequence[tf.Tensor], clip_value: float) -> list[tf.Tensor]:
    """Limits each number of the gradient that is summed over replicas.

    Args:
        gradients: This replica's shares.
        clip_value: Largest absolute value, above 0.

    Returns:
        Shares, equal on all replicas, that sum to the limited gradient.
    """
    context = tf.distribute.get_replica_context()
    return [
        tf.clip_by_value(gradient, -clip_value, clip_value) / context.num_replicas_in_sync
        for gradient in _sum_replicas(gradients)
    ]


def _add(gradients: list[tf.Tensor | tf.IndexedSlices]) -> Gradient:
    if not gradients:
        return None
    if not any(isinstance(gradient, tf.IndexedSlices) for gradient in gradients):
        return tf.add_n(gradients)
    slices = [s for gradient in gradients if (s := as_slices(gradient)) is not None]
    return tf.IndexedSlices(
        tf.concat([s.values for s in slices], axis=0),
        tf.concat([tf.cast(s.indices, tf.int64) for s in slices], axis=0),
        slices[0].dense_shape,
    )


def _sum_replicas(gradients: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    context = tf.distribute.get_replica_context()
    if not gradients or context.num_replicas_in_sync == 1:
        return gradients
    return context.all_reduce(tf.distribute.ReduceOp.SUM, list(gradients))


def _gather_slices(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return slices
    values, indices = context.all_gather([slices.values, slices.indices], axis=0)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


class LossScale(tf.Module):
    """The scale and what it depends on; a checkpoint holds both.

    Args:
        initial_scale: First scale, 1 or more.
        growth_steps: Finite steps in a row after which the scale doubles.
    """

    def __init__(self, initial_scale: float, growth_steps: int) -> None:
        super().__init__(name="loss_scale")
        self._growth_steps = growth_steps
        self.scale = tf.Variable(initial_scale, dtype=tf.float32, trainable=False, name="scale")
        self.finite_steps = tf.Variable(
            0, dtype=tf.int64, trainable=False, name="finite_steps_in_a_row"
        )

    def unscale(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Divides gradients by the scale."""
        factor = 1.0 / self.scale.read_value()
        return [_multiply(gradient, factor) for gradient in gradients]

    def adapt(self, strategy: tf.distribute.Strategy, is_finite: tf.Tensor) -> None:
        """Sets the scale of the next step, in a cross-replica context.

        Args:
            strategy: The strategy of the variables.
            is_finite: Whether this step's gradients were, on all replicas; bool scalar.
        """
        scale = tf.convert_to_tensor(self.scale)
        steps = tf.convert_to_tensor(self.finite_steps) + 1
        grows = steps >= self._growth_steps
        larger = tf.where(grows, scale * 2.0, scale)
        # Doubled past what float32 holds it would be infinite for ever.
        larger = tf.where(tf.math.is_finite(larger), larger, scale)
        new_scale = tf.where(is_finite, larger, tf.maximum(scale / 2.0, 1.0))
        new_steps = tf.where(is_finite & ~grows, steps, tf.zeros_like(steps))
        strategy.extended.update(self.scale, lambda v, new: v.assign(new), args=(new_scale,))
        strategy.extended.update(self.finite_steps, lambda v, new: v.assign(new), args=(new_steps,))


def are_finite(gradients: Sequence[Gradient]) -> tf.Tensor:
    """Returns whether all numbers of this replica's gradients are finite, bool scalar."""
    values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    return tf.reduce_all([tf.reduce_all(tf.math.is_finite(v)) for v in values if v is not None])


def _multiply(gradient: Gradient, factor: tf.Tensor) -> Gradient:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return keras.ops.multiply(gradient, factor)
