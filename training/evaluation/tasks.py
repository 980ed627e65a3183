"""Metrics of labels and of a ranking model's tasks, beside a constant prediction.

Of binary labels AUC, GAUC, log loss and calibration; of values RMSE and MAE. Rows are those of
`scored_rows`: of users, weights and slices they know what the table knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from conf.errors import ConfigError, InputDataError
from conf.manifest import Manifest
from conf.metrics import list_families
from training.checkpoint.restore import TrainedModel
from training.embedding.dynamic_table import DynamicTable
from training.evaluation.intervals import (
    CONSTANT,
    GROUPS,
    Interval,
    compare_auc,
    compare_groups,
    compare_rows,
    describe_differences,
    find_gap,
    find_means,
    find_root_gap,
)
from training.evaluation.metrics import (
    BINARY_METRICS,
    VALUE_METRICS,
    FloatArray,
    GroupedAUC,
    IntArray,
    StreamedAUC,
    StreamedCalibration,
    absolute_errors,
    auc_by_group,
    constant_log_loss,
    find_log_losses,
    square_errors,
)
from training.evaluation.own_metrics import OwnMetric, OwnScores, build_own_metrics
from training.evaluation.scored_rows import (
    ROWS,
    GroupSums,
    RowColumns,
    ScoredRows,
    UserGroups,
    build_user_groups,
    count_owners,
    has_user_vocabulary,
    number_owners,
    plan_slicings,
)
from training.input.batches import (
    FINITE_ADVICE,
    Batch,
    Features,
    read_split,
    tell_non_finite,
)
from training.models.embedded_inputs import vector_errors
from training.models.ranking import RankingModel, Task
from training.reader.feature_columns import check_binary

ScoreRows = Callable[[Features], Mapping[str, tf.Tensor]]
"""From the inputs of a model to the logits or values of each task, `[rows]`."""
_SLICE_METRICS = ("auc", "log_loss", "rmse", "mae")


class LabelScores:
    """Metrics of a binary label, with GAUC of `users` and, by `seed`, with intervals.

    `temperature` is what scores are divided by to be log-odds (None: they are none), `train_rate`
    the rate of train, the constant prediction (None: the rows' own).
    """

    def __init__(
        self,
        temperature: float | None = None,
        users: UserGroups | None = None,
        seed: int | None = None,
        train_rate: float | None = None,
    ) -> None:
        self._temperature, self._users, self._seed = temperature, users, seed
        self._train_rate = train_rate
        self._rows = self._unnamed = 0
        self._auc, self._gauc = StreamedAUC(), GroupedAUC()
        self._calibration = StreamedCalibration()
        self._sums = GroupSums(1 if seed is None else 2 * GROUPS)

    def add(self, rows: ScoredRows) -> None:
        positive, scores, weights = rows.labels > 0.5, rows.scores.astype(np.float32), rows.weights
        groups = None if self._seed is None else rows.groups
        self._rows += len(rows)
        self._auc.update(positive, scores, groups, weights)
        if self._users is not None:
            # Users outside the vocabulary share an id or a bucket, and are many.
            known = self._users.are_named(rows.users)
            self._unnamed += int(np.count_nonzero(~known))
            own = None if weights is None else weights[known]
            self._gauc.update(rows.users[known], positive[known], scores[known], own)
        values: dict[str, NDArray[Any]] = {"positives": positive}
        if self._temperature is not None:
            logits = scores / self._temperature
            values["log_loss"] = find_log_losses(positive, logits)
            self._calibration.update(positive, logits, weights)
        self._sums.add(values, groups, weights)

    def result(self) -> dict[str, Any] | None:
        """The metrics, beside those of the constant; None of no rows."""
        if not self._rows:
            return None
        means, auc = self._sums.means(), self._auc.result()
        rate = means["positives"] if self._train_rate is None else self._train_rate
        gauc, gaps = (None, None) if self._users is None else self._gauc.result()
        if gauc is not None:
            gauc["rows_of_unknown_users"] = self._unnamed
        constant = constant_log_loss(means["positives"], rate)
        return {
            "rows": self._rows,
            "auc": None if auc is None else auc.value,
            "auc_error": None if auc is None else auc.error,
            "gauc": gauc,
            "log_loss": means.get("log_loss"),
            "calibration": self._calibration.result(),
            "constant": {"auc": 0.5, "log_loss": constant, "rate": rate},
            **({} if self._seed is None else self._compare(self._seed, rate, gaps)),
        }

    def _compare(self, seed: int, rate: float, gaps: FloatArray | None) -> dict[str, Any]:
        intervals: dict[str, Interval] = {}
        if (auc := self._auc.compare()) is not None:
            intervals["auc"] = auc
        if gaps is not None and gaps.any():
            [intervals["gauc"]] = compare_groups(gaps, find_means, seed)
        if self._temperature is not None and 0.0 < rate < 1.0:
            rows, positives = self._sums[ROWS], self._sums["positives"]
            constant = -positives * np.log(rate) - (rows - positives) * np.log1p(-rate)
            table = np.stack([self._sums["log_loss"], constant, rows], axis=1)
            [intervals["log_loss"]] = compare_groups(table, find_gap, seed)
        return {"differences": describe_differences(self._sums[ROWS], {CONSTANT: intervals})}


class ErrorScores:
    """Errors of predicted values, beside the constant `train_mean`; None: the rows' own mean."""

    def __init__(self, train_mean: float | None = None, seed: int | None = None) -> None:
        self._train_mean, self._seed, self._rows = train_mean, seed, 0
        self._sums = GroupSums(1 if seed is None else 2 * GROUPS)

    def add(self, rows: ScoredRows) -> None:
        self._rows += len(rows)
        values = {
            "labels": rows.labels,
            "squared_labels": np.square(rows.labels),
            "squared": square_errors(rows.labels, rows.scores),
            "absolute": absolute_errors(rows.labels, rows.scores),
        }
        self._sums.add(values, None if self._seed is None else rows.groups, rows.weights)

    def result(self) -> dict[str, Any] | None:
        if not self._rows:
            return None
        sums, means = self._sums, self._sums.means()
        constant = means["labels"] if self._train_mean is None else self._train_mean
        squared = sums["squared_labels"] - 2 * constant * sums["labels"] + constant**2 * sums[ROWS]
        error = float(np.sqrt(max(squared.sum() / sums.total(), 0.0)))
        values = {
            "rows": self._rows,
            "rmse": float(np.sqrt(means["squared"])),
            "mae": means["absolute"],
            "constant": {"value": constant, "rmse": error},
        }
        if self._seed is None:
            return values
        table = np.stack([sums["squared"], np.maximum(squared, 0.0), sums[ROWS]], axis=1)
        [found] = compare_groups(table, find_root_gap, self._seed)
        against = {CONSTANT: {"rmse": found}}
        return {**values, "differences": describe_differences(sums[ROWS], against)}


@dataclass
class _TaskParts:
    """What one task is measured by: all rows, each slice, before calibration, by the user."""

    task: Task
    columns: RowColumns
    whole: LabelScores | ErrorScores
    before: LabelScores | None = None
    own: OwnScores | None = None
    slices: dict[tuple[int, int], LabelScores | ErrorScores] = field(default_factory=dict)

    def add(self, batch: Batch, scores: NDArray[np.float32], before: tf.Tensor | None) -> None:
        every = self.columns.read(batch, scores)
        rows = every.take_counted()
        if self.task.is_binary:
            check_binary(self.task.label, rows.labels, f"rows of task {self.task.name}")
        self.whole.add(rows)
        for number, groups in enumerate(rows.slices):
            for group in np.unique(groups).tolist():
                if (number, group) not in self.slices:
                    new = LabelScores(1.0) if self.task.is_binary else ErrorScores()
                    self.slices[number, group] = new
                self.slices[number, group].add(rows.take(np.flatnonzero(groups == group)))
        if self.before is not None:
            scores = np.asarray(before, np.float32)
            self.before.add(replace(every, scores=scores).take_counted())
        if self.own is not None:
            exact = rows.scores.astype(np.float64)
            values = np.exp(-np.logaddexp(0.0, -exact)) if self.task.is_binary else exact
            self.own.add(rows, values)

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = {"kind": self.task.kind, "label": self.task.label}
        if found := self.whole.result():
            described |= {**found, **self.columns.describe_weight()}
        if self.before is not None:
            described["uncalibrated"] = _pick(self.before.result(), ("log_loss", "calibration"))
        if self.own is not None:
            described["own"] = self.own.result()
        if self.columns.slicings:
            described["slices"] = self._describe_slices()
        return described

    def _describe_slices(self) -> dict[str, list[dict[str, Any]]]:
        slicings = self.columns.slicings
        found: dict[str, list[dict[str, Any]]] = {slicing.name: [] for slicing in slicings}
        for number, group in sorted(self.slices):
            values = self.slices[number, group].result() or {"rows": 0}
            value = {"value": slicings[number].labels[group], "rows": values["rows"]}
            systems = {"model": _pick(values, _SLICE_METRICS)}
            found[slicings[number].name].append({**value, "systems": systems})
        return found


def _pick(values: Mapping[str, Any] | None, names: Sequence[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values} if values else {}


class TaskScores:
    """Metrics of each task of a ranking model, batch by batch.

    `score` scores rows (None: the model), `columns` has groups of users and slices, `seed` is that
    of the intervals (None: without them).
    """

    def __init__(
        self,
        model: RankingModel,
        manifest: Manifest,
        score: ScoreRows | None = None,
        columns: RowColumns | None = None,
        seed: int | None = None,
    ) -> None:
        self._model, self._score = model, score or compile_scores(model)
        self._score_before: ScoreRows | None = None
        columns = columns or RowColumns()
        users = columns.groups if has_user_vocabulary(manifest) else None
        self._parts: dict[str, _TaskParts] = {}
        for task in model.tasks:
            mean = manifest.find_label_mean(task.label, "train")
            whole = LabelScores(1.0, users, seed, mean)
            self._parts[task.name] = _TaskParts(
                task,
                columns.with_label(manifest, task.label),
                whole if task.is_binary else ErrorScores(mean, seed),
            )

    def measure_uncalibrated(self) -> None:
        """Also measures log loss and calibration without the calibration that was fitted."""
        if self._model.calibrations:
            compute = self._model.compute_uncalibrated_logits
            self._score_before = compile_scores(self._model, compute)
            for name in self._model.calibrations:
                self._parts[name].before = LabelScores(1.0)

    def measure_own(self, metrics: tuple[OwnMetric, ...]) -> None:
        for name, part in self._parts.items():
            part.own = OwnScores(name, metrics) if metrics else None

    @property
    def inputs(self) -> tuple[str, ...]:
        names = [name for part in self._parts.values() for name in part.columns.inputs]
        return tuple(dict.fromkeys((*self._model.inputs, *names)))

    def update(self, batch: Batch) -> None:
        """Adds a batch; its scores have to be numbers, and labels those of their task."""
        given = {name: batch[name] for name in self._model.inputs if name in batch}
        logits = self._score(given)
        before = {} if self._score_before is None else self._score_before(given)
        for name, part in self._parts.items():
            scores = np.asarray(logits[name], np.float32)
            check_scores(part.task, scores, given)
            part.add(batch, scores, before.get(name))

    def result(self) -> dict[str, dict[str, Any]]:
        return {name: part.describe() for name, part in self._parts.items()}


def compile_scores(model: RankingModel, compute: ScoreRows | None = None) -> ScoreRows:
    """Compiles logits, or `compute`, for any number of rows; dynamic tables map keys in Python."""
    run: Any = compute or model.compute_logits
    is_graph = not any(isinstance(table, DynamicTable) for table in model.tables.values())
    if is_graph:
        run = tf.function(run, reduce_retracing=True)

    def score(features: Features) -> Mapping[str, tf.Tensor]:
        with vector_errors():
            if is_graph and not run.experimental_get_tracing_count():
                specs = {name: _spec_of_any_rows(value) for name, value in features.items()}
                run.get_concrete_function(specs)  # Calls find it before they trace anew.
            scores: Mapping[str, tf.Tensor] = run(features)
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
    """Flattens the results of tasks to what validation keeps: of the first without a prefix.

    `loss` sums each task's log loss or mean squared error by its weight.
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
    trained: TrainedModel, model: RankingModel, split: str, score: ScoreRows | None = None
) -> dict[str, dict[str, Any]]:
    """Measures tasks with slices and intervals; `score` scores rows in place of the model."""
    where, config = (trained.version_dir, trained.manifest), trained.config
    slicings = plan_slicings(*where, config.evaluation.slices, "event", config.input)
    columns = RowColumns(build_user_groups(*where), slicings)
    scores = TaskScores(model, trained.manifest, score, columns, config.seed)
    scores.measure_own(build_own_metrics(config))
    if score is None:  # What serves a model gives the calibrated scores alone.
        scores.measure_uncalibrated()
    for batch in read_scored(trained, split, scores.inputs):
        scores.update(batch)
    return scores.result()


def read_scored(trained: TrainedModel, split: str, names: tuple[str, ...]) -> Iterator[Batch]:
    where, config = (trained.version_dir, trained.manifest), trained.config.evaluation
    return read_split(*where, split, config.batch_size, names, (), config.filter)


def compare_tasks(trained: TrainedModel, other: TrainedModel, split: str) -> dict[str, Any]:
    """Compares the tasks that two ranking models have in common, row by row."""
    where, tasks = (trained.version_dir, trained.manifest), _find_common_tasks(trained, other)
    own, rival = (_score_rows(trained, one.model, split, tasks) for one in (trained, other))
    metrics: dict[str, Interval] = {}
    for task, rows, others in zip(tasks, own, rival, strict=True):
        counted, scores = rows.take_counted(), others.take_counted().scores
        owners = number_owners(*where, counted.users)
        prefix = "" if task == trained.model.tasks[0] else f"{task.name}/"
        found = _compare_task(task, counted, scores, owners, trained.config.seed)
        metrics |= {f"{prefix}{name}": difference for name, difference in found.items()}
    weight = trained.manifest.find_weight()
    return {
        "protocol": "rows",
        "rows": len(own[0]),
        "users": count_owners(number_owners(*where, own[0].users)),
        "metrics": metrics,
        **({} if weight is None else {"weighted_by": weight}),
    }


def _find_common_tasks(trained: TrainedModel, other: TrainedModel) -> list[Task]:
    rival = [(task.name, task.label, task.kind) for task in other.model.tasks]
    common = [t for t in trained.model.tasks if (t.name, t.label, t.kind) in rival]
    if not common:
        names = [", ".join(task.name for task in one.model.tasks) for one in (trained, other)]
        raise ConfigError(
            "the runs have no task in common",
            received=" and ".join(names),
            allowed="tasks of one name, label and objective",
        )
    return common


def _score_rows(
    trained: TrainedModel, model: RankingModel, split: str, tasks: list[Task]
) -> list[ScoredRows]:
    """Rows whose weight is above 0, of each task, also those without its label."""
    manifest, score = trained.manifest, compile_scores(model)
    groups = build_user_groups(trained.version_dir, manifest)
    columns = [RowColumns(groups).with_label(manifest, task.label) for task in tasks]
    names = (*model.inputs, *(name for each in columns for name in each.inputs))
    parts: list[list[ScoredRows]] = [[] for _ in tasks]
    for batch in read_scored(trained, split, tuple(dict.fromkeys(names))):
        logits = score({name: batch[name] for name in model.inputs})
        for task, own, kept in zip(tasks, columns, parts, strict=True):
            scores = np.asarray(logits[task.name], np.float64)
            check_scores(task, scores, batch)
            rows = own.read(batch, scores)
            kept.append(rows if rows.weights is None else rows.take(rows.weights > 0))
    return [ScoredRows.join(kept) for kept in parts]


def _compare_task(
    task: Task, rows: ScoredRows, rival: FloatArray, owners: IntArray, seed: int
) -> dict[str, Interval]:
    scores, weights = (rows.scores, rival), rows.weights
    if not task.is_binary:
        values = {n: [f(rows.labels, s) for s in scores] for n, f in VALUE_METRICS.items()}
        return {n: compare_rows(n, each, owners, seed, weights) for n, each in values.items()}
    positive, found = rows.labels > 0.5, {}
    if positive.any() and not positive.all():
        found["auc"] = compare_auc(positive, scores, owners, weights)
    for name, compute in BINARY_METRICS.items():
        losses = [compute(positive, each) for each in scores]
        found[name] = compare_rows(name, losses, owners, seed, weights)
    named, w = owners >= 0, np.ones(len(rows)) if weights is None else weights
    if not named.any():
        return found
    first, second = (
        auc_by_group(owners[named], positive[named], each[named].astype(np.float32), w[named])
        for each in scores
    )
    if len(first.values):
        size = first.weights
        table = np.stack([first.values * size, second.values * size, size], axis=1)
        [gauc] = compare_groups(table, find_gap, seed)
        run, other = (float(np.average(each.values, weights=size)) for each in (first, second))
        found["gauc"] = {"run": run, "other": other, **gauc}
    return found


def check_scores(task: Task, scores: NDArray[np.floating], features: Features) -> None:
    bad = int(np.isnan(scores).sum())
    if bad:
        raise InputDataError(
            f"the model's scores of task {task.name} are no numbers",
            received=f"{bad} of {len(scores)} rows are NaN{tell_non_finite(features)}",
            fix=FINITE_ADVICE,
        )
