"""Finished training runs for tests of the jobs that follow: real checkpoints, no training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tensorflow as tf

from conf.dataset import read_manifest, write_text_atomic
from conf.run import RunPaths, update_run_card
from conf.training import TrainConfig
from tests.training.fixtures import TinyConfig, write_tiny_dataset
from training.checkpoint import manifest_sha256
from training.models import build_model


def write_tiny_run(root: Path, model: dict[str, Any], dataset: TinyConfig | None = None) -> Path:
    """Writes a data set and an untrained run on it; returns the series' directory."""
    version = write_tiny_dataset(root / "datasets", config=dataset)
    manifest = read_manifest(version)
    config = TrainConfig.model_validate(
        {
            "dataset": str(version),
            "name": "tiny",
            "root": str(root / "runs"),
            "model": model,
            "evaluation": {"ks": [5, 10], "sampled_negatives": 9},
        }
    )
    paths = RunPaths(root / "runs", "tiny")
    run = paths.run("20260101T000000Z-00000000")
    run.mkdir(parents=True)
    checkpoint = tf.train.Checkpoint(model=build_model(config.model, manifest, config.seed))
    for which in ("best", "last"):
        manager = tf.train.CheckpointManager(
            checkpoint, str(run / "checkpoints" / which), max_to_keep=1
        )
        manager.save(checkpoint_number=1)
    update_run_card(
        run,
        status="trained",
        config=config.resolved(),
        dataset={"path": str(version), "manifest_sha256": manifest_sha256(manifest)},
    )
    write_text_atomic(paths.current, run.name + "\n")
    return paths.base
