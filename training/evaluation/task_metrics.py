"""Metrics of a ranking model's tasks: AUC, GAUC and log loss of binary ones, errors of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.metrics import list_families
from conf.paths import ReadablePath
from conf.training.train import TrainConfig
from training.embedding.dynamic_table import DynamicTable
from training.evaluation.confidence_intervals import (
    CONSTANT,
    ROWS,
    GroupSums,
    UserGroups,
    bootstrap_groups,
    build_user_groups,
    describe_differences,
    find_root_gap,
)
from training.evaluation.label_metrics import (
    LabelScores,
    find_labelled,
    find_user_ids,
    read_weights,
)
from training.evaluation.own_metrics import OwnMetric, OwnScores, build_own_metrics
from training.evaluation.slices import Slicing, plan_slicings
from training.input.batches import (
    FINITE_ADVICE,
    Batch,
    Features,
    build_eval_dataset,
    read_batches,
    tell_non_finite,
)
from training.models.embedded_inputs import vector_errors
from training.models.ranking import RankingModel, Task

_SLICE_METRICS = ("auc", "log_loss", "rmse", "mae")
ScoreRows = Callable[[Features], Mapping[str, tf.Tensor]]


@dataclass
class ErrorScores:
    """Errors of predicted values, beside those of the mean.

    Attributes:
        label: Name of the label feature.
        train_mean: Mean label of the train split, which the constant predicts; None: that of the
            rows themselves.
        groups: The groups of users whose draws give intervals; None: no intervals.
        weight: Name of the feature of the rows' weights, as in the loss; None: all weigh the same.
    """

    label: str
    train_mean: float | None = None
    groups: UserGroups | None = None
    weight: str | None = None
    _rows: int = 0
    _weights: float = 0.0
    _labels: float = 0.0
    _squared_labels: float = 0.0
    _squared: float = 0.0
    _absolute: float = 0.0
    _sums: GroupSums = field(default_factory=GroupSums)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Features that are read."""
        weights = () if self.weight is None else (self.weight,)
        return (self.label, *(self.groups.inputs if self.groups else ()), *weights)

    def update(self, features: Features, scores: NDArray[np.floating]) -> None:
        """Adds rows, with their scores `[rows]`; those of weight 0 are left out.

        Raises:
            InputDataError: A weight is below 0, or no number.
        """
        labels = np.asarray(features[self.label], np.float64)
        errors = scores.astype(np.float64) - labels
        weights = read_weights(features, self.weight, len(labels))
        w = np.ones(len(labels)) if weights is None else weights
        self._rows += int(np.count_nonzero(w))
        self._weights += float(w.sum())
        self._labels += float(w @ labels)
        self._squared_labels += float(w @ np.square(labels))
        self._squared += float(w @ np.square(errors))
        self._absolute += float(w @ np.abs(errors))
        if self.groups is not None:
            columns = {"squared": errors**2, "labels": labels, "squared_labels": labels**2}
            self._sums.add(self.groups.find(features, len(labels)), columns, weights)

    def result(self) -> dict[str, Any] | None:
        """Returns RMSE and MAE beside the RMSE of a constant; None without a row."""
        if not self._rows:
            return None
        rows, mean = self._weights, self._labels / self._weights
        constant = mean if self.train_mean is None else self.train_mean
        squared = self._squared_labels / rows - 2 * constant * mean + constant**2
        values: dict[str, Any] = {
            "rows": self._rows,
            **({} if self.weight is None else {"weighted_by": self.weight}),
            "rmse": float(np.sqrt(self._squared / rows)),
            "mae": self._absolute / rows,
            "constant": {"value": constant, "rmse": float(np.sqrt(max(squared, 0.0)))},
        }
        if self.groups is not None:
            values["differences"] = self._compare(self.groups.seed, constant)
        return values

    def _compare(self, seed: int, constant: float) -> dict[str, Any]:
        """Compares with the constant."""
        sums, rows = self._sums, self._sums[ROWS]
        squared = sums["squared_labels"] - 2 * constant * sums["labels"] + constant**2 * rows
        table = np.stack([sums["squared"], np.maximum(squared, 0.0), rows], axis=1)
        [found] = bootstrap_groups(table, find_root_gap, seed)
        return describe_differences(rows, {CONSTANT: {"rmse": found}})


