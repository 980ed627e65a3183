"""A training run from config to finished run directory: check, build, train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from conf.artefacts.run import INPUT_COUNTS_FILE, update_run_card
from conf.deadline import repeating
from conf.errors import ConfigError
from conf.publication.working_copy import describe_place
from conf.storage.locations import is_remote
from conf.training.train import StepRange, TrainConfig
from training.calibration_fit import check_calibration, fit_calibrations
from training.checkpoint.stored_runs import StoredSeries
from training.distribution.strategy import build_strategy, describe_devices
from training.distribution.workers import (
    Workers,
    lost_worker_errors,
    memory_errors,
    seed_everything,
)
from training.loop.epochs import stop_on_signals
from training.loop.parts import TrainingParts, build
from training.loop.plan import check
from training.loop.trainer import Trainer
from training.loop.validation import build_validate, check_validation
from training.monitoring.mlflow_log import build_client, send_run
from training.monitoring.progress import TrainingProgress
from training.run_directory import (
    RunStart,
    choose_start,
    config_sha256,
    counted_seconds,
    create_run,
    describe_end,
    describe_start,
    locked,
    only_one,
    publish_run,
    recorded_status,
)

_MLFLOW_EVERY_S = 5.0


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
        resume: Whether to go on with the newest run of the same config, if it is unfinished.
        once: The same, and to train nothing where it has finished on the same dataset version.
        profile: Steps to profile, or None.

    Raises:
        TrainingInterruptedError: SIGTERM or SIGINT came, to any process; the state is saved.
        SluiceError: Training was refused or failed; earlier runs are untouched.
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
    alone = only_one(config) if once and workers.is_chief else nullcontext()
    with lost_worker_errors(workers), memory_errors(), alone:
        start = _choose_start(config, progress, workers, resume, once)
        if start.finished is not None:
            return start.finished
        seed_everything(config.seed)
        plan = check(start.pin(), start.data)
        parts = build(plan, strategy, progress, profile)
        return train(parts, start)


def _choose_start(
    config: TrainConfig, progress: TrainingProgress, workers: Workers, resume: bool, once: bool
) -> RunStart:
    series = _find_series(config, workers)
    if series is not None and (resume or once):
        series.bring_newest(config_sha256(config))
    start = choose_start(config, progress, workers, resume=resume, once=once)
    if start.finished is not None and workers.is_chief:
        publish_run(config, start.finished)  # One of another config may be the current one.
    if series is not None and start.finished is not None:
        series.publish(start.finished)
    return start


def _find_series(config: TrainConfig, workers: Workers) -> StoredSeries | None:
    return StoredSeries(config) if workers.is_chief and is_remote(config.root) else None


def train(parts: TrainingParts, start: RunStart | None = None) -> Path:
    """Trains what is built and returns the directory of the run, by default a new one."""
    start = start or RunStart(parts.plan.config, parts.plan.data)
    config, data, progress = start.config, start.data, parts.progress
    trainer, workers = Trainer.of(parts), Workers(parts.strategy)
    check_calibration(config, data, parts.model)
    if start.unfinished is None:
        trainer.warm_start()  # Refused, it leaves no directory behind.
    run = Path(workers.share(lambda: str(start.unfinished or create_run(config))))
    series = _find_series(config, workers)
    with (
        nullcontext() if series is None else series.kept(run),
        _recording(run, start, workers, progress),
        stop_on_signals() as stop,
    ):
        _begin(run, parts, start, workers)
        with counted_seconds(run) if workers.is_chief else nullcontext():
            result = trainer.fit(run, build_validate(config, data), stop)
        for line in workers.share(lambda: fit_calibrations(config, run, data)):
            progress.message(line)

        def finish() -> None:
            publish_run(config, run)
            # The status comes last: a run that is killed in between is resumed, and published.
            update_run_card(run, **describe_end(result, parts.model))

        workers.share(finish)
    if series is not None:
        series.publish(run)
    return run


def _begin(run: Path, parts: TrainingParts, start: RunStart, workers: Workers) -> None:
    devices = describe_devices(parts.strategy, start.config.input.batch_size)
    if workers.is_chief:
        update_run_card(run, **describe_start(run, start, parts.model, devices))
        # Resumed, it has the same number of steps.
        kept = replace(start.data, counts_file=run / INPUT_COUNTS_FILE)
        kept.steps_per_epoch(parts.plan.config.input)
        check_validation(parts.plan.config, kept)
    parts.progress.message(
        f"training {start.config.model.name} on {devices['replicas']} device(s) in "
        f"{devices['workers']} process(es), batches of {devices['batch_size']:,} rows: "
        f"{start.data.manifest.split('train').rows:,} rows in train, "
        f"{parts.steps.steps_per_epoch:,} steps per epoch, "
        f"{parts.model.parameter_count:,} parameters; run {describe_place(run)}",
        run=describe_place(run),
    )


@contextmanager
def _recording(
    run: Path, start: RunStart, workers: Workers, progress: TrainingProgress
) -> Iterator[None]:
    """Holds a run, tells MLflow and notes how it ends, on the process that writes it."""
    with ExitStack() as stack:
        if workers.is_chief:
            if start.config.mlflow is not None:
                send = partial(send_run, start.config, run)
                stack.callback(send, progress.message)  # With how the run ended.
                say_once = cache(progress.message)
                stack.enter_context(repeating(_MLFLOW_EVERY_S, lambda: send(say_once)))
            stack.enter_context(locked(run))
            stack.enter_context(recorded_status(run))
        stack.enter_context(memory_errors())
        yield
