"""A user's network trains by Sluice's step as by Keras' `fit`, whatever layers it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.training.optimizer import OptimizerConfig
from conf.training.train import DevicesConfig
from training.distribution.strategy import build_run_steps, build_strategy, distribute_batches
from training.input.batches import Batch, Features
from training.loop.optimizers import Optimizers
from training.loop.step import StepOptions, TrainStep
from training.models.embedded_inputs import EmbeddedInputs
from training.models.model import Model
from training.networks.network import (
    Network,
    StepContext,
    build_keras_model,
    building_layers,
    name_weights,
)

WIDTH, ROWS, STEPS = 48, 16, 6
RATE, MOMENTUM = 0.05, 0.9
Build = Callable[[keras.KerasTensor], Any]
"""Makes anything of a tensor of 48 numbers between -1 and 1 for each row."""
# Of weights that no output depends on, by Keras.
pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist")


@dataclass(frozen=True)
class Setting:
    dtype: str = "float32"
    replicas: int = 1
    parts: int | None = None  # that a batch is computed in


class NumbersModel(Model):
    """A network of numbers, without tables."""

    inputs = ("x",)
    embedded_inputs: Sequence[EmbeddedInputs] = ()

    def __init__(self, build: Build, dtype: str) -> None:
        super().__init__(name="numbers")
        self.tables = {}
        self.network = Network(build_network(build, dtype))

    def describe_inputs(self) -> dict[str, list[str]]:
        return {"row": ["x"]}

    @property
    def networks(self) -> Sequence[Network]:
        return (self.network,)

    def compute_logits(self, features: Features, training: StepContext | None = None) -> tf.Tensor:
        return tf.squeeze(self.network(features, training), axis=1)


def build_network(build: Build, dtype: str) -> keras.Model:
    """Builds a network with what a function makes of numbers in its middle."""
    with building_layers("net", 3, tf.as_dtype(dtype)):
        x = keras.Input((WIDTH,), name="x")
        made = build(keras.layers.Dense(WIDTH, activation="tanh")(x))
        flat = keras.layers.Flatten()(keras.ops.cast(made, "float32"))
        return build_keras_model("net", {"x": x}, keras.layers.Dense(1)(flat))


def draw_batches() -> Batch:
    x = np.random.default_rng(7).standard_normal([STEPS * ROWS, WIDTH]).astype(np.float32)
    return {"x": x, "label": (x[:, :4].sum(axis=1) > 0).astype(np.float32)}


def train_by_step(build: Build, setting: Setting) -> dict[str, np.ndarray]:
    """Returns the weights, alike on all replicas, and the logits of all rows."""
    strategy = build_strategy(DevicesConfig(cpu_replicas=setting.replicas))
    asked = {"kind": "sgd", "momentum": MOMENTUM}
    config = {"learning_rate": RATE, "dense": asked, "accumulate_steps": setting.parts}
    with strategy.scope():
        model = NumbersModel(build, setting.dtype)
        optimizers = Optimizers(OptimizerConfig.model_validate(config), model, STEPS)
    options = StepOptions(1, tf.as_dtype(setting.dtype))
    drawn = draw_batches()
    dataset = tf.data.Dataset.from_tensor_slices(drawn).batch(ROWS, drop_remainder=True)
    batches = iter(distribute_batches(dataset, strategy))
    run = build_run_steps(strategy, TrainStep(model, find_loss, optimizers, options))
    assert len(run(batches, tf.constant(STEPS)).losses) == STEPS
    found = {}
    for name, variable in model.network.weights.items():
        found[name], *others = strategy.experimental_local_results(variable)
        for other in others:
            np.testing.assert_array_equal(other, found[name])
    return {**found, "logits": model.compute_logits({"x": tf.constant(drawn["x"])})}


def find_loss(model: NumbersModel, batch: Batch, training: StepContext) -> tf.Tensor:
    return tf.nn.sigmoid_cross_entropy_with_logits(
        labels=batch["label"], logits=model.compute_logits(batch, training)
    )


def train_by_fit(build: Build, setting: Setting) -> dict[str, np.ndarray]:
    """Trains by Keras, on the same rows in the same order."""
    with build_strategy(DevicesConfig(cpu_replicas=setting.replicas)).scope():
        model = build_network(build, setting.dtype)
        optimizer = keras.optimizers.SGD(
            RATE, momentum=MOMENTUM, gradient_accumulation_steps=setting.parts
        )
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=False)
    drawn = draw_batches()
    # The parts of a batch are every so manieth of its rows.
    parts = setting.parts or 1
    order = np.arange(STEPS * ROWS).reshape(STEPS, -1, parts).swapaxes(1, 2).ravel()
    rows = tf.data.Dataset.from_tensor_slices(({"x": drawn["x"][order]}, drawn["label"][order]))
    model.fit(rows.batch(ROWS // parts, drop_remainder=True), shuffle=False, verbose=0)
    weights = {name: weight.value for name, weight in name_weights(model).items()}
    return {**weights, "logits": model({"x": tf.constant(drawn["x"])}, training=False)[:, 0]}


class Unread(keras.layers.Layer):
    """Has a weight that no output depends on."""

    def build(self, shape: tuple[int, ...]) -> None:
        self.scale = self.add_weight(shape=shape[-1:], name="scale", initializer="ones")
        self.unread = self.add_weight(shape=(3,), name="unread", constraint="non_neg")

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x * self.scale


class Counted(keras.layers.Layer):
    """Counts its calls in training, as a whole number and as a float, and passes."""

    def build(self, shape: tuple[int, ...]) -> None:
        del shape
        self.calls = self.add_weight(shape=(), dtype="int32", trainable=False, name="calls")
        self.moved = self.add_weight(shape=(), trainable=False, name="moved")

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        if training:
            self.calls.assign_add(1)
            self.moved.assign(self.moved * 0.9 + 1.0)
        return x


class Centred(keras.layers.Layer):
    """Takes off a moving mean that it has just set, which is no function of the batch to `fit`."""

    def build(self, shape: tuple[int, ...]) -> None:
        self.mean = self.add_weight(shape=shape[-1:], trainable=False, name="mean")

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        if training:
            self.mean.assign(0.5 * self.mean + 0.5 * keras.ops.mean(x, axis=0))
        return x - self.mean


def clip(weight: keras.Variable) -> tf.Tensor:
    return keras.ops.clip(weight.value, 0.0, 0.01)


def find_whole(x: keras.KerasTensor) -> keras.KerasTensor:
    return keras.ops.cast(keras.ops.round((x[:, :8] + 1.0) * 4.0), "int32")


MAX_NORM = keras.constraints.MaxNorm(0.5)
HALF_ON_TWO = Setting("bfloat16", replicas=2)
CASES: dict[str, tuple[Build, Setting]] = {
    "non_neg": (
        lambda x: keras.layers.Dense(8, kernel_constraint="non_neg")(x),
        Setting("bfloat16", parts=2),
    ),
    "max_norm": (
        lambda x: keras.layers.Dense(8, kernel_constraint=MAX_NORM)(x),
        Setting(replicas=2),
    ),
    "user's": (lambda x: keras.layers.Dense(8, bias_constraint=clip)(x), HALF_ON_TWO),
    "spectral": (
        lambda x: keras.layers.SpectralNormalization(keras.layers.Dense(5))(x),
        HALF_ON_TWO,
    ),
    "embedding": (
        lambda x: keras.layers.Embedding(9, 3, embeddings_constraint="unit_norm")(find_whole(x)),
        HALF_ON_TWO,
    ),
    "unread": (lambda x: Unread()(x), HALF_ON_TWO),
    "counted": (lambda x: Counted()(x), Setting(replicas=2)),
    "centred": (lambda x: Centred()(x), Setting()),
    "float64": (lambda x: keras.layers.Dense(5, dtype="float64")(x), Setting("bfloat16")),
    "batch": (lambda x: keras.layers.BatchNormalization()(x), Setting("bfloat16")),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_are_what_fit_makes_of_them(name: str) -> None:
    build, setting = CASES[name]
    # Without statistics of batches and assignments the sum of parts is the whole.
    as_fit = setting if name == "spectral" else replace(setting, parts=None)
    expected, found = train_by_fit(build, as_fit), train_by_step(build, setting)
    assert list(found) == list(expected)
    bound = 1e-5 if setting.dtype == "float32" else 1e-2
    for key, values in expected.items():
        numbers = [np.asarray(v, np.float32) for v in (found[key], values)]
        np.testing.assert_allclose(*numbers, rtol=bound, atol=bound, err_msg=key)