class TaskScores:
    """Metrics of every task over the rows of a split.

    Args:
        model: The model.
        manifest: Manifest of the rows' dataset version.
        score: The model's logits, compiled; None: compiled here.
        slicings: Cuts into slices that are measured too.
        groups: The groups of users whose draws give intervals; None: no intervals.
        user_ids: As of `LabelScores`.
    """

    def __init__(
        self,
        model: RankingModel,
        manifest: Manifest,
        score: ScoreRows | None = None,
        slicings: Sequence[Slicing] = (),
        groups: UserGroups | None = None,
        user_ids: range | None = None,
    ) -> None:
        self._model, self._score = model, score or compile_scores(model)
        self._manifest = manifest
        user = find_user_ids(manifest)
        self._scores = {
            task.name: _build_scores(task, manifest, user, groups, user_ids) for task in model.tasks
        }
        self._slices = {task.name: _SliceScores(task, manifest, slicings) for task in model.tasks}
        self._own: dict[str, OwnScores] = {}
        self._before: dict[str, LabelScores] = {}
        self._score_before = self._score

    def measure_uncalibrated(self) -> None:
        """Measures what calibrated tasks had without it, too; call it before the first rows."""
        if self._model.calibrations:
            model, weight = self._model, self._manifest.find_weight()
            self._score_before = compile_scores(model, model.compute_uncalibrated_logits)
            self._before = {
                task.name: LabelScores(task.label, temperature=1.0, weight=weight)
                for task in model.tasks
                if task.name in model.calibrations
            }

    def measure_own(self, metrics: tuple[OwnMetric, ...]) -> None:
        """Measures metrics of one's own too; call it before the first rows."""
        if metrics:
            self._own = {task.name: OwnScores(task.name, metrics) for task in self._model.tasks}

    @property
    def inputs(self) -> tuple[str, ...]:
        """Features that are read."""
        return tuple(dict.fromkeys((*self._model.inputs, *self._measured)))

    @property
    def _measured(self) -> list[str]:
        """Those that metrics read."""
        names = [name for scores in self._scores.values() for name in scores.inputs]
        return names + [name for slices in self._slices.values() for name in slices.inputs]

    def update(self, batch: Batch) -> None:
        """Adds the rows of a batch.

        Raises:
            InputDataError: A score is no number, or a label of a binary task neither 0 nor 1.
        """
        given = {name: batch[name] for name in self._model.inputs if name in batch}
        logits = self._score(given)
        before = self._score_before(given) if self._before else {}
        for task in self._model.tasks:
            scores = np.asarray(logits[task.name], np.float32)
            check_scores(task, scores, given)
            own, rows = self._keep_labelled(task, batch)
            if task.is_binary:
                check_binary(task, np.asarray(own[task.label]))
            if task.name in self._before:
                uncalibrated = np.asarray(before[task.name], np.float32)
                self._before[task.name].update(own, uncalibrated[rows])
            self._scores[task.name].update(own, scores[rows])
            self._slices[task.name].update(own, scores[rows])
            if task.name in self._own:
                self._add_own(task, own, scores[rows])

    def _keep_labelled(self, task: Task, batch: Batch) -> tuple[Batch, NDArray[np.intp] | slice]:
        """Returns what is measured of the rows that have a task's label, and their places."""
        known = find_labelled(self._manifest, task.label, np.asarray(batch[task.label]))
        if known.all():
            return batch, slice(None)
        rows = np.flatnonzero(known)
        return {name: tf.gather(batch[name], rows) for name in self._measured}, rows

    def _add_own(self, task: Task, batch: Batch, scores: NDArray[np.float32]) -> None:
        weights = read_weights(batch, self._manifest.find_weight(), len(scores))
        exact = scores.astype(np.float64)
        values = np.exp(-np.logaddexp(0.0, -exact)) if task.is_binary else exact
        self._own[task.name].update(np.asarray(batch[task.label]), values, weights)

    def result(self) -> dict[str, dict[str, Any]]:
        """Returns the metrics of each task."""
        results = {}
        for task in self._model.tasks:
            scores = self._scores[task.name]
            if isinstance(scores, ErrorScores):
                found = scores.result()
            else:
                found = scores.result(self._manifest.find_label_mean(task.label, "train"))
            results[task.name] = {"kind": task.kind, "label": task.label, **(found or {})}
            if (uncalibrated := self._before.get(task.name)) is not None:
                results[task.name]["uncalibrated"] = _describe_before(uncalibrated)
            if task.name in self._own:
                results[task.name]["own"] = self._own[task.name].result()
            if slices := self._slices[task.name].result():
                results[task.name]["slices"] = slices
        return results


