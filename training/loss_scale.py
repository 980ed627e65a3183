"""Dynamic loss scaling: keeps float16 gradients from vanishing.

Micikevicius et al. 2018, "Mixed precision training", section 3.2: the loss is multiplied by a
scale, its gradients are divided by it; a step whose gradients overflow is left out and halves the
scale, which doubles again after many finite steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from training.gradients import Gradient


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
    flags = [tf.reduce_all(tf.math.is_finite(v)) for v in values if v is not None]
    return tf.reduce_all(tf.stack(flags))


def _multiply(gradient: Gradient, factor: tf.Tensor) -> Gradient:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor
