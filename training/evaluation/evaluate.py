"""Evaluation of a trained model on a split, beside popularity and chance."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conf.manifest import Manifest
from conf.schema import PAD_ID
from conf.training.input import FilterConfig
from conf.training.models import RankingConfig
from training.checkpoint.restore import TrainedModel
from training.evaluation.baselines import (
    EASE,
    Ease,
    EaseLists,
    EaseScorer,
    fit_baseline,
    read_popularity,
    refuse_baselines,
)
from training.evaluation.confidence_intervals import SystemSums, UserGroups, build_user_groups
from training.evaluation.item_index import ItemIds, build_item_index
from training.evaluation.label_metrics import LabelScores, find_user_ids
from training.evaluation.metrics import (
    MISSING,
    FloatArray,
    IntArray,
    Pairs,
    RankingMeans,
    RankMeasures,
    measure,
)
from training.evaluation.own_metrics import build_measures
from training.evaluation.per_user_ranking import (
    ListScorer,
    PopularityLists,
    RandomLists,
    UserBatch,
    UserReader,
    describe_protocol,
    read_held_out,
)
from training.evaluation.protocols import (
    FULL_ALL,
    FULL_UNSEEN,
    SAMPLED_GIVEN,
    HeldOutRows,
    RankingBatch,
    RankingReader,
    Relevance,
    UniformNegatives,
    carries_seen,
    count_missing,
    describe_filter,
    find_relevance,
    find_relevant_rows,
    headline_protocol,
    learns_label,
    rank_by_protocol,
    require_relevant,
    require_rows,
    warn_unmasked,
)
from training.evaluation.scorers import (
    ListStatistics,
    ModelScorer,
    PopularityScorer,
    RandomScorer,
    Scorer,
    score_pairs,
)
from training.evaluation.slices import SliceMeans, describe_slices, plan_slicings
from training.evaluation.task_metrics import ScoreRows, evaluate_tasks
from training.evaluation.users_as_of import BEFORE
from training.models.ranking import RankingModel
from training.models.retrieval import RetrievalModel, require_retrieval
from training.reader.training_data import TrainingData

LIST_LENGTH = 10
SLICED_SYSTEMS = (ModelScorer.name, PopularityScorer.name)


@dataclass(frozen=True)
class FullRanking:
    """How the rows of a split are ranked among the whole catalogue.

    Attributes:
        measures: What is measured of each row.
        mask_seen: Whether items that the user had met before are left out.
        batch_size: Rows of a batch; of a large catalogue fewer are ranked at a time.
        held_out: Ranks these rows of train alone.
        batches: How many batches are ranked, the first ones; None: all.
        evaluation_filter: What rows must pass.
        relevance: What says which rows count (`find_relevance`).
    """

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
    """Ranks each row's target among the whole catalogue; what validation calls every epoch.

    Ties count against the target; targets outside the catalogue count as misses.

    Args:
        model: The model.
        data: The dataset version.
        split: Split to rank.
        ranking: How it is ranked.

    Returns:
        `hit_rate@k`, `recall@k`, `ndcg@k` and metrics of one's own for each k, and `mrr`.

    Raises:
        InputDataError: The split is empty, no row has a relevant item, a record is damaged, or a
            vector is not finite.
        OwnCodeError: A metric of one's own fails.
    """
    version_dir, manifest, batch_size = data.version_dir, data.manifest, ranking.batch_size
    protocol = headline_protocol(manifest, ranking.mask_seen, split)
    held_out = ranking.held_out
    if ranking.mask_seen and held_out is not None and held_out.met is not None:
        protocol = FULL_UNSEEN
    index = build_item_index(model, version_dir, manifest, batch_size)
    scorer = ModelScorer(model, index)
    means, relevance = RankingMeans(ranking.measures), ranking.relevance
    reader = RankingReader(version_dir, manifest, index, tuple(model.user_inputs), batch_size)
    rows = reader.read(
        split,
        seen=protocol == FULL_UNSEEN,
        held_out=held_out,
        evaluation_filter=ranking.evaluation_filter,
        optional=relevance.inputs,
    )
    # Of a large catalogue a block has fewer rows than a batch: rows are counted, not blocks.
    left = math.inf if ranking.batches is None else ranking.batches * batch_size
    irrelevant = 0
    for batch in rows:
        scores = scorer.scores(batch.features, batch.rows)
        ranks = rank_by_protocol(scores, batch, None)[protocol]
        is_relevant = find_relevant_rows(batch.features, batch.rows, relevance)
        is_counted = np.arange(batch.rows) < left
        means.update(ranks[is_relevant & is_counted])
        irrelevant += int(np.count_nonzero(~is_relevant & is_counted))
        left -= batch.rows
        if left <= 0:
            break
    require_relevant(relevance, means.rows, irrelevant)
    return means.result()


def evaluate_split(
    trained: TrainedModel,
    split: str,
    *,
    baselines: bool = False,
    score: ScoreRows | None = None,
) -> dict[str, Any]:
    """Evaluates a split under every protocol, with the baselines; the content of `metrics.json`.

    Args:
        trained: The model, with the config of its run (`evaluation` decides the protocols).
        split: Split to rank.
        baselines: Whether EASE is fitted and measured beside popularity and chance.
        score: What scores the rows of a ranking model; None: the model.

    Raises:
        ConfigError: Baselines are asked for, and the model ranks no catalogue; or a metric of
            one's own does not work.
        InputDataError: The split is empty or holds no events, no row passes `evaluation.filter`,
            a record is damaged, or a vector is not finite.
    """
    require_rows(trained.manifest, split)
    if baselines:
        refuse_baselines(trained)
    described = _describe_split(trained, split)
    if isinstance(trained.model, RankingModel):
        filtered = described.get("filter", {})
        rows = filtered.get("rows", trained.manifest.split(split).rows)
        where = trained.version_dir, trained.manifest
        tasks = evaluate_tasks(trained.model, *where, split, trained.config, score)
        return {**described, "rows": rows, "tasks": tasks}
    model = require_retrieval(trained.model)
    warn_unmasked(trained.manifest, trained.config.evaluation.mask_seen, split)
    if not baselines:
        return {**described, **_evaluate_retrieval(trained, model, split)}
    config = trained.config.evaluation
    index = build_item_index(model, trained.version_dir, trained.manifest, config.batch_size)
    ease = fit_baseline(trained, split, index)
    found = _evaluate_retrieval(trained, model, split, ease if isinstance(ease, Ease) else None)
    return {**described, **found, "baselines": {EASE: ease.describe()}}


def _evaluate_retrieval(
    trained: TrainedModel, model: RetrievalModel, split: str, ease: Ease | None = None
) -> dict[str, Any]:
    """Evaluates per event, per user, or both; what comes first is the headline."""
    asked = trained.config.evaluation.per
    if asked == ("user",):
        return evaluate_users(trained, model, split, ease)
    found = evaluate_events(trained, model, split, ease)
    has_several = found["users"] < found["rows"] and split in BEFORE
    if asked is None and (not has_several or trained.manifest.keys.seen is None):
        return found
    if asked == ("event",):
        return found
    users = evaluate_users(trained, model, split, ease)
    protocols = [*found["protocols"], *users["protocols"]]
    if asked is None or asked[0] == "event":
        return {**found, "protocols": protocols}
    return {**users, "protocols": protocols, "labels": found["labels"]}


def _describe_split(trained: TrainedModel, split: str) -> dict[str, Any]:
    data = TrainingData(trained.version_dir, trained.manifest)
    return {
        "kind": trained.config.model.kind,
        "dataset": trained.manifest.dataset_name,
        "dataset_version": trained.manifest.dataset_version,
        "split": split,
        **describe_filter(data, split, trained.config.evaluation.filter),
    }


def evaluate_events(
    trained: TrainedModel, model: RetrievalModel, split: str, ease: Ease | None = None
) -> dict[str, Any]:
    """Ranks the target of each row under every protocol, beside the baselines."""
    evaluation = _Evaluation(trained, model, split, ease)
    for batch in evaluation.read():
        evaluation.update(batch)
    return evaluation.result()


class _Evaluation:
    """One pass over a split: every system, every protocol."""

    def __init__(
        self, trained: TrainedModel, model: RetrievalModel, split: str, ease: Ease | None
    ) -> None:
        self.trained, self.model, self.split = trained, model, split
        self.measures = build_measures(trained.config)
        manifest = trained.manifest
        config = trained.config.evaluation
        self.index = build_item_index(model, trained.version_dir, manifest, config.batch_size)
        where = trained.version_dir, manifest
        counts = read_popularity(trained, self.index.ids)
        self.systems: tuple[Scorer, ...] = (
            ModelScorer(model, self.index),
            *_build_ease(trained, ease, self.index),
            PopularityScorer(counts),
            RandomScorer(len(self.index), trained.config.seed),
        )
        self.headline = headline_protocol(manifest, config.mask_seen, split)
        lengths = (LIST_LENGTH, *config.ks)
        self.lists = ListStatistics(counts, lengths, self.headline == FULL_UNSEEN)
        slicings = plan_slicings(*where, config.slices, "event", trained.config.input)
        self.slices = {name: SliceMeans(slicings) for name in SLICED_SYSTEMS}
        self.groups = build_user_groups(trained.version_dir, manifest, trained.config.seed)
        self.labels = self._build_labels()
        self.given = manifest.keys.candidates is not None
        self.draws_unseen = self.given or carries_seen(manifest, split)
        self.sampled = _sampled_name(self.given, config.sampled_negatives)
        self.means: dict[str, dict[str, RankingMeans]] = {}
        self.sums: dict[str, SystemSums] = {}
        self.pool = _CandidatePool()
        self.users = _UserCount(manifest, self.groups)
        self.oov_targets = 0
        self.relevance = find_relevance(trained.config, manifest, split)
        self.irrelevant = 0

    def _build_labels(self) -> LabelScores | None:
        manifest, config = self.trained.manifest, self.trained.config.model
        if not manifest.keys.label or isinstance(config, RankingConfig):
            return None
        return LabelScores(
            manifest.keys.label,
            find_user_ids(manifest),
            config.temperature if learns_label(config) else None,
            replace(self.groups),
            manifest.find_weight(),
        )

    def read(self) -> Iterator[RankingBatch]:
        trained, config = self.trained, self.trained.config.evaluation
        inputs = (
            *self.model.user_inputs,
            *((self.labels and (*self.model.item_inputs, *self.labels.inputs)) or ()),
            *((self.users.name,) if self.users.name else ()),
            *self.groups.inputs,
            *(slicing.feature for slicing in self.slices[ModelScorer.name].slicings),
        )
        negatives = None
        if self.sampled is not None and not self.given and config.sampled_negatives is not None:
            negatives = UniformNegatives(
                len(self.index), config.sampled_negatives, trained.config.seed
            )
        reader = RankingReader(
            trained.version_dir, trained.manifest, self.index, inputs, config.batch_size
        )
        return reader.read(
            self.split,
            seen=True,
            negatives=negatives,
            given=self.given,
            optional=self._list_optional(),
            evaluation_filter=config.filter,
        )

    def _list_optional(self) -> tuple[str, ...]:
        """Scalars that records may lack; label metrics read the weight of each row."""
        if self.labels is None:
            return self.relevance.inputs
        return (self.labels.label, *(n for n in self.relevance.inputs if n != self.labels.weight))

    def update(self, batch: RankingBatch) -> None:
        if self.labels is not None:
            self.labels.update(batch.features, score_pairs(self.model, batch.features))
        groups, relevant = (
            self.groups.find(batch.features, batch.rows),
            find_relevant_rows(batch.features, batch.rows, self.relevance),
        )
        self.oov_targets += count_missing(batch, relevant)
        self.pool.update(batch.candidates, relevant)
        self.users.update(batch, relevant)
        self.irrelevant += int(np.count_nonzero(~relevant))
        for system in self.systems:
            scores = system.scores(batch.features, batch.rows)
            for protocol, ranks in rank_by_protocol(scores, batch, self.sampled).items():
                by_system = self.means.setdefault(protocol, {})
                values = measure(ranks[relevant], self.measures)
                by_system.setdefault(system.name, RankingMeans(self.measures)).add(values)
                sums = self.sums.setdefault(protocol, SystemSums())
                sums.add(system.name, groups[relevant], values)
                if protocol == self.headline and system.name in self.slices:
                    self.slices[system.name].update(batch.features, values, relevant)
            if system.name == ModelScorer.name:
                self.lists.update(scores, batch)

    def result(self) -> dict[str, Any]:
        means = next(iter(self.means.values()))[ModelScorer.name]
        require_relevant(self.relevance, means.rows, self.irrelevant)
        return {
            "rows": means.rows,
            "rows_not_relevant": self.irrelevant,
            "users": self.users.result(),
            "oov_targets": self.oov_targets,
            "ties": "counted against the target",
            "headline": self.headline,
            "protocols": [self._protocol(name) for name in self.means],
            "labels": self._labels(),
            "beyond_accuracy": self.lists.result(),
            "slices": describe_slices(self.slices),
        }

    def _protocol(self, name: str) -> dict[str, Any]:
        full = name in (FULL_ALL, FULL_UNSEEN)
        return {
            "name": name,
            "per": "event",
            "rows": self.means[name][ModelScorer.name].rows,
            "mask_seen": name == FULL_UNSEEN or (not full and self.draws_unseen),
            "candidates": len(self.index) if full else self.pool.largest + 1,
            "systems": {system: means.result() for system, means in self.means[name].items()},
            "differences": self.sums[name].compare(ModelScorer.name, self.groups.seed),
        }

    def _labels(self) -> dict[str, Any] | None:
        if self.labels is None:
            return None
        manifest = self.trained.manifest
        return self.labels.result(manifest.find_label_mean(self.labels.label, "train"))


def _build_ease(trained: TrainedModel, ease: Ease | None, items: ItemIds) -> tuple[EaseScorer, ...]:
    """Builds the scorer of EASE, where it was fitted: one or none."""
    seen = trained.manifest.keys.seen
    return () if ease is None or seen is None else (EaseScorer(ease, items, seen),)


def evaluate_users(
    trained: TrainedModel, model: RetrievalModel, split: str, ease: Ease | None = None
) -> dict[str, Any]:
    """Ranks for each user of a split as of the split before, beside the baselines.

    Raises:
        ConfigError: The dataset has no users or no seen items, or no split is before this one.
        InputDataError: The split is empty, a record is damaged, or a vector is not finite.
    """
    evaluation = _UserEvaluation(trained, model, split, ease)
    for batch in evaluation.reader.read():
        evaluation.update(batch)
    return evaluation.result()


class _UserEvaluation:
    """One pass over the users of a split: every system, one protocol."""

    def __init__(
        self, trained: TrainedModel, model: RetrievalModel, split: str, ease: Ease | None
    ) -> None:
        manifest, config = trained.manifest, trained.config.evaluation
        self.measures = build_measures(trained.config)
        self.protocol = headline_protocol(manifest, config.mask_seen, split)
        self.index = build_item_index(model, trained.version_dir, manifest, config.batch_size)
        where = trained.version_dir, manifest
        counts = read_popularity(trained, self.index.ids)
        slicings = plan_slicings(*where, config.slices, "user", trained.config.input)
        scorers, k = _build_ease(trained, ease, self.index), max(*config.ks, LIST_LENGTH)
        inputs = (*model.user_inputs, *(slicing.feature for slicing in slicings))
        inputs += tuple(scorer.seen for scorer in scorers)
        relevance = find_relevance(trained.config, manifest, split)
        held_out = read_held_out(trained, split, self.index, relevance)
        self.reader = UserReader(trained, split, self.index, inputs, config.mask_seen, held_out)
        self.scorer = ListScorer(model, self.index, k)
        self.baselines: tuple[EaseLists | PopularityLists | RandomLists, ...] = (
            *(EaseLists(scorer, k) for scorer in scorers),
            PopularityLists(counts),
            RandomLists(len(counts), trained.config.seed),
        )
        names = (ModelScorer.name, *(system.name for system in self.baselines))
        self.means = {name: RankingMeans(self.measures, "user") for name in names}
        self.lists = ListStatistics(counts, (LIST_LENGTH, *config.ks), mask_seen=False)
        self.slices = {name: SliceMeans(slicings) for name in SLICED_SYSTEMS}
        self.groups = UserGroups(seed=trained.config.seed)  # Each row is a user of its own.
        self.sums = SystemSums()
        self.left_out = 0

    def update(self, batch: UserBatch) -> None:
        self.left_out += batch.count_left_out()
        lists = self.scorer.rank(batch)
        self.lists.add(np.where(lists.ids == PAD_ID, MISSING, self.index.columns_of(lists.ids)))
        groups = self.groups.find(batch.features, len(batch))
        self._add(ModelScorer.name, self.scorer.measure(batch, lists), batch, groups)
        for system in self.baselines:
            self._add(system.name, system.measure(batch), batch, groups)

    def _add(self, system: str, ranks: FloatArray, batch: UserBatch, groups: IntArray) -> None:
        values = measure(ranks, self.measures, "user")
        self.means[system].add(values)
        self.sums.add(system, groups, values)
        if system in self.slices:
            self.slices[system].update(batch.features, values)

    def result(self) -> dict[str, Any]:
        protocol = {
            **describe_protocol(self.protocol, len(self.index), self.reader),
            "left_out_as_seen": self.left_out,
        }
        systems = {name: means.result() for name, means in self.means.items()}
        differences = self.sums.compare(ModelScorer.name, self.groups.seed)
        return {
            "rows": protocol["rows"],
            "rows_not_relevant": protocol["rows_not_relevant"],
            "users": protocol["rows"],
            "oov_targets": protocol["outside_catalogue"],
            "ties": "counted against the target",
            "headline": protocol["name"],
            "protocols": [{**protocol, "systems": systems, "differences": differences}],
            "labels": None,
            "beyond_accuracy": self.lists.result(),
            "slices": describe_slices(self.slices),
        }


class _CandidatePool:
    """Largest number of sampled candidates in any row."""

    def __init__(self) -> None:
        self.largest = 0

    def update(self, candidates: Pairs | None, relevant: NDArray[np.bool_]) -> None:
        if candidates is not None and len(candidates):
            per_row = np.bincount(candidates.rows, minlength=len(relevant))[relevant]
            self.largest = max(self.largest, int(per_row.max(initial=0)))


class _UserCount:
    """Distinct known users; each row of a dataset without users counts as one."""

    def __init__(self, manifest: Manifest, groups: UserGroups) -> None:
        self.name, self._groups = manifest.keys.user, groups
        spec = manifest.schema[self.name] if self.name else None
        self._size = spec.vocabulary_size if spec else None
        # Keys of 64 bits have no vocabulary to count in.
        self._has_keys = spec is not None and self._size is None and spec.dtype == "int64"
        self._seen = np.zeros(self._size or 0, dtype=bool)
        self._keys: set[int] = set()
        self._other = 0

    def update(self, batch: RankingBatch, relevant: NDArray[np.bool_]) -> None:
        """Counts the users of the rows that are ranked, which `relevant` marks."""
        if self.name is None or (self._size is None and not self._has_keys):
            self._other += int(np.count_nonzero(relevant))
            return
        ids = np.asarray(batch.features[self.name])[relevant]
        known = ids[self._groups.are_named(ids)]
        if self._size is None:
            self._keys.update(known.tolist())
        else:
            self._seen[known] = True

    def result(self) -> int:
        return int(self._seen.sum()) + len(self._keys) + self._other


def _sampled_name(given: bool, count: int | None) -> str | None:
    if given:
        return SAMPLED_GIVEN
    return None if count is None else f"sampled_{count}"