def _describe_before(scores: LabelScores) -> dict[str, Any]:
    found = scores.result(None) or {}
    return {name: found[name] for name in ("log_loss", "calibration") if name in found}


def _build_scores(
    task: Task,
    manifest: Manifest,
    user: str | None,
    groups: UserGroups | None = None,
    user_ids: range | None = None,
) -> LabelScores | ErrorScores:
    own = None if groups is None else replace(groups)  # Each counts its own rows.
    weight = manifest.find_weight()
    if task.is_binary:
        return LabelScores(
            task.label, user, temperature=1.0, groups=own, weight=weight, user_ids=user_ids
        )
    return ErrorScores(task.label, manifest.find_label_mean(task.label, "train"), own, weight)


class _SliceScores:
    """Metrics of a task in each slice that has rows; GAUC is left to all rows."""

    def __init__(self, task: Task, manifest: Manifest, slicings: Sequence[Slicing]) -> None:
        self._task, self._manifest, self._slicings = task, manifest, slicings
        self._scores: dict[tuple[str, int], LabelScores | ErrorScores] = {}

    @property
    def inputs(self) -> tuple[str, ...]:
        """Features that are read."""
        return tuple(slicing.feature for slicing in self._slicings)

    def update(self, batch: Batch, scores: NDArray[np.float32]) -> None:
        """Adds rows, with their scores `[rows]`."""
        for slicing in self._slicings:
            groups = slicing.find_groups(batch)
            for group in np.unique(groups).tolist():
                rows, key = np.flatnonzero(groups == group), (slicing.name, group)
                if key not in self._scores:
                    self._scores[key] = _build_scores(self._task, self._manifest, None)
                own = self._scores[key]
                own.update(
                    {name: tf.gather(batch[name], rows) for name in own.inputs}, scores[rows]
                )

    def result(self) -> dict[str, list[dict[str, Any]]]:
        """Returns the slices as `describe_slices` does."""
        found: dict[str, list[dict[str, Any]]] = {}
        for slicing in self._slicings:
            groups = sorted(g for name, g in self._scores if name == slicing.name)
            found[slicing.name] = [self._describe(slicing, group) for group in groups]
        return found

    def _describe(self, slicing: Slicing, group: int) -> dict[str, Any]:
        own = self._scores[slicing.name, group]
        values = own.result() if isinstance(own, ErrorScores) else own.result(None)
        found = values or {"rows": 0}
        metrics = {name: found[name] for name in _SLICE_METRICS if name in found}
        rows = {"value": slicing.labels[group], "rows": found["rows"]}
        return {**rows, "systems": {"model": metrics}}


def compile_scores(model: RankingModel, compute: ScoreRows | None = None) -> ScoreRows:
    """Returns the model's logits as one compiled call; keys of dynamic tables are found outside.

    It is traced for any number of rows, as exports are: where that number is fixed, TensorFlow may
    compute in another order, and round the last digit otherwise.

    Args:
        model: The model.
        compute: Another function of the model instead of its logits.
    """
    found = compute or model.compute_logits
    if not any(isinstance(table, DynamicTable) for table in model.tables.values()):
        found = _compile_for_any_rows(found)

    def score(features: Features) -> Mapping[str, tf.Tensor]:
        with vector_errors():
            scores: Mapping[str, tf.Tensor] = found(features)
        return scores

    return score


def _compile_for_any_rows(compute: ScoreRows) -> ScoreRows:
    compiled = tf.function(compute, reduce_retracing=True)

    def score(features: Features) -> Mapping[str, tf.Tensor]:
        if not compiled.experimental_get_tracing_count():
            specs = {name: _spec_of_any_rows(value) for name, value in features.items()}
            compiled.get_concrete_function(specs)  # Calls find it before they trace anew.
        scores: Mapping[str, tf.Tensor] = compiled(features)
        return scores

    return score


