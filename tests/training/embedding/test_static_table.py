from __future__ import annotations

import zlib
from statistics import NormalDist

import numpy as np
import pytest
import tensorflow as tf

import training.embedding.static_table as table_module
from conf.training.tables import NormalConfig, TruncatedNormalConfig, UniformConfig
from training.embedding.static_table import EmbeddingTable


@pytest.mark.parametrize("dim", [1, 3, 4])
def test_rows_drawn_in_pieces_are_those_drawn_at_once(dim: int, monkeypatch) -> None:
    monkeypatch.setattr(table_module, "PIECE_ROWS", 8)
    shape, seed, normal = [29, dim], [7, zlib.crc32(b"a")], NormalDist(0, 0.3)
    draws, lowest = tf.random.stateless_uniform(shape, seed).numpy(), normal.cdf(-0.6)
    truncate = np.vectorize(lambda share: normal.inv_cdf(lowest + share * (1 - 2 * lowest)))
    expected = {
        NormalConfig(stddev=0.3): tf.random.stateless_normal(shape, seed, stddev=0.3).numpy(),
        UniformConfig(low=-1, high=3): draws * 4.0 - 1.0,
        TruncatedNormalConfig(stddev=0.3): truncate(draws.astype(np.float64)),
    }
    for initializer, values in expected.items():
        rows = EmbeddingTable("a", 29, dim, seed=7, initializer=initializer).rows.numpy()
        np.testing.assert_allclose(rows[2:], values[2:], rtol=1e-5, atol=1e-6)
        assert not rows[:2].any()


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
