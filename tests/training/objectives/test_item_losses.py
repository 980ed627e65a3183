from __future__ import annotations

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.training.train import DevicesConfig
from training.distribution.strategy import build_strategy
from training.objectives.item_losses import (
    compute_drawn_loss,
    gather_replicas,
    keep_hardest,
    replica_offset,
)


def test_replicas_see_all_rows_in_order_and_gradients_flow_back() -> None:
    strategy = build_strategy(DevicesConfig(cpu_replicas=2))

    def step() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        local = tf.cast(replica, tf.float32) * 10 + tf.constant([[1.0], [2.0]])
        with tf.GradientTape() as tape:
            tape.watch(local)
            gathered = gather_replicas(local)
            weight = tf.constant([[1.0], [2.0], [3.0], [4.0]]) * tf.cast(replica + 1, tf.float32)
            loss = tf.reduce_sum(gathered * weight)
        return gathered, tape.gradient(loss, local), replica_offset(2)

    gathered, gradients, offsets = tf.function(lambda: strategy.run(step))()
    for copy in strategy.experimental_local_results(gathered):
        assert copy.numpy().ravel().tolist() == [1, 2, 11, 12]
    # Replica r weighs row k by (k + 1) (r + 1): summed over both replicas, 3 (k + 1).
    found = [g.numpy().ravel().tolist() for g in strategy.experimental_local_results(gradients)]
    assert found == [[3, 6], [9, 12]]
    assert [int(o) for o in strategy.experimental_local_results(offsets)] == [0, 2]


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**16), rows=st.integers(1, 6), count=st.integers(1, 4))
def test_drawn_losses_equal_the_references(seed, rows, count) -> None:
    rng = np.random.default_rng(seed)
    own, drawn = rng.normal(size=rows) * 3, rng.normal(size=(rows, count)) * 3
    counted = rng.random((rows, count)) < 0.7
    pairs, singles = [], []
    for row in range(rows):
        sigmoids = [1 / (1 + np.exp(x - own[row])) for x in drawn[row, counted[row]]]
        pairs.append(np.mean(-np.log(sigmoids)) if sigmoids else 0.0)
        negatives = [np.log1p(np.exp(x)) for x in drawn[row, counted[row]]]
        singles.append(np.log1p(np.exp(-own[row])) + sum(negatives))
    tensors = tf.constant(own, tf.float32), tf.constant(drawn, tf.float32), tf.constant(counted)
    np.testing.assert_allclose(compute_drawn_loss("bpr", *tensors), pairs, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(compute_drawn_loss("binary", *tensors), singles, rtol=1e-4)


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**16), rows=st.integers(0, 5), hardest=st.integers(1, 7))
def test_the_hardest_are_the_first_of_a_stable_sort(seed, rows, hardest) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.integers(-2, 3, (rows, 5)).astype(np.float32)  # Ties are frequent.
    counted = rng.random((rows, 5)) < 0.7
    expected = np.zeros((rows, 5), bool)
    for row in range(rows):
        order = [j for j in np.argsort(-logits[row], kind="stable") if counted[row, j]]
        expected[row, order[:hardest]] = True
    found = keep_hardest(tf.constant(logits), tf.constant(counted), hardest)
    np.testing.assert_array_equal(found, expected)
