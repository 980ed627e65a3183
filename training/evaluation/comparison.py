"""Comparison of two runs on the same rows: paired differences with 95 % confidence intervals.

How the intervals are found stands in `training.evaluation.confidence_intervals`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conf.errors import ConfigError, did_you_mean
from conf.metrics import register_metric
from training.checkpoint.restore import TrainedModel
from training.encoders.vocabularies import find_named_ids, is_named
from training.evaluation.confidence_intervals import (
    BOOTSTRAP,
    Difference,
    Pair,
    bootstrap_mean,
    compare_auc,
    compare_rows,
)
from training.evaluation.item_index import build_item_index
from training.evaluation.label_metrics import auc_by_group, find_labelled, read_weights
from training.evaluation.metrics import FloatArray, IntArray, Per, find_log_losses, measure
from training.evaluation.own_metrics import build_measures
from training.evaluation.per_user_ranking import PER_USER, ListScorer, UserReader, read_held_out
from training.evaluation.protocols import (
    FULL_UNSEEN,
    RankingReader,
    Relevance,
    describe_filter,
    find_relevance,
    find_relevant_rows,
    headline_protocol,
    rank_by_protocol,
    require_relevant,
    require_rows,
)
from training.evaluation.scorers import ModelScorer
from training.evaluation.task_metrics import check_scores, compile_scores
from training.input.batches import build_eval_dataset, read_batches
from training.models.ranking import RankingModel, Task
from training.models.retrieval import RetrievalModel, require_retrieval
from training.reader.training_data import TrainingData


def compare_runs(trained: TrainedModel, other: TrainedModel, split: str) -> dict[str, Any]:
    """Compares two runs on a split, row by row.

    Args:
        trained: The first run; its `evaluation` settings hold for both.
        other: The second run.
        split: Split to measure on.

    Returns:
        What was compared, and the fields of a `Difference` by metric; further tasks of ranking
        models have their name in front, as in `like/auc`.

    Raises:
        ConfigError: The runs have other dataset versions, kinds or tasks, or a metric of one's
            own does not work.
        InputDataError: The split is empty, no row passes `evaluation.filter`, a record is damaged,
            or a score is not finite.
    """
    _require_same(trained, other)
    require_rows(trained.manifest, split)
    config = trained.config.model_copy(update={"model": other.config.model})
    for name, metric in config.evaluation.metrics.items():  # The other run may say otherwise.
        register_metric(name, metric.direction)
    rival = TrainedModel(other.run_dir, other.model, config, trained.manifest, trained.version_dir)
    data = TrainingData(trained.version_dir, trained.manifest)
    evaluation_filter = config.evaluation.filter
    described = describe_filter(data, split, evaluation_filter)
    if isinstance(trained.model, RankingModel):
        return {**described, **_compare_ranking(trained, rival, split)}
    return {**described, **_compare_retrieval(trained, rival, split)}


def _require_same(trained: TrainedModel, other: TrainedModel) -> None:
    versions = [f"{t.manifest.dataset_name} {t.manifest.dataset_version}" for t in (trained, other)]
    if trained.manifest != other.manifest:
        raise ConfigError(
            "the runs were trained on different dataset versions: their rows are not the same",
            received=" and ".join(versions),
            fix="measure both on the later version: --dataset DIR",
        )
    kinds = [isinstance(t.model, RankingModel) for t in (trained, other)]
    if kinds[0] != kinds[1]:
        names = " and ".join("ranking" if kind else "retrieval" for kind in kinds)
        raise ConfigError("runs of different kinds have no metric in common", received=names)


@dataclass
class MeasuredRows:
    """Metrics of every row of a split.

    Attributes:
        owners: The user of each row, or a number of its own below 0.
        values: `[rows]` by metric.
        not_relevant: Rows that are left out, as their label says that their item is not relevant.
    """

    owners: list[IntArray] = field(default_factory=list)
    values: dict[str, list[FloatArray]] = field(default_factory=dict)
    not_relevant: int = 0

    def add(self, owners: IntArray, values: Mapping[str, FloatArray]) -> None:
        """Adds a batch."""
        self.owners.append(owners)
        for name, per_row in values.items():
            self.values.setdefault(name, []).append(per_row)


def _compare_retrieval(trained: TrainedModel, other: TrainedModel, split: str) -> dict[str, Any]:
    per: Per = (trained.config.evaluation.per or ("event",))[0]
    measure_rows = _measure_users if per == "user" else _measure_events
    # Of both runs the same rows count, whatever the second one's objective is.
    relevance = find_relevance(trained.config, trained.manifest, split)
    rows, rival = (measure_rows(one, split, relevance) for one in (trained, other))
    owners = number_owners(trained, np.concatenate(rows.owners))
    protocol = headline_protocol(trained.manifest, trained.config.evaluation.mask_seen, split)
    own, others = ({m: np.concatenate(v) for m, v in r.values.items()} for r in (rows, rival))
    seed = trained.config.seed
    return {
        "protocol": protocol + (PER_USER if per == "user" else ""),
        "rows": len(owners),
        "rows_not_relevant": rows.not_relevant,
        "users": _count_users(owners),
        "metrics": {m: vars(compare_rows(m, (own[m], others[m]), owners, seed)) for m in own},
    }


def _measure_events(trained: TrainedModel, split: str, relevance: Relevance) -> MeasuredRows:
    model, config = require_retrieval(trained.model), trained.config.evaluation
    where = (trained.version_dir, trained.manifest)
    protocol = headline_protocol(trained.manifest, config.mask_seen, split)
    index = build_item_index(model, *where, config.batch_size)
    user = trained.manifest.keys.user
    inputs = (*model.user_inputs, *((user,) if user else ()))
    reader, scorer = (
        RankingReader(*where, index, inputs, config.batch_size),
        ModelScorer(model, index),
    )
    rows, measures = MeasuredRows(), build_measures(trained.config)
    for batch in reader.read(
        split,
        seen=protocol == FULL_UNSEEN,
        optional=relevance.inputs,
        evaluation_filter=config.filter,
    ):
        scores = scorer.scores(batch.features, batch.rows)
        ranks = rank_by_protocol(scores, batch, None)[protocol]
        ids = np.asarray(batch.features[user], np.int64) if user else np.zeros(batch.rows, np.int64)
        relevant = find_relevant_rows(batch.features, batch.rows, relevance)
        rows.not_relevant += int(np.count_nonzero(~relevant))
        rows.add(ids[relevant], measure(ranks[relevant], measures))
    require_relevant(relevance, sum(map(len, rows.owners)), rows.not_relevant)
    return rows


def _measure_users(trained: TrainedModel, split: str, relevance: Relevance) -> MeasuredRows:
    model: RetrievalModel = require_retrieval(trained.model)
    config = trained.config.evaluation
    index = build_item_index(model, trained.version_dir, trained.manifest, config.batch_size)
    held_out = read_held_out(trained, split, index, relevance)
    inputs = tuple(model.user_inputs)
    reader = UserReader(trained, split, index, inputs, config.mask_seen, held_out)
    scorer = ListScorer(model, index, max(config.ks))
    rows = MeasuredRows(not_relevant=held_out.not_relevant)
    measures = build_measures(trained.config)
    for batch in reader.read():
        ranks = scorer.measure(batch, scorer.rank(batch))
        rows.add(batch.users, measure(ranks, measures, "user"))
    return rows


def number_owners(trained: TrainedModel, ids: IntArray) -> IntArray:
    """Returns the user of each row; below 0 unknown users by the id they share, or each row."""
    user = trained.manifest.keys.user
    if user is None or trained.manifest.schema[user].shape != ():
        return -1 - np.arange(len(ids))
    named_ids = find_named_ids(trained.version_dir, trained.manifest, user)
    named = np.unique(ids[is_named(ids, named_ids)])
    place = np.searchsorted(named, ids)
    place = np.minimum(place, max(len(named) - 1, 0))
    is_own = named[place] == ids if len(named) else np.zeros(len(ids), bool)
    return np.where(is_own, place, -1 - ids)


def _count_users(owners: IntArray) -> int:
    return len(np.unique(owners[owners >= 0]))


def _compare_ranking(trained: TrainedModel, other: TrainedModel, split: str) -> dict[str, Any]:
    tasks = _find_common_tasks(trained, other)
    own, rival = _score_rows(trained, split, tasks), _score_rows(other, split, tasks)
    owners = number_owners(trained, own.users)
    metrics: dict[str, Any] = {}
    for task in tasks:
        labels = own.labels[task.name]
        kept = find_labelled(trained.manifest, task.label, labels)
        scores = own.scores[task.name][kept], rival.scores[task.name][kept]
        compare = _compare_binary if task.is_binary else _compare_errors
        found = compare(labels[kept], scores, owners[kept], trained.config.seed, own.weights[kept])
        prefix = "" if task == trained.model.tasks[0] else f"{task.name}/"
        metrics |= {f"{prefix}{name}": vars(difference) for name, difference in found.items()}
    described: dict[str, Any] = {
        "protocol": "rows",
        "rows": len(owners),
        "users": _count_users(owners),
        "metrics": metrics,
    }
    weight = trained.manifest.find_weight()
    return described if weight is None else {**described, "weighted_by": weight}


def _find_common_tasks(trained: TrainedModel, other: TrainedModel) -> list[Task]:
    own, rival = ({(t.label, t.kind): t for t in m.model.tasks} for m in (trained, other))
    common = [task for key, task in own.items() if key in rival and rival[key].name == task.name]
    if not common:
        raise ConfigError(
            "the runs have no task in common",
            received=" and ".join(
                ", ".join(t.name for t in tasks.values()) for tasks in (own, rival)
            ),
            allowed="tasks of one name, label and objective",
        )
    return common


@dataclass(frozen=True)
class _ScoredRows:
    """Scores and labels of a split's rows by task, their users and weights; all `[rows]`."""

    users: IntArray
    weights: FloatArray
    labels: dict[str, FloatArray]
    scores: dict[str, FloatArray]


