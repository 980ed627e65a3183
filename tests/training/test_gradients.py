from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.training import DevicesConfig
from training.gradients import add_parts, as_slices, clip_dense_values, clip_global_norm
from training.strategy import build_strategy


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


def test_values_are_clipped_after_the_sum_over_replicas() -> None:
    strategy = build_strategy(DevicesConfig(cpu_replicas=2))

    def step() -> tf.Tensor:
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        share = tf.where(replica == 0, [3.0, 0.25, -9.0], [-2.5, 0.25, 1.0])
        return clip_dense_values([share], 1.0)[0]

    shares = strategy.experimental_local_results(tf.function(lambda: strategy.run(step))())
    np.testing.assert_allclose(sum(shares), [0.5, 0.5, -1.0])


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 2**16), sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_parts_add_up_to_the_whole(seed: int, sizes: list[int]) -> None:
    rng = np.random.default_rng(seed)
    parts, table, weight = [], np.zeros((6, 2)), np.zeros(3)
    for size in sizes:
        ids, values = rng.integers(6, size=size), rng.normal(size=(size, 2))
        dense = rng.normal(size=3)
        np.add.at(table, ids, values)
        weight += dense
        slices = tf.IndexedSlices(tf.constant(values), tf.constant(ids), [6, 2])
        parts.append([slices, tf.constant(dense), None])
    found = add_parts(parts)
    np.testing.assert_allclose(tf.convert_to_tensor(found[0]).numpy(), table, atol=1e-12)
    np.testing.assert_allclose(found[1], weight)
    assert found[2] is None


def test_rows_and_whole_tables_add_up() -> None:
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([2]), [3, 2])
    whole = tf.constant([[1.0, 2], [3, 4], [5, 6]])
    found = add_parts([[rows], [whole]])[0]
    np.testing.assert_array_equal(tf.convert_to_tensor(found), [[1, 2], [3, 4], [6, 7]])
    np.testing.assert_array_equal(as_slices(whole).indices, [0, 1, 2])
