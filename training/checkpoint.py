"""Checkpoints of a run: the last epochs, to resume from, and the best one, to use.

TensorFlow writes a checkpoint's files first and then replaces the `checkpoint` state file that
names it. A run killed or a disk filled in between leaves the one before readable; a machine that
loses power as well, as everything is synced before the next file of the run is written.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import tensorflow as tf

from conf.dataset import local_path, read_manifest, sync_directory
from conf.errors import InputDataError, UpstreamNotReadyError
from conf.manifest import Manifest
from conf.run import CHECKPOINTS_DIR, RUN_CARD_FILE, read_json
from conf.schema import fingerprint
from conf.training import TrainConfig
from training.disk_errors import describe_error, disk_errors
from training.models import build_model
from training.models.base import RetrievalModel
from training.optimizers import Optimizers

Which = Literal["best", "last"]

LAST_DIR = "last"
BEST_DIR = "best"
KEEP_LAST = 2
STATE_FILE = "checkpoint"

_log = logging.getLogger("sluice.training.checkpoint")


class Checkpoints:
    """Saves and restores one run's state.

    Args:
        run: Directory of the run.
        model: The model.
        optimizers: Its optimizers, with the moments that a resumed run goes on from.

    Raises:
        InputDataError: A file that names the checkpoints is damaged.
    """

    def __init__(self, run: Path, model: RetrievalModel, optimizers: Optimizers) -> None:
        directory = run / CHECKPOINTS_DIR
        self._epoch = tf.Variable(0, dtype=tf.int64, trainable=False, name="finished_epochs")
        last = tf.train.Checkpoint(model=model, optimizers=optimizers, finished_epochs=self._epoch)
        self._last = _open_manager(last, directory / LAST_DIR, KEEP_LAST)
        self._best = _open_manager(tf.train.Checkpoint(model=model), directory / BEST_DIR, 1)

    @property
    def newest_epoch(self) -> int:
        """One-based epoch of the newest checkpoint to resume from, readable or not; 0: none."""
        path = self._last.latest_checkpoint
        return 0 if path is None else int(path.rpartition("-")[2])

    def restore_last(self, tell: Callable[[str], None] = _log.warning) -> int:
        """Restores the newest readable checkpoint and returns the number of finished epochs.

        Args:
            tell: Receives a message for each damaged checkpoint that is passed over.

        Raises:
            InputDataError: No checkpoint fits the model and can be read.
        """
        refused: list[InputDataError] = []
        for path in reversed(self._last.checkpoints):
            try:
                _restore(self._last.checkpoint, path)
            except InputDataError as error:
                refused.append(error)
                tell(f"passing over checkpoint {path}: it cannot be restored")
            else:
                return int(self._epoch.numpy())
        if refused:
            raise refused[0]
        return 0

    def save_last(self, epoch: int) -> None:
        """Saves everything after an epoch (one-based)."""
        self._epoch.assign(epoch)
        _save(self._last, epoch)

    def save_best(self, epoch: int) -> None:
        """Saves the model as that of the best epoch (one-based) so far.

        An epoch that is replayed after a kill is saved again: what it left may be half written.
        """
        _save(self._best, epoch)


def restore_model(
    run_dir: Path, which: Which = "best"
) -> tuple[RetrievalModel, TrainConfig, Manifest, Path]:
    """Builds a run's model and restores its weights.

    Args:
        run_dir: Directory of the run.
        which: The best epoch's weights, or the last one's.

    Returns:
        The model, the run's config, the manifest that it was trained on, and that dataset
        version's directory.

    Raises:
        UpstreamNotReadyError: The run has no such checkpoint yet.
        InputDataError: The dataset version is gone or another one, or the checkpoint is damaged.
    """
    card = read_json(run_dir / RUN_CARD_FILE)
    try:
        config = TrainConfig.model_validate(card["config"])
    except (KeyError, ValueError) as error:
        raise _incomplete(run_dir, error) from error
    version_dir, expected = read_dataset_reference(run_dir)
    manifest = read_run_manifest(version_dir, expected)
    path = _find_newest(run_dir / CHECKPOINTS_DIR / which)
    model = build_model(config.model, manifest, config.seed)
    _restore(tf.train.Checkpoint(model=model), path)
    return model, config, manifest, version_dir


def read_dataset_reference(run_dir: Path) -> tuple[Path, str]:
    """Returns which dataset version a run was trained on, and its manifest's fingerprint.

    Raises:
        InputDataError: The run card does not say so.
    """
    card = read_json(run_dir / RUN_CARD_FILE)
    try:
        return local_path(card["dataset"]["path"]), str(card["dataset"]["manifest_sha256"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _incomplete(run_dir, error) from error


def read_run_manifest(version_dir: Path, expected_sha256: str) -> Manifest:
    """Reads the manifest of the dataset version that a run was trained on.

    Raises:
        InputDataError: It is gone, or is not the one that the run read.
    """
    manifest = read_manifest(version_dir)
    found = manifest_sha256(manifest)
    if found != expected_sha256:
        raise InputDataError(
            "the dataset version is not the one that this run was trained on",
            received=f"{version_dir}: manifest {found[:12]}",
            allowed=f"manifest {expected_sha256[:12]}",
            fix="restore that version, or train again on the new one",
        )
    return manifest


def manifest_sha256(manifest: Manifest) -> str:
    """Returns the fingerprint of a manifest: schema, shards, vocabularies, all that it states."""
    return fingerprint(manifest.to_json())


def _incomplete(run_dir: Path, error: Exception) -> InputDataError:
    return InputDataError(
        f"{run_dir / RUN_CARD_FILE} is not complete",
        received=repr(error),
        fix="restore the file, or train again without --resume",
    )


def _open_manager(
    checkpoint: tf.train.Checkpoint, directory: Path, keep: int
) -> tf.train.CheckpointManager:
    try:
        return tf.train.CheckpointManager(checkpoint, str(directory), max_to_keep=keep)
    except (ValueError, tf.errors.OpError) as error:
        raise _damaged_state(directory, error) from error


def _find_newest(directory: Path) -> str:
    """Returns the path prefix of the newest checkpoint of a directory."""
    try:
        path = tf.train.latest_checkpoint(str(directory))
    except (ValueError, tf.errors.OpError) as error:
        raise _damaged_state(directory, error) from error
    if path is not None:
        return str(path)
    if (directory / STATE_FILE).exists():
        raise _damaged_state(directory, FileNotFoundError("the files that it names are missing"))
    raise UpstreamNotReadyError(
        f"this run has no {directory.name} checkpoint yet",
        received=str(directory),
        fix="let the training finish at least one epoch",
    )


def _restore(checkpoint: tf.train.Checkpoint, path: str) -> None:
    """Restores what the checkpoint's objects need; more in the file is left alone."""
    try:
        checkpoint.restore(path).assert_existing_objects_matched().expect_partial()
    except Exception as error:  # Damaged bytes end in whatever the code that trips on them raises.
        raise InputDataError(
            "cannot restore a checkpoint: it is damaged or belongs to another model",
            received=f"{path}: {describe_error(error)}",
            fix="train again without --resume, or restore the file",
        ) from error


def _save(manager: tf.train.CheckpointManager, epoch: int) -> None:
    with disk_errors(
        "cannot write a checkpoint; the one before is untouched",
        "free some space (or check the permissions), then go on with --resume",
    ):
        path = Path(manager.save(checkpoint_number=epoch))
        for file in (*path.parent.glob(f"{path.name}.*"), path.parent / STATE_FILE):
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        sync_directory(path.parent)


def _damaged_state(directory: Path, error: Exception) -> InputDataError:
    return InputDataError(
        "the file that names a run's checkpoints is damaged",
        received=f"{directory / STATE_FILE}: {describe_error(error)}",
        allowed="the state file that TensorFlow writes beside its checkpoints",
        fix="restore the file, or train again without --resume",
    )
