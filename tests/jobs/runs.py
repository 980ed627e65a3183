"""Finished training runs for tests of the jobs that follow: real checkpoints, no training."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from conf.artefacts.dataset import read_manifest
from conf.artefacts.run import RunPaths, update_run_card
from conf.storage.atomic_output import write_text_atomic
from conf.training.train import TrainConfig
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset
from training.checkpoint.checkpoint_files import EpochSums, Position, ResumeState
from training.checkpoint.manager import CheckpointManager
from training.checkpoint.restore import manifest_sha256
from training.loop.optimizers import Optimizers
from training.models.registry import build_model


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
    built = build_model(config.model, manifest, config.seed)
    with closing(
        CheckpointManager(run, built, Optimizers(config.optimizer, built, 1))
    ) as checkpoints:
        checkpoints.save(ResumeState(Position(1, 0), EpochSums(), config.seed), best=True)
        checkpoints.wait()
    update_run_card(
        run,
        status="trained",
        config=config.resolved(),
        dataset={"path": str(version), "manifest_sha256": manifest_sha256(manifest)},
    )
    write_text_atomic(paths.current, run.name + "\n")
    return paths.base