def _score_rows(trained: TrainedModel, split: str, tasks: list[Task]) -> _ScoredRows:
    """Rows of weight 0 count for nothing and are left out."""
    model, user, weight = trained.model, trained.manifest.keys.user, trained.manifest.find_weight()
    score = compile_scores(model)
    where = (trained.version_dir, trained.manifest)
    labels = [task.label for task in tasks]
    others = [name for name in (user, weight) if name]
    names = tuple(dict.fromkeys((*model.inputs, *labels, *others)))
    config = trained.config.evaluation
    dataset = build_eval_dataset(
        *where, split, config.batch_size, names, evaluation_filter=config.filter
    )
    rows = MeasuredRows()
    for batch in read_batches(dataset, *where, split):
        logits = score({name: batch[name] for name in model.inputs})
        found = {f"score {t.name}": np.asarray(logits[t.name], np.float64) for t in tasks}
        for task in tasks:
            check_scores(task, found[f"score {task.name}"], batch)
        found |= {f"label {t.name}": np.asarray(batch[t.label], np.float64) for t in tasks}
        size = len(next(iter(found.values())))
        ids = np.asarray(batch[user], np.int64) if user else np.zeros(size, np.int64)
        weights = read_weights(batch, weight, size)
        rows.add(ids, {**found, "weight": np.ones(size) if weights is None else weights})
    values = {name: np.concatenate(parts) for name, parts in rows.values.items()}
    kept = np.flatnonzero(values["weight"])
    values = {name: column[kept] for name, column in values.items()}
    return _ScoredRows(
        np.concatenate(rows.owners)[kept],
        values["weight"],
        {task.name: values[f"label {task.name}"] for task in tasks},
        {task.name: values[f"score {task.name}"] for task in tasks},
    )


