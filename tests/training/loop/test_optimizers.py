from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from conf.manifest import Manifest
from conf.training.models import DSSMConfig
from conf.training.optimizer import OptimizerConfig
from tests.training.toy_models import ToyModel, build_toy_batches, squared_error
from training.distribution.strategy import build_run_steps
from training.loop.optimizers import (
    Optimizers,
    add_parts,
    build_dense_optimizer,
    build_learning_rate,
    clip_global_norm,
    dense_optimizer_classes,
)
from training.loop.step import StepOptions, TrainStep
from training.models.registry import build_model


def test_clipping_counts_repeated_rows_once() -> None:
    values = np.array([[3.0, 0], [1.0, 0], [0, 2.0]], np.float32)
    slices = tf.IndexedSlices(tf.constant(values), tf.constant([4, 4, 1]), tf.constant([9, 2]))
    dense = tf.constant([[4.0]])
    norm = np.sqrt(4.0**2 + 2.0**2 + 4.0**2)  # rows 4 sum to (4, 0)
    tables, weights = clip_global_norm([slices, None], [dense], 1.5)
    assert tables[1] is None
    np.testing.assert_allclose(tables[0].values, values * 1.5 / norm, rtol=1e-6)
    np.testing.assert_allclose(weights[0], [[4.0 * 1.5 / norm]], rtol=1e-6)


def test_parts_add_up_to_the_whole() -> None:
    whole, weight = tf.constant([[1.0, 2], [3, 4], [5, 6]]), tf.constant([1.0, -2])
    rows = tf.IndexedSlices(tf.ones([3, 2]), tf.constant([2, 0, 2]), [3, 2])
    few = tf.IndexedSlices(tf.fill([1, 2], 0.5), tf.constant([0]), [3, 2])
    table, other, dense, unused = add_parts(
        [[rows, rows, weight, None], [few, whole, 3 * weight, None]]
    )
    np.testing.assert_array_equal(tf.convert_to_tensor(table), [[1.5, 1.5], [0, 0], [2, 2]])
    np.testing.assert_array_equal(tf.convert_to_tensor(other), [[2, 3], [3, 4], [7, 8]])
    np.testing.assert_array_equal(dense, 4 * weight)
    assert unused is None


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


def test_a_schedule_applies_to_a_rate_of_its_own() -> None:
    weight = tf.Variable([0.0])
    optimizer = build(
        {"kind": "sgd", "learning_rate": 4.0}, weight, schedule="cosine", learning_rate=1.0
    )
    for _ in range(2):
        optimizer.apply([tf.constant([1.0])], [weight])
    second = 0.5 + 0.5 * np.cos(np.pi / 10)
    np.testing.assert_allclose(weight.numpy(), [-4.0 * (1 + second)], rtol=1e-6)


@pytest.mark.parametrize("l1", [0.0, 0.1])
def test_ftrl_moves_weights_by_their_gradients_alone(l1: float) -> None:
    """Keras' FTRL scales them by the rate; with one that stays both are the same."""
    start, gradient = np.array([0.0, 0.0], np.float32), np.array([0.3, -2.0], np.float32)
    ours, keras_own = tf.Variable(start), tf.Variable(start)
    dense = {"kind": "ftrl", "l1_regularization_strength": l1, "beta": 0.2}
    constant = build(dense, ours, learning_rate=0.5)
    plain = keras.optimizers.Ftrl(0.5, l1_regularization_strength=l1, beta=0.2)
    for _ in range(3):
        constant.apply([tf.constant(gradient)], [ours])
        plain.apply([tf.constant(gradient)], [keras_own])
    np.testing.assert_allclose(ours.numpy(), keras_own.numpy(), rtol=1e-5)
    falling = build(dense, ours, learning_rate=0.5, schedule="cosine")
    ours.assign(start)
    falling.apply([tf.constant(gradient)], [ours])
    before = ours.numpy()
    assert before.all()
    for _ in range(8):
        falling.apply([tf.zeros(2)], [ours])
    np.testing.assert_allclose(ours.numpy(), before, rtol=1e-5)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_step_moves_dense_weights_and_touched_rows(clip_norm, tiny_manifest: Manifest) -> None:
    model = build_model(DSSMConfig(embedding_dim=4), tiny_manifest, 1)
    optimizers = Optimizers(OptimizerConfig(clip_norm=clip_norm), model, 10)
    before = {n: v.numpy() for n, v in model.named_variables.items()}
    columns = {"user_id": [5], "gender": [2], "history": [[7, 0]]}
    users = {name: tf.constant(values) for name, values in columns.items()}
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model.embed_users(users) * tf.range(1.0, 5.0))
    optimizers.apply(tape.gradient(loss, optimizers.variables_in_step_order))
    moved = {
        name: np.unique(np.argwhere(before[name] != variable.numpy())[:, 0]).tolist()
        for name, variable in model.named_variables.items()
    }
    assert moved["user_id/rows"] == [5]
    assert moved["movie_id/rows"] == [7]
    assert moved["genres/rows"] == []  # the loss does not read the item side
    assert moved["user_tower/dense/kernel"]
    assert not moved["item_tower/dense/kernel"]
    assert int(optimizers.step) == 1


