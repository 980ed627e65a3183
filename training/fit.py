"""A training run from config to finished run directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from conf.manifest import MANIFEST_FILE, Manifest
from conf.paths import read_manifest, resolve_version
from conf.run import INPUT_COUNTS_FILE, update_run_card
from conf.training.train import StepRange, TrainConfig
from etl.tfrecord.reading import find_path
from training.checkpoint.restore import (
    manifest_sha256,
    read_dataset_reference,
    read_model_specs,
    read_run_manifest,
)
from training.distribution.parameter_server import released_servers
from training.distribution.strategy import (
    build_strategy,
    describe_devices,
    plan_devices,
    seed_everything,
)
from training.distribution.workers import Workers, lost_worker_errors
from training.loop.epoch_records import LOSS_METRIC
from training.loop.epochs import TrainingData
from training.loop.interruption import stop_on_signals
from training.loop.trainer import Trainer, TrainingResult
from training.loop.validation import build_validate, check_held_out, is_validated, selection_metric
from training.models.retrieval import RetrievalModel
from training.monitoring.progress import TrainingProgress
from training.run_directory import (
    counted_seconds,
    create_run,
    describe_end,
    describe_start,
    describe_tables,
    find_unfinished_run,
    locked,
    publish_run,
    recorded_status,
)
from training.tensorflow_runtime import memory_errors


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
        TrainingInterruptedError: SIGTERM or SIGINT came, to any process; the state is saved.
        SluiceError: The config, the dataset or the devices do not fit, or training failed. The
            earlier runs and the current one are untouched.
    """
    if config.devices.strategy in ("multi_worker", "parameter_server"):
        progress.message("waiting for the other processes of TF_CONFIG")
    strategy = build_strategy(config.devices)
    workers = Workers(strategy)
    with released_servers(strategy), lost_worker_errors(workers), memory_errors():
        start = _share_start(workers, config, progress, resume)
        seed_everything(config.seed)
        trainer = Trainer(config, start.data, strategy, progress, profile)
        if start.unfinished is None:
            trainer.warm_start()  # Refused, it leaves no directory behind.
        return _train(trainer, start, config, workers, progress)


def _train(
    trainer: Trainer,
    start: _Start,
    config: TrainConfig,
    workers: Workers,
    progress: TrainingProgress,
) -> Path:
    devices = describe_devices(workers.strategy, config.input.batch_size)
    run = Path(workers.share(lambda: str(start.unfinished or create_run(config))))
    with _recording(run, workers), stop_on_signals() as stop:
        if workers.is_chief:
            update_run_card(run, **describe_start(config, run, start.data, trainer.model, devices))
            _keep_counts(config, start.data, run)
        progress.message(
            f"training {config.model.name} on {devices.render()}: "
            f"{start.data.manifest.split('train').rows:,} rows, "
            f"{trainer.steps_per_epoch:,} steps per epoch, "
            f"{trainer.model.parameter_count:,} parameters; run {run}",
            run=str(run),
        )
        with counted_seconds(run, workers):
            result = trainer.fit(run, build_validate(config, start.data), stop)
        workers.share(lambda: _finish(config, run, result, trainer.model))
    return run


def _finish(config: TrainConfig, run: Path, result: TrainingResult, model: RetrievalModel) -> None:
    """Publishes a run. The status comes last: one killed in between is resumed, and published."""
    publish_run(config, run)
    update_run_card(run, **describe_end(result, model))


@contextmanager
def _recording(run: Path, workers: Workers) -> Iterator[None]:
    """Holds a run and notes how it ends, on the process that writes it."""
    with ExitStack() as stack:
        if workers.is_chief:
            stack.enter_context(locked(run))
            stack.enter_context(recorded_status(run))
        stack.enter_context(memory_errors())
        yield


@memory_errors()
def plan_run(config: TrainConfig) -> dict[str, Any]:
    """Returns what a run would do; nothing is written.

    Raises:
        SluiceError: The config, the dataset or the devices do not fit.
    """
    version_dir = resolve_version(find_path(config.dataset))
    data = TrainingData(version_dir, read_manifest(version_dir, config.input.tolerates))
    strategy, devices = plan_devices(config.devices, config.input.batch_size)
    trainer = Trainer(config, data, strategy, _NoProgress())
    splits = {split.name: split.rows for split in data.manifest.splits}
    warm = trainer.warm_start()
    return {
        "config": config.resolved(),
        "dataset": str(version_dir),
        "rows": splits,
        "steps_per_epoch": trainer.steps_per_epoch,
        "steps": trainer.steps_per_epoch * config.fit.epochs,
        "parameters": trainer.model.parameter_count,
        "tables": describe_tables(trainer.model),
        "warm_start": None if warm is None else asdict(warm),
        "features": {
            "user": list(trainer.model.user_inputs),
            "item": list(trainer.model.item_inputs),
        },
        "selected_by": _find_metric(config, data.manifest),
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
    place = find_path(str(version_dir))
    tolerates = config.input.tolerates
    manifest = read_run_manifest(place, str(expected_sha256), tolerates=tolerates)
    run = None if unfinished is None else Path(unfinished)
    # The others may not see the run; what they count is the same.
    counts_file = run / INPUT_COUNTS_FILE if run is not None and workers.is_chief else None
    return _Start(TrainingData(place, manifest, counts_file), run)


def _find_start(config: TrainConfig, progress: TrainingProgress, resume: bool) -> _Start:
    unfinished = find_unfinished_run(config) if resume else None
    if unfinished is None:
        if resume:
            progress.message("no unfinished run of this config: starting a new one")
        return _start_anew(config)
    # On with the version that the run began with, even if a newer one is current by now.
    version_dir, expected_sha256 = read_dataset_reference(unfinished)
    if not (version_dir / MANIFEST_FILE).is_file():
        progress.message(
            f"the dataset version of the unfinished run {unfinished.name} is gone "
            f"({version_dir}): starting a new run"
        )
        return _start_anew(config)
    manifest = read_run_manifest(
        version_dir, expected_sha256, read_model_specs(unfinished), config.input.tolerates
    )
    data = TrainingData(version_dir, manifest, unfinished / INPUT_COUNTS_FILE)
    return _Start(data, unfinished)


def _start_anew(config: TrainConfig) -> _Start:
    version_dir = resolve_version(find_path(config.dataset))
    manifest = read_manifest(version_dir, config.input.tolerates)
    return _Start(TrainingData(version_dir, manifest), None)


def _keep_counts(config: TrainConfig, data: TrainingData, run: Path) -> None:
    """Keeps what was counted beside the run: resumed, it has the same number of steps."""
    kept = replace(data, counts_file=run / INPUT_COUNTS_FILE)
    kept.steps_per_epoch(config.input)
    check_held_out(config, kept)


def _find_metric(config: TrainConfig, manifest: Manifest) -> str | None:
    metric = selection_metric(config)
    return metric if metric == LOSS_METRIC or is_validated(config, manifest) else None


class _NoProgress:
    """Progress of a plan: none."""

    def message(self, text: str, **fields: Any) -> None:
        """Drops the message."""

    def step(self, status: Any) -> None:
        """Drops the status."""

    def epoch(self, record: Any, best: bool) -> None:
        """Drops the record."""

    def close(self) -> None:
        """Nothing to end."""
