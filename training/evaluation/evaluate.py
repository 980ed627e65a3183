"""Evaluation of a trained model on a split, beside popularity and chance, or another run.

Systems score the same rows; their metrics are kept whole, by group of users and by slice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conf.errors import ConfigError
from conf.metrics import register_metric
from conf.training.input import FilterConfig
from conf.training.models import RankingConfig, learns_label
from training.checkpoint.restore import TrainedModel
from training.evaluation.intervals import compare_rows
from training.evaluation.item_index import MISSING, build_item_index
from training.evaluation.metrics import FloatArray, IntArray, Per, RankMeasures, measure
from training.evaluation.own_metrics import build_measures
from training.evaluation.protocols import (
    FULL,
    FULL_UNSEEN,
    SAMPLED_GIVEN,
    HeldOutRows,
    RankingBatch,
    RankingReader,
    Relevance,
    UniformNegatives,
    carries_seen,
    describe_filter,
    find_candidates,
    find_relevance,
    headline_protocol,
    rank_by_protocol,
    require_rows,
    warn_unmasked,
)
from training.evaluation.scored_rows import (
    DistinctRows,
    GroupSums,
    RowColumns,
    ScoredRows,
    Slicing,
    SystemSums,
    build_user_groups,
    count_owners,
    has_user_vocabulary,
    number_owners,
    plan_slicings,
)
from training.evaluation.systems import (
    EASE,
    Ease,
    EaseSystem,
    ListStatistics,
    ModelSystem,
    PopularitySystem,
    RandomSystem,
    System,
    fit_ease,
    read_popularity,
    score_pairs,
)
from training.evaluation.tasks import LabelScores, ScoreRows, compare_tasks, evaluate_tasks
from training.evaluation.users import BEFORE, PER_USER, UserReader, read_held_out
from training.models.ranking import RankingModel
from training.models.retrieval import RetrievalModel, require_retrieval
from training.reader.training_data import TrainingData

LIST_LENGTH = 10


@dataclass(frozen=True)
class FullRanking:
    """How validation ranks: the first `batches` (None: all) of a split, or of `held_out` rows."""

    measures: RankMeasures
    mask_seen: bool
    batch_size: int
    held_out: HeldOutRows | None = None
    batches: int | None = None
    evaluation_filter: tuple[FilterConfig, ...] = ()
    relevance: Relevance = field(default_factory=Relevance)


def evaluate_full(
    model: RetrievalModel, data: TrainingData, split: str, ranking: FullRanking
) -> dict[str, float]:
    """Ranks each row's target among the whole catalogue; what validation calls every epoch."""
    version_dir, manifest, batch_size = data.version_dir, data.manifest, ranking.batch_size
    protocol, held_out = headline_protocol(manifest, ranking.mask_seen, split), ranking.held_out
    if ranking.mask_seen and held_out is not None and held_out.met is not None:
        protocol = FULL_UNSEEN
    index = build_item_index(model, version_dir, manifest, batch_size)
    system, means = ModelSystem(model, index), GroupSums()
    reader = RankingReader(version_dir, manifest, index, tuple(model.user_inputs), batch_size)
    batches = reader.read(
        split,
        seen=protocol == FULL_UNSEEN,
        held_out=held_out,
        evaluation_filter=ranking.evaluation_filter,
        optional=ranking.relevance.inputs,
    )
    # Of a large catalogue a block has fewer rows than a batch: rows are counted, not blocks.
    most = math.inf if ranking.batches is None else ranking.batches * batch_size
    for batch, relevant in _RelevantRows(batches, ranking.relevance, most):
        ranks = rank_by_protocol(system.scores(batch.features, batch.rows), batch, None)[protocol]
        means.add(measure(ranks[relevant], ranking.measures))
    return means.means()


