from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from training.layers.mlp import MLP
from training.layers.precision import compute_dtype, computing_in, matmul_rows


def test_the_type_holds_inside_the_block_alone() -> None:
    def fail() -> None:
        with computing_in(tf.bfloat16):
            raise KeyError

    with computing_in(tf.float16):
        assert compute_dtype() == tf.float16
    with pytest.raises(KeyError):
        fail()
    assert compute_dtype() == tf.float32


def test_products_are_computed_in_half_and_returned_in_float32() -> None:
    left, right = tf.constant([[1.0, 1e-3]]), tf.constant([[1.0, 1.0], [2.0, 0.0]])
    np.testing.assert_allclose(matmul_rows(left, right), [[1.001, 2.0]])
    with computing_in(tf.bfloat16):
        product = matmul_rows(left, right)
    assert product.dtype == tf.float32
    np.testing.assert_array_equal(product, [[1.0, 2.0]])  # bfloat16 has 8 bits


def test_hidden_layers_follow_and_gradients_are_float32() -> None:
    mlp = MLP("m", 3, [4], 2, seed=1)
    inputs = tf.random.stateless_normal([5, 3], [1, 2])
    with computing_in(tf.bfloat16), tf.GradientTape() as tape:
        half = mlp(inputs, tf.constant([1, 2]))
        loss = tf.reduce_sum(half)
    assert half.dtype == tf.float32
    assert {g.dtype for g in tape.gradient(loss, mlp.trainable_variables)} == {tf.float32}
    full = mlp(inputs)
    np.testing.assert_allclose(half, full, atol=0.05)
    assert not np.array_equal(half, full)


def test_a_tower_goes_on_from_a_checkpoint_bit_for_bit(tmp_path) -> None:
    mlp, other = MLP("m", 3, [4], 2, seed=1), MLP("m", 3, [4], 2, seed=2)
    path = tf.train.Checkpoint(mlp=mlp).save(str(tmp_path / "c"))
    tf.train.Checkpoint(mlp=other).restore(path).assert_consumed()
    inputs = tf.random.stateless_normal([5, 3], [1, 2])
    np.testing.assert_array_equal(other(inputs), mlp(inputs))
