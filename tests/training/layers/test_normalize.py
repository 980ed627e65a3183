from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from training.layers.normalize import normalize_rows


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

    def reference(values: tf.Tensor) -> tf.Tensor:
        return tf.math.l2_normalize(values, axis=1)

    np.testing.assert_allclose(
        gradient_of(normalize_rows, vectors, upstream),
        gradient_of(reference, vectors, upstream),
        rtol=1e-4,
        atol=1e-5 / scale,
    )


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-7, 1e-4])
def test_the_gradient_stays_small_near_zero(size: float) -> None:
    vectors = tf.constant([[size, 0.0, 0.0]])
    upstream = tf.constant([[1.0, 1.0, -1.0]])
    norm = np.linalg.norm(gradient_of(normalize_rows, vectors, upstream))
    assert 0 < norm < 200


def test_zeros_stay_zeros() -> None:
    assert not normalize_rows(tf.zeros([2, 3])).numpy().any()
