"""Trained models read back from a run's directory, with what they were trained on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from conf.artefacts.run import (
    BEST_DIR,
    CHECKPOINT_FILE,
    CHECKPOINTS_DIR,
    LAST_DIR,
    RUN_CARD_FILE,
)
from conf.errors import InputDataError, UpstreamNotReadyError
from conf.local_paths import local_path
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.storage.locations import is_remote
from conf.training.train import TrainConfig
from training.checkpoint.calibrations import read_calibrations, requires_fit
from training.checkpoint.checkpoint_files import (
    list_checkpoints,
    read_checkpoint,
)
from training.checkpoint.checkpoint_tensors import STATE_PREFIX
from training.checkpoint.manager import restore_newest
from training.checkpoint.resume_state import Position
from training.checkpoint.run_reference import RunReference
from training.checkpoint.saved_tensors import MODEL, collect_state, restore_state
from training.checkpoint.stored_runs import find_run
from training.embedding.key_space import holding_whole_tables
from training.models.model import Model
from training.models.ranking import NetworkRankingModel
from training.models.registry import build_model, undo_balance


@dataclass(frozen=True)
class SavedPoint:
    """Which of a run's checkpoints a model is of.

    Attributes:
        name: `best` or `last`; both may hold the same one.
        position: Where training was, which tells the checkpoints of a run apart.
    """

    name: str
    position: Position

    def to_json(self) -> dict[str, Any]:
        """Returns what `export.json` says of it."""
        return {"name": self.name, "epoch": self.position.epoch, "batch": self.position.batch}


@dataclass(frozen=True)
class TrainedModel:
    """A model with what it was trained on.

    Attributes:
        run_dir: Directory of its run.
        model: The model.
        config: Config of its run.
        manifest: Manifest of its dataset version.
        version_dir: Directory of that version.
        checkpoint: Which of the run's checkpoints it is; None: it was not read from one by name.
    """

    run_dir: Path
    model: Model
    config: TrainConfig
    manifest: Manifest
    version_dir: ReadablePath
    checkpoint: SavedPoint | None = None


def find_checkpoint(run_dir: Path, which: Literal["best", "last"] = "best") -> SavedPoint:
    """Returns which checkpoint of a run is its best or last one.

    Raises:
        UpstreamNotReadyError: It has none yet.
    """
    directory = run_dir / CHECKPOINTS_DIR / which
    entries = list_checkpoints(directory)
    if not entries:
        raise UpstreamNotReadyError(
            f"this run has no {which} checkpoint yet",
            received=str(directory),
            fix="let the training finish at least one epoch",
        )
    return SavedPoint(which, entries[-1].position)


def load_run(
    run: str | Path, which: Literal["best", "last"] = "best", *, is_calibrated: bool = True
) -> TrainedModel:
    """Loads the model of a run, and what it was trained on.

    Args:
        run: A run's directory, or a series' (its last finished run).
        which: The best epoch's weights, or the last one's.
        is_calibrated: Whether `model.calibration` is applied, which training fits at its end.

    Raises:
        UpstreamNotReadyError: There is no such run, or it has no such checkpoint yet, or no
            calibration of it.
        InputDataError: The dataset version is gone or another one, or the checkpoint or the
            calibration is damaged.
    """
    run_dir = find_run(run)
    reference = RunReference.read(run_dir)
    config = reference.config
    manifest = reference.read_manifest(config.input.tolerates)
    find_checkpoint(run_dir, which)
    with holding_whole_tables():
        model = build_model(config.model, manifest, config.seed)
    state = collect_state(**{MODEL: model})
    restored, _ = restore_newest(run_dir / CHECKPOINTS_DIR / which, state)
    if restored is None:
        raise TypeError("a checkpoint that was listed is gone")
    position = restored.metadata.resume_state.position
    undo_balance(model, config.input, manifest)
    if is_calibrated and isinstance(model, NetworkRankingModel) and requires_fit(config.model):
        fitted = read_calibrations(run_dir, position)
        model.calibrate({**model.calibrations, **fitted})
    point = SavedPoint(which, position)
    return TrainedModel(run_dir, model, config, manifest, reference.version_dir, point)


def resolve_checkpoint(path: str) -> Path:
    """Returns the checkpoint that a path stands for: itself, or a run's best, else its last one.

    Args:
        path: A run, a series of runs (its last finished one) or a checkpoint's directory.

    Raises:
        UpstreamNotReadyError: There is no such run or checkpoint.
    """
    if not is_remote(path) and (local_path(path) / CHECKPOINT_FILE).is_file():
        return local_path(path)
    run = find_run(path)
    checkpoints = run / CHECKPOINTS_DIR
    entries = list_checkpoints(checkpoints / BEST_DIR) or list_checkpoints(checkpoints / LAST_DIR)
    if not entries:
        raise UpstreamNotReadyError(
            "the run to start from has no checkpoint yet",
            received=run,
            fix="let it finish at least one epoch, or name another run",
        )
    return entries[-1].path


def find_run_of(checkpoint: Path) -> Path:
    """Returns the directory of the run that a checkpoint is of.

    Raises:
        InputDataError: It does not lie in one.
    """
    above = checkpoint.resolve().parents
    if len(above) < 3 or not (above[2] / RUN_CARD_FILE).is_file():
        raise InputDataError(
            "a checkpoint is read where it was saved: inside its run",
            received=checkpoint,
            allowed=f"RUN/{CHECKPOINTS_DIR}/{BEST_DIR}/NUMBER, with RUN/{RUN_CARD_FILE}",
            fix="copy the run's whole directory",
        )
    return above[2]


def load_checkpoint(directory: Path) -> TrainedModel:
    """Loads the model of one checkpoint for its tables; unlike `load_run`, without calibrations.

    Raises:
        InputDataError: The dataset version is gone or another one, or the checkpoint is damaged.
    """
    run_dir = find_run_of(directory)
    reference = RunReference.read(run_dir)
    config = reference.config
    manifest = reference.read_manifest(config.input.tolerates)
    read_checkpoint(directory)
    with holding_whole_tables():
        model = build_model(config.model, manifest, config.seed)
    restore_state(collect_state(**{MODEL: model}), directory / STATE_PREFIX)
    return TrainedModel(run_dir, model, config, manifest, reference.version_dir)
