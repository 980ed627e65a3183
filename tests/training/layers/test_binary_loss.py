from __future__ import annotations

import numpy as np
import tensorflow as tf

from training.layers.binary_loss import compute_binary_loss


def test_equals_the_reference() -> None:
    rng = np.random.default_rng(0)
    users = rng.normal(size=(20, 3)).astype(np.float32)
    items = rng.normal(size=(20, 3)).astype(np.float32)
    labels = rng.integers(0, 2, size=20)
    logits = (users.astype(np.float64) * items).sum(axis=1) / 0.5
    p = 1 / (1 + np.exp(-logits))
    expected = -(labels * np.log(p) + (1 - labels) * np.log1p(-p))
    found = compute_binary_loss(
        tf.constant(users), tf.constant(items), tf.constant(labels), temperature=0.5
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_huge_score_stays_finite() -> None:
    loss = compute_binary_loss(tf.fill([1, 1], 1e4), tf.fill([1, 1], 1e4), tf.constant([0.0]))
    np.testing.assert_allclose(loss, [1e8])
