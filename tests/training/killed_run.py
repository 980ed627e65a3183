"""A training run that records the rows of each step, and that kills its process where asked to."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.training.input import InputConfig
from conf.training.models import DSSMConfig, RankingConfig
from conf.training.objectives import NegativesConfig, SampledSoftmaxConfig
from conf.training.optimizer import OptimizerConfig
from conf.training.train import (
    CheckpointConfig,
    FitConfig,
    StepValidationConfig,
    TrainConfig,
)
from training.checkpoint import manager as checkpoints_module
from training.distribution import strategy as strategies
from training.loop.trainer import Trainer
from training.monitoring.progress import TrainingProgress
from training.reader.training_data import TrainingData

KEYS = ("user_id", "movie_id", "history")
# All that draws: dropout, adaptive negatives, shuffling; and a rate that depends on the step.
CONFIG = TrainConfig(
    dataset="tiny",
    name="t",
    model=DSSMConfig(
        embedding_dim=4,
        user_hidden_units=(8,),
        dropout=0.2,
        objective=SampledSoftmaxConfig(
            negatives=NegativesConfig(source="adaptive", count=4), mask="user_items"
        ),
    ),
    input=InputConfig(batch_size=64, shuffle_buffer=300),
    optimizer=OptimizerConfig(learning_rate=0.01, schedule="cosine"),
    fit=FitConfig(
        epochs=2,
        early_stopping=None,
        steps_per_loop=5,
        checkpoint=CheckpointConfig(every_steps=3),
    ),
)
# Dropout and moving statistics of a Keras network, and validations between epochs.
RANKING = CONFIG.model_copy(
    update={
        "model": RankingConfig(
            embedding_dim=4,
            params={"hidden_units": [8], "dropout": 0.2, "batch_normalization": True},
        ),
        "fit": CONFIG.fit.model_copy(update={"validation": StepValidationConfig(every_steps=4)}),
    }
)
Key = tuple[int, ...]


def row_keys(batch: dict[str, tf.Tensor]) -> list[Key]:
    """What tells the rows of a batch apart."""
    columns = [batch[name].numpy() for name in KEYS]
    return [
        (int(user), int(item), *map(int, history))
        for user, item, history in zip(*columns, strict=True)
    ]


class Recorded:
    """The rows of each step that ran, by the step's number.

    Args:
        then: Called with each step's number and rows, before the model is updated.
    """

    def __init__(self, then: Callable[[int, list[Key]], None] = lambda step, rows: None) -> None:
        self.rows: dict[int, list[Key]] = {}
        self._then = then

    def wrap(self, build_run_steps: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a `build_run_steps` whose steps are recorded."""

        def build(strategy: tf.distribute.Strategy, train_step: Any) -> Any:
            counter = train_step._optimizers.step

            def record(step: tf.Tensor, *columns: tf.Tensor) -> None:
                rows = row_keys(dict(zip(KEYS, columns, strict=True)))
                self.rows[int(step)] = rows
                self._then(int(step), rows)

            def recorded(batch: dict[str, tf.Tensor]) -> tf.Tensor:
                columns = [batch[name] for name in KEYS]
                told = tf.py_function(record, [counter.read_value(), *columns], [])
                with tf.control_dependencies([told] if isinstance(told, tf.Operation) else told):
                    batch = tf.nest.map_structure(tf.identity, batch)
                return train_step(batch)

            return build_run_steps(strategy, recorded)

        return build


def train(version: Path, run: Path, recorded: Recorded, config: TrainConfig = CONFIG) -> Trainer:
    """Trains in a directory, or goes on there; returns the trainer."""
    build = strategies.build_run_steps
    strategies.build_run_steps = recorded.wrap(build)
    try:
        data = TrainingData(version, read_manifest(version))
        trainer = Trainer(config, data, tf.distribute.get_strategy(), TrainingProgress())
        trainer.fit(run, None)
        return trainer
    finally:
        strategies.build_run_steps = build


class ActsAfter(TrainingProgress):
    """Does something once, when a number of steps of the run is done; None: never."""

    def __init__(self, after: int | None, act: Callable[[], None]) -> None:
        self.after, self._act = after, act

    def step(self, status: Any) -> None:
        done = (status.epoch - 1) * status.steps + status.step
        if self.after is not None and done >= self.after:
            self.after = None
            self._act()


class KilledError(Exception):
    """Stands for the process being killed between two calls."""


def break_off() -> None:
    raise KilledError


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(version: str, run: str, log: str, when: str, config: TrainConfig = CONFIG) -> None:
    """Kills the process at a step, or (`writing`) while the fifth checkpoint is written."""

    def then(step: int, rows: list[Key]) -> None:
        with Path(log).open("a") as file:
            file.write(json.dumps([step, rows]) + "\n")
        if when == str(step):
            kill()

    if when == "writing":
        writes = iter(range(99))
        place = checkpoints_module.publish_checkpoint

        def place_or_die(*arguments: Any) -> Any:
            assert threading.current_thread() is not threading.main_thread()
            return kill() if next(writes) == 4 else place(*arguments)

        checkpoints_module.publish_checkpoint = place_or_die
    train(Path(version), Path(run), Recorded(then), config)
