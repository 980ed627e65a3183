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
from training.distribution.strategy import build_strategy
from training.embedding.static_table import EmbeddingTable, read_rows


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


def test_a_table_that_no_memory_holds_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="embedding table 'item' does not fit") as caught:
        EmbeddingTable("item", 2**62 + 1, 64, seed=0)
    assert "4,611,686,018,427,387,905 rows of 64 numbers" in caught.value.received
    assert "model.embeddings.item.kind=dynamic" in caught.value.fix
