"""The same network trained by a step of Sluice's and by Keras' own `fit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from conf.training.optimizer import OptimizerConfig
from conf.training.train import DevicesConfig
from training.distribution.run_steps import build_run_steps
from training.distribution.strategy import build_strategy, distribute_batches
from training.input.batches import Batch, Features
from training.loop.gradients import LossScale
from training.loop.optimizers import Optimizers
from training.loop.step import StepOptions, TrainStep
from training.models.embedded_inputs import EmbeddedInputs
from training.models.model import Model
from training.networks.network import (
    Network,
    TrainingPass,
    build_keras_model,
    building_layers,
    name_weights,
)

WIDTH, ROWS, STEPS = 48, 16, 6
RATE, MOMENTUM = 0.05, 0.9
Build = Callable[[keras.KerasTensor], Any]
"""Makes anything of a tensor of 48 numbers between -1 and 1 for each row."""


@dataclass(frozen=True)
class Setting:
    """How both train.

    Attributes:
        dtype: What layers compute in.
        replicas: Logical CPU devices.
        parts: How many a batch is computed in.
        xla: Whether XLA compiles the step.
    """

    dtype: str = "float32"
    replicas: int = 1
    parts: int = 1
    xla: bool = False


@dataclass(frozen=True)
class Trained:
    """Weights by name, and the logits of all rows outside of training."""

    weights: dict[str, np.ndarray]
    logits: np.ndarray


class NumbersModel(Model):
    """A network of numbers, without tables."""

    def __init__(self, build: Build, dtype: str) -> None:
        super().__init__(name="numbers")
        self.tables = {}
        self.network = Network(build_network(build, dtype))

    @property
    def inputs(self) -> tuple[str, ...]:
        return ("x",)

    def describe_inputs(self) -> dict[str, list[str]]:
        return {"row": ["x"]}

    @property
    def embedded_inputs(self) -> Sequence[EmbeddedInputs]:
        return ()

    @property
    def networks(self) -> Sequence[Network]:
        return (self.network,)

    def compute_logits(self, features: Features, training: TrainingPass | None = None) -> tf.Tensor:
        return tf.squeeze(self.network(features, training), axis=1)


def build_network(build: Build, dtype: str) -> keras.Model:
    """Builds a network with what a function makes of numbers in its middle."""
    with building_layers("net", 3, tf.as_dtype(dtype)):
        x = keras.Input((WIDTH,), name="x")
        made = build(keras.layers.Dense(WIDTH, activation="tanh")(x))
        flat = keras.layers.Flatten()(keras.ops.cast(made, "float32"))
        return build_keras_model("net", {"x": x}, keras.layers.Dense(1)(flat))


def draw_batches() -> Batch:
    """Draws numbers and labels that depend on them."""
    rng = np.random.default_rng(7)
    x = rng.standard_normal([STEPS * ROWS, WIDTH]).astype(np.float32)
    return {"x": x, "label": (x[:, :4].sum(axis=1) > 0).astype(np.float32)}


def train_by_step(build: Build, setting: Setting) -> Trained:
    """Trains by the step, on all replicas alike."""
    strategy = build_strategy(DevicesConfig(cpu_replicas=setting.replicas))
    dtype = tf.as_dtype(setting.dtype)
    asked = {"kind": "sgd", "momentum": MOMENTUM}
    parts = None if setting.parts == 1 else setting.parts
    config = {"learning_rate": RATE, "dense": asked, "accumulate_steps": parts}
    with strategy.scope():
        model = NumbersModel(build, setting.dtype)
        # That of Keras: where scaled gradients overflow both leave the step out.
        scale = LossScale(2.0**15, 2000) if dtype == tf.float16 else None
        optimizers = Optimizers(OptimizerConfig.model_validate(config), model, STEPS, scale)
    step = TrainStep(model, find_loss, optimizers, StepOptions(1, dtype, setting.xla))
    drawn = draw_batches()
    dataset = tf.data.Dataset.from_tensor_slices(drawn).batch(ROWS, drop_remainder=True)
    batches = iter(distribute_batches(dataset, strategy))
    losses = build_run_steps(strategy, step)(batches, tf.constant(STEPS)).losses
    assert len(losses) == STEPS
    for variable in model.network.weights.values():
        first, *others = (c.numpy() for c in strategy.experimental_local_results(variable))
        for other in others:
            np.testing.assert_array_equal(other, first)
    weights = {name: variable.numpy() for name, variable in model.network.weights.items()}
    return Trained(weights, model.compute_logits({"x": tf.constant(drawn["x"])}).numpy())


def find_loss(model: NumbersModel, batch: Batch, training: TrainingPass) -> tf.Tensor:
    """Cross-entropy of each row."""
    return tf.nn.sigmoid_cross_entropy_with_logits(
        labels=batch["label"], logits=model.compute_logits(batch, training)
    )


def train_by_fit(build: Build, setting: Setting) -> Trained:
    """Trains by `fit` of Keras, on the same rows in the same order."""
    with build_strategy(DevicesConfig(cpu_replicas=setting.replicas)).scope():
        model = build_network(build, setting.dtype)
        model.compile(
            keras.optimizers.SGD(
                RATE,
                momentum=MOMENTUM,
                gradient_accumulation_steps=None if setting.parts == 1 else setting.parts,
            ),
            keras.losses.BinaryCrossentropy(from_logits=True),
            jit_compile=False,
        )
    drawn = draw_batches()
    # The parts of a batch are every so manieth of its rows.
    order = np.arange(STEPS * ROWS).reshape(STEPS, -1, setting.parts).swapaxes(1, 2).ravel()
    rows = tf.data.Dataset.from_tensor_slices(({"x": drawn["x"][order]}, drawn["label"][order]))
    model.fit(rows.batch(ROWS // setting.parts, drop_remainder=True), shuffle=False, verbose=0)
    weights = {name: np.asarray(weight.value) for name, weight in name_weights(model).items()}
    logits = np.asarray(model({"x": tf.constant(drawn["x"])}, training=False), np.float32)
    return Trained(weights, logits[:, 0])


def check_equal(found: Trained, expected: Trained, tolerance: float) -> None:
    """Compares weights and logits."""
    assert list(found.weights) == list(expected.weights)
    for name, values in expected.weights.items():
        np.testing.assert_allclose(
            found.weights[name], values, rtol=tolerance, atol=tolerance, err_msg=name
        )
    np.testing.assert_allclose(found.logits, expected.logits, rtol=tolerance, atol=tolerance)
