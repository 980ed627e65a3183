"""Systems that are compared: the model, popularity, chance, and EASE; what their lists look like.

EASE is the linear model of Steck (2019), Embarrassingly Shallow Autoencoders for Sparse Data: each
item is predicted by a ridge regression on all others, in closed form.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conf.schema import PAD_ID
from conf.splits import TRAIN
from conf.training.input import FilterConfig, InputConfig
from conf.training.models import learns_label
from training.checkpoint.restore import TrainedModel
from training.encoders.vocabularies import find_named_ids, is_named
from training.evaluation.item_index import (
    BLOCK_CELLS,
    MISSING,
    ItemIds,
    ItemIndex,
    Pairs,
    check_finite,
    rank_top_k,
    read_cells,
    score_cells,
    score_items,
    take_top,
)
from training.evaluation.metrics import FloatArray, IntArray
from training.evaluation.protocols import RankingBatch, carries_seen, find_relevance
from training.evaluation.scored_rows import DistinctRows
from training.evaluation.users import UserBatch, rank_in_lists, spread_ranks
from training.input.batches import Features
from training.input.train_counts import find_counted_keys, read_train_counts, read_train_pairs
from training.models.retrieval import RetrievalModel

EASE = "ease"
L2_GRID = (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
MAX_BYTES = 4 << 30
_MATRICES = 6  # float64 each, with what the solver holds: 5.3 were measured with 5,000 items.
_LAST = float(np.finfo(np.float32).min)  # the score of an item that is not known
_HIDDEN_SHARE, _CHOSEN_AT = 0.2, 10
_log = logging.getLogger("sluice.training.evaluate")


UserRanks = tuple[FloatArray, IntArray | None]
"""Ranks of relevant items, `[rows, relevant]`, and the columns of the lists that hold them."""


class ModelSystem:
    """A retrieval model: dot products of its vectors."""

    name = "model"

    def __init__(self, model: RetrievalModel, index: ItemIndex) -> None:
        self.model, self.index = model, index

    def scores(self, features: Features, rows: int) -> NDArray[np.float32]:
        return score_items(self._embed(features, np.arange(rows)), self.index.vectors)

    def _embed(self, features: Features, ids: IntArray) -> NDArray[np.float32]:
        inputs = {name: features[name] for name in self.model.user_inputs}
        vectors = np.asarray(self.model.embed_users(inputs), dtype=np.float32)
        check_finite("user", ids, vectors, inputs)
        return vectors

    def rank_users(self, batch: UserBatch, k: int) -> UserRanks:
        lists = rank_top_k(self._embed(batch.features, batch.users), self.index, k + 1, batch.seen)
        columns = np.where(lists.ids == PAD_ID, MISSING, self.index.columns_of(lists.ids))
        return rank_in_lists(lists.scores, columns, batch.relevant, k), columns


def score_pairs(model: RetrievalModel, features: Features) -> NDArray[np.float32]:
    """Scores each row's own item, `[rows]`."""
    users = np.asarray(model.embed_users({name: features[name] for name in model.user_inputs}))
    items = np.asarray(model.embed_items({name: features[name] for name in model.item_inputs}))
    for side, vectors in (("user", users), ("item", items)):
        check_finite(side, np.arange(len(vectors)), vectors, features)
    return score_cells(users, items)


class PopularitySystem:
    """Ranks items by how often they occur in the rows that train, `counts` `[items]`."""

    name = "popularity"

    def __init__(self, counts: IntArray) -> None:
        # An order by id would be one by all events: ids fall with them. And float32 holds the
        # places of distinct counts where it would round the counts.
        _, places = np.unique(counts, return_inverse=True)
        self._scores = places.astype(np.float32)
        self._levels = places.max() - places
        self._ends = np.cumsum(np.bincount(self._levels))

    def scores(self, features: Features, rows: int) -> NDArray[np.float32]:
        return np.broadcast_to(self._scores, (rows, len(self._scores)))

    def rank_users(self, batch: UserBatch, k: int) -> UserRanks:
        """Ranks without a list: how many items are as popular, less those that are seen."""
        rows, columns = _find_rankable(batch)
        levels, size = self._levels[columns], np.int64(len(self._ends) + 1)
        ranks = self._ends[levels].astype(np.float64)
        if batch.seen is not None and len(batch.seen):
            codes = np.sort(batch.seen.rows * size + self._levels[batch.seen.columns])
            upto = np.searchsorted(codes, rows * size + levels, side="right")
            ranks -= upto - np.searchsorted(codes, rows * size)
        # Relevant items of one row that tie take the last places of their tie, one each.
        own = rows * size + levels
        order = np.argsort(own, kind="stable")
        ranks[order] -= np.searchsorted(own[order], own[order], side="right") - np.arange(
            1, len(own) + 1
        )
        return spread_ranks(batch.relevant.rows, len(batch), rows, ranks), None


