from __future__ import annotations

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from training.layers.pooling import PositionWeights, pool_mean


def reference(embeddings: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> np.ndarray:
    out = np.zeros((len(ids), embeddings.shape[2]))
    for row in range(len(ids)):
        tokens = np.flatnonzero(ids[row])
        if len(tokens):
            share = weights[tokens].astype(np.float64) / weights[tokens].astype(np.float64).sum()
            out[row] = (share[:, None] * embeddings[row, tokens].astype(np.float64)).sum(axis=0)
    return out


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**16), rows=st.integers(1, 5), length=st.integers(1, 7))
def test_equals_the_reference(seed: int, rows: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 4, size=(rows, length)) * rng.integers(0, 2, size=(rows, 1))
    embeddings = rng.normal(size=(rows, length, 3)).astype(np.float32)
    weights = rng.uniform(0.1, 2, size=length).astype(np.float32)
    plain = pool_mean(tf.constant(embeddings), tf.constant(ids))
    np.testing.assert_allclose(plain, reference(embeddings, ids, np.ones(length)), atol=1e-6)
    weighted = pool_mean(tf.constant(embeddings), tf.constant(ids), tf.constant(weights))
    np.testing.assert_allclose(weighted, reference(embeddings, ids, weights), atol=1e-5)


def test_what_stands_at_padded_positions_does_not_matter() -> None:
    ids = tf.constant([[3, 0], [0, 0]])
    embeddings = np.ones((2, 2, 4), np.float32)
    garbage = embeddings.copy()
    garbage[0, 1] = garbage[1] = 1e9
    np.testing.assert_array_equal(pool_mean(garbage, ids), pool_mean(embeddings, ids))


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
    assert positions(3).numpy().tolist() == [1, 1, 1]
    embeddings = tf.constant([[[1.0], [0.0], [0.0]]])
    with tf.GradientTape() as tape:
        pooled = pool_mean(embeddings, tf.constant([[4, 4, 4]]), positions(3))
    gradient = tape.gradient(pooled, positions.logits)
    gradient = tf.convert_to_tensor(gradient).numpy()
    assert gradient[0] > 0 > gradient[1]
    assert not gradient[3:].any()


def test_positions_go_on_from_a_checkpoint(tmp_path) -> None:
    positions, other = PositionWeights("h", 3), PositionWeights("h", 3)
    positions.logits.assign([0.5, -1.0, 2.0])
    path = tf.train.Checkpoint(positions=positions).save(str(tmp_path / "c"))
    tf.train.Checkpoint(positions=other).restore(path).assert_consumed()
    np.testing.assert_array_equal(other(3), positions(3))