def _compare_binary(
    labels: FloatArray, scores: Pair, owners: IntArray, seed: int, weights: FloatArray
) -> dict[str, Difference]:
    positive = labels > 0.5
    losses = [find_log_losses(positive, s) for s in scores]
    found = {"log_loss": compare_rows("log_loss", (losses[0], losses[1]), owners, seed, weights)}
    if positive.any() and not positive.all():
        found = {"auc": compare_auc(positive, scores, owners, weights), **found}
    named = owners >= 0
    if not named.any():
        return found
    grouped = [
        auc_by_group(owners[named], positive[named], s[named].astype(np.float32), weights[named])
        for s in scores
    ]
    (values, sums, _), (rivals, _, _) = grouped
    if len(values):
        low, high = bootstrap_mean((values - rivals) * sums, sums, seed)
        run, other = (float(v @ sums / sums.sum()) for v in (values, rivals))
        found["gauc"] = Difference(run, other, run - other, low, high, BOOTSTRAP)
    return found


def _compare_errors(
    labels: FloatArray, scores: Pair, owners: IntArray, seed: int, weights: FloatArray
) -> dict[str, Difference]:
    errors = [s - labels for s in scores]
    squared, absolute = [np.square(e) for e in errors], [np.abs(e) for e in errors]
    measured = {"mse": squared, "rmse": squared, "mae": absolute}
    return {
        name: compare_rows(name, (run, other), owners, seed, weights)
        for name, (run, other) in measured.items()
    }


def require_metric(result: Mapping[str, Any], metric: str | None) -> str:
    """Returns the metric that decides: the one that is named, NDCG@10, or the first task's AUC.

    Raises:
        ConfigError: The runs were not compared on it.
    """
    known = result["metrics"]
    if metric is None:
        return next((m for m in ("ndcg@10", "auc", "mse") if m in known), next(iter(known)))
    if metric not in known:
        raise ConfigError(
            "the runs were not compared on this metric",
            received=metric,
            allowed=", ".join(known),
            fix=did_you_mean(metric, list(known)),
        )
    return metric
