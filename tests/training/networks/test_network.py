"""Keras networks in the step: names of weights, seeds, moving statistics, penalties."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.training.train import DevicesConfig
from training.distribution.strategy import build_strategy
from training.networks.network import (
    Network,
    StepContext,
    build_keras_model,
    building_layers,
)

WIDTH = 6


def build(l2: float | None = None) -> Network:
    """Builds two dense layers with batch normalization and dropout between them."""
    regularizer = None if l2 is None else keras.regularizers.L2(l2)
    with building_layers("net", 3):
        tensors = {"x": keras.Input((WIDTH,), name="x"), "unread": keras.Input((1,), name="unread")}
        hidden = keras.layers.Dense(WIDTH, kernel_regularizer=regularizer)(tensors["x"])
        hidden = keras.layers.BatchNormalization()(hidden)
        hidden = keras.layers.Dropout(0.5)(keras.layers.Dropout(0.5)(hidden))
        output = keras.layers.Dense(1)(hidden)
        return Network(build_keras_model("net", tensors, output))


def begin(network: Network, step: int) -> StepContext:
    """Returns the pass of a step."""
    state = network.state_variables
    return StepContext(tf.constant([7, step]), state, [v.read_value() for v in state])


BATCH = {"x": tf.random.stateless_normal([8, WIDTH], [1, 2])}


@pytest.fixture(scope="module")
def network() -> Network:
    return build()


def test_weights_are_named_by_their_place_in_the_network(network: Network) -> None:
    normalized = ("gamma", "beta", "moving_mean", "moving_variance")
    names = ["dense/kernel", "dense/bias", *(f"batch_normalization/{n}" for n in normalized)]
    names += ["dense_1/kernel", "dense_1/bias"]
    assert list(network.weights) == names
    assert list(build().weights) == names  # Keras calls these layers dense_2 and dense_3.
    assert network.input_names == ("x",)
    assert network.random_layers == 2
    assert len(network.trained_variables) == 6


def test_first_weights_depend_on_name_and_seed_and_leave_pythons_numbers_alone() -> None:
    def draw(name: str, seed: int) -> np.ndarray:
        with building_layers(name, seed):
            layer = keras.layers.Dense(3)
            layer.build((None, 3))
        return np.asarray(layer.kernel)

    first = draw("a", 1)
    np.testing.assert_array_equal(first, draw("a", 1))
    assert not np.array_equal(first, draw("a", 2))
    assert not np.array_equal(first, draw("b", 1))


def test_a_seed_is_of_its_step_and_its_layer(network: Network) -> None:
    outputs = {step: network(BATCH, begin(network, step)).numpy() for step in (1, 2)}
    np.testing.assert_array_equal(network(BATCH, begin(network, 1)), outputs[1])
    assert not np.array_equal(outputs[1], outputs[2])
    training = begin(network, 1)
    seeds = [tuple(training.draw_seed(number).numpy()) for number in (1, 2, 3)]
    assert len(set(seeds)) == 3
    with training.drawing_from(1):
        assert tuple(training.draw_seed(1).numpy()) not in seeds
    assert tuple(training.draw_seed(1).numpy()) == seeds[0]


def test_replicas_draw_other_numbers_unless_they_shall_not() -> None:
    strategy = build_strategy(DevicesConfig(cpu_replicas=2))

    def draw() -> tuple[tf.Tensor, tf.Tensor]:
        training = StepContext(tf.constant([7, 1]))
        own = training.draw_seed(1)
        with training.drawing_from(2):
            return own, training.draw_seed(1)

    own, shared = (strategy.experimental_local_results(v) for v in strategy.run(draw))
    assert not np.array_equal(*own)
    np.testing.assert_array_equal(*shared)


def test_a_pass_leaves_new_statistics_and_sets_no_variable(network: Network) -> None:
    before = {name: variable.numpy() for name, variable in network.weights.items()}
    training = begin(network, 1)
    network(BATCH, training)
    for name, variable in network.weights.items():
        np.testing.assert_array_equal(variable, before[name])
    hidden = BATCH["x"].numpy() @ before["dense/kernel"] + before["dense/bias"]
    mean, variance = training.values
    np.testing.assert_allclose(mean, 0.01 * hidden.mean(axis=0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(variance, 0.99 + 0.01 * hidden.var(axis=0), rtol=1e-4)
    network(BATCH, training)  # A second part of the batch goes on from there.
    np.testing.assert_allclose(
        training.values[0], (0.99 * 0.01 + 0.01) * hidden.mean(axis=0), rtol=1e-4, atol=1e-6
    )


class Counted(keras.layers.Layer):
    """Counts its calls, in training and outside."""

    def build(self, shape: tuple[int, ...]) -> None:
        del shape
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.calls.assign_add(1.0)
        return x


def test_outside_of_training_nothing_is_drawn_or_assigned(network: Network) -> None:
    np.testing.assert_array_equal(network(BATCH), network(BATCH))
    with building_layers("net", 3):
        tensors = {"x": keras.Input((WIDTH,), name="x")}
        output = keras.layers.Dense(1)(Counted()(tensors["x"]))
        counted = Network(build_keras_model("net", tensors, output))
    counted(BATCH)
    assert counted.weights["counted/calls"].numpy() == 0.0
    training = begin(counted, 1)
    counted(BATCH, training)
    assert [value.numpy() for value in training.values] == [1.0]


def test_penalties_of_all_networks_are_summed_and_count_once_in_a_pass() -> None:
    network, other = build(l2=0.1), build(l2=0.3)
    state = [*network.state_variables, *other.state_variables]
    training = StepContext(tf.constant([7, 1]), state, [v.read_value() for v in state])
    network(BATCH, training)
    norm = np.square(network.weights["dense/kernel"].numpy()).sum()
    np.testing.assert_allclose(training.penalty, 0.1 * norm, rtol=1e-5)
    network(BATCH, training)  # As an item tower embeds the batch's items, and drawn ones.
    np.testing.assert_allclose(training.penalty, 0.1 * norm, rtol=1e-5)
    other(BATCH, training)
    norms = norm * 0.1 + 0.3 * np.square(other.weights["dense/kernel"].numpy()).sum()
    np.testing.assert_allclose(training.penalty, norms, rtol=1e-5)
