"""What models compute with rows, beside NumPy and what TensorFlow derives: values, gradients."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from training.networks.layers import (
    combine_positions,
    matmul_rows,
    normalize_rows,
    pool_mean,
)
from training.networks.tower import EPSILON, Dice, apply_dice


def test_products_are_computed_in_half_and_returned_in_float32() -> None:
    left, right = tf.constant([[1.0, 1e-3]]), tf.constant([[1.0, 1.0], [2.0, 0.0]])
    np.testing.assert_allclose(matmul_rows(left, right), [[1.001, 2.0]])
    product = matmul_rows(left, right, tf.bfloat16)
    assert product.dtype == tf.float32
    np.testing.assert_array_equal(product, [[1.0, 2.0]])  # bfloat16 has 8 bits


def gradient_of(function, vectors: tf.Tensor, upstream: tf.Tensor) -> np.ndarray:
    with tf.GradientTape() as tape:
        tape.watch(vectors)
        loss = tf.reduce_sum(function(vectors) * upstream)
    return tape.gradient(loss, vectors).numpy()


@pytest.mark.parametrize("scale", [0.1, 1.0, 50.0])
def test_values_and_gradients_are_those_of_tensorflow(scale: float) -> None:
    rng = np.random.default_rng(3)
    vectors = tf.constant(scale * rng.normal(size=(20, 6)), tf.float32)
    upstream = tf.constant(rng.normal(size=(20, 6)), tf.float32)
    expected = vectors.numpy() / np.linalg.norm(vectors.numpy(), axis=1, keepdims=True)
    np.testing.assert_allclose(normalize_rows(vectors), expected, rtol=1e-5)
    found = gradient_of(normalize_rows, vectors, upstream)
    derived = gradient_of(lambda x: tf.math.l2_normalize(x, axis=1), vectors, upstream)
    np.testing.assert_allclose(found, derived, rtol=1e-4, atol=1e-5 / scale)


def average(embeddings: tf.Tensor, ids: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    share = tf.cast(ids != 0, tf.float32) * weights
    share = tf.math.divide_no_nan(share, tf.reduce_sum(share, axis=1, keepdims=True))
    return tf.reduce_sum(share[:, :, None] * embeddings, axis=1)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**16), rows=st.integers(1, 5), length=st.integers(1, 7))
def test_pooling_and_its_gradients_are_those_of_a_mean(seed: int, rows: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    ids = tf.constant(rng.integers(0, 4, (rows, length)) * rng.integers(0, 2, (rows, 1)))
    embeddings = tf.constant(rng.normal(size=(rows, length, 3)), tf.float32)
    weights = tf.constant(rng.uniform(0.1, 2, length), tf.float32)
    upstream = tf.constant(rng.normal(size=(rows, 3)), tf.float32)
    found = []
    for pool in (pool_mean, average):
        with tf.GradientTape() as tape:
            tape.watch([embeddings, weights])
            pooled = pool(embeddings, ids, weights)
        found.append([pooled, *tape.gradient(pooled, [embeddings, weights], upstream)])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not found[0][1].numpy()[ids.numpy() == 0].any()
    expected = average(embeddings, ids, tf.ones(length))
    np.testing.assert_allclose(pool_mean(embeddings, ids), expected, atol=1e-6)


def combine_each(
    embeddings: tf.Tensor, ids: np.ndarray, weights: tf.Tensor | None, combiner: str
) -> tf.Tensor:
    """One list at a time, which TensorFlow differentiates."""
    reduce = {"sum": tf.reduce_sum, "mean": tf.reduce_mean, "max": tf.reduce_max}.get(combiner)
    pooled = []
    for row, tokens in enumerate(ids != 0):
        own = tf.boolean_mask(embeddings[row], tokens)
        if weights is not None:
            own *= tf.boolean_mask(weights[row], tokens)[:, None]
        if tokens.any():
            pooled.append(own[-1] if reduce is None else reduce(own, axis=0))
        else:
            pooled.append(tf.zeros(embeddings.shape[2], embeddings.dtype))
    return tf.stack(pooled)


@pytest.mark.parametrize("combiner", ["sum", "mean", "max", "last"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_combiners_and_their_gradients_are_those_of_each_list(
    combiner: str, is_weighted: bool
) -> None:
    rng = np.random.default_rng(1)
    ids = np.array([[3, 1, 2, 5], [7, 4, 0, 0], [0, 0, 0, 0], [0, 9, 0, 2]])
    embeddings, weights = rng.normal(size=(4, 4, 3)), rng.normal(size=(4, 4))
    embeddings[ids == 0] = weights[ids == 0] = np.nan  # must be of no account
    upstream = tf.constant(rng.normal(size=(4, 3)))
    given = [tf.constant(embeddings), *([tf.constant(weights)] if is_weighted else [])]
    found = []
    for combine in (combine_positions, combine_each):
        with tf.GradientTape() as tape:
            tape.watch(given)
            pooled = combine(given[0], ids, given[1] if is_weighted else None, combiner)
        found.append([pooled, *tape.gradient(pooled, given, output_gradients=upstream)])
    for ours, theirs in zip(*found, strict=True):
        ours, theirs = tf.convert_to_tensor(ours), tf.convert_to_tensor(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=1e-7, atol=1e-7)


def test_positions_are_kept_without_what_pads_them() -> None:
    ids = tf.constant([[3, 0], [0, 0]])
    garbage = tf.constant([[[2.0], [np.nan]], [[np.inf], [1e9]]])
    weights = tf.constant([[3.0, np.nan], [np.inf, 1.0]])
    found = combine_positions(garbage, ids, weights, "none")
    assert found.numpy().tolist() == [[[6.0], [0.0]], [[0.0], [0.0]]]


ROWS, LENGTH, UNITS = 5, 4, 3


def draw() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    rng = np.random.default_rng(0)
    x = tf.constant(rng.normal(1.0, 2.0, (ROWS * LENGTH, UNITS)), tf.float64)
    weights = tf.constant(rng.random((1, ROWS * LENGTH)) < 0.7, tf.float64)
    return x, weights, tf.constant(rng.normal(size=UNITS), tf.float64)


def follow_the_formula(x: tf.Tensor, weights: tf.Tensor, slope: tf.Tensor) -> tf.Tensor:
    """Equation 4 of the paper, which TensorFlow differentiates."""
    counted = tf.boolean_mask(x, weights[0] > 0)
    mean, variance = tf.nn.moments(counted, axes=[0])
    gate = tf.sigmoid((x - mean) / tf.sqrt(variance + EPSILON))
    return gate * x + (1.0 - gate) * slope * x


def test_dice_and_its_gradients_are_those_of_the_formula() -> None:
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


def test_statistics_of_dice_are_kept_as_keras_keeps_them() -> None:
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


def test_dice_of_a_batch_without_tokens_has_finite_gradients() -> None:
    x, weights, slope = draw()
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = apply_dice(x, tf.zeros_like(weights), slope)[0]
    assert np.isfinite(tape.gradient(y, x)).all()
