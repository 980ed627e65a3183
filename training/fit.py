"""A training run from config to finished run directory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tensorflow as tf

from conf.dataset import read_manifest, resolve_version
from conf.manifest import MANIFEST_FILE, Manifest
from conf.run import RUN_CARD_FILE, read_json, update_run_card
from conf.training import TrainConfig
from training.checkpoint import manifest_sha256, read_dataset_reference, read_run_manifest
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
from training.strategy import (
    Devices,
    build_strategy,
    describe_devices,
    plan_devices,
    seed_everything,
)
from training.trainer import Trainer, TrainingData, TrainingResult, Validate, selection_metric
from training.workers import Workers, lost_worker_errors

KIBIBYTE = 1024


@dataclass(frozen=True)
class _Start:
    """Where a run starts: a new directory (None) or an unfinished one."""

    data: TrainingData
    unfinished: Path | None


def fit_run(config: TrainConfig, progress: TrainingProgress, *, resume: bool = False) -> Path:
    """Trains a model and returns the directory of the run.

    Args:
        config: The resolved config.
        progress: Where to tell how it goes.
        resume: Whether to go on with the newest run of the same config, if it is unfinished,
            at the position of its newest checkpoint.

    Raises:
        TrainingInterruptedError: SIGTERM or SIGINT came, to any process; the state is saved.
        SluiceError: The config, the dataset or the devices do not fit, or training failed. The
            earlier runs and the current one are untouched.
    """
    if config.devices.strategy == "multi_worker":
        progress.message("waiting for the other workers of TF_CONFIG")
    strategy = build_strategy(config.devices)
    workers = Workers(strategy)
    with lost_worker_errors(workers):
        return _fit_run(config, progress, resume, strategy, workers)


def _fit_run(
    config: TrainConfig,
    progress: TrainingProgress,
    resume: bool,
    strategy: tf.distribute.Strategy,
    workers: Workers,
) -> Path:
    start = _share_start(workers, config, progress, resume)
    seed_everything(config.seed)
    trainer = Trainer(config, start.data, strategy, progress)
    if start.unfinished is None:
        trainer.warm_start()  # Refused, it leaves no directory behind.
    devices = describe_devices(strategy, config.input.batch_size)
    run = Path(workers.share(lambda: str(start.unfinished or create_run(config))))
    with _recording(run, workers), stop_on_signals() as stop:
        if workers.is_chief:
            update_run_card(run, **_describe_start(config, run, start.data, trainer.model, devices))
        progress.message(
            f"training {config.model.name} on {devices.render()}: "
            f"{start.data.manifest.split('train').rows:,} rows, "
            f"{trainer.steps_per_epoch:,} steps per epoch, "
            f"{trainer.model.parameter_count:,} parameters; run {run}",
            run=str(run),
        )
        with _counted_seconds(run, workers):
            result = trainer.fit(run, _build_validate(config, start.data), stop)
        workers.share(lambda: _finish(config, run, result))
    return run


def _finish(config: TrainConfig, run: Path, result: TrainingResult) -> None:
    """Publishes a run. The status comes last: one killed in between is resumed, and published."""
    publish_run(config, run)
    update_run_card(run, **_describe_end(result))


@contextmanager
def _recording(run: Path, workers: Workers) -> Iterator[None]:
    """Holds a run and notes how it ends, on the process that writes it."""
    with ExitStack() as stack:
        if workers.is_chief:
            stack.enter_context(locked(run))
            stack.enter_context(recorded_status(run))
        yield


def plan_run(config: TrainConfig) -> dict[str, Any]:
    """Returns what a run would do; nothing is written.

    Raises:
        SluiceError: The config, the dataset or the devices do not fit.
    """
    version_dir = resolve_version(config.dataset)
    data = TrainingData(version_dir, read_manifest(version_dir))
    strategy, devices = plan_devices(config.devices, config.input.batch_size)
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
        "selected_by": selection_metric(config) if data.manifest.has_split("validation") else None,
        "devices": devices.to_json(),
    }


def _share_start(
    workers: Workers, config: TrainConfig, progress: TrainingProgress, resume: bool
) -> _Start:
    """Returns where the run starts; every process reads the dataset version of the chief."""
    if workers.count == 1:
        return _find_start(config, progress, resume)

    def find() -> list[str | None]:
        start = _find_start(config, progress, resume)
        unfinished = None if start.unfinished is None else str(start.unfinished)
        data = start.data
        return [str(data.version_dir.absolute()), manifest_sha256(data.manifest), unfinished]

    version_dir, expected_sha256, unfinished = workers.share(find)
    manifest = read_run_manifest(Path(str(version_dir)), str(expected_sha256))
    data = TrainingData(Path(str(version_dir)), manifest)
    return _Start(data, None if unfinished is None else Path(unfinished))


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
    manifest = read_run_manifest(version_dir, expected_sha256)
    return _Start(TrainingData(version_dir, manifest), unfinished)


def _start_anew(config: TrainConfig) -> _Start:
    version_dir = resolve_version(config.dataset)
    return _Start(TrainingData(version_dir, read_manifest(version_dir)), None)


def _build_validate(config: TrainConfig, data: TrainingData) -> Validate | None:
    if not data.manifest.has_split("validation"):
        return None
    from training.evaluate import evaluate_full
    from training.protocols import warn_unmasked

    warn_unmasked(data.manifest, config.evaluation.mask_seen, "validation")

    def validate(model: RetrievalModel) -> dict[str, float]:
        evaluation = config.evaluation
        return evaluate_full(
            model,
            data.version_dir,
            data.manifest,
            "validation",
            evaluation.ks,
            evaluation.mask_seen,
            evaluation.batch_size,
        )

    return validate


def _describe_start(
    config: TrainConfig,
    run: Path,
    data: TrainingData,
    model: RetrievalModel,
    devices: Devices,
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
        "devices": devices.to_json(),
        "model": {
            "name": config.model.name,
            "parameters": model.parameter_count,
            "tables": _describe_tables(model),
            "user_inputs": list(model.user_inputs),
            "item_inputs": list(model.item_inputs),
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
def _counted_seconds(run: Path, workers: Workers) -> Iterator[None]:
    """Adds the time of the block to the card: a resumed run counts the time of all its parts."""
    if not workers.is_chief:
        yield
        return
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
