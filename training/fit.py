"""A training run from config to finished run directory: check, build, train, calibrate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np
from numpy.typing import NDArray

from conf.artefacts.run import (
    CALIBRATION_FILE,
    CHECKPOINTS_DIR,
    INPUT_COUNTS_FILE,
    update_run_card,
    write_json,
)
from conf.deadline import repeating
from conf.errors import ConfigError, InputDataError
from conf.publication.working_copy import describe_place
from conf.schema import fingerprint
from conf.storage.locations import is_remote
from conf.training.train import StepRange, TrainConfig
from training.checkpoint.checkpoint_files import Position, list_checkpoints
from training.checkpoint.restore import load_run
from training.checkpoint.stored_runs import StoredSeries
from training.distribution.strategy import build_strategy, describe_devices
from training.distribution.workers import Workers, lost_worker_errors, memory_errors
from training.evaluation.scored_rows import find_labelled, read_weights
from training.evaluation.tasks import compile_scores
from training.loop.epochs import stop_on_signals
from training.loop.parts import TrainingParts, build
from training.loop.plan import check, is_validated
from training.loop.trainer import Trainer
from training.loop.validation import build_validate, check_validation, read_validation
from training.models.calibration import TaskFit, fit_task, requires_fit
from training.models.model import Model
from training.models.ranking import RankingModel
from training.monitoring.mlflow_log import build_client, send_run
from training.monitoring.progress import TrainingProgress
from training.reader.feature_columns import check_binary
from training.reader.training_data import TrainingData
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
# A rate of so few rows is known to a tenth of itself at best.
_FEW_ROWS = 100


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
        keras.utils.set_random_seed(config.seed)
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


def check_calibration(config: TrainConfig, data: TrainingData, model: Model) -> None:
    """Refuses a calibration that has nothing to be fitted to, before training starts."""
    if not requires_fit(config.model) or not isinstance(model, RankingModel):
        return
    tasks = [task for task in model.tasks if task.is_binary]
    if not tasks:
        raise ConfigError(
            "model.calibration is of probabilities, and no task of the model has any",
            received=", ".join(f"{task.name}: {task.kind}" for task in model.tasks),
            fix="leave model.calibration out",
        )
    if not is_validated(config, data.manifest):
        raise ConfigError(
            "model.calibration has no rows to validate on, which it is fitted to",
            received=f"splits {', '.join(split.name for split in data.manifest.splits)}",
            fix="build the dataset with a validation split, or set input.validation",
        )
    if config.input.validation is None:
        rows = data.manifest.split("validation").rows
        for task in tasks:
            rate = data.manifest.find_label_rate(task.label).get("validation")
            if rate in (0.0, 1.0):
                raise _build_one_class_error(task.name, rows, int(rate))


def fit_calibrations(config: TrainConfig, run: Path, data: TrainingData) -> tuple[str, ...]:
    """Fits the calibration of each kept checkpoint that commands load; returns what to tell of it.

    Each is loaded beside the model that was trained, which takes the memory of one more.
    """
    if not requires_fit(config.model):
        return ()
    fitted: dict[Position, dict[str, Any]] = {}
    told: list[str] = []
    names: tuple[Literal["best", "last"], ...] = ("best", "last")
    for which in names:
        position = list_checkpoints(run / CHECKPOINTS_DIR / which)[-1].position
        if position not in fitted:
            model = load_run(run, which, is_calibrated=False).model
            if not isinstance(model, RankingModel):
                raise TypeError(f"a {type(model).__name__} has no tasks to calibrate")
            rows, fits = _fit_tasks(model, config, data)
            kept = {name: fit.line.to_json() for name, fit in fits.items() if fit.is_kept}
            at = {"epoch": position.epoch, "batch": position.batch}
            fitted[position] = {**at, "rows": rows, "tasks": kept}
            told += _describe_fits(which, rows, fits)
    content = {"checkpoints": list(fitted.values())}
    write_json(run / CALIBRATION_FILE, {**content, "fingerprint": fingerprint(content)})
    return tuple(told)


def _describe_fits(which: str, rows: int, fits: dict[str, TaskFit]) -> list[str]:
    """Says what is calibrated, and what is left out."""
    of_rows = f"{rows:,} rows to validate on"
    few = "".join(
        f"; warning: of task {name} only {fit.rarer:,} have the rarer label, and the calibrated "
        "probabilities are as uncertain as their rate"
        for name, fit in fits.items()
        if fit.is_kept and fit.rarer < _FEW_ROWS
    )
    told = [f"probabilities are calibrated by isotonic regression on {of_rows}{few}"]
    has_kept = any(fit.is_kept for fit in fits.values())
    return (told if has_kept and which == "best" else []) + [
        f"task {name} of the {which} checkpoint is not calibrated: over five folds of the "
        f"{of_rows}, log loss is {fit.loss:.4f} with it and {fit.loss_before:.4f} without"
        for name, fit in fits.items()
        if not fit.is_kept
    ]


def _fit_tasks(
    model: RankingModel, config: TrainConfig, data: TrainingData
) -> tuple[int, dict[str, TaskFit]]:
    """Returns how many rows are validated on, and the fit of each binary task."""
    tasks, weight = [t for t in model.tasks if t.is_binary], data.manifest.find_weight()
    score = compile_scores(model, model.compute_uncalibrated_logits)
    beside = (*(task.label for task in tasks), *([] if weight is None else [weight]))
    seen: dict[str, list[NDArray[Any]]] = {task.name: [] for task in tasks}
    count = 0
    for batch in read_validation(config, data, tuple(dict.fromkeys((*model.inputs, *beside)))):
        found = score({name: batch[name] for name in model.inputs})
        for task in tasks:
            values = np.asarray(batch[task.label]).reshape(-1)
            known = find_labelled(data.manifest, task.label, values)
            check_binary(task.label, values[known], f"rows of task {task.name}")
            weights = read_weights(batch, weight, len(values))
            own = known * (1.0 if weights is None else weights)
            logits = np.asarray(found[task.name], np.float32)
            seen[task.name].append(np.stack([logits, values > 0.5, own]).astype(np.float64))
        count += len(values)
    return count, {name: _fit_task(name, parts, model) for name, parts in seen.items()}


def _fit_task(name: str, parts: Sequence[NDArray[Any]], model: RankingModel) -> TaskFit:
    """Fits rows, `[3, rows]` of logits, labels and weights; those of weight 0 count for nothing."""
    rows = np.concatenate([np.zeros((3, 0)), *parts], axis=1)
    logits, positive, weights = rows[:, rows[2] > 0]
    labels = positive > 0
    if not 0 < labels.sum() < len(labels):
        raise _build_one_class_error(name, len(labels), int(labels.any()))
    if not np.isfinite(logits).all():
        raise InputDataError(
            f"log-odds of task {name} are not finite: nothing can be fitted to them",
            received=f"{int((~np.isfinite(logits)).sum()):,} of {len(logits):,} rows",
            fix="look for numbers in the features that are far from all others",
        )
    return fit_task(logits.astype(np.float32), labels, weights, model.calibrations.get(name))


def _build_one_class_error(task: str, rows: int, label: int) -> InputDataError:
    return InputDataError(
        f"model.calibration of task {task} needs rows of both labels to validate on",
        received=f"{rows:,} rows, all of label {label}" if rows else "no row",
        allowed="at least one row of label 0 and one of label 1",
        fix="let validation have rows of both, by the build's split or input.validation",
    )