def _spec_of_any_rows(value: Any) -> tf.TypeSpec:
    shape = [None, *value.shape[1:]]
    if isinstance(value, tf.RaggedTensor):
        row_splits = value.row_splits.dtype
        return tf.RaggedTensorSpec(shape, value.dtype, value.ragged_rank, row_splits)
    if isinstance(value, tf.SparseTensor):
        return tf.SparseTensorSpec(shape, value.dtype)
    return tf.TensorSpec(shape, value.dtype)


def summarize_tasks(
    model: RankingModel, results: Mapping[str, Mapping[str, Any]]
) -> dict[str, float]:
    """Returns the metrics that validation shows and early stopping knows.

    Those are the metrics of `conf.metrics` that may stop training, metrics of one's own, and `loss`
    (of a value the mean squared error). Those of further tasks have the task's name in front, as in
    `like/auc`, and `loss` is then the weighted sum over tasks.
    """
    metrics: dict[str, float] = {}
    losses = []
    for number, task in enumerate(model.tasks):
        found = results[task.name]
        prefix = f"{task.name}/" if number else ""
        families = list_families("binary", "value", may_stop=True)
        values = {family: found.get(family) for family in families} | found.get("own", {})
        values["gauc"] = (found.get("gauc") or {}).get("value")
        metrics |= {f"{prefix}{name}": v for name, v in values.items() if v is not None}
        loss = found.get("log_loss") if task.is_binary else np.square(found.get("rmse", np.nan))
        if "rows" in found:  # Others have no row with their label.
            losses.append(task.weight * float(np.nan if loss is None else loss))
    return {"loss": sum(losses) if losses else np.nan, **metrics}


def evaluate_tasks(
    model: RankingModel,
    version_dir: ReadablePath,
    manifest: Manifest,
    split: str,
    config: TrainConfig,
    score: ScoreRows | None = None,
) -> dict[str, dict[str, Any]]:
    """Returns the metrics of each task on a split, in all and by slice.

    Args:
        model: The model.
        version_dir: Directory of the dataset version.
        manifest: Its manifest.
        split: Split to measure on.
        config: How rows are read and cut, what the model was trained on, and the seed of the draws
            that give intervals.
        score: What scores the rows; None: the model.

    Raises:
        ConfigError: A slice is unknown.
        InputDataError: The split is empty, a record is damaged, or a score is no number.
    """
    slices, batch_size = config.evaluation.slices, config.evaluation.batch_size
    slicings = plan_slicings(version_dir, manifest, slices, "event", config.input)
    groups = build_user_groups(version_dir, manifest, config.seed)
    scores = TaskScores(model, manifest, score, slicings, groups)
    scores.measure_own(build_own_metrics(config.evaluation.metrics))
    if score is None:  # What serves a model gives the calibrated scores alone.
        scores.measure_uncalibrated()
    dataset = build_eval_dataset(
        version_dir,
        manifest,
        split,
        batch_size,
        scores.inputs,
        evaluation_filter=config.evaluation.filter,
    )
    for batch in read_batches(dataset, version_dir, manifest, split):
        scores.update(batch)
    return scores.result()


def check_scores(task: Task, scores: NDArray[np.floating], features: Features) -> None:
    """Refuses scores that have no order.

    Args:
        task: What they are of.
        scores: `[rows]`.
        features: What they are made of.

    Raises:
        InputDataError: One is NaN; names the features that are not finite.
    """
    bad = int(np.isnan(scores).sum())
    if bad:
        raise InputDataError(
            f"the model's scores of task {task.name} are no numbers",
            received=f"{bad} of {len(scores)} rows are NaN{tell_non_finite(features)}",
            fix=FINITE_ADVICE,
        )


def check_binary(task: Task, labels: NDArray[np.generic]) -> None:
    """Refuses labels of a binary task that are neither 0 nor 1.

    Args:
        task: The task.
        labels: `[rows]`.

    Raises:
        InputDataError: One is another number, or NaN.
    """
    bad = (labels != 0) & (labels != 1)
    if bad.any():
        raise InputDataError(
            f"label {task.label!r} holds a value that the binary task {task.name} does not know",
            received=str(labels[int(bad.argmax())]),
            allowed="0 or 1",
            fix="map the label in the build config, or set the task's objective to squared_error",
        )