class _RelevantRows:
    """Batches, at most so many rows of them, each with which of its rows have a relevant item."""

    def __init__(
        self, batches: Iterator[RankingBatch], relevance: Relevance, most: float = math.inf
    ) -> None:
        self._batches, self._relevance, self._most = batches, relevance, most
        self.irrelevant = 0

    def __iter__(self) -> Iterator[tuple[RankingBatch, NDArray[np.bool_]]]:
        rows, left = 0, self._most
        for batch in self._batches:
            is_read = np.arange(batch.rows) < left
            is_relevant = self._relevance.find(batch.features, batch.rows)
            relevant = is_relevant & is_read
            rows += int(np.count_nonzero(relevant))
            self.irrelevant += int(np.count_nonzero(is_read & ~is_relevant))
            yield batch, relevant
            left -= batch.rows
            if left <= 0:
                break
        self._relevance.require(rows, self.irrelevant)


def evaluate_split(
    trained: TrainedModel,
    split: str,
    *,
    baselines: bool = False,
    score: ScoreRows | None = None,
) -> dict[str, Any]:
    """The content of `metrics.json`: a split under every protocol, with the baselines.

    `baselines` adds EASE to popularity and chance; `score` scores the rows of a ranking model in
    its place.
    """
    manifest, config = trained.manifest, trained.config.evaluation
    require_rows(manifest, split)
    if isinstance(trained.model, RankingModel) and baselines:
        raise ConfigError(
            "--baselines rank the catalogue, and a ranking model is measured on its rows",
            received=f"a run of kind {trained.config.model.kind}",
            allowed="runs of retrieval models",
            fix="leave --baselines out: tasks are measured beside the constant",
        )
    described = {
        "kind": trained.config.model.kind,
        "dataset": manifest.dataset_name,
        "dataset_version": manifest.dataset_version,
        "split": split,
        **describe_filter(TrainingData(trained.version_dir, manifest), split, config.filter),
    }
    if isinstance(trained.model, RankingModel):
        rows = described.get("filter", {}).get("rows", manifest.split(split).rows)
        tasks = evaluate_tasks(trained, trained.model, split, score)
        return {**described, "rows": rows, "tasks": tasks}
    warn_unmasked(manifest, config.mask_seen, split)
    evaluation = _Retrieval(trained, require_retrieval(trained.model), split)
    if baselines:
        ease = fit_ease(trained, split, evaluation.index)
        if isinstance(ease, Ease):
            evaluation.ease = ease
        left_out = {"left_out": ease} if isinstance(ease, str) else ease.describe()
        described["baselines"] = {EASE: left_out}
    return {**described, **evaluation.measure()}


def compare_runs(trained: TrainedModel, other: TrainedModel, split: str) -> dict[str, Any]:
    """Compares two runs on the same rows; the `evaluation` settings of the first hold for both."""
    require_rows(trained.manifest, split)
    if trained.manifest != other.manifest:
        manifests = (trained.manifest, other.manifest)
        raise ConfigError(
            "the runs were trained on different dataset versions: their rows are not the same",
            received=" and ".join(f"{m.dataset_name} {m.dataset_version}" for m in manifests),
            fix="measure both on the later version: --dataset DIR",
        )
    config, where = trained.config.evaluation, (trained.version_dir, trained.manifest)
    for name, metric in config.metrics.items():  # The other run may say otherwise.
        register_metric(name, metric.direction)
    described = describe_filter(TrainingData(*where), split, config.filter)
    if isinstance(trained.model, RankingModel) != isinstance(other.model, RankingModel):
        raise ConfigError(
            "runs of different kinds have no metric in common",
            received=" and ".join(one.config.model.kind for one in (trained, other)),
        )
    if isinstance(trained.model, RankingModel):
        return {**described, **compare_tasks(trained, other, split)}
    rival = require_retrieval(other.model)
    own = _Retrieval(trained, require_retrieval(trained.model), split)
    return {**described, **own.compare(rival)}


