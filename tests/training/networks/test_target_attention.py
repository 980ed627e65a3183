"""The first layer of DIN's attention: half of the product, the same numbers, weights and names."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

from training.networks.attention import CompareWithTarget
from training.networks.network import Network, build_keras_model, building_layers

ROWS, LENGTH, DIM, UNITS = 3, 5, 4, 6


def build() -> tuple[Network, Network]:
    """The layer, and a dense one over what it stands for; their first weights are drawn alike."""
    shapes = {"history": (None, DIM), "target": (DIM,)}
    networks = []
    for is_split in (True, False):
        inputs = {name: keras.Input(shape, name=name) for name, shape in shapes.items()}
        history, target = inputs["history"], inputs["target"]
        with building_layers("din", 1):
            dense = keras.layers.Dense(UNITS, bias_initializer="normal")
            if is_split:
                dense.build((None, 4 * DIM))
                output = CompareWithTarget(dense)([history, target])
            else:
                each = keras.ops.zeros_like(history) + keras.ops.expand_dims(target, 1)
                joined = [history, each, history - each, history * each]
                output = dense(keras.layers.Concatenate()(joined))
            networks.append(Network(build_keras_model("din", inputs, output)))
    return networks[0], networks[1]


def test_it_is_a_dense_layer_over_the_parts_side_by_side() -> None:
    rng = np.random.default_rng(1)
    x = {
        "history": tf.constant(rng.normal(size=(ROWS, LENGTH, DIM)), tf.float32),
        "target": tf.constant(rng.normal(size=(ROWS, DIM)), tf.float32),
    }
    weigh = tf.constant(rng.normal(size=(ROWS, LENGTH, UNITS)), tf.float32)
    found = []
    for network in build():
        with tf.GradientTape() as tape:
            tape.watch(x)
            output = network(x)
            loss = tf.reduce_sum(weigh * output)
        assert {n: tuple(v.shape) for n, v in network.weights.items()} == {
            "dense/kernel": (4 * DIM, UNITS), "dense/bias": (UNITS,)
        }  # fmt: skip
        assert len(network.trained_variables) == 2
        found.append([output, *tape.gradient(loss, [*x.values(), *network.trained_variables])])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_it_is_read_from_what_it_says_of_itself() -> None:
    layer = CompareWithTarget(keras.layers.Dense(UNITS))
    other = CompareWithTarget.from_config(layer.get_config())
    output = other([tf.ones([ROWS, LENGTH, DIM]), tf.ones([ROWS, DIM])])
    assert output.shape == (ROWS, LENGTH, UNITS)
    assert other.dense.kernel.shape == (4 * DIM, UNITS)
