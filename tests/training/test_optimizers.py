from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from conf.manifest import Manifest
from conf.training import DSSMConfig, OptimizerConfig
from tests.training.toy_training import ToyModel, build_toy_batches, squared_error
from training.loss_scale import LossScale
from training.models import build_model
from training.optimizers import Optimizers
from training.step import StepOptions, TrainStep, build_run_steps


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_step_moves_dense_weights_and_touched_rows(clip_norm, tiny_manifest: Manifest) -> None:
    model = build_model(DSSMConfig(embedding_dim=4), tiny_manifest, 1)
    optimizers = Optimizers(OptimizerConfig(clip_norm=clip_norm), model, 10)
    before = {v.name: v.numpy() for v in model.trainable_variables}
    users = {
        "user_id": tf.constant([5]),
        "gender": tf.constant([2]),
        "history": tf.constant([[7, 0]]),
    }
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model.embed_users(users) * tf.range(1.0, 5.0))
    variables = optimizers.variables_in_step_order
    optimizers.apply(tape.gradient(loss, variables))
    after = {v.name: v.numpy() for v in model.trainable_variables}
    moved = {
        name: np.flatnonzero(
            (before[name] != after[name]).reshape(len(after[name]), -1).any(axis=1)
        ).tolist()
        for name in before
    }
    assert moved["user_id/rows:0"] == [5]
    assert moved["movie_id/rows:0"] == [7]
    assert moved["genres/rows:0"] == []  # the loss does not read the item side
    assert moved["user_tower/dense_0/kernel:0"]
    assert not moved["item_tower/dense_0/kernel:0"]
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
@pytest.mark.parametrize("is_scaled", [False, True])
def test_training_goes_on_from_a_checkpoint_bit_for_bit(kind, is_scaled, tmp_path) -> None:
    config = OptimizerConfig.model_validate({"learning_rate": 0.05, **OPTIMIZERS[kind]})

    def build(seed: int) -> tuple[ToyModel, Optimizers]:
        model = ToyModel(seed)
        return model, Optimizers(config, model, 8, LossScale(4.0, 2) if is_scaled else None)

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
    if is_scaled:
        assert float(restored.loss_scale.scale) == float(optimizers.loss_scale.scale) == 32.0


def test_dense_gradients_are_clipped_by_value_too() -> None:
    config = OptimizerConfig.model_validate(
        {
            "learning_rate": 1.0,
            "clip_value": 0.25,
            "sparse": {"kind": "sgd"},
            "dense": {"kind": "sgd"},
        }
    )
    model = ToyModel()
    optimizers = Optimizers(config, model, 8)
    variables = optimizers.variables_in_step_order
    before = [variable.numpy() for variable in variables]
    optimizers.apply([tf.fill(variable.shape, -3.0) for variable in variables])
    for old, variable in zip(before, variables, strict=True):
        np.testing.assert_allclose(variable.numpy() - old, 0.25, rtol=1e-5)