class _Retrieval:
    """A retrieval model on the rows of a split, which are events, users, or both."""

    def __init__(self, trained: TrainedModel, model: RetrievalModel, split: str) -> None:
        self._trained, self._model, self._split = trained, model, split
        self.ease: Ease | None = None
        self._manifest, self._config = trained.manifest, trained.config.evaluation
        self._where = trained.version_dir, trained.manifest
        self.index = build_item_index(model, *self._where, self._config.batch_size)
        self._measures = build_measures(trained.config)
        self._headline = headline_protocol(self._manifest, self._config.mask_seen, split)
        self._relevance = find_relevance(trained.config, self._manifest, split)
        self._irrelevant = 0

    def measure(self) -> dict[str, Any]:
        """Measures per event, per user, or both; what comes first is the headline."""
        asked = self._config.per
        if asked == ("user",):
            return self._measure_users()
        events = self._measure_events()
        has_several = events["users"] < events["rows"] and self._split in BEFORE
        if asked is None and (not has_several or self._manifest.keys.seen is None):
            return events
        if asked == ("event",):
            return events
        users = self._measure_users()
        protocols = [*events["protocols"], *users["protocols"]]
        if asked is None or asked[0] == "event":
            return {**events, "protocols": protocols}
        return {**users, "protocols": protocols, "labels": events["labels"]}

    def _build_systems(self, popularity: IntArray) -> tuple[System, ...]:
        ease, seen = self.ease, self._manifest.keys.seen
        return (
            ModelSystem(self._model, self.index),
            *(() if ease is None or seen is None else (EaseSystem(ease, self.index, seen),)),
            PopularitySystem(popularity),
            RandomSystem(len(self.index), self._trained.config.seed),
        )

    def _plan_slicings(self, per: Per) -> tuple[Slicing, ...]:
        return plan_slicings(*self._where, self._config.slices, per, self._trained.config.input)

    def _read_events(
        self,
        inputs: Sequence[str],
        optional: Sequence[str],
        *,
        seen: bool = True,
        sampled: str | None = None,
    ) -> Iterator[tuple[RankingBatch, NDArray[np.bool_]]]:
        """Yields rows, and which of them count."""
        count, negatives = self._config.sampled_negatives, None
        if sampled not in (None, SAMPLED_GIVEN) and count is not None:
            negatives = UniformNegatives(len(self.index), count, self._trained.config.seed)
        names = tuple(dict.fromkeys(inputs))
        reader = RankingReader(*self._where, self.index, names, self._config.batch_size)
        batches = reader.read(
            self._split,
            seen=seen,
            negatives=negatives,
            given=sampled == SAMPLED_GIVEN,
            optional=optional,
            evaluation_filter=self._config.filter,
        )
        rows = _RelevantRows(batches, self._relevance)
        yield from rows
        self._irrelevant = rows.irrelevant

    def _measure_events(self) -> dict[str, Any]:
        popularity, given = read_popularity(self._trained, self.index.ids), None
        if find_candidates(self._manifest, self._split) is not None:
            given = SAMPLED_GIVEN
        elif self._config.sampled_negatives is not None:
            given = f"sampled_{self._config.sampled_negatives}"
        columns = RowColumns(build_user_groups(*self._where), self._plan_slicings("event"))
        labels = _EventLabels(self._trained, self._model, columns)
        tables: dict[str, SystemSums] = {}
        systems = self._build_systems(popularity)
        lengths = (LIST_LENGTH, *self._config.ks)
        lists = ListStatistics(popularity, lengths, self._headline == FULL_UNSEEN)
        users, missing, largest = DistinctRows(), 0, 0
        inputs = (*self._model.user_inputs, *labels.inputs)
        optional = labels.list_optional(self._relevance)
        for batch, relevant in self._read_events(inputs, optional, sampled=given):
            rows = labels.add(batch).take(relevant)
            users.add(rows.users[columns.groups.are_named(rows.users)])
            missing += int(np.count_nonzero(batch.targets[relevant] == MISSING))
            largest = max(largest, _count_candidates(batch, relevant))
            for system in systems:
                scores = system.scores(batch.features, batch.rows)
                for name, ranks in rank_by_protocol(scores, batch, given).items():
                    slicings = columns.slicings if name == self._headline else ()
                    table = tables.setdefault(name, SystemSums(slicings))
                    table.add(system.name, rows, measure(ranks[relevant], self._measures))
                if isinstance(system, ModelSystem):
                    lists.update(scores, batch)
        protocols = [
            self._describe(name, table, len(self.index) if name in FULL else largest + 1)
            for name, table in tables.items()
        ]
        return {
            "rows_not_relevant": self._irrelevant,
            "users": len(users.read()[0])
            if columns.groups.feature
            else tables[self._headline].rows,
            "oov_targets": missing,
            "labels": labels.result(),
            **self._summarize(self._headline, protocols, tables[self._headline], lists),
        }

    def _describe(self, name: str, table: SystemSums, candidates: int) -> dict[str, Any]:
        is_unseen = name == SAMPLED_GIVEN or carries_seen(self._manifest, self._split)
        return {
            "name": name,
            "per": "event",
            "rows": table.rows,
            "mask_seen": name == FULL_UNSEEN or (name not in FULL and is_unseen),
            "candidates": candidates,
            "systems": table.means(),
            "differences": table.compare(ModelSystem.name, self._trained.config.seed),
        }

    def _summarize(
        self, headline: str, protocols: list[Any], table: SystemSums, lists: ListStatistics
    ) -> dict[str, Any]:
        return {
            "rows": table.rows,
            "ties": "counted against the target",
            "headline": headline,
            "protocols": protocols,
            "beyond_accuracy": lists.result(),
            "slices": table.describe_slices(),
        }

    def _read_users(self, inputs: Sequence[str]) -> UserReader:
        held_out = read_held_out(self._trained, self._split, self.index, self._relevance)
        self._irrelevant = held_out.not_relevant
        names = tuple(dict.fromkeys(inputs))
        return UserReader(self._trained, self._split, self.index, names, held_out)

    def _measure_users(self) -> dict[str, Any]:
        popularity = read_popularity(self._trained, self.index.ids)
        columns = RowColumns(slicings=self._plan_slicings("user"))  # A row is a user of its own.
        systems, k = self._build_systems(popularity), max(*self._config.ks, LIST_LENGTH)
        seen = [system.seen for system in systems if isinstance(system, EaseSystem)]
        reader = self._read_users((*self._model.user_inputs, *columns.inputs, *seen))
        table, left_out = SystemSums(columns.slicings), 0
        lists = ListStatistics(popularity, (LIST_LENGTH, *self._config.ks), mask_seen=False)
        for batch in reader.read():
            left_out += int(batch.find_seen().sum())
            rows = columns.read(batch.features, batch.users)
            for system in systems:
                ranks, shown = system.rank_users(batch, k)
                table.add(system.name, rows, measure(ranks, self._measures, "user"))
                if isinstance(system, ModelSystem) and shown is not None:
                    lists.add(shown)
        counts, name = reader.held_out.describe(), self._headline + PER_USER
        protocol = {
            **self._describe(name, table, len(self.index)),
            "per": "user",
            "mask_seen": reader.masks,
            **counts,
            "left_out_as_seen": left_out,
        }
        return {
            "rows_not_relevant": self._irrelevant,
            "users": counts["rows"],
            "oov_targets": counts["outside_catalogue"],
            "labels": None,
            **self._summarize(name, [protocol], table, lists),
        }

    def compare(self, rival: RetrievalModel) -> dict[str, Any]:
        """Compares the model with another one on the same rows, whatever its objective is."""
        per: Per = (self._config.per or ("event",))[0]
        index = build_item_index(rival, *self._where, self._config.batch_size)
        systems = (ModelSystem(self._model, self.index), ModelSystem(rival, index))
        rank = self._rank_users if per == "user" else self._rank_events
        users: list[IntArray] = []
        parts: tuple[list[dict[str, FloatArray]], ...] = ([], [])
        for ids, ranks in rank(systems, (*self._model.user_inputs, *rival.user_inputs)):
            users.append(ids)
            for own, each in zip(parts, ranks, strict=True):
                own.append(measure(each, self._measures, per))
        owners, seed = number_owners(*self._where, np.concatenate(users)), self._trained.config.seed
        values = {
            name: [np.concatenate([part[name] for part in own]) for own in parts]
            for name in parts[0][0]
        }
        return {
            "protocol": self._headline + (PER_USER if per == "user" else ""),
            "rows": len(owners),
            "rows_not_relevant": self._irrelevant,
            "users": count_owners(owners),
            "metrics": {m: compare_rows(m, each, owners, seed) for m, each in values.items()},
        }

    def _rank_events(
        self, systems: Sequence[ModelSystem], inputs: Sequence[str]
    ) -> Iterator[tuple[IntArray, list[FloatArray]]]:
        user, masks = self._manifest.keys.user, self._headline == FULL_UNSEEN
        names = (*inputs, *((user,) if user else ()))
        for batch, relevant in self._read_events(names, self._relevance.inputs, seen=masks):
            users = np.asarray(batch.features[user]) if user else np.zeros(batch.rows, np.int64)
            ranks = []
            for system in systems:
                scores = system.scores(batch.features, batch.rows)
                ranks.append(rank_by_protocol(scores, batch, None)[self._headline][relevant])
            yield users[relevant], ranks

    def _rank_users(
        self, systems: Sequence[ModelSystem], inputs: Sequence[str]
    ) -> Iterator[tuple[IntArray, list[FloatArray]]]:
        for batch in self._read_users(inputs).read():
            k = max(self._config.ks)
            yield batch.users, [system.rank_users(batch, k)[0] for system in systems]