class RandomSystem:
    name = "random"

    def __init__(self, items: int, seed: int) -> None:
        self._items, self._rng = items, np.random.default_rng(seed)

    def scores(self, features: Features, rows: int) -> NDArray[np.float32]:
        return self._rng.random((rows, self._items), dtype=np.float32)

    def rank_users(self, batch: UserBatch, k: int) -> UserRanks:
        """Draws distinct ranks among the items that are not seen."""
        rows, _ = _find_rankable(batch)
        left = np.full(len(batch), self._items)
        if batch.seen is not None:
            left -= np.bincount(batch.seen.rows, minlength=len(batch))
        counts = np.bincount(rows, minlength=len(batch))
        ranks = [self._rng.choice(n, c, replace=False) for n, c in zip(left, counts, strict=True)]
        drawn = 1.0 + np.concatenate([np.zeros(0), *ranks])
        return spread_ranks(batch.relevant.rows, len(batch), rows, drawn), None


def _find_rankable(batch: UserBatch) -> tuple[IntArray, IntArray]:
    keep = (batch.relevant.columns != MISSING) & ~batch.find_seen()
    return batch.relevant.rows[keep], batch.relevant.columns[keep]


def popularity_percentiles(counts: IntArray) -> FloatArray:
    """Share of the items that are less popular than each, ties a half, `[items]`."""
    ordered = np.sort(counts)
    fewer = np.searchsorted(ordered, counts, side="left")
    not_more = np.searchsorted(ordered, counts, side="right")
    return np.asarray((fewer + not_more) / (2.0 * len(counts)))


class ListStatistics:
    """Coverage, Gini coefficient and popularity (`counts` `[items]`) of what lists show."""

    def __init__(self, counts: IntArray, ks: Sequence[int], mask_seen: bool) -> None:
        self._percentiles, self._first = popularity_percentiles(counts), ks[0]
        self._shown = {k: np.zeros(len(counts), np.int64) for k in sorted(set(ks))}
        self._mask_seen = mask_seen

    def update(self, scores: NDArray[np.float32], batch: RankingBatch) -> None:
        """Adds the lists of events by scores `[rows, items]`, which are changed."""
        if self._mask_seen and batch.seen is not None:
            scores[batch.seen.rows, batch.seen.columns] = -np.inf
        values, columns = take_top(scores, max(self._shown))
        self.add(np.where(np.isneginf(values), MISSING, columns))

    def add(self, lists: IntArray) -> None:
        """Adds lists of columns, `[rows, length]`, MISSING where one ends."""
        for k, shown in self._shown.items():
            chosen = lists[:, :k]
            np.add.at(shown, chosen[chosen != MISSING], 1)

    def result(self) -> dict[str, float]:
        """`coverage@k` of each length; `gini` and `popularity_percentile` of the first."""
        shown, k = self._shown[self._first], self._first
        popularity = float(shown @ self._percentiles) / max(int(shown.sum()), 1)
        coverage = {f"coverage@{k}": float(np.mean(n > 0)) for k, n in self._shown.items()}
        return {**coverage, f"gini@{k}": _gini(shown), f"popularity_percentile@{k}": popularity}


def _gini(counts: IntArray) -> float:
    ordered, size = np.sort(counts).astype(np.float64), len(counts)
    weights = 2.0 * np.arange(1, size + 1) - size - 1
    return float(weights @ ordered / (size * max(ordered.sum(), 1.0)))


def read_popularity(trained: TrainedModel, ids: IntArray) -> IntArray:
    """How often rows that train have each item as a positive, `[items]`."""
    where = trained.version_dir, trained.manifest
    counts = read_train_counts(*where, "item", _leave_out_untaught(trained))
    by_label = learns_label(trained.config.model)
    return counts.place(counts.positives if by_label else counts.events, ids)


