"""What models compute with rows, beside NumPy and what TensorFlow derives: values, gradients."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from training.networks.layers import (
    PositionWeights,
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


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-7, 1e-4])
def test_the_gradient_stays_small_near_zero(size: float) -> None:
    vectors = tf.constant([[size, 0.0, 0.0]])
    upstream = tf.constant([[1.0, 1.0, -1.0]])
    norm = np.linalg.norm(gradient_of(normalize_rows, vectors, upstream))
    assert 0 < norm < 200


def average(embeddings: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    out = np.zeros((len(ids), embeddings.shape[2]))
    for row, tokens in enumerate(ids != 0):
        if tokens.any():
            out[row] = np.average(embeddings[row, tokens], axis=0, weights=weights[tokens])
    return out


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**16), rows=st.integers(1, 5), length=st.integers(1, 7))
def test_pooling_equals_the_reference(seed: int, rows: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 4, size=(rows, length)) * rng.integers(0, 2, size=(rows, 1))
    embeddings = rng.normal(size=(rows, length, 3)).astype(np.float32)
    weights = rng.uniform(0.1, 2, size=length).astype(np.float32)
    plain = pool_mean(tf.constant(embeddings), tf.constant(ids))
    np.testing.assert_allclose(plain, average(embeddings, ids, np.ones(length)), atol=1e-6)
    weighted = pool_mean(tf.constant(embeddings), tf.constant(ids), tf.constant(weights))
    np.testing.assert_allclose(weighted, average(embeddings, ids, weights), atol=1e-5)


def test_gradients_equal_those_that_tensorflow_derives() -> None:
    rng = np.random.default_rng(0)
    ids = tf.constant([[3, 1, 0], [2, 0, 0], [0, 0, 0]])
    embeddings = tf.Variable(rng.normal(size=(3, 3, 4)).astype(np.float32))
    weights = tf.Variable(rng.uniform(0.5, 2, size=3).astype(np.float32))
    direction = tf.constant(rng.normal(size=(3, 4)).astype(np.float32))

    def derived() -> tf.Tensor:
        share = tf.cast(ids != 0, tf.float32) * weights
        share = tf.math.divide_no_nan(share, tf.reduce_sum(share, 1, keepdims=True))
        return tf.reduce_sum(share[:, :, None] * embeddings, axis=1)

    gradients = []
    for pooled in (lambda: pool_mean(embeddings, ids, weights), derived):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(pooled() * direction)
        gradients.append(tape.gradient(value, [embeddings, weights]))
    for ours, theirs in zip(*gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert not gradients[0][0].numpy()[ids == 0].any()


def test_positions_start_alike_and_learn() -> None:
    positions = PositionWeights("h", 5)
    with tf.GradientTape() as tape:
        weights = positions(3)
    assert weights.numpy().tolist() == [1, 1, 1]
    gradient = tf.convert_to_tensor(tape.gradient(weights, positions.logits))
    assert gradient.numpy().tolist() == [1, 1, 1, 0, 0]


def combine_by_hand(
    rows: np.ndarray, weights: np.ndarray | None, combiner: str, upstream: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Value of one list's tokens, and the gradients of rows `[tokens, dim]` and weights."""
    factors = np.ones(len(rows)) if weights is None else weights
    weighted = rows * factors[:, None]
    each = np.zeros_like(rows)
    if not len(rows):
        return np.zeros(rows.shape[1]), each, factors
    if combiner == "max":
        value = weighted.max(axis=0)
        each[weighted.argmax(axis=0), np.arange(rows.shape[1])] = upstream
    elif combiner == "last":
        value, each[-1] = weighted[-1], upstream
    else:
        count = len(rows) + 1e-8 if combiner == "mean" else 1.0
        value, each[:] = weighted.sum(axis=0) / count, upstream / count
    return value, each * factors[:, None], (each * rows).sum(axis=1)


@pytest.mark.parametrize("combiner", ["sum", "mean", "max", "last"])
@pytest.mark.parametrize("weighted", ["plain", "weights"])
def test_combiners_and_their_gradients_are_those_by_hand(combiner: str, weighted: str) -> None:
    rng = np.random.default_rng(1)
    ids = np.array([[3, 1, 2, 5], [7, 4, 0, 0], [0, 0, 0, 0], [0, 9, 0, 2]])
    embeddings = rng.normal(size=(4, 4, 3)).astype(np.float32)
    weights = rng.normal(size=(4, 4)).astype(np.float32)
    embeddings[ids == 0] = weights[ids == 0] = np.nan  # must be of no account
    upstream = rng.normal(size=(4, 3)).astype(np.float32)
    given = [tf.Variable(embeddings), tf.Variable(weights)]
    with tf.GradientTape() as tape:
        factors = None if weighted == "plain" else tf.convert_to_tensor(given[1])
        pooled = combine_positions(given[0], tf.constant(ids), factors, combiner)
        target = tf.reduce_sum(pooled * upstream)
    by_rows, by_weights = tape.gradient(target, given)
    expected = np.zeros((4, 3))
    expected_rows, expected_weights = np.zeros((4, 4, 3)), np.zeros((4, 4))
    for row, tokens in enumerate(ids != 0):
        own = weights[row, tokens].astype(np.float64)
        factors = {"plain": None, "weights": own}[weighted]
        found = combine_by_hand(
            embeddings[row, tokens].astype(np.float64), factors, combiner, upstream[row]
        )
        expected[row], expected_rows[row, tokens] = found[:2]
        expected_weights[row, tokens] = found[2]
    np.testing.assert_allclose(pooled, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(by_rows, expected_rows, rtol=1e-5, atol=1e-6)
    if weighted != "plain":
        np.testing.assert_allclose(by_weights, expected_weights, rtol=1e-4, atol=1e-6)


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
