"""Whole runs by configs of steps that the defaults leave out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tensorflow as tf

from conf.manifest import Manifest
from conf.training.train import TrainConfig
from tests.training.loop.test_trainer import Messages
from training.input.split_source import TrainingData
from training.loop.trainer import Trainer

CONFIGS = {
    "parts in half precision": {
        "optimizer": {"accumulate_steps": 2, "clip_value": 0.5},
        "compute": {"mixed_precision": True},
    },
    "float16": {"compute": {"mixed_precision": True, "half_dtype": "float16"}},
    "XLA": {"compute": {"xla": True}},
    "FTRL and AdamW": {
        "optimizer": {
            "sparse": {"kind": "ftrl", "learning_rate": 0.1},
            "dense": {"kind": "adamw"},
            "schedule": {"kind": "inverse_sqrt"},
            "warmup_steps": 5,
        }
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_learns(
    name: str, tmp_path: Path, tiny_version: Path, tiny_manifest: Manifest
) -> None:
    changes = CONFIGS[name]
    config = TrainConfig.model_validate(
        {
            "dataset": "tiny",
            "name": "t",
            "model": {
                "embedding_dim": 8,
                "user_hidden_units": [16],
                "dropout": 0.1,
                "embedding_l2": 1e-4,
                "objective": {"uniform_negatives": 8},
            },
            "input": {"batch_size": 64, "shuffle_buffer": 1000},
            "fit": {"epochs": 3, "steps_per_loop": 6, "early_stopping": None},
            **changes,
            "optimizer": {"learning_rate": 0.01, **changes.get("optimizer", {})},
        }
    )
    data = TrainingData(tiny_version, tiny_manifest)
    trainer = Trainer(config, data, tf.distribute.get_strategy(), Messages())
    assert trainer.fit(tmp_path, None).steps == 36
    updates = int(trainer._optimizers.step.numpy())
    # The first loss scale is too large for some steps, which are left out.
    assert 30 <= updates < 36 if name == "float16" else updates == 36
    losses = [entry["loss"] for entry in json.loads((tmp_path / "history.json").read_text())]
    assert losses[2] < losses[0] * 0.97
