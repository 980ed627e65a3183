"""A training run from config to finished run directory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tensorflow as tf

from conf.dataset import read_manifest, resolve_version
from conf.manifest import MANIFEST_FILE, Manifest
from conf.run import INPUT_COUNTS_FILE, RUN_CARD_FILE, read_json, update_run_card
from conf.training import TrainConfig
from conf.training.profile import StepRange
from training.checkpoint import (
    manifest_sha256,
    read_dataset_reference,
    read_model_specs,
    read_run_manifest,
)
from training.history import LOSS_METRIC
from training.interruption import stop_on_signals
from training.models.base import RetrievalModel
from training.progress import TrainingProgress
from training.run_directory import (
    STATUS_TRAINED,
    STATUS_TRAINING,
    config_sha256,
    create_run,
    describe_versions,
    find_unfinished_run,
    locked,
    publish_run,
    recorded_status,
)
from training.strategy import build_strategy, describe_devices, seed_everything
from training.trainer import Trainer, TrainingData, TrainingResult
from training.validation import build_validate, check_held_out, is_validated, selection_metric

KIBIBYTE = 1024


@dataclass(frozen=True)
class _Start:
    """Where a run starts: a new directory (None) or an unfinished one."""

    data: TrainingData
    unfinished: Path | None


def fit_run(
    config: TrainConfig,
    progress: TrainingProgress,
    *,
    resume: bool = False,
    profile: StepRange | None = None,
) -> Path:
    """Trains a model and returns the directory of the run.

    Args:
        config: The resolved config.
        progress: Where to tell how it goes.
        resume: Whether to go on with the newest run of the same config, if it is unfinished,
            at the position of its newest checkpoint.
        profile: Steps to profile, or None.

    Raises:
        TrainingInterruptedError: SIGTERM or SIGINT came; the state is saved.
        SluiceError: The config, the dataset or the devices do not fit, or training failed. The
            earlier runs and the current one are untouched.
    """
    start = _find_start(config, progress, resume)
    strategy = build_strategy(config.devices)
    seed_everything(config.seed)
    trainer = Trainer(config, start.data, strategy, progress, profile)
    if start.unfinished is None:
        trainer.warm_start()  # Refused, it leaves no directory behind.
    run = start.unfinished or create_run(config)
    with locked(run), recorded_status(run), stop_on_signals() as stop:
        update_run_card(run, **_describe_start(config, run, start.data, trainer.model, strategy))
        _keep_counts(config, start.data, run)
        progress.message(
            f"training {config.model.name} on {len(describe_devices(strategy))} device(s): "
            f"{start.data.manifest.split('train').rows:,} rows, "
            f"{trainer.steps_per_epoch:,} steps per epoch, "
            f"{trainer.model.parameter_count:,} parameters; run {run}",
            run=str(run),
        )
        with _counted_seconds(run):
            result = trainer.fit(run, build_validate(config, start.data), stop)
        # The status comes last: a run that was killed in between is resumed, and published.
        publish_run(config, run)
        update_run_card(run, **_describe_end(result))
    return run


def plan_run(config: TrainConfig) -> dict[str, Any]:
    """Returns what a run would do; nothing is written.

    Raises:
        SluiceError: The config, the dataset or the devices do not fit.
    """
    version_dir = resolve_version(config.dataset)
    data = TrainingData(version_dir, read_manifest(version_dir))
    strategy = build_strategy(config.devices)
    trainer = Trainer(config, data, strategy, _Silent())
    splits = {split.name: split.rows for split in data.manifest.splits}
    warm = trainer.warm_start()
    return {
        "config": config.resolved(),
        "dataset": str(version_dir),
        "rows": splits,
        "steps_per_epoch": trainer.steps_per_epoch,
        "steps": trainer.steps_per_epoch * config.fit.epochs,
        "parameters": trainer.model.parameter_count,
        "tables": _describe_tables(trainer.model),
        "warm_start": None if warm is None else asdict(warm),
        "features": {
            "user": list(trainer.model.user_inputs),
            "item": list(trainer.model.item_inputs),
        },
        "selected_by": _find_metric(config, data.manifest),
        "devices": describe_devices(strategy),
    }


def _find_start(config: TrainConfig, progress: TrainingProgress, resume: bool) -> _Start:
    unfinished = find_unfinished_run(config) if resume else None
    if unfinished is None:
        if resume:
            progress.message("no unfinished run of this config: starting a new one")
        return _start_anew(config)
    # On with the version that the run began with, even if a newer one is current by now.
    version_dir, expected_sha256 = read_dataset_reference(unfinished)
    if not (version_dir / MANIFEST_FILE).exists():
        progress.message(
            f"the dataset version of the unfinished run {unfinished.name} is gone "
            f"({version_dir}): starting a new run"
        )
        return _start_anew(config)
    manifest = read_run_manifest(version_dir, expected_sha256, read_model_specs(unfinished))
    data = TrainingData(version_dir, manifest, unfinished / INPUT_COUNTS_FILE)
    return _Start(data, unfinished)


def _start_anew(config: TrainConfig) -> _Start:
    version_dir = resolve_version(config.dataset)
    return _Start(TrainingData(version_dir, read_manifest(version_dir)), None)


def _keep_counts(config: TrainConfig, data: TrainingData, run: Path) -> None:
    """Keeps what was counted beside the run: resumed, it has the same number of steps."""
    kept = replace(data, counts_file=run / INPUT_COUNTS_FILE)
    kept.steps_per_epoch(config.input)
    check_held_out(config, kept)


def _find_metric(config: TrainConfig, manifest: Manifest) -> str | None:
    metric = selection_metric(config)
    return metric if metric == LOSS_METRIC or is_validated(config, manifest) else None


def _describe_start(
    config: TrainConfig,
    run: Path,
    data: TrainingData,
    model: RetrievalModel,
    strategy: tf.distribute.Strategy,
) -> dict[str, Any]:
    return {
        "status": STATUS_TRAINING,
        "error": None,
        "name": config.name,
        "run_id": run.name,
        "config": config.resolved(),
        "config_sha256": config_sha256(config),
        "dataset": _describe_dataset(data.version_dir, data.manifest),
        "versions": describe_versions(),
        "devices": describe_devices(strategy),
        "model": {
            "name": config.model.name,
            "parameters": model.parameter_count,
            "tables": _describe_tables(model),
            "user_inputs": list(model.user_inputs),
            "item_inputs": list(model.item_inputs),
            "specs": [
                data.manifest.schema[name].to_json()
                for name in dict.fromkeys((*model.user_inputs, *model.item_inputs))
            ],
        },
        "timing": {"training_started_at": _now()},
    }


def _describe_dataset(version_dir: Path, manifest: Manifest) -> dict[str, Any]:
    return {
        "path": str(version_dir.resolve()),
        "name": manifest.dataset_name,
        "version": manifest.dataset_version,
        "manifest_sha256": manifest_sha256(manifest),
        "rows": {split.name: split.rows for split in manifest.splits},
    }


def _describe_tables(model: RetrievalModel) -> dict[str, list[int]]:
    return {name: [table.vocabulary_size, table.dim] for name, table in model.tables.items()}


@contextmanager
def _counted_seconds(run: Path) -> Iterator[None]:
    """Adds the time of the block to the card: a resumed run counts the time of all its parts."""
    started = time.monotonic()
    try:
        yield
    finally:
        with suppress(OSError):  # A full disk must not hide what went wrong first.
            before = read_json(run / RUN_CARD_FILE)["timing"].get("train_seconds", 0.0)
            seconds = before + time.monotonic() - started
            update_run_card(run, timing={"train_seconds": seconds})


def _describe_end(result: TrainingResult) -> dict[str, Any]:
    return {
        "status": STATUS_TRAINED,
        "timing": {"training_finished_at": _now()},
        "training": {
            "best_epoch": result.best_epoch,
            "epochs": result.epochs,
            "steps": result.steps,
            "stopped_early": result.stopped_early,
            "left_out": dict(result.left_out),
            "peak_memory_bytes": peak_memory_bytes(),
        },
    }


def peak_memory_bytes() -> int:
    """Returns the most memory that this process has held, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KIBIBYTE


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class _Silent:
    """Progress of a plan: none."""

    def message(self, text: str, **fields: Any) -> None:
        """Drops the message."""

    def step(self, status: Any) -> None:
        """Drops the status."""

    def epoch(self, record: Any, best: bool) -> None:
        """Drops the record."""

    def close(self) -> None:
        """Nothing to end."""
