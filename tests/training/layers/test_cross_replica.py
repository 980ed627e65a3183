from __future__ import annotations

import numpy as np
import tensorflow as tf

from conf.training import DevicesConfig
from training.layers.cross_replica import gather_replicas, replica_offset
from training.strategy import build_strategy


def test_outside_a_strategy_nothing_changes() -> None:
    values = tf.constant([[1.0], [2.0]])
    np.testing.assert_array_equal(gather_replicas(values), values)
    assert int(replica_offset(2)) == 0


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
