"""Trained models read back from a run's directory, with what they were trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from conf.errors import UpstreamNotReadyError
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.run import CHECKPOINTS_DIR, resolve_run
from conf.training.train import TrainConfig
from training.checkpoint.checkpoint_files import list_checkpoints
from training.checkpoint.manager import restore_newest
from training.checkpoint.saved_tensors import MODEL, collect_state
from training.models.model import Model
from training.models.registry import build_model
from training.run_directory import RunReference


@dataclass(frozen=True)
class TrainedModel:
    """A model with what it was trained on.

    Attributes:
        run_dir: Directory of its run.
        model: The model.
        config: Config of its run.
        manifest: Manifest of its dataset version.
        version_dir: Directory of that version.
    """

    run_dir: Path
    model: Model
    config: TrainConfig
    manifest: Manifest
    version_dir: ReadablePath


def load_run(run: str | Path, which: Literal["best", "last"] = "best") -> TrainedModel:
    """Loads the model of a run, and what it was trained on.

    Args:
        run: A run's directory, or a series' (its last finished run).
        which: The best epoch's weights, or the last one's.

    Raises:
        UpstreamNotReadyError: There is no such run, or it has no such checkpoint yet.
        InputDataError: The dataset version is gone or another one, or the checkpoint is damaged.
    """
    run_dir = resolve_run(str(run))
    reference = RunReference.read(run_dir)
    config = reference.config
    manifest = reference.read_manifest(config.input.tolerates)
    directory = run_dir / CHECKPOINTS_DIR / which
    if not list_checkpoints(directory):
        raise UpstreamNotReadyError(
            f"this run has no {which} checkpoint yet",
            received=str(directory),
            fix="let the training finish at least one epoch",
        )
    model = build_model(config.model, manifest, config.seed)
    restore_newest(directory, collect_state(**{MODEL: model}))
    return TrainedModel(run_dir, model, config, manifest, reference.version_dir)