def _leave_out_untaught(trained: TrainedModel) -> InputConfig:
    config, weight = trained.config.input, find_relevance(trained.config, trained.manifest).weight
    found = trained.manifest.statistics.get(TRAIN, {}).get(weight or "", {})
    if weight is None or not found.get("zeros"):
        return config
    taught = FilterConfig(feature=weight, op=">", value=0)
    return config.model_copy(update={"filter": (*config.filter, taught)})


@dataclass(frozen=True)
class Ease:
    """What EASE has learned: float32 `[known, known]` weights of the columns that it knows.

    `pairs_outside` counts pairs of users and items that it does not know.
    """

    weights: NDArray[np.float32]
    columns: IntArray
    l2: float
    users: int
    pairs: int
    pairs_outside: int = 0

    def describe(self) -> dict[str, Any]:
        names = ("l2", "users", "pairs", "pairs_outside")
        return {"items": len(self.columns), **{name: getattr(self, name) for name in names}}


def fit_ease(trained: TrainedModel, split: str, items: ItemIds) -> Ease | str:
    """Fits EASE on the rows that train, or says why it is left out of the measured `split`."""
    features = find_counted_keys(trained.manifest).features
    missing = [part for part in ("user", "item") if part not in features]
    if missing:
        why = f"the dataset has no {' and no '.join(missing)} as one int64 per row"
    elif not carries_seen(trained.manifest, split):
        why = f"rows of the {split} split do not hold the items that their user had met"
    elif len(cells := _read_cells(trained, items)):
        return _fit_frequent(cells, len(items), trained.config.seed)
    else:
        why = "no row that trains has both a user and an item with ids of their own"
    _log.warning("baseline %s is left out: %s", EASE, why)
    return why


