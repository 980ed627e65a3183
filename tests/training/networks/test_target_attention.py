"""DIN's attention over tokens alone: half of the product, the same numbers, weights and names."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from training.networks.network import Network, build_keras_model, building_layers
from training.networks.target_attention import score_tokens

ROWS, LENGTH, DIM, UNITS = 4, 5, 4, 6
LENGTHS = {"real": (2, 0, 4, 0), "full": (LENGTH,) * ROWS, "empty": (0,) * ROWS}


def build(activation: str) -> tuple[Network, Network]:
    """The scores, and a dense MLP over all positions; their first weights are drawn alike."""
    shapes = {"history": (None, DIM), "target": (DIM,), "mask": (None,)}
    networks = []
    for is_packed in (True, False):
        inputs = {
            name: keras.Input(shape, name=name, dtype="bool" if name == "mask" else None)
            for name, shape in shapes.items()
        }
        history, target, mask = inputs["history"], inputs["target"], inputs["mask"]
        with building_layers("din", 1):
            if is_packed:
                output = score_tokens(history, mask, target, (UNITS,), activation)
            else:
                each = keras.ops.zeros_like(history) + keras.ops.expand_dims(target, 1)
                joined = [history, each, history - each, history * each]
                hidden = keras.layers.Dense(UNITS)(keras.layers.Concatenate()(joined))
                hidden = keras.layers.Activation(activation)(hidden)
                output = keras.ops.squeeze(keras.layers.Dense(1)(hidden), axis=2)
                output = keras.ops.where(mask, output, 0.0)
            networks.append(Network(build_keras_model("din", inputs, output)))
    return networks[0], networks[1]


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_it_is_an_mlp_over_the_parts_side_by_side(lengths: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    x = {
        "history": tf.constant(rng.normal(size=(ROWS, LENGTH, DIM)), tf.float32),
        "target": tf.constant(rng.normal(size=(ROWS, DIM)), tf.float32),
    }
    mask = tf.sequence_mask(lengths, LENGTH)
    weigh = tf.constant(rng.normal(size=(ROWS, LENGTH)), tf.float32)
    found = []
    for network in build("tanh"):
        with tf.GradientTape() as tape:
            tape.watch(x)
            output = network({**x, "mask": mask})
            loss = tf.reduce_sum(weigh * output)
        assert {n: tuple(v.shape) for n, v in network.weights.items()} == {
            "dense/kernel": (4 * DIM, UNITS), "dense/bias": (UNITS,),
            "dense_1/kernel": (UNITS, 1), "dense_1/bias": (1,),
        }  # fmt: skip
        assert len(network.trained_variables) == 4
        found.append([output, *tape.gradient(loss, [*x.values(), *network.trained_variables])])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(
            tf.convert_to_tensor(one), tf.convert_to_tensor(other), rtol=1e-5, atol=1e-5
        )
