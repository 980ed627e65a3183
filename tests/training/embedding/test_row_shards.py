from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from training.checkpoint.state import collect_state, copy_state, restore_state
from training.embedding.lazy_optimizer import LazyOptimizer, sum_repeated_rows
from training.embedding.row_shards import Rows, RowShards, build_row_shards, list_variables
from training.embedding.rules import Adam
from training.embedding.table import read_rows

ROWS, DIM = 11, 3


def draw(seed: int, rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, DIM)).astype(np.float32)


def build_shards(count: int, values: np.ndarray) -> RowShards:
    shards = build_row_shards(*values.shape, "t", count)
    shards.assign(values)
    return shards


@pytest.mark.parametrize("count", [1, 2, 3, 11])
def test_shards_are_the_matrix(count: int) -> None:
    values = draw(0)
    shards = build_shards(count, values)
    assert (shards.shape.as_list(), shards.dtype) == ([ROWS, DIM], tf.float32)
    np.testing.assert_array_equal(shards.numpy(), values)
    ids = tf.constant([[0, 10, 3], [3, 3, 9]])
    np.testing.assert_array_equal(read_rows(shards, ids), values[ids.numpy()])
    new = draw(1, 4)
    shards.scatter_update(tf.IndexedSlices(tf.constant(new), tf.constant([10, 0, 4, 7])))
    values[[10, 0, 4, 7]] = new
    np.testing.assert_array_equal(shards.numpy(), values)


def test_the_most_frequent_ids_are_on_all_shards() -> None:
    shards = build_shards(3, np.repeat(np.arange(ROWS, dtype=np.float32)[:, None], DIM, axis=1))
    assert [shard.numpy()[0, 0] for shard in shards.shards] == [0, 1, 2]
    assert [len(shard.numpy()) for shard in shards.shards] == [4, 4, 3]


def train(rows: Rows, steps: int) -> LazyOptimizer:
    """Trains on ids that repeat within a batch and between batches."""
    optimizer = LazyOptimizer([rows], Adam(), 0.1)
    variables = list_variables(rows)
    for step in range(steps):
        ids = tf.constant(np.random.default_rng(step).integers(0, ROWS, (4, 3)))
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(variables)
            loss = tf.reduce_sum(tf.square(read_rows(rows, ids) - 1.0))
        gradients = [sum_repeated_rows(slices) for slices in tape.gradient(loss, variables)]
        optimizer.apply(gradients, variables, are_unique=True)
    return optimizer


def test_steps_on_shards_are_those_on_the_matrix() -> None:
    values = draw(2)
    whole, shards = tf.Variable(values), build_shards(3, values)
    optimizers = train(whole, 5), train(shards, 5)
    np.testing.assert_allclose(shards.numpy(), whole.numpy(), rtol=1e-5, atol=1e-6)
    for name in ("first_moment", "second_moment"):
        mine, theirs = (optimizer.slots[name][0].numpy() for optimizer in optimizers)
        np.testing.assert_allclose(theirs, mine, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_of_shards_is_that_of_the_matrix(tmp_path) -> None:
    class Holder(tf.Module):
        def __init__(self, rows: Rows) -> None:
            super().__init__()
            self.rows = rows
            self.variables_of_rows = list_variables(rows)

    values = draw(3)
    saved = copy_state(collect_state(model=Holder(build_shards(2, values))))
    assert {name: tensor.shape.as_list() for name, tensor in saved.items()} == {
        "model/rows": [ROWS, DIM]
    }
    prefix = tmp_path / "state"
    tf.raw_ops.SaveV2(
        prefix=str(prefix),
        tensor_names=list(saved),
        shape_and_slices=[""],
        tensors=list(saved.values()),
    )
    for other in (tf.Variable(draw(4)), build_shards(3, draw(4))):
        restore_state(collect_state(model=Holder(other)), prefix)
        np.testing.assert_array_equal(other.numpy(), values)