def _fit_frequent(cells: Pairs, items: int, seed: int) -> Ease:
    """Fits EASE of as many items as memory allows: those that most users have."""
    most = max(1, math.isqrt(MAX_BYTES // (8 * _MATRICES)))
    if items <= most:
        return fit_chosen_ease(cells, items, seed)
    counts = np.bincount(cells.columns, minlength=items)
    columns = np.sort(np.argsort(-counts, kind="stable")[:most])
    places = np.full(items, MISSING)
    places[columns] = np.arange(most)
    known = places[cells.columns] != MISSING
    frequent = Pairs(cells.rows[known], places[cells.columns[known]])
    _log.warning(
        "baseline %s knows the %s most frequent of %s items, which are %.1f %% of the pairs of "
        "users and items that train: %.1f GiB hold no more, items by items",
        EASE, f"{most:,}", f"{items:,}", 100 * len(frequent) / len(cells), MAX_BYTES / 2**30,
    )  # fmt: skip
    ease = fit_chosen_ease(frequent, most, seed)
    return replace(ease, columns=columns, pairs_outside=len(cells) - len(frequent))


def _read_cells(trained: TrainedModel, items: ItemIds) -> Pairs:
    """Users of train (numbered from 0) and columns of the items that each has, each once."""
    where = trained.version_dir, trained.manifest
    named = find_named_ids(*where, trained.manifest.require_key("user"))
    found = DistinctRows(2)
    pairs = read_train_pairs(
        *where, _leave_out_untaught(trained), positives=learns_label(trained.config.model)
    )
    for owners, ids in pairs:
        columns = items.columns_of(ids)
        known = (columns != MISSING) & is_named(owners, named)
        found.add(owners[known], columns[known])
    owners, columns = found.read()
    return Pairs(np.unique(owners, return_inverse=True)[1], columns)


def fit_chosen_ease(cells: Pairs, items: int, seed: int) -> Ease:
    """Fits on users, ascending from 0, and columns of their items, each once."""
    l2 = _choose_l2(cells, items, seed)
    weights = solve_ease(multiply_items(cells, items), l2)
    return Ease(weights, np.arange(items), l2, len(np.unique(cells.rows)), len(cells))


def _choose_l2(cells: Pairs, items: int, seed: int) -> float:
    """The penalty that finds most of a fifth of the cells, which is hidden."""
    hidden = np.random.default_rng(seed).random(len(cells)) < _HIDDEN_SHARE
    if hidden.all() or not hidden.any():
        return L2_GRID[len(L2_GRID) // 2]
    shown = Pairs(cells.rows[~hidden], cells.columns[~hidden])
    asked = Pairs(cells.rows[hidden], cells.columns[hidden])
    products = multiply_items(shown, items)
    recalls = [_measure_recall(solve_ease(products, l2), shown, asked) for l2 in L2_GRID]
    return L2_GRID[int(np.argmax(recalls))]


def multiply_items(cells: Pairs, items: int) -> FloatArray:
    """X'X `[items, items]` float64 of the binary matrix X of users (ascending) and items."""
    products = np.zeros((items, items))
    for _, users, block in _read_blocks(cells, items):
        matrix = _lay_out(block, users, items)
        products += matrix.T @ matrix  # float32 holds these counts: a block has at most 2^24 users.
    return products


def solve_ease(products: FloatArray, l2: float) -> NDArray[np.float32]:
    """Solves EASE: the ridge regression of each item on all others, at once.

    With P = (X'X + l2 I)^-1 the weights are -P_ij / P_jj, and 0 on the diagonal (Steck 2019,
    equation 8).
    """
    inverse = np.linalg.inv(products + l2 * np.eye(len(products)))
    inverse /= -inverse.diagonal()
    np.fill_diagonal(inverse, 0.0)
    return inverse.astype(np.float32)


def _measure_recall(weights: NDArray[np.float32], shown: Pairs, asked: Pairs) -> float:
    """Mean recall of hidden items among the first ten that were not shown, over their users."""
    items, total = len(weights), 0.0
    each = np.bincount(asked.rows, minlength=int(shown.rows[-1]) + 1)
    for first, users, block in _read_blocks(shown, items):
        scores = _lay_out(block, users, items) @ weights
        scores[block.rows, block.columns] = -np.inf
        low, high = np.searchsorted(asked.rows, (first, first + users))
        own = Pairs(asked.rows[low:high] - first, asked.columns[low:high])
        best = take_top(scores, _CHOSEN_AT)[1]
        hits = np.take_along_axis(_lay_out(own, users, items), best, axis=1).sum(axis=1)
        total += float((hits / np.maximum(each[first : first + users], 1)).sum())
    return total / np.count_nonzero(each)


def _read_blocks(cells: Pairs, items: int) -> Iterator[tuple[int, int, Pairs]]:
    """Some users at a time: the first one, their number, and their cells counted from the first."""
    users, step = int(cells.rows[-1]) + 1, max(1, BLOCK_CELLS // items)
    for first in range(0, users, step):
        low, high = np.searchsorted(cells.rows, (first, first + step))
        block = Pairs(cells.rows[low:high] - first, cells.columns[low:high])
        yield first, min(step, users - first), block


def _lay_out(cells: Pairs, rows: int, items: int) -> NDArray[np.float32]:
    """Returns the binary matrix of cells, float32 `[rows, items]`."""
    matrix = np.zeros((rows, items), np.float32)
    matrix[cells.rows, cells.columns] = 1.0
    return matrix


class EaseSystem:
    """Scores by the items `seen` of each row; what EASE does not know comes last."""

    name = EASE

    def __init__(self, ease: Ease, items: ItemIds, seen: str) -> None:
        self._ease, self._items, self.seen = ease, len(items), seen
        self._known = ItemIds(items.ids[ease.columns])

    def scores(self, features: Features, rows: int) -> NDArray[np.float32]:
        met = read_cells(features[self.seen], self._known)
        found = _lay_out(met, rows, len(self._known)) @ self._ease.weights
        if len(self._known) == self._items:
            return np.asarray(found)
        scores = np.full((rows, self._items), _LAST, np.float32)
        scores[:, self._ease.columns] = found
        return scores

    def rank_users(self, batch: UserBatch, k: int) -> UserRanks:
        scores = self.scores(batch.features, len(batch))
        if batch.seen is not None:
            scores[batch.seen.rows, batch.seen.columns] = -np.inf
        values, columns = take_top(scores, k + 1)
        columns = np.where(np.isneginf(values), MISSING, columns)
        return rank_in_lists(values, columns, batch.relevant, k), columns


System = ModelSystem | EaseSystem | PopularitySystem | RandomSystem
"""Scores the catalogue for rows of events, `[rows, items]`, and ranks the items of users."""
