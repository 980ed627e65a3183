"""Trained models read back from a run's directory, with what they were trained on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from conf.artefacts.dataset import ToleratesShard, read_manifest
from conf.artefacts.run import (
    BEST_DIR,
    CALIBRATION_FILE,
    CHECKPOINT_FILE,
    CHECKPOINTS_DIR,
    LAST_DIR,
    RUN_CARD_FILE,
    read_json,
)
from conf.errors import InputDataError, UpstreamNotReadyError
from conf.local_paths import local_path
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.schema import FeatureSpec, fingerprint
from conf.storage.locations import find_path, is_remote
from conf.training.train import TrainConfig
from training.checkpoint.checkpoint_files import (
    STATE_PREFIX,
    Position,
    list_checkpoints,
    read_checkpoint,
)
from training.checkpoint.manager import restore_newest
from training.checkpoint.saved_tensors import MODEL, collect_state, restore_state
from training.checkpoint.stored_runs import find_run
from training.distribution.strategy import use_tf32
from training.embedding.key_space import holding_whole_tables
from training.models.calibration import Calibration, requires_fit
from training.models.model import Model
from training.models.ranking import NetworkRankingModel, undo_balance
from training.models.registry import build_model
from training.reader.feature_columns import check_specs


def manifest_sha256(manifest: Manifest) -> str:
    """Returns the fingerprint of a manifest: schema, shards, vocabularies, all that it states."""
    return fingerprint(manifest.to_json())


@dataclass(frozen=True)
class RunReference:
    """What a run's card names: its config, dataset version, those of `input.mix`, features."""

    run_dir: Path
    config: TrainConfig
    version_dir: ReadablePath
    manifest_sha256: str
    specs: tuple[FeatureSpec, ...]
    mixed: tuple[tuple[ReadablePath, str], ...]

    @classmethod
    def read(cls, run_dir: Path) -> RunReference:
        """Reads the card of a run."""
        card = read_json(run_dir / RUN_CARD_FILE)
        try:
            (version_dir, sha256), *mixed = (
                (find_path(found["path"]), str(found["manifest_sha256"]))
                for found in (card["dataset"], *card.get("mixed", ()))
            )
            specs = map(FeatureSpec.from_json, card.get("model", {}).get("specs", ()))
            config = TrainConfig.model_validate(card.get("config"))
            return cls(run_dir, config, version_dir, sha256, tuple(specs), tuple(mixed))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputDataError(
                f"{run_dir / RUN_CARD_FILE} is not complete",
                received=repr(error),
                fix="restore the file, or train again without --resume",
            ) from error

    def read_manifest(self, tolerates: ToleratesShard | None = None) -> Manifest:
        """Reads the version's manifest; the config says which shards may lack, or an argument."""
        tolerates = tolerates or self.config.input.tolerates
        return read_run_manifest(self.version_dir, self.manifest_sha256, self.specs, tolerates)


def read_run_manifest(
    version_dir: ReadablePath,
    expected_sha256: str,
    specs: Sequence[FeatureSpec] = (),
    tolerates: ToleratesShard | None = None,
) -> Manifest:
    """Reads the manifest of the dataset version that a run was trained on, and no other."""
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


@dataclass(frozen=True)
class TrainedModel:
    """A model with what it was trained on, and what `export.json` says of its checkpoint."""

    run_dir: Path
    model: Model
    config: TrainConfig
    manifest: Manifest
    version_dir: ReadablePath
    checkpoint: Mapping[str, Any] | None = None

    @classmethod
    def build(cls, run_dir: Path) -> TrainedModel:
        """Builds the model of a run, without its weights, with whole tables."""
        reference = RunReference.read(run_dir)
        config, manifest = reference.config, reference.read_manifest()
        use_tf32(config.compute.tf32)
        with holding_whole_tables():
            model = build_model(config.model, manifest, config.seed)
        return cls(run_dir, model, config, manifest, reference.version_dir)


def find_checkpoint(run_dir: Path, which: Literal["best", "last"] = "best") -> Position:
    """Returns where training was at the best or the last checkpoint of a run."""
    directory = run_dir / CHECKPOINTS_DIR / which
    entries = list_checkpoints(directory)
    if not entries:
        raise _build_too_early_error(directory)
    return entries[-1].position


def _build_too_early_error(directory: Path) -> UpstreamNotReadyError:
    return UpstreamNotReadyError(
        f"this run has no {directory.name} checkpoint yet",
        received=directory,
        fix="let the training finish at least one epoch",
    )


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
    trained = TrainedModel.build(run_dir)
    model, config = trained.model, trained.config
    restored = restore_newest(run_dir / CHECKPOINTS_DIR / which, collect_state(**{MODEL: model}))
    if restored is None:
        raise _build_too_early_error(run_dir / CHECKPOINTS_DIR / which)
    position = restored[1].position
    undo_balance(model, config.input, trained.manifest)
    if is_calibrated and isinstance(model, NetworkRankingModel) and requires_fit(config.model):
        fitted = read_calibrations(run_dir, position)
        model.calibrate({**model.calibrations, **fitted})
    return replace(trained, checkpoint={"name": which, **asdict(position)})


def load_checkpoint(directory: Path) -> TrainedModel:
    """Loads the model of one checkpoint for its tables, without calibrations."""
    trained = TrainedModel.build(find_run_of(directory))
    read_checkpoint(directory)
    restore_state(collect_state(**{MODEL: trained.model}), directory / STATE_PREFIX)
    return trained


def read_calibrations(run: Path, position: Position) -> dict[str, Calibration]:
    """Returns the calibration of each task that was fitted to a checkpoint of a run."""
    file = run / CALIBRATION_FILE
    if not file.is_file():
        raise UpstreamNotReadyError(
            "this run has no calibration yet: it is fitted when training has ended",
            received=file,
            fix="let the training finish, by --resume if it was interrupted",
        )
    content = read_json(file)
    if content.pop("fingerprint", None) == fingerprint(content):
        for found in content["checkpoints"]:
            if (found["epoch"], found["batch"]) == (position.epoch, position.batch):
                return {name: Calibration.of(task) for name, task in found["tasks"].items()}
    raise InputDataError(
        f"{file} does not fit the checkpoint, or is damaged",
        received=f"nothing of epoch {position.epoch}, batch {position.batch}",
        fix="restore the file, or train again",
    )


def resolve_checkpoint(path: str) -> Path:
    """Returns the checkpoint that a path stands for: itself, or a run's best, else its last one."""
    if not is_remote(path) and (local_path(path) / CHECKPOINT_FILE).is_file():
        return local_path(path)
    run = find_run(path)
    checkpoints = run / CHECKPOINTS_DIR
    entries = list_checkpoints(checkpoints / BEST_DIR) or list_checkpoints(checkpoints / LAST_DIR)
    if not entries:
        raise _build_too_early_error(checkpoints / BEST_DIR)
    return entries[-1].path


def find_run_of(checkpoint: Path) -> Path:
    """Returns the directory of the run that a checkpoint lies in."""
    above = checkpoint.resolve().parents
    if len(above) < 3 or not (above[2] / RUN_CARD_FILE).is_file():
        raise InputDataError(
            "a checkpoint is read where it was saved: inside its run",
            received=checkpoint,
            allowed=f"RUN/{CHECKPOINTS_DIR}/{BEST_DIR}/NUMBER, with RUN/{RUN_CARD_FILE}",
            fix="copy the run's whole directory",
        )
    return above[2]
