from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.errors import ConfigError
from conf.training import OptimizerConfig
from training.dense_optimizer import build_dense_optimizer, dense_optimizer_classes


def build(dense: dict[str, object], variable: tf.Variable | None = None, **config: object):
    full = OptimizerConfig.model_validate({"dense": dense, **config})
    variables = [tf.Variable(tf.ones([2, 2])) if variable is None else variable]
    return build_dense_optimizer(full, variables, 10)


@pytest.mark.parametrize("kind", sorted(dense_optimizer_classes()))
def test_every_optimizer_of_keras_lowers_a_loss(kind: str) -> None:
    weight = tf.Variable([[2.0, -3.0], [1.5, 4.0]])
    optimizer = build({"kind": kind}, weight, learning_rate=0.01)

    @tf.function
    def step() -> None:
        optimizer.apply([2 * weight.read_value()], [weight])

    before = float(tf.reduce_sum(tf.square(weight)))
    for _ in range(5):
        step()
    assert float(tf.reduce_sum(tf.square(weight))) < before


def test_muon_updates_plain_variables_as_keras_does_its_own() -> None:
    values = {"kernel": np.array([[2.0, -3.0], [1.5, 4.0]]), "bias": np.array([1.0, -2.0])}
    plain = [tf.Variable(tf.zeros(value.shape), name=name) for name, value in values.items()]
    own = [keras.Variable(value, dtype="float32", name=name) for name, value in values.items()]
    full = OptimizerConfig.model_validate({"dense": {"kind": "muon"}, "learning_rate": 0.1})
    ours = build_dense_optimizer(full, plain, 10)
    for variable, value in zip(plain, values.values(), strict=True):
        variable.assign(value)  # Set after the optimizer was built, as by a warm start.
    theirs = keras.optimizers.Muon(0.1)
    theirs.build(own)
    step = tf.function(lambda: ours.apply([2 * v.read_value() for v in plain], plain))
    for _ in range(4):
        step()
        theirs.apply([2 * variable.value for variable in own], own)
    for a, b, first in zip(plain, own, values.values(), strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-5)
        assert np.abs(a.numpy() - first).min() > 0.01


def test_schedule_free_adamw_is_that_of_the_paper() -> None:
    first, rate, beta, decay = np.array([[2.0, -3.0], [1.5, 4.0]]), 0.1, 0.8, 0.99
    weight = tf.Variable(tf.zeros([2, 2]))
    kind = {"kind": "schedulefreeadamw", "beta_1": beta, "beta_2": decay, "learning_rate": rate}
    optimizer = build(kind, weight)
    weight.assign(first)  # Set after the optimizer was built, as by a warm start.
    step = tf.function(lambda: optimizer.apply([2 * weight.read_value()], [weight]))
    y, z, x, v = first, first, first, 0.0
    for number in range(1, 9):
        step()
        v = decay * v + (1 - decay) * (2 * y) ** 2
        z = z - rate * 2 * y / (np.sqrt(v / (1 - decay**number)) + 1e-8)
        x = (1 - 1 / number) * x + z / number
        y = (1 - beta) * z + beta * x
        np.testing.assert_allclose(weight.numpy(), y, rtol=1e-5)


def test_muon_leaves_out_the_layers_that_it_is_told_to() -> None:
    weight = tf.Variable(tf.ones([2, 2]), name="tower/kernel")
    assert build({"kind": "muon"}, weight).adam_velocities[0] is None
    excluded = build({"kind": "muon", "exclude_layers": ["tower"]}, weight)
    assert excluded.adam_velocities[0] is not None


def test_arguments_reach_keras() -> None:
    optimizer = build({"kind": "AdamW", "weight_decay": 0.25, "beta_2": 0.9, "learning_rate": 0.5})
    assert type(optimizer).__name__ == "AdamW"
    assert (optimizer.weight_decay, optimizer.beta_2) == (0.25, 0.9)
    assert float(optimizer.learning_rate) == 0.5


def test_adam_has_the_optimizers_betas_unless_it_has_its_own() -> None:
    optimizer = build({"beta_2": 0.5}, beta_1=0.7, beta_2=0.8, epsilon=1e-3)
    assert (optimizer.beta_1, optimizer.beta_2, optimizer.epsilon) == (0.7, 0.5, 1e-3)


def test_a_schedule_applies_to_a_rate_of_its_own() -> None:
    weight = tf.Variable([0.0])
    optimizer = build(
        {"kind": "sgd", "learning_rate": 4.0}, weight, schedule="linear", learning_rate=1.0
    )
    for _ in range(2):
        optimizer.apply([tf.constant([1.0])], [weight])
    np.testing.assert_allclose(weight.numpy(), [-(4.0 + 3.6)], rtol=1e-6)


@pytest.mark.parametrize(
    ("dense", "message"),
    [
        ({"kind": "adamm"}, "did you mean 'adam'"),
        ({"kind": "optimizer"}, "none of Keras"),
        ({"kind": "sgd", "momentun": 0.9}, "did you mean 'momentum'"),
        ({"kind": "adam", "clipnorm": 1.0}, r"optimizer\.clip_norm"),
        ({"kind": "adam", "gradient_accumulation_steps": 2}, r"optimizer\.accumulate_steps"),
        ({"kind": "sgd", "momentum": 7.0}, "Keras refuses"),
        ({"kind": "schedulefreeadamw", "beta_1": 0.0}, "beta_1 must be between 0 and 1"),
    ],
)
def test_what_keras_does_not_have_is_refused(dense: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(dense)
