"""A training run from config to finished run directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from conf.artefacts.run import INPUT_COUNTS_FILE, update_run_card
from conf.errors import ConfigError, read_code_version
from conf.training.train import StepRange, TrainConfig
from training.calibration_fit import check_calibration, fit_calibrations
from training.checkpoint.stored_runs import StoredSeries, describe_run, is_stored
from training.distribution.strategy import (
    build_strategy,
    describe_devices,
    plan_devices,
)
from training.distribution.tensorflow_runtime import memory_errors, seed_everything
from training.distribution.workers import Workers, lost_worker_errors
from training.loop.early_stopping import find_used_metric
from training.loop.interruption import stop_on_signals
from training.loop.trainer import Trainer
from training.loop.validation import build_validate, check_validation
from training.models.model import Model
from training.monitoring.mlflow_log import build_client, tracked
from training.monitoring.progress import NoProgress, TrainingProgress
from training.monitoring.run_logs import TrainingResult
from training.reader.training_data import TrainingData, read_current_data
from training.run_directory import (
    RunStart,
    StartMode,
    choose_start,
    config_sha256,
    counted_seconds,
    create_run,
    describe_end,
    describe_start,
    describe_tables,
    locked,
    only_one,
    publish_run,
    recorded_status,
)


def fit_run(
    config: TrainConfig,
    progress: TrainingProgress,
    *,
    resume: bool = False,
    once: bool = False,
    profile: StepRange | None = None,
) -> Path:
    """Trains a model and returns the directory of the run.

    Args:
        config: The resolved config.
        progress: Shows how it goes.
        resume: Whether to go on with the newest run of the same config, if it is unfinished,
            at the position of its newest checkpoint.
        once: Whether to do so, and to train nothing where that run has finished on the same
            dataset version.
        profile: Steps to profile, or None.

    Raises:
        TrainingInterruptedError: SIGTERM or SIGINT came, to any process; the state is saved.
        UpstreamNotReadyError: Another process trains this config once, or the unfinished run.
        SluiceError: The config, the dataset or the devices do not fit, or training failed. The
            earlier runs and the current one are untouched.
    """
    if config.fit.refit is not None:
        raise ConfigError(
            "fit.refit trains several runs, and this call trains one",
            fix="train by `sluice train` or training.refit.fit_chosen, or leave fit.refit out",
        )
    if config.mlflow is not None:
        build_client(config)  # One that is missing is refused before a run is made.
    if config.devices.strategy == "multi_worker":
        progress.message("waiting for the other processes of TF_CONFIG")
    strategy = build_strategy(config.devices)
    workers = Workers(strategy)
    mode = StartMode.ONCE if once else StartMode.RESUME if resume else StartMode.NEW
    with lost_worker_errors(workers), memory_errors(), only_one(config, workers, mode):
        start = _choose_start(config, progress, workers, mode)
        if start.finished is not None:
            return start.finished
        seed_everything(config.seed)
        trainer = Trainer(start.pin(config), start.data, strategy, progress, profile)
        check_calibration(config, start.data, trainer.parts.model)
        if start.unfinished is None:
            trainer.warm_start()  # Refused, it leaves no directory behind.
        return _train(trainer, start, config, workers, progress)


def _choose_start(
    config: TrainConfig, progress: TrainingProgress, workers: Workers, mode: StartMode
) -> RunStart:
    """As `choose_start`, of the runs in a store, too."""
    series = _find_series(config, workers)
    if series is not None and mode is not StartMode.NEW:
        series.bring_newest(config_sha256(config))
    start = choose_start(config, progress, workers, mode)
    if start.finished is not None and workers.is_chief:
        publish_run(config, start.finished)  # One of another config may be the current one.
    if series is not None and start.finished is not None:
        series.publish(start.finished)
    return start


def _find_series(config: TrainConfig, workers: Workers) -> StoredSeries | None:
    """The runs' place in a store, on the process that writes them; None for a local one."""
    return StoredSeries(config) if workers.is_chief and is_stored(config) else None


def _train(
    trainer: Trainer,
    start: RunStart,
    config: TrainConfig,
    workers: Workers,
    progress: TrainingProgress,
) -> Path:
    devices = describe_devices(workers.strategy, config.input.batch_size)
    run = Path(workers.share(lambda: str(start.unfinished or create_run(config))))
    series = _find_series(config, workers)
    kept = nullcontext() if series is None else series.kept(run)
    with (
        kept,
        _telling(config, run, start, workers, progress),
        _recording(run, workers),
        stop_on_signals() as stop,
    ):
        if workers.is_chief:
            model = trainer.parts.model
            of_start = describe_start(config, run, start.data, model, devices, start.mixed)
            update_run_card(run, **of_start)
            _keep_counts(start.pin(config), start.data, run)
        progress.message(
            f"training {config.model.name} on {devices.render()}: "
            f"{start.data.manifest.split('train').rows:,} rows in train, "
            f"{trainer.parts.steps_per_epoch:,} steps per epoch, "
            f"{trainer.parts.model.parameter_count:,} parameters; run {describe_run(run)}",
            run=describe_run(run),
        )
        with counted_seconds(run, workers):
            result = trainer.fit(run, build_validate(config, start.data), stop)
        for line in workers.share(lambda: fit_calibrations(config, run, start.data)):
            progress.message(line)
        workers.share(lambda: _finish(config, run, result, trainer.parts.model))
    if series is not None:
        series.publish(run)
    return run


def _telling(
    config: TrainConfig,
    run: Path,
    start: RunStart,
    workers: Workers,
    progress: TrainingProgress,
) -> AbstractContextManager[None]:
    """Tells MLflow of a run, on the process that writes it."""
    tags = {
        "run": describe_run(run),
        "dataset": str(start.data.version_dir),
        "dataset_version": start.data.manifest.dataset_version,
        "code_version": read_code_version(),
    }
    return tracked(config, run, tags, progress) if workers.is_chief else nullcontext()


def _finish(config: TrainConfig, run: Path, result: TrainingResult, model: Model) -> None:
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
    data = read_current_data(config)
    strategy, devices = plan_devices(config.devices, config.input.batch_size)
    trainer = Trainer(config, data, strategy, NoProgress())
    check_calibration(config, data, trainer.parts.model)
    splits = {split.name: split.rows for split in data.manifest.splits}
    warm = trainer.warm_start()
    memory = trainer.parts.memory
    return {
        "config": config.resolved(),
        "dataset": str(data.version_dir),
        "rows": splits,
        "steps_per_epoch": trainer.parts.steps_per_epoch,
        "steps": trainer.plan.total,
        "parameters": trainer.parts.model.parameter_count,
        "tables": describe_tables(trainer.parts.model),
        "catalogue_softmax": None if memory is None else memory.to_json(),
        "warm_start": None if warm is None else asdict(warm),
        "features": trainer.parts.model.describe_inputs(),
        "selected_by": find_used_metric(config, data.manifest),
        "devices": devices.to_json(),
    }


def _keep_counts(config: TrainConfig, data: TrainingData, run: Path) -> None:
    """Keeps what was counted beside the run: resumed, it has the same number of steps."""
    kept = replace(data, counts_file=run / INPUT_COUNTS_FILE)
    kept.steps_per_epoch(config.input)
    check_validation(config, kept)
