"""The end of the training of a calibrated model: its kept checkpoints, fitted to labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from conf.artefacts.run import CHECKPOINTS_DIR
from conf.errors import ConfigError, InputDataError
from conf.training.train import TrainConfig
from training.checkpoint.calibrations import (
    CheckpointCalibration,
    requires_fit,
    write_calibrations,
)
from training.checkpoint.checkpoint_files import list_checkpoints
from training.checkpoint.restore import load_run
from training.evaluation.metrics import FloatArray, find_log_losses
from training.evaluation.scored_rows import find_labelled, read_weights
from training.evaluation.tasks import check_binary, compile_scores
from training.loop.validation import is_validated, read_validation
from training.models.calibration import Calibration
from training.models.model import Model
from training.models.ranking import RankingModel, Task
from training.reader.training_data import TrainingData

# A rate of so few rows is known to a tenth of itself at best.
_FEW_ROWS = 100
_LEAST_WEIGHT = 1e-300
_FOLDS = 5


def check_calibration(config: TrainConfig, data: TrainingData, model: Model) -> None:
    """Refuses a calibration that has nothing to be fitted to, before training starts.

    Args:
        config: The run's config.
        data: The dataset version.
        model: The model.

    Raises:
        ConfigError: There are no rows to validate on, or no task has a binary label.
        InputDataError: The validation split has rows of one label alone.
    """
    if not requires_fit(config.model) or not isinstance(model, RankingModel):
        return
    tasks = _list_binary(model)
    if not tasks:
        raise ConfigError(
            "model.calibration is of probabilities, and no task of the model has any",
            received=", ".join(f"{task.name}: {task.kind}" for task in model.tasks),
            allowed="a task with objective binary",
            fix="leave model.calibration out",
        )
    if not is_validated(config, data.manifest):
        raise ConfigError(
            "model.calibration has no rows to validate on, which it is fitted to",
            received=f"splits {', '.join(split.name for split in data.manifest.splits)}",
            fix="build the dataset with a validation split, set input.validation, or leave "
            "model.calibration out",
        )
    if config.input.validation is None:
        rows = data.manifest.split("validation").rows
        for task in tasks:
            rate = data.manifest.find_label_rate(task.label).get("validation")
            if rate in (0.0, 1.0):
                raise refuse_one_class(task.name, rows, int(rate))


def fit_calibrations(config: TrainConfig, run: Path, data: TrainingData) -> tuple[str, ...]:
    """Fits the calibration of each kept checkpoint that commands load, and writes them.

    Each is loaded beside the model that was trained, which takes the memory of one more.

    Args:
        config: The run's config.
        run: Directory of the run.
        data: The dataset version.

    Returns:
        Lines to tell of it; none: the model is not calibrated.

    Raises:
        InputDataError: There are rows of one label alone, a label is neither 0 nor 1, or log-odds
            are not finite.
    """
    if not requires_fit(config.model):
        return ()
    fitted: dict[object, CheckpointCalibration] = {}
    told: list[str] = []
    names: tuple[Literal["best", "last"], ...] = ("best", "last")
    for which in names:
        position = list_checkpoints(run / CHECKPOINTS_DIR / which)[-1].position
        if position not in fitted:
            model = load_run(run, which, is_calibrated=False).model
            if not isinstance(model, RankingModel):
                raise TypeError(f"a {type(model).__name__} has no tasks to calibrate")
            found = _fit(model, config, data)
            fitted[position] = CheckpointCalibration(position, found.rows, found.kept)
            told += found.describe(which)
    write_calibrations(run, list(fitted.values()))
    return tuple(told)


@dataclass(frozen=True)
class TaskFit:
    """A calibration, beside the log loss of rows that it was not fitted to.

    Attributes:
        line: Fitted to all rows.
        rarer: Rows of the rarer label.
        loss: Log loss of five folds, each calibrated by the others.
        loss_before: Log loss without.
        error: Standard error of the difference.
    """

    line: Calibration
    rarer: int
    loss: float
    loss_before: float
    error: float

    @property
    def is_kept(self) -> bool:
        """Whether the rows do not say that it does harm."""
        return self.loss - self.loss_before <= self.error


@dataclass(frozen=True)
class _CheckpointFit:
    rows: int
    tasks: Mapping[str, TaskFit]

    @property
    def kept(self) -> dict[str, Calibration]:
        return {name: fit.line for name, fit in self.tasks.items() if fit.is_kept}

    def describe(self, which: str) -> list[str]:
        """Says what is calibrated, and what is left out."""
        few = "".join(
            f"; warning: of task {name} only {self.tasks[name].rarer:,} have the rarer label, and "
            "the calibrated probabilities are as uncertain as their rate"
            for name in self.kept
            if self.tasks[name].rarer < _FEW_ROWS
        )
        rows = f"{self.rows:,} rows to validate on"
        told = [f"probabilities are calibrated by isotonic regression on {rows}{few}"]
        return (told if self.kept and which == "best" else []) + [
            f"task {name} of the {which} checkpoint is not calibrated: over five folds of the "
            f"{rows}, log loss is {fit.loss:.4f} with it and {fit.loss_before:.4f} without"
            for name, fit in self.tasks.items()
            if not fit.is_kept
        ]


def _fit(model: RankingModel, config: TrainConfig, data: TrainingData) -> _CheckpointFit:
    tasks, weight = _list_binary(model), data.manifest.find_weight()
    score = compile_scores(model, model.compute_uncalibrated_logits)
    beside = (*(task.label for task in tasks), *([] if weight is None else [weight]))
    logits: dict[str, list[NDArray[np.float32]]] = {task.name: [] for task in tasks}
    labels: dict[str, list[NDArray[np.bool_]]] = {task.name: [] for task in tasks}
    known: dict[str, list[NDArray[np.bool_]]] = {task.name: [] for task in tasks}
    weights: list[FloatArray] = []
    for batch in read_validation(config, data, tuple(dict.fromkeys((*model.inputs, *beside)))):
        found = score({name: batch[name] for name in model.inputs})
        for task in tasks:
            logits[task.name].append(np.asarray(found[task.name], np.float32))
            values = np.asarray(batch[task.label]).reshape(-1)
            known[task.name].append(find_labelled(data.manifest, task.label, values))
            check_binary(task, values[known[task.name][-1]])
            labels[task.name].append(values > 0.5)
        rows = len(labels[tasks[0].name][-1])
        own = read_weights(batch, weight, rows)
        weights.append(np.ones(rows) if own is None else own)
    w = np.concatenate([np.zeros(0), *weights])
    fits = {}
    for name in logits:
        z, y = np.concatenate([*logits[name], []]), np.concatenate([*labels[name], []])
        own = w * np.concatenate([*known[name], []])
        fits[name] = _fit_task(name, z, y.astype(bool), own, model.calibrations.get(name))
    return _CheckpointFit(len(w), fits)


def _fit_task(
    name: str,
    logits: NDArray[np.floating],
    labels: NDArray[np.bool_],
    weights: FloatArray,
    before: Calibration | None,
) -> TaskFit:
    """Fits rows of weight above 0: others count for nothing."""
    kept = np.flatnonzero(weights)
    logits, labels, weights = logits[kept], labels[kept], weights[kept]
    if not 0 < labels.sum() < len(labels):
        raise refuse_one_class(name, len(labels), int(labels.any()))
    if not np.isfinite(logits).all():
        raise InputDataError(
            f"log-odds of task {name} are not finite: nothing can be fitted to them",
            received=f"{int((~np.isfinite(logits)).sum()):,} of {len(logits):,} rows",
            fix="look for numbers in the features that are far from all others",
        )
    return fit_task(logits.astype(np.float32), labels, weights, before)


def fit_task(
    logits: NDArray[np.float32],
    labels: NDArray[np.bool_],
    weights: FloatArray,
    before: Calibration | None = None,
) -> TaskFit:
    """Fits a calibration to rows, and measures it on five folds of them.

    Args:
        logits: `[rows]`, log-odds of a network, finite.
        labels: `[rows]`, whether each is a positive.
        weights: `[rows]`, above 0, what each counts for.
        before: What log-odds go through without it.
    """
    # Folds of like shares of both labels.
    order = np.lexsort((np.random.default_rng(0).random(len(labels)), labels))
    folds = np.argsort(order) % _FOLDS
    calibrated = np.zeros_like(logits)
    for out in (folds == fold for fold in range(_FOLDS)):
        line = fit_isotonic(logits[~out], labels[~out], weights[~out])
        calibrated[out] = line.apply(logits[out])
    losses = find_log_losses(labels, calibrated)
    losses_before = find_log_losses(labels, logits if before is None else before.apply(logits))
    share = weights / weights.max()
    share = share / share.sum()
    loss, loss_before = float(share @ losses), float(share @ losses_before)
    error = np.linalg.norm(share * (losses - losses_before - (loss - loss_before)))
    rarer = int(min(labels.sum(), (~labels).sum()))
    return TaskFit(fit_isotonic(logits, labels, weights), rarer, loss, loss_before, float(error))


def _list_binary(model: RankingModel) -> list[Task]:
    return [task for task in model.tasks if task.is_binary]


def fit_isotonic(
    logits: NDArray[np.floating], labels: NDArray[np.bool_], weights: FloatArray | None = None
) -> Calibration:
    """Fits a calibration to rows.

    A step of one label alone would be a probability of 0 or 1: of its own rows, half a row is of
    the label that it lacks, of that label's lightest. Steps are pooled again after that.

    Args:
        logits: `[rows]`, log-odds of a network, finite.
        labels: `[rows]`, whether each is a positive.
        weights: `[rows]`, above 0, what each counts for; None: 1.
    """
    own = np.ones(len(labels)) if weights is None else weights
    own = np.maximum(own / own.max(), _LEAST_WEIGHT)  # Of any size, whose sums are finite.
    x, place = np.unique(logits.astype(np.float32), return_inverse=True)
    w = np.bincount(place, own, len(x)).astype(np.float64)
    steps = _pool(x.astype(np.float64), np.bincount(place, own * labels, len(x)) / w, w)
    middle, rate, _ = _pool(steps[0], _keep_from_ends(*steps[1:], own, labels), steps[2])
    knots = np.stack([middle, np.log(rate) - np.log1p(-rate)]).astype(np.float32)
    # Steps that are one number in float32 are one knot.
    kept = np.concatenate(([True], (np.diff(knots) > 0).all(axis=0)))
    return Calibration(*(tuple(values) for values in knots[:, kept].tolist()))


def _pool(
    x: FloatArray, rates: FloatArray, weights: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Returns the middle, the rate and the weight of each step of rates that rise."""
    starts = pool_adjacent_violators(rates, weights)
    total = np.add.reduceat(weights, starts)
    middle, rate = (np.add.reduceat(weights * values, starts) / total for values in (x, rates))
    return middle, rate, total