class _EventLabels:
    """Rows of events, and metrics of their label, if there is one, by the score of their item."""

    def __init__(self, trained: TrainedModel, model: RetrievalModel, columns: RowColumns) -> None:
        manifest, config = trained.manifest, trained.config.model
        label, self._model, self._columns = manifest.keys.label, model, columns
        self._scores: LabelScores | None = None
        if label and not isinstance(config, RankingConfig):
            self._columns = columns.with_label(manifest, label)
            users = columns.groups if has_user_vocabulary(manifest) else None
            temperature = config.temperature if learns_label(config) else None
            mean = manifest.find_label_mean(label, "train")
            self._scores = LabelScores(temperature, users, trained.config.seed, mean)

    @property
    def inputs(self) -> tuple[str, ...]:
        items = () if self._scores is None else self._model.item_inputs
        return (*items, *self._columns.inputs)

    def list_optional(self, relevance: Relevance) -> tuple[str, ...]:
        """Scalars that records may lack; label metrics read the weight of each row."""
        if self._columns.label is None:
            return relevance.inputs
        others = (name for name in relevance.inputs if name != self._columns.weight)
        return (self._columns.label, *others)

    def add(self, batch: RankingBatch) -> ScoredRows:
        if self._scores is None:
            return self._columns.read(batch.features, np.zeros(batch.rows, np.float32))
        rows = self._columns.read(batch.features, score_pairs(self._model, batch.features))
        self._scores.add(rows.take_counted())
        return rows

    def result(self) -> dict[str, Any] | None:
        found = None if self._scores is None else self._scores.result()
        return None if found is None else {**found, **self._columns.describe_weight()}


def _count_candidates(batch: RankingBatch, relevant: NDArray[np.bool_]) -> int:
    if batch.candidates is None:
        return 0
    counts = np.bincount(batch.candidates.rows, minlength=batch.rows)
    return int(counts[relevant].max(initial=0))
