"""Trained models read back from a run's directory, with what they were trained on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from conf.errors import InputDataError, UpstreamNotReadyError
from conf.manifest import Manifest
from conf.paths import ReadablePath, ToleratesShard, read_manifest
from conf.run import CHECKPOINTS_DIR, RUN_CARD_FILE, read_json
from conf.schema import FeatureSpec, fingerprint
from conf.training.train import TrainConfig
from etl.tfrecord.reading import find_path
from training.checkpoint.checkpoint_files import (
    STATE_PREFIX,
    CheckpointMetadata,
    list_checkpoints,
    read_checkpoint,
)
from training.checkpoint.training_state import MODEL, TrainingState, collect_state, restore_state
from training.input.feature_columns import check_specs
from training.models.registry import build_model
from training.models.retrieval import RetrievalModel

Which = Literal["best", "last"]

_log = logging.getLogger("sluice.training.checkpoint")


def restore_newest(
    shelf: Path, state: TrainingState, tell: Callable[[str], None]
) -> tuple[CheckpointMetadata | None, list[Path]]:
    """Sets the state to the newest checkpoint that can be read.

    Args:
        shelf: Directory of the checkpoints.
        state: What to set.
        tell: Receives a message for each damaged checkpoint that is passed over.

    Returns:
        What the checkpoint says of itself, or None where there is none; and the checkpoints that
        were passed over.

    Raises:
        InputDataError: There are checkpoints, and none fits the model and can be read.
    """
    refused: list[Path] = []
    first: InputDataError | None = None
    for entry in reversed(list_checkpoints(shelf)):
        try:
            seal = read_checkpoint(entry.path)
            restore_state(state, entry.path / STATE_PREFIX)
        except InputDataError as error:
            refused.append(entry.path)
            first = first or error
            tell(f"passing over checkpoint {entry.path}: {error.received}")
        else:
            return seal, refused
    if first is not None:
        raise first
    return None, []


def restore_model(
    run_dir: Path, which: Which = "best"
) -> tuple[RetrievalModel, TrainConfig, Manifest, ReadablePath]:
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
    manifest = read_run_manifest(
        version_dir, expected, read_model_specs(run_dir), config.input.tolerates
    )
    shelf = run_dir / CHECKPOINTS_DIR / which
    if not list_checkpoints(shelf):
        raise UpstreamNotReadyError(
            f"this run has no {which} checkpoint yet",
            received=str(shelf),
            fix="let the training finish at least one epoch",
        )
    model = build_model(config.model, manifest, config.seed)
    restore_newest(shelf, collect_state(**{MODEL: model}), _log.warning)
    return model, config, manifest, version_dir


def read_dataset_reference(run_dir: Path) -> tuple[ReadablePath, str]:
    """Returns which dataset version a run was trained on, and its manifest's fingerprint.

    Raises:
        InputDataError: The run card does not say so.
    """
    card = read_json(run_dir / RUN_CARD_FILE)
    try:
        return find_path(card["dataset"]["path"]), str(card["dataset"]["manifest_sha256"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _incomplete(run_dir, error) from error


def read_model_specs(run_dir: Path) -> tuple[FeatureSpec, ...]:
    """Returns the specs of the features that a run's model was built for; none of an older run.

    Raises:
        InputDataError: The run card is damaged.
    """
    card = read_json(run_dir / RUN_CARD_FILE)
    try:
        return tuple(
            FeatureSpec.from_json(spec) for spec in (card.get("model") or {}).get("specs", ())
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _incomplete(run_dir, error) from error


def read_run_manifest(
    version_dir: ReadablePath,
    expected_sha256: str,
    specs: Sequence[FeatureSpec] = (),
    tolerates: ToleratesShard | None = None,
) -> Manifest:
    """Reads the manifest of the dataset version that a run was trained on.

    Args:
        version_dir: Directory of the version.
        expected_sha256: Fingerprint of the manifest that the run read.
        specs: Features that its model was built for.
        tolerates: As for `conf.paths.read_manifest`.

    Raises:
        InputDataError: It is gone, or is not the one that the run read; names the feature that
            the model does not fit, if there is one.
    """
    manifest = read_manifest(version_dir, tolerates)
    found = manifest_sha256(manifest)
    if found != expected_sha256:
        check_specs(manifest, specs)
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


@dataclass(frozen=True)
class TrainedModel:
    """A model with what it was trained on.

    Attributes:
        model: The model.
        config: Config of its run.
        manifest: Manifest of its dataset version.
        version_dir: Directory of that version.
    """

    model: RetrievalModel
    config: TrainConfig
    manifest: Manifest
    version_dir: ReadablePath


def load_run(run_dir: Path, which: Literal["best", "last"] = "best") -> TrainedModel:
    """Restores a run's model from its best or last checkpoint.

    Raises:
        UpstreamNotReadyError: The run has no such checkpoint, or its dataset is gone.
        InputDataError: The checkpoint or the dataset version is damaged.
    """
    model, config, manifest, version_dir = restore_model(run_dir, which)
    return TrainedModel(model, config, manifest, version_dir)
