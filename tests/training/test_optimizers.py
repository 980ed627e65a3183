from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from conf.manifest import Manifest
from conf.training import DSSMConfig, OptimizerConfig
from training.gradients import clip_global_norm
from training.models import build_model
from training.optimizers import Optimizers
from training.schedules import build_learning_rate


def test_cosine_falls_from_the_rate_to_zero() -> None:
    rate = build_learning_rate(OptimizerConfig(learning_rate=0.5, schedule="cosine"), 100)
    assert callable(rate)
    found = [float(rate(tf.constant(step))) for step in (0, 25, 50, 75, 100, 130)]
    expected = [
        0.25 * (1 + np.cos(np.pi * min(step, 100) / 100)) for step in (0, 25, 50, 75, 100, 130)
    ]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert build_learning_rate(OptimizerConfig(learning_rate=0.5), 100) == 0.5


def test_clipping_counts_repeated_rows_once() -> None:
    values = np.array([[3.0, 0], [1.0, 0], [0, 2.0]], np.float32)
    slices = tf.IndexedSlices(tf.constant(values), tf.constant([4, 4, 1]), tf.constant([9, 2]))
    dense = tf.constant([[4.0]])
    norm = np.sqrt(4.0**2 + 2.0**2 + 4.0**2)  # rows 4 sum to (4, 0)
    tables, weights = clip_global_norm([slices, None], [dense], 1.5)
    assert tables[1] is None
    np.testing.assert_allclose(tables[0].values, values * 1.5 / norm, rtol=1e-6)
    np.testing.assert_allclose(weights[0], [[4.0 * 1.5 / norm]], rtol=1e-6)


def test_small_gradients_are_not_scaled() -> None:
    _, weights = clip_global_norm([], [tf.constant([[0.3]])], 1.0)
    assert weights[0].numpy() == pytest.approx(0.3)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_step_moves_dense_weights_and_touched_rows(clip_norm, tiny_manifest: Manifest) -> None:
    model = build_model(DSSMConfig(embedding_dim=4), tiny_manifest, 1)
    optimizers = Optimizers(OptimizerConfig(clip_norm=clip_norm), model, 10)
    before = {v.name: v.numpy() for v in model.trainable_variables}
    users = {
        "user_id": tf.constant([5]),
        "gender": tf.constant([2]),
        "history": tf.constant([[7, 0]]),
    }
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model.embed_users(users) * tf.range(1.0, 5.0))
    variables = optimizers.variables_in_step_order
    optimizers.apply(tape.gradient(loss, variables))
    after = {v.name: v.numpy() for v in model.trainable_variables}
    moved = {
        name: np.flatnonzero(
            (before[name] != after[name]).reshape(len(after[name]), -1).any(axis=1)
        ).tolist()
        for name in before
    }
    assert moved["user_id/rows:0"] == [5]
    assert moved["movie_id/rows:0"] == [7]
    assert moved["genres/rows:0"] == []  # the loss does not read the item side
    assert moved["user_tower/dense_0/kernel:0"]
    assert not moved["item_tower/dense_0/kernel:0"]
    assert int(optimizers.step) == 1
