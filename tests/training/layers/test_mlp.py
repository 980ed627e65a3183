from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from training.layers.mlp import MLP


def forward(mlp: MLP, inputs: np.ndarray) -> np.ndarray:
    hidden = inputs.astype(np.float64)
    for index, layer in enumerate(mlp.layers):
        hidden = hidden @ layer.kernel.numpy().astype(np.float64) + layer.bias.numpy()
        if index < len(mlp.layers) - 1:
            hidden = np.maximum(hidden, 0)
    return hidden


@pytest.mark.parametrize("units", [(), (7,), (9, 4)])
def test_equals_the_reference(units: tuple[int, ...]) -> None:
    mlp = MLP("tower", 5, units, 3, seed=1)
    for layer in mlp.layers:
        layer.bias.assign(tf.random.stateless_normal(layer.bias.shape, [1, 2]))
    inputs = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32)
    np.testing.assert_allclose(mlp(tf.constant(inputs)), forward(mlp, inputs), atol=1e-5)


def test_first_weights_depend_on_seed_and_name() -> None:
    kernel = MLP("a", 5, (), 3, seed=1).layers[0].kernel.numpy()
    np.testing.assert_array_equal(kernel, MLP("a", 5, (), 3, seed=1).layers[0].kernel.numpy())
    assert not np.array_equal(kernel, MLP("b", 5, (), 3, seed=1).layers[0].kernel.numpy())
    assert np.abs(kernel).max() <= np.sqrt(6 / 8)


def test_dropout_drops_in_training_alone_and_keeps_the_mean() -> None:
    mlp = MLP("a", 4, (4096,), 1, seed=1, dropout=0.3)
    mlp.layers[0].kernel.assign(tf.zeros([4, 4096]))
    mlp.layers[0].bias.assign(tf.ones([4096]))
    mlp.layers[1].kernel.assign(tf.fill([4096, 1], 1 / 4096))
    inputs = tf.zeros([1, 4])
    assert float(mlp(inputs)[0, 0]) == pytest.approx(1.0)
    dropped = float(mlp(inputs, tf.constant([1, 8]))[0, 0])
    assert dropped != pytest.approx(1.0, abs=1e-6)
    assert dropped == pytest.approx(1.0, abs=0.05)


def test_the_same_seed_drops_the_same_units() -> None:
    mlp = MLP("a", 4, (32,), 2, seed=1, dropout=0.5)
    inputs = tf.ones([3, 4])
    first = mlp(inputs, tf.constant([1, 8])).numpy()
    np.testing.assert_array_equal(first, mlp(inputs, tf.constant([1, 8])).numpy())
    assert not np.array_equal(first, mlp(inputs, tf.constant([1, 16])).numpy())


def test_saves_and_loads(tmp_path) -> None:
    mlp = MLP("a", 4, (8,), 2, seed=1)
    path = tf.train.Checkpoint(mlp=mlp).save(str(tmp_path / "c"))
    other = MLP("a", 4, (8,), 2, seed=9)
    tf.train.Checkpoint(mlp=other).restore(path).assert_existing_objects_matched()
    inputs = tf.ones([3, 4])
    np.testing.assert_array_equal(other(inputs), mlp(inputs))
