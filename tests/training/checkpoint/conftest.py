"""A model with its optimizers and checkpoints, and a step to change it by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from conf.manifest import Manifest
from conf.training.models import DSSMConfig
from conf.training.optimizer import OptimizerConfig
from conf.training.train import CheckpointConfig
from training.checkpoint.checkpoint_files import (
    CheckpointMetadata,
    EpochSums,
    Position,
    ResumeState,
    seal_checkpoint,
    write_part,
)
from training.checkpoint.manager import CheckpointManager
from training.checkpoint.saved_tensors import copy_state
from training.embedding.worker_rows import RowOwners
from training.loop.optimizers import Optimizers
from training.models.registry import build_model
from training.models.retrieval import RetrievalModel

MODEL = DSSMConfig(embedding_dim=4)


def state_at(epoch: int, batch: int = 0, sums: EpochSums | None = None) -> ResumeState:
    return ResumeState(Position(epoch, batch), sums or EpochSums(), seed=7)


def write_checkpoint(
    directory: Path, tensors: dict[str, tf.Tensor], metadata: CheckpointMetadata
) -> Path:
    """Writes a checkpoint as one process does."""
    write_part(directory, RowOwners(0, 1), {}, tensors)
    seal_checkpoint(directory, 1, metadata)
    return directory


@dataclass(frozen=True)
class Training:
    """What is saved, and what saves it."""

    model: RetrievalModel
    optimizers: Optimizers
    checkpoints: CheckpointManager

    def step(self) -> None:
        users = {
            "user_id": tf.constant([5]),
            "gender": tf.constant([2]),
            "history": tf.constant([[7, 0]]),
        }
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.model.embed_users(users) * tf.range(1.0, 5.0))
        self.optimizers.apply(tape.gradient(loss, self.optimizers.variables_in_step_order))

    def save(self, resume_state: ResumeState, *, best: bool = False) -> None:
        self.checkpoints.save(resume_state, best=best)
        self.checkpoints.wait()

    def values(self) -> dict[str, np.ndarray]:
        return {name: tensor.numpy() for name, tensor in copy_state(self.checkpoints.state).items()}


@pytest.fixture
def begin(tmp_path: Path, tiny_manifest: Manifest) -> Callable[..., Training]:
    """Builds the training of a run in `tmp_path`, as a new process would."""

    def build(
        seed: int = 1, config: CheckpointConfig | None = None, run: Path | None = None
    ) -> Training:
        model = build_model(MODEL, tiny_manifest, seed)
        optimizers = Optimizers(OptimizerConfig(), model, 10)
        return Training(
            model, optimizers, CheckpointManager(run or tmp_path, model, optimizers, config)
        )

    return build


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
