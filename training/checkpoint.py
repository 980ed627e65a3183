"""Checkpoints of a run: the last epochs, to resume from, and the best one, to use.

TensorFlow writes a checkpoint's files first and then replaces the `checkpoint` state file that
names it. A run killed or a disk filled in between leaves the one before readable.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import tensorflow as tf

from conf.dataset import local_path, read_manifest
from conf.errors import InputDataError, InternalError, UpstreamNotReadyError
from conf.manifest import Manifest
from conf.run import CHECKPOINTS_DIR, RUN_CARD_FILE, read_json
from conf.schema import fingerprint
from conf.training import TrainConfig
from training.models import build_model
from training.models.base import RetrievalModel
from training.optimizers import Optimizers

Which = Literal["best", "last"]

LAST_DIR = "last"
BEST_DIR = "best"
KEEP_LAST = 2


class Checkpoints:
    """Saves and restores one run's state.

    Args:
        run: Directory of the run.
        model: The model.
        optimizers: Its optimizers, with the moments that a resumed run goes on from.
    """

    def __init__(self, run: Path, model: RetrievalModel, optimizers: Optimizers) -> None:
        self._directory = run / CHECKPOINTS_DIR
        self._epoch = tf.Variable(0, dtype=tf.int64, trainable=False, name="finished_epochs")
        last = tf.train.Checkpoint(model=model, optimizers=optimizers, finished_epochs=self._epoch)
        self._last = tf.train.CheckpointManager(
            last, str(self._directory / LAST_DIR), max_to_keep=KEEP_LAST
        )
        self._best = tf.train.CheckpointManager(
            tf.train.Checkpoint(model=model), str(self._directory / BEST_DIR), max_to_keep=1
        )

    def restore_last(self) -> int:
        """Restores the newest checkpoint and returns the number of finished epochs.

        Raises:
            InputDataError: The checkpoint does not fit the model, or is damaged.
        """
        path = self._last.latest_checkpoint
        if path is None:
            return 0
        try:
            self._last.checkpoint.restore(path).assert_existing_objects_matched()
        except (AssertionError, ValueError, tf.errors.OpError) as error:
            raise _unreadable(path, error) from error
        return int(self._epoch.numpy())

    def save_last(self, epoch: int) -> None:
        """Saves everything after an epoch (one-based)."""
        self._epoch.assign(epoch)
        _save(self._last, epoch)

    def save_best(self, epoch: int) -> None:
        """Saves the model as that of the best epoch (one-based) so far.

        An epoch that is replayed after a kill finds its own checkpoint there and leaves it.
        """
        if Path(self._best.latest_checkpoint or "").name != f"ckpt-{epoch}":
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
        dataset = card["dataset"]
        version_dir = local_path(dataset["path"])
        expected = dataset["manifest_sha256"]
    except (KeyError, TypeError, ValueError) as error:
        raise InputDataError(
            f"{run_dir / RUN_CARD_FILE} is not complete", received=repr(error)
        ) from error
    manifest = read_run_manifest(version_dir, expected)
    directory = run_dir / CHECKPOINTS_DIR / which
    path = tf.train.latest_checkpoint(str(directory))
    if path is None:
        raise UpstreamNotReadyError(
            f"this run has no {which} checkpoint yet",
            received=str(directory),
            fix="let the training finish at least one epoch",
        )
    model = build_model(config.model, manifest, config.seed)
    try:
        status = tf.train.Checkpoint(model=model).restore(path)
        status.assert_existing_objects_matched().expect_partial()
    except (AssertionError, ValueError, tf.errors.OpError) as error:
        raise _unreadable(path, error) from error
    return model, config, manifest, version_dir


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


def _save(manager: tf.train.CheckpointManager, epoch: int) -> None:
    try:
        manager.save(checkpoint_number=epoch)
    except (tf.errors.OpError, OSError) as error:
        raise InternalError(
            "cannot write a checkpoint; the one before is untouched",
            received=str(error).splitlines()[0],
            fix="free some space (or check the permissions), then go on with --resume",
        ) from error


def _unreadable(path: str, error: Exception) -> InputDataError:
    return InputDataError(
        "cannot restore a checkpoint: it is damaged or belongs to another model",
        received=f"{path}: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
        fix="train again without --resume, or restore the file",
    )
