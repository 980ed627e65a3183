"""Dice over positions: values, gradients and statistics are those of the formula, step by step."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from training.networks.tower import EPSILON, Dice, apply_dice

ROWS, LENGTH, UNITS = 5, 4, 3


def draw(seed: int = 0) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    rng = np.random.default_rng(seed)
    x = tf.constant(rng.normal(1.0, 2.0, (ROWS * LENGTH, UNITS)), tf.float64)
    weights = tf.constant(rng.random((1, ROWS * LENGTH)) < 0.7, tf.float64)
    return x, weights, tf.constant(rng.normal(size=UNITS), tf.float64)


def follow_the_formula(x: tf.Tensor, weights: tf.Tensor, slope: tf.Tensor) -> tf.Tensor:
    """Equation 4 of the paper, which TensorFlow differentiates."""
    counted = tf.boolean_mask(x, weights[0] > 0)
    mean, variance = tf.nn.moments(counted, axes=[0])
    gate = tf.sigmoid((x - mean) / tf.sqrt(variance + EPSILON))
    return gate * x + (1.0 - gate) * slope * x


def test_values_and_gradients_are_those_of_the_formula() -> None:
    x, weights, slope = draw()
    upstream = tf.constant(np.random.default_rng(1).normal(size=x.shape))
    found = []
    for function in (lambda *values: apply_dice(*values)[0], follow_the_formula):
        with tf.GradientTape() as tape:
            tape.watch([x, slope])
            y = function(x, weights, slope)
        found.append((y, *tape.gradient(y, [x, slope], output_gradients=upstream)))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-9)


def test_statistics_are_kept_as_keras_keeps_them() -> None:
    x, weights, _ = draw()
    inputs = tf.cast(tf.reshape(x, [ROWS, LENGTH, UNITS]), tf.float32)
    tokens = tf.reshape(weights > 0, [ROWS, LENGTH])
    layer, peer = Dice(), keras.layers.BatchNormalization(center=False, scale=False)
    for _ in range(3):
        layer(inputs, training=True, tokens=tokens)
        peer(inputs, training=True, mask=tokens)
    kept = layer.normalize
    np.testing.assert_allclose(kept.moving_mean, peer.moving_mean, rtol=1e-5)
    np.testing.assert_allclose(kept.moving_variance, peer.moving_variance, rtol=1e-5)


def test_a_batch_without_tokens_has_finite_gradients() -> None:
    x, weights, slope = draw()
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = apply_dice(x, tf.zeros_like(weights), slope)[0]
    assert np.isfinite(tape.gradient(y, x)).all()
