"""Dice, the activation of DIN: a PReLU whose kink moves with the batch (Zhou et al. 2018, 5.3).

Over the positions of histories it takes most of a step of DIN, as each of its many small operations
reads and writes every position. There its gradient is written out, and sums over positions are
products with a row of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

EPSILON = 1e-8
"""Added to the variance."""


@keras.saving.register_keras_serializable("sluice")
class Dice(keras.layers.Layer):
    """`p x + (1 - p) a x`: p the sigmoid of x normalized by the batch, a trained (DIN, equation 4).

    At a = 0 it is the unit's own gate; the kink of a PReLU moves to where the batch's mean is.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.normalize = keras.layers.BatchNormalization(
            center=False, scale=False, epsilon=EPSILON, synchronized=True
        )

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Makes the slopes, one for each unit."""
        self.normalize.build(input_shape)
        self.slope = self.add_weight(shape=(input_shape[-1],), initializer="zeros", name="slope")

    def call(
        self,
        inputs: keras.KerasTensor,
        training: bool | None = None,
        tokens: keras.KerasTensor | None = None,
    ) -> keras.KerasTensor:
        """Returns the activation of `[batch, …, units]`; `tokens` is the mask of `build_mlp`."""
        if tokens is None or not training:
            gate = keras.ops.sigmoid(self.normalize(inputs, training=training))
            return inputs * (gate + (1.0 - gate) * self.slope)
        rows = tf.reshape(inputs, [-1, inputs.shape[-1]])
        weights = tf.cast(tf.reshape(tokens, [1, -1]), rows.dtype)
        outputs, mean, variance = apply_dice(rows, weights, tf.convert_to_tensor(self.slope))
        self._keep(mean, variance)
        return tf.reshape(outputs, tf.shape(inputs))

    def _keep(self, mean: tf.Tensor, variance: tf.Tensor) -> None:
        """Moves the statistics for evaluation towards those of the batch, as Keras' layer does."""
        kept = self.normalize
        for variable, value in ((kept.moving_mean, mean), (kept.moving_variance, variance)):
            old = keras.ops.cast(variable, value.dtype)
            variable.assign(old * kept.momentum + value * (1.0 - kept.momentum))


@tf.custom_gradient
def apply_dice(
    rows: tf.Tensor, weights: tf.Tensor, slope: tf.Tensor
) -> tuple[tuple[tf.Tensor, tf.Tensor, tf.Tensor], Callable[..., Any]]:
    """Dice of rows, normalized by those that count.

    With z the normalized x and p its sigmoid, y = x (a + (1 - a) p). The gradient through z is that
    of batch normalization (Ioffe & Szegedy 2015, section 3), whose mean and variance are of the
    rows that count alone.

    Args:
        rows: x, float `[n, units]`.
        weights: 1 for a row that counts in mean and variance, else 0; `[1, n]`.
        slope: a, `[units]`.

    Returns:
        y `[n, units]`, and the mean and the variance, `[units]`, which have no gradient.
    """
    share = weights / tf.maximum(tf.reduce_sum(weights), 1.0)
    mean = tf.matmul(share, rows)
    centred = rows - mean
    variance = tf.matmul(share, tf.square(centred))
    scale = tf.math.rsqrt(variance + EPSILON)
    normalized = centred * scale
    gate = tf.sigmoid(normalized)
    factor = slope + (1.0 - slope) * gate

    def differentiate(
        upstream: tf.Tensor, _mean: tf.Tensor, _variance: tf.Tensor
    ) -> tuple[tf.Tensor, None, tf.Tensor]:
        each = tf.ones_like(weights)
        through = upstream * rows
        of_gate = through * gate
        of_slope = tf.matmul(each, through) - tf.matmul(each, of_gate)
        of_normalized = of_gate - of_gate * factor  # 1 - factor is (1 - a) (1 - p).
        total = tf.matmul(each, of_normalized) * scale
        along = tf.matmul(each, of_normalized * normalized) * scale
        correction = (normalized * along + total) * tf.transpose(share)
        gradient = upstream * factor + of_normalized * scale - correction
        return gradient, None, tf.squeeze(of_slope, 0)

    return (rows * factor, tf.squeeze(mean, 0), tf.squeeze(variance, 0)), differentiate
