"""A network of one's own trains as Keras' `fit` trains it, whatever layers it has."""

from __future__ import annotations

from dataclasses import replace

import keras
import pytest
import tensorflow as tf

from tests.training.networks.plain_fit import (
    Setting,
    check_equal,
    train_by_fit,
    train_by_step,
)


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


# Of weights that no output depends on, by Keras.
pytestmark = pytest.mark.filterwarnings("ignore:Gradients do not exist")
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 1e-2}


BUILDS = {
    "non_neg": lambda x: keras.layers.Dense(8, kernel_constraint="non_neg")(x),
    "max_norm": lambda x: keras.layers.Dense(8, kernel_constraint=keras.constraints.MaxNorm(0.5))(
        x
    ),
    "own constraint": lambda x: keras.layers.Dense(
        8, bias_constraint=lambda w: keras.ops.clip(w.value, 0.0, 0.01)
    )(x),
    "embedding": lambda x: keras.layers.Embedding(9, 3, embeddings_constraint="unit_norm")(
        keras.ops.cast(keras.ops.round((x[:, :8] + 1.0) * 4.0), "int32")
    ),
    "spectral": lambda x: keras.layers.SpectralNormalization(keras.layers.Dense(5))(x),
    "unread": lambda x: Unread()(x),
    "counted": lambda x: Counted()(x),
    "centred": lambda x: Centred()(x),
    "float64": lambda x: keras.layers.Dense(5, dtype="float64")(x),
    "batch": lambda x: keras.layers.BatchNormalization()(x),
}


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("non_neg", Setting("float16", parts=2)),
        ("max_norm", Setting(replicas=2)),
        ("own constraint", Setting("bfloat16", replicas=2)),
        ("spectral", Setting(xla=True, parts=2)),
        ("spectral", Setting("float16", replicas=2)),
        ("embedding", Setting("float16", replicas=2)),
        ("unread", Setting("float16", replicas=2)),
        ("counted", Setting(replicas=2)),
        ("centred", Setting()),
        ("float64", Setting("float16")),
        ("batch", Setting("bfloat16")),
    ],
)
def test_weights_are_what_fit_makes_of_them(name: str, setting: Setting) -> None:
    # Without statistics of batches and assignments the sum of parts is the whole.
    as_fit = setting if name == "spectral" else replace(setting, parts=1)
    expected = train_by_fit(BUILDS[name], as_fit)
    check_equal(train_by_step(BUILDS[name], setting), expected, TOLERANCES[setting.dtype])
