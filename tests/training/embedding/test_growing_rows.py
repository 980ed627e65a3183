from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from conf.training import DevicesConfig
from training.embedding.growing_rows import GrowingRows, read_capacity, reserve_rows
from training.embedding.key_space import KeySpace
from training.strategy import build_strategy


def reserve(matrix: GrowingRows, count: int) -> int:
    strategy = tf.distribute.get_strategy()

    @tf.function
    def run(rows: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies(reserve_rows(matrix, rows)):
            return read_capacity(matrix)

    return int(
        strategy.experimental_local_results(strategy.run(run, (tf.constant(count, tf.int64),)))[0]
    )


@pytest.mark.parametrize("replicas", [1, 2])
def test_more_memory_keeps_rows_and_holds_first_values(replicas: int) -> None:
    strategy = build_strategy(DevicesConfig(cpu_replicas=replicas))
    with strategy.scope():
        keys = KeySpace("item", capacity=2)
        matrix = GrowingRows(keys, 3, "slot", fill=0.5, trainable=False)
        values = np.arange(12, dtype=np.float32).reshape(4, 3)
        values[0] = 0.5  # of padding
        matrix.assign(values)
        assert reserve(matrix, 10) == 15
    for copy in strategy.experimental_local_results(matrix.variable):
        held = copy.numpy()
        np.testing.assert_array_equal(held[:4], values)
        np.testing.assert_array_equal(held[4:], np.full((11, 3), 0.5))


def test_is_as_long_as_there_are_keys() -> None:
    keys = KeySpace("item", capacity=50)
    matrix = GrowingRows(keys, 2, "rows")
    keys.set_keys(np.array([8, 9, 10]))
    assert matrix.shape.as_list() == [5, 2]
    matrix.assign(np.ones((5, 2), np.float32))
    np.testing.assert_array_equal(matrix.numpy(), np.ones((5, 2)))
    assert len(matrix.variable.read_value()) == 52
    assert matrix.fill_like(0.25, "slot").numpy().tolist() == [[0.25, 0.25]] * 5


def test_no_memory_beyond_the_most_keys_there_may_be() -> None:
    matrix = GrowingRows(KeySpace("item", max_rows=11), 2, "rows")
    assert reserve(matrix, 12) == 13


def test_a_limit_of_more_than_32_bits_is_none() -> None:
    matrix = GrowingRows(KeySpace("item", max_rows=3_000_000_000), 2, "rows")
    assert reserve(matrix, 12) == 18
