"""Runs on keys of 64 bits, with dynamic tables."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.training.input import InputConfig
from conf.training.optimizer import OptimizerConfig
from conf.training.train import CheckpointConfig, DevicesConfig, FitConfig, TrainConfig
from training.distribution.strategy import build_strategy
from training.loop.trainer import Trainer
from training.monitoring.progress import StepStatus, TrainingProgress
from training.reader.training_data import TrainingData

TABLES: dict[str, Any] = {
    "user_id": "dynamic",
    "items": {"features": ["movie_id", "history"], "capacity": 4},
}
RULED: dict[str, Any] = {
    "user_id": {
        "admission": {"count": 2},
        "eviction": {"timestamp": "time", "unused_time": 70, "every": 7},
    },
    "items": {
        "features": ["movie_id"],
        "capacity": 4,
        "max_rows": 15,
        "admission": {"probability": 0.6},
        "eviction": {"every": 4, "when_full": "least_frequent"},
    },
    "past": {"features": ["history"], "eviction": {"min_count": 40, "every": "epoch"}},
}
TIERED: dict[str, Any] = {
    "user_id": {**RULED["user_id"], "device_rows": 9},
    "items": {**RULED["items"], "device_rows": 8},
    "past": {**RULED["past"], "device_rows": 37},
}
DSSM = {
    "name": "dssm",
    "embedding_dim": 4,
    "user_hidden_units": [8],
    "dropout": 0.2,
    "objective": {"logq_correction": False},
}
FIT = FitConfig(
    epochs=2, early_stopping=None, steps_per_loop=5, checkpoint=CheckpointConfig(every_steps=3)
)


def build_config(model: dict[str, Any], **changes: Any) -> TrainConfig:
    """A run on keys; `changes` are sections of the config."""
    sections = {
        "model": {"embeddings": TABLES, **model},
        "input": InputConfig(batch_size=64, shuffle_buffer=300),
        "optimizer": OptimizerConfig(learning_rate=0.02),
        "fit": FIT,
        **changes,
    }
    return TrainConfig.model_validate({"dataset": "tiny", "name": "t", **sections})


def build_ruled_config(*, tiered: bool = False, **model: Any) -> TrainConfig:
    """A run with tables of all rules, in small batches, whose rows may lie in two tiers."""
    return build_config(
        {**DSSM, "embeddings": TIERED if tiered else RULED, **model},
        input=InputConfig(batch_size=8, shuffle_buffer=300),
        # Sums of two replicas differ in the last bit; many small steps must not widen that.
        optimizer=OptimizerConfig(learning_rate=0.005, epsilon=1e-3),
    )


def build_trainer(
    config: TrainConfig, version: Path, progress: TrainingProgress | None = None, replicas: int = 1
) -> Trainer:
    """A trainer on one device, or on logical ones."""
    strategy = tf.distribute.get_strategy()
    if replicas > 1:
        strategy = build_strategy(DevicesConfig(cpu_replicas=replicas))
    data = TrainingData(version, read_manifest(version))
    return Trainer(config, data, strategy, progress or TrainingProgress())


def read_state(trainer: Trainer) -> dict[str, np.ndarray]:
    """All that a checkpoint would hold."""
    from training.checkpoint.saved_tensors import MODEL, OPTIMIZERS, collect_state, copy_state

    state = collect_state(**{MODEL: trainer.parts.model, OPTIMIZERS: trainer.parts.optimizers})
    return {name: tensor.numpy() for name, tensor in copy_state(state).items()}


class Killing(TrainingProgress):
    """Kills the process at a step."""

    def __init__(self, epoch: int, step: int) -> None:
        self._at = (epoch, step)

    def step(self, status: StepStatus) -> None:
        """Compares."""
        if (status.epoch, status.step) >= self._at:
            os.kill(os.getpid(), signal.SIGKILL)


def train_and_die(
    version: str, run: str, epoch: int, step: int, ruled: bool = False, tiered: bool = False
) -> None:
    """Trains until a step, in a process of its own."""
    config = build_ruled_config(tiered=tiered) if ruled else build_config(DSSM)
    build_trainer(config, Path(version), Killing(epoch, step)).fit(Path(run), None)