def _keep_from_ends(
    rates: FloatArray, totals: FloatArray, weights: FloatArray, labels: NDArray[np.bool_]
) -> FloatArray:
    """Returns the rates of steps, half a row of each step's own from 0 and 1."""
    lightest = (weights.min(where=of, initial=1.0) for of in (labels, ~labels))
    low, high = (np.minimum(0.5, 0.5 * lacking / totals) for lacking in lightest)
    return np.clip(rates, low, np.minimum(1.0 - high, np.nextafter(1.0, 0.0)))


def refuse_one_class(task: str, rows: int, label: int) -> InputDataError:
    """Returns the error of rows to validate on that are of one label alone, or none."""
    return InputDataError(
        f"model.calibration of task {task} needs rows of both labels to validate on",
        received=f"{rows:,} rows, all of label {label}" if rows else "no row",
        allowed="at least one row of label 0 and one of label 1",
        fix="let validation have rows of both (the build's split, or input.validation), or leave "
        "model.calibration out",
    )


def pool_adjacent_violators(values: FloatArray, weights: FloatArray) -> NDArray[np.intp]:
    """Returns where the steps of the nearest rising sequence begin, by weighted squares.

    Args:
        values: `[n]`, 1 or more.
        weights: `[n]`, above 0.

    Returns:
        Rising positions, the first 0; the mean of a step is above that of the one before.
    """
    starts: list[int] = []
    sums: list[tuple[float, float]] = []
    for position, (value, weight) in enumerate(zip(values.tolist(), weights.tolist(), strict=True)):
        start, total, mass = position, value * weight, weight
        while sums and sums[-1][0] * mass >= total * sums[-1][1]:
            before, its_mass = sums.pop()
            start, total, mass = starts.pop(), total + before, mass + its_mass
        starts.append(start)
        sums.append((total, mass))
    return np.array(starts, np.intp)
