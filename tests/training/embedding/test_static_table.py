from __future__ import annotations

import zlib
from statistics import NormalDist

import numpy as np
import pytest
import tensorflow as tf

import training.embedding.static_table as table_module
from conf.errors import ConfigError
from conf.training.tables import NormalConfig, TruncatedNormalConfig, UniformConfig
from conf.training.train import DevicesConfig
from training.checkpoint.saved_tensors import collect_state, copy_state, restore_state
from training.distribution.strategy import build_strategy
from training.embedding.lazy_optimizer import LazyAdam, LazyOptimizer, TableRule, sum_repeated_rows
from training.embedding.static_table import (
    EmbeddingTable,
    RowShards,
    TableRows,
    build_row_shards,
    list_variables,
    read_rows,
)


def test_first_rows_depend_on_seed_and_name_alone() -> None:
    first = EmbeddingTable("a", 50, 8, seed=1).rows.numpy()
    np.testing.assert_array_equal(first, EmbeddingTable("a", 50, 8, seed=1).rows.numpy())
    assert not np.array_equal(first, EmbeddingTable("a", 50, 8, seed=2).rows.numpy())
    assert not np.array_equal(first, EmbeddingTable("b", 50, 8, seed=1).rows.numpy())


def test_first_rows_have_the_asked_spread_and_zeros_for_pad_and_oov() -> None:
    rows = EmbeddingTable("a", 5000, 8, seed=1, initializer=NormalConfig(stddev=0.2)).rows.numpy()
    assert abs(rows[2:].std() - 0.2) < 0.01
    assert rows[2:].any(axis=1).all()
    assert not rows[:2].any()


@pytest.mark.parametrize("dim", [1, 3, 4])
def test_rows_drawn_in_pieces_are_those_drawn_at_once(dim: int, monkeypatch) -> None:
    monkeypatch.setattr(table_module, "PIECE_ROWS", 8)
    rows = EmbeddingTable("a", 29, dim, seed=7, initializer=NormalConfig(stddev=0.3)).rows.numpy()
    seed = [7, zlib.crc32(b"a")]
    expected = tf.random.stateless_normal([29, dim], seed, stddev=0.3).numpy()
    np.testing.assert_array_equal(rows[2:], expected[2:])
    assert not rows[:2].any()


@pytest.mark.parametrize("dim", [1, 3, 4])
def test_other_distributions_are_drawn_in_pieces_too(dim: int, monkeypatch) -> None:
    monkeypatch.setattr(table_module, "PIECE_ROWS", 8)
    draws = tf.random.stateless_uniform([29, dim], [7, zlib.crc32(b"a")]).numpy()
    normal = NormalDist(0, 0.3)
    lowest = normal.cdf(-0.6)

    def truncated(share: float) -> float:
        return normal.inv_cdf(lowest + share * (1 - 2 * lowest))

    expected = {
        UniformConfig(low=-1, high=3): draws * 4.0 - 1.0,
        TruncatedNormalConfig(stddev=0.3): np.vectorize(truncated)(draws.astype(np.float64)),
    }
    for initializer, values in expected.items():
        rows = EmbeddingTable("a", 29, dim, seed=7, initializer=initializer).rows.numpy()
        np.testing.assert_allclose(rows[2:], values[2:], rtol=1e-5, atol=1e-6)
        assert not rows[:2].any()


def test_rows_are_equal_on_all_replicas() -> None:
    strategy = build_strategy(DevicesConfig(cpu_replicas=2))
    with strategy.scope():
        table = EmbeddingTable("a", 9, 3, seed=1)
    for copy in strategy.experimental_local_results(table.rows):
        np.testing.assert_array_equal(copy.numpy(), EmbeddingTable("a", 9, 3, seed=1).rows.numpy())


def test_padding_reads_as_zeros_and_gets_no_gradient() -> None:
    table = EmbeddingTable("a", 5, 3, seed=1)
    table.rows.assign(tf.ones([5, 3]))
    ids = tf.constant([[0, 2], [4, 0]], tf.int64)
    with tf.GradientTape() as tape:
        vectors = table.lookup(ids)
        loss = tf.reduce_sum(vectors)
    assert vectors.numpy()[0, 0].tolist() == [0, 0, 0]
    assert vectors.numpy()[0, 1].tolist() == [1, 1, 1]
    gradient = tf.convert_to_tensor(tape.gradient(loss, table.rows)).numpy()
    assert gradient[0].tolist() == [0, 0, 0]
    assert gradient[2].tolist() == [1, 1, 1]


def test_a_table_restores_from_a_checkpoint(tmp_path) -> None:
    table = EmbeddingTable("a", 5, 3, seed=1)
    path = tf.train.Checkpoint(table=table).save(str(tmp_path / "c"))
    other = EmbeddingTable("a", 5, 3, seed=2)
    tf.train.Checkpoint(table=other).restore(path).assert_existing_objects_matched()
    np.testing.assert_array_equal(other.rows.numpy(), table.rows.numpy())


@pytest.mark.parametrize("replicas", [1, 2])
def test_reading_rows_gives_gradients_of_these_rows(replicas: int) -> None:
    start = np.arange(24, dtype=np.float32).reshape(6, 4)
    strategy = build_strategy(DevicesConfig(cpu_replicas=replicas))
    with strategy.scope():
        rows = tf.Variable(start)
        np.testing.assert_array_equal(read_rows(rows, tf.constant([[5], [1]])), start[[[5], [1]]])

    def step() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(rows)
            read = read_rows(rows, tf.constant([3, 0, 3]))
            loss = tf.reduce_sum(read * tf.constant([[1.0], [2.0], [4.0]]))
        gradient = tape.gradient(loss, rows)
        return read, gradient.indices, gradient.values

    results = tf.function(lambda: strategy.run(step))()
    for read, ids, values in zip(
        *(strategy.experimental_local_results(result) for result in results), strict=True
    ):
        np.testing.assert_array_equal(read, start[[3, 0, 3]])
        assert ids.numpy().tolist() == [3, 0, 3]
        np.testing.assert_array_equal(values, np.repeat([[1.0], [2.0], [4.0]], 4, axis=1))
    np.testing.assert_array_equal(read_rows(rows, tf.constant([2])), start[[2]])


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


def train(rows: TableRows, steps: int) -> LazyOptimizer:
    """Trains on ids that repeat within a batch and between batches."""
    optimizer = LazyOptimizer([rows], TableRule(LazyAdam(), 0.1))
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
        def __init__(self, rows: TableRows) -> None:
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


def test_a_table_that_no_memory_holds_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="embedding table 'item' does not fit") as caught:
        EmbeddingTable("item", 2**62 + 1, 64, seed=0)
    assert "4,611,686,018,427,387,905 rows of 64 numbers" in caught.value.received
    assert "model.embeddings.item.kind=dynamic" in caught.value.fix
