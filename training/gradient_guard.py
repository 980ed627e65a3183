"""Finds the step whose gradients are not finite, one step before its loss would show it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import tensorflow as tf

from training.gradients import Gradient
from training.input import Batch
from training.loss_scale import LossScale
from training.optimizers import KnownRows, Optimizers
from training.step import StepFunction


class GradientGuard:
    """Looks at the gradients on their way to the optimizers.

    Args:
        optimizers: What updates the model.
    """

    def __init__(self, optimizers: Optimizers) -> None:
        self._optimizers = optimizers
        self._seen = threading.local()  # The replicas of a step are traced in a thread each.

    @property
    def variables_in_step_order(self) -> list[tf.Variable]:
        """As of the optimizers."""
        return self._optimizers.variables_in_step_order

    @property
    def step(self) -> tf.Variable:
        """As of the optimizers."""
        return self._optimizers.step

    @property
    def accumulate_steps(self) -> int:
        """As of the optimizers."""
        return self._optimizers.accumulate_steps

    @property
    def loss_scale(self) -> LossScale | None:
        """As of the optimizers."""
        return self._optimizers.loss_scale

    def apply(self, gradients: Sequence[Gradient], known: KnownRows | None = None) -> None:
        """Updates all variables once; arguments as of the optimizers."""
        self._seen.finite = tf.reduce_all(
            [tf.reduce_all(tf.math.is_finite(_values(g))) for g in gradients if g is not None]
        )
        self._optimizers.apply(gradients, known)

    def watch(self, train_step: StepFunction) -> StepFunction:
        """Returns the step with a loss of NaN where this replica's gradients are not finite."""

        def guarded_step(batch: Batch) -> tf.Tensor:
            loss = train_step(batch)
            return tf.where(self._seen.finite, loss, tf.constant(float("nan"), loss.dtype))

        return guarded_step


def _values(gradient: tf.Tensor | tf.IndexedSlices) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
