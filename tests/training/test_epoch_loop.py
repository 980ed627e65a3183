"""The guard of the loop: a loss, a gradient or state that is not finite ends training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.errors import TrainingDivergedError
from conf.manifest import Manifest
from conf.training import CheckpointConfig, DevicesConfig, FitConfig, OptimizerConfig
from tests.training.killed_run import CONFIG, Silent
from training import learner as learner_module
from training.checkpoint.restore import restore_newest
from training.checkpoint.shelf import list_entries
from training.checkpoint.state import collect_state, find_non_finite
from training.position import Position
from training.strategy import build_strategy
from training.trainer import Trainer, TrainingData

CULPRIT = Position(1, 4)  # step 17 of the run


def objective_that_trips(*, in_gradient: bool):
    """An objective that is not finite in one step of the run."""
    build = learner_module.build_objective

    class Tripping:
        def __init__(self, objective) -> None:
            self._objective = objective
            self.inputs = objective.inputs

        def __call__(self, model, batch, seed) -> tf.Tensor:
            losses = self._objective(model, batch, seed)
            hit = seed[1] == 8 * CULPRIT.step(12)  # the counter of random numbers
            if not in_gradient:
                return tf.where(hit, tf.constant(np.inf), losses)
            # The root of zero has a value and no derivative.
            mean = tf.reduce_mean(losses)
            return losses + tf.sqrt(mean * tf.where(hit, 0.0, 1e-12)) * 1e-9

    return lambda *arguments: Tripping(build(*arguments))


def build_trainer(
    data: TrainingData, monkeypatch, *, in_gradient: bool = False, replicas: int = 1, **fit
) -> Trainer:
    checkpoint = CheckpointConfig(every_steps=1)
    settings = {"epochs": 2, "early_stopping": None, "checkpoint": checkpoint, **fit}
    config = CONFIG.model_copy(update={"fit": FitConfig(**settings)})
    strategy = build_strategy(DevicesConfig(cpu_replicas=replicas))
    trip = objective_that_trips(in_gradient=in_gradient)
    monkeypatch.setattr(learner_module, "build_objective", trip)
    return Trainer(config, data, strategy, Silent())


@pytest.fixture
def data(tiny_version: Path, tiny_manifest: Manifest) -> TrainingData:
    return TrainingData(tiny_version, tiny_manifest)


@pytest.mark.parametrize(
    ("fit", "in_gradient", "replicas"),
    [
        ({"steps_per_loop": 5}, False, 1),
        ({"steps_per_loop": 12, "checkpoint": CheckpointConfig()}, False, 2),
        ({"steps_per_loop": 5, "check_gradients": True}, True, 1),
        ({"steps_per_loop": 5, "check_gradients": True}, True, 2),
    ],
)
def test_training_ends_at_the_batch_that_is_at_fault(
    fit, in_gradient: bool, replicas: int, data: TrainingData, monkeypatch, tmp_path: Path
) -> None:
    trainer = build_trainer(data, monkeypatch, in_gradient=in_gradient, replicas=replicas, **fit)
    with pytest.raises(TrainingDivergedError, match="epoch 2, at step 5") as caught:
        trainer.fit(tmp_path, None)
    assert caught.value.exit_code == 5
    summary = json.loads((tmp_path / "diverged" / "diverged.json").read_text())
    assert (summary["epoch"], summary["batch"], summary["step"]) == (2, 4, 17)
    check_written_batch(trainer, tmp_path, CULPRIT)
    check_last_checkpoint(trainer, tmp_path, fit)


def check_last_checkpoint(trainer: Trainer, run: Path, fit) -> None:
    """The last one is of before that step, and its numbers are finite."""
    newest = list_entries(run / "checkpoints" / "last")[-1].position
    assert newest == (Position(1, 0) if "checkpoint" in fit else CULPRIT)
    state = collect_state(model=trainer.model, optimizers=trainer._optimizers)
    restore_newest(run / "checkpoints" / "last", state, print)
    assert int(trainer._optimizers.step.numpy()) == newest.step(12)
    assert find_non_finite(state.variables.items()) is None


def test_unchecked_gradients_show_one_step_later(data, monkeypatch, tmp_path: Path) -> None:
    trainer = build_trainer(
        data, monkeypatch, in_gradient=True, steps_per_loop=5, checkpoint=CheckpointConfig()
    )
    with pytest.raises(TrainingDivergedError, match="epoch 2, at step 6"):
        trainer.fit(tmp_path, None)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_weights_that_burst_in_the_last_step_are_not_saved(
    data: TrainingData, monkeypatch, tmp_path: Path
) -> None:
    """No loss shows it any more; without the check they would be the newest checkpoint."""
    wild = OptimizerConfig(learning_rate=1e300)
    config = CONFIG.model_copy(
        update={"optimizer": wild, "fit": FitConfig(epochs=1, steps_per_loop=1)}
    )
    trainer = Trainer(config, data, tf.distribute.get_strategy(), Silent())
    trainer.steps_per_epoch = trainer._runner.steps_per_epoch = 1
    with pytest.raises(TrainingDivergedError, match=r"epoch 1, at step 1\n.*not finite"):
        trainer.fit(tmp_path, None)
    assert list_entries(tmp_path / "checkpoints" / "last") == []
    check_written_batch(trainer, tmp_path, Position(0, 0))


def check_written_batch(trainer: Trainer, run: Path, position: Position) -> None:
    batch = trainer._runner.read_batch(position)
    with np.load(run / "diverged" / "batch.npz", allow_pickle=False) as arrays:
        assert set(arrays) == set(batch)
        for name, value in batch.items():
            np.testing.assert_array_equal(arrays[name], value)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("every_steps", [4, 12])
def test_state_that_bursts_where_no_loss_shows_it_leaves_the_batch(
    asynchronous: bool, every_steps: int, data: TrainingData, monkeypatch, tmp_path: Path
) -> None:
    """Found when it is saved, inside of an epoch and at its end."""
    checkpoint = CheckpointConfig(every_steps=every_steps, asynchronous=asynchronous)
    fit = FitConfig(epochs=1, steps_per_loop=4, early_stopping=None, checkpoint=checkpoint)
    config = CONFIG.model_copy(update={"fit": fit})
    trainer = Trainer(config, data, tf.distribute.get_strategy(), Silent())
    run = trainer._runner.run

    def bursting(position: Position):
        for number, chunk in enumerate(run(position), start=1):
            if number == every_steps // 4:
                slot = trainer._optimizers.sparse.slots["second_moment"][0]
                slot.assign(tf.fill(slot.shape, np.inf))
            yield chunk

    monkeypatch.setattr(trainer._runner, "run", bursting)
    message = rf"epoch 1, at step {every_steps}\n.*second_moment.* is not finite"
    with pytest.raises(TrainingDivergedError, match=message):
        trainer.fit(tmp_path, None)
    assert list_entries(tmp_path / "checkpoints" / "last") == []
    check_written_batch(trainer, tmp_path, Position(0, every_steps - 1))


def test_a_disk_that_is_full_does_not_hide_the_divergence(
    data: TrainingData, monkeypatch, tmp_path: Path
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    trainer = build_trainer(data, monkeypatch, steps_per_loop=5)
    monkeypatch.setattr("training.epoch_loop.write_divergence", full)
    with pytest.raises(TrainingDivergedError, match="epoch 2, at step 5"):
        trainer.fit(tmp_path, None)
