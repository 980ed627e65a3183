"""The end of the training of a calibrated model: its kept checkpoints, fitted to labels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from conf.artefacts.run import CALIBRATION_FILE, CHECKPOINTS_DIR, write_json
from conf.errors import ConfigError, InputDataError
from conf.schema import fingerprint
from conf.training.train import TrainConfig
from training.checkpoint.checkpoint_files import Position, list_checkpoints
from training.checkpoint.restore import load_run
from training.evaluation.scored_rows import find_labelled, read_weights
from training.evaluation.tasks import check_binary, compile_scores
from training.loop.plan import is_validated
from training.loop.validation import read_validation
from training.models.calibration import TaskFit, fit_task, requires_fit
from training.models.model import Model
from training.models.ranking import RankingModel, Task
from training.reader.training_data import TrainingData

# A rate of so few rows is known to a tenth of itself at best.
_FEW_ROWS = 100


def check_calibration(config: TrainConfig, data: TrainingData, model: Model) -> None:
    """Refuses a calibration that has nothing to be fitted to, before training starts."""
    if not requires_fit(config.model) or not isinstance(model, RankingModel):
        return
    tasks = _list_binary(model)
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
            rows, fits = _fit(model, config, data)
            kept = {name: fit.line.to_json() for name, fit in fits.items() if fit.is_kept}
            at = {"epoch": position.epoch, "batch": position.batch}
            fitted[position] = {**at, "rows": rows, "tasks": kept}
            told += _describe(which, rows, fits)
    content = {"checkpoints": list(fitted.values())}
    write_json(run / CALIBRATION_FILE, {**content, "fingerprint": fingerprint(content)})
    return tuple(told)


def _describe(which: str, rows: int, fits: dict[str, TaskFit]) -> list[str]:
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


def _fit(
    model: RankingModel, config: TrainConfig, data: TrainingData
) -> tuple[int, dict[str, TaskFit]]:
    """Returns how many rows are validated on, and the fit of each binary task."""
    tasks, weight = _list_binary(model), data.manifest.find_weight()
    score = compile_scores(model, model.compute_uncalibrated_logits)
    beside = (*(task.label for task in tasks), *([] if weight is None else [weight]))
    seen: dict[str, list[NDArray[Any]]] = {task.name: [] for task in tasks}
    count = 0
    for batch in read_validation(config, data, tuple(dict.fromkeys((*model.inputs, *beside)))):
        found = score({name: batch[name] for name in model.inputs})
        for task in tasks:
            values = np.asarray(batch[task.label]).reshape(-1)
            known = find_labelled(data.manifest, task.label, values)
            check_binary(task, values[known])
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


def _list_binary(model: RankingModel) -> list[Task]:
    return [task for task in model.tasks if task.is_binary]


def _build_one_class_error(task: str, rows: int, label: int) -> InputDataError:
    return InputDataError(
        f"model.calibration of task {task} needs rows of both labels to validate on",
        received=f"{rows:,} rows, all of label {label}" if rows else "no row",
        allowed="at least one row of label 0 and one of label 1",
        fix="let validation have rows of both, by the build's split or input.validation",
    )