OPTIMIZERS = {
    "sgd": {"sparse": {"kind": "sgd"}, "dense": {"kind": "sgd", "momentum": 0.9}},
    "adagrad": {"sparse": {"kind": "adagrad"}, "dense": {"kind": "rmsprop"}},
    "adam": {"schedule": "cosine", "warmup_steps": 2, "dense": {"kind": "adamw"}},
    "ftrl": {"sparse": {"kind": "ftrl", "l1": 0.001}, "dense": {"kind": "ftrl"}},
}


def train(model: ToyModel, optimizers: Optimizers, skip: int, steps: int) -> list[float]:
    step = TrainStep(model, squared_error, optimizers, StepOptions(seed=1))
    run_steps = build_run_steps(tf.distribute.get_strategy(), step)
    batches = iter(build_toy_batches(8).skip(skip))
    return [float(run_steps(batches, tf.constant(1)).losses[0]) for _ in range(steps)]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_from_a_checkpoint_bit_for_bit(kind, tmp_path) -> None:
    config = OptimizerConfig.model_validate({"learning_rate": 0.05, **OPTIMIZERS[kind]})

    def build(seed: int) -> tuple[ToyModel, Optimizers]:
        model = ToyModel(seed)
        return model, Optimizers(config, model, 8)

    model, optimizers = build(1)
    train(model, optimizers, 0, 3)
    path = tf.train.Checkpoint(model=model, optimizers=optimizers).save(str(tmp_path / "c"))
    whole = train(model, optimizers, 3, 4)
    other, restored = build(2)
    checkpoint = tf.train.Checkpoint(model=other, optimizers=restored)
    checkpoint.restore(path).assert_existing_objects_matched()
    assert train(other, restored, 3, 4) == whole
    for a, b in zip(model.trainable_variables, other.trainable_variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


RATE, TOTAL = 0.5, 100


def rates(steps: list[int], **config: object) -> np.ndarray:
    full = OptimizerConfig.model_validate({"learning_rate": RATE, **config})
    rate = build_learning_rate(full, TOTAL)
    assert callable(rate)
    return np.array([float(rate(tf.constant(step, tf.int64))) for step in steps])


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_a_schedule_falls_from_the_rate_to_its_share_over_the_run(share: float) -> None:
    steps = [0, 1, 6, 7, 13, 50, 99, 100, 130]
    done = np.minimum(np.array(steps) / TOTAL, 1)
    expected = RATE * (share + (1 - share) * (0.5 + 0.5 * np.cos(np.pi * done)))
    found = rates(steps, schedule={"kind": "cosine", "final_share": share})
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)
    assert build_learning_rate(OptimizerConfig(learning_rate=0.5), 100, 0.25) == 0.25


def test_warm_up_rises_in_a_line_then_the_schedule_has_the_steps_that_are_left() -> None:
    found = rates([0, 1, 9, 10, 55, 100], schedule="cosine", warmup_steps=10)
    np.testing.assert_allclose(found, RATE * np.array([0.1, 0.2, 1, 1, 0.5, 0]), atol=1e-6)
    constant = rates([0, 3, 4, 90], warmup_steps=4)
    np.testing.assert_allclose(constant, RATE * np.array([0.25, 1, 1, 1]), rtol=1e-6)
