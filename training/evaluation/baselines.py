"""What a retrieval model is compared with: popularity, and EASE where it is asked for.

EASE is a linear model of items by items whose weights have a closed form (Steck 2019,
"Embarrassingly Shallow Autoencoders for Sparse Data", equation 8). It is learned of the rows that
train the run, and scores a row by the items that its user had met before: the same ones that are
left out as seen. Of a large catalogue it knows the most frequent items alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conf.errors import ConfigError
from conf.splits import TRAIN
from conf.training.input import FilterConfig, InputConfig
from training.checkpoint.restore import TrainedModel
from training.encoders.vocabularies import find_named_ids, is_named
from training.evaluation.item_index import BLOCK_CELLS, ItemIds, read_cells, take_top
from training.evaluation.metrics import MISSING, FloatArray, IntArray, Pairs
from training.evaluation.per_user_ranking import UserBatch, rank_in_lists
from training.evaluation.protocols import carries_seen, find_relevance, learns_label
from training.input.train_counts import (
    find_counted_keys,
    read_train_counts,
    read_train_pairs,
)
from training.models.ranking import RankingModel

EASE = "ease"
L2_GRID = (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
"""Penalties that are tried, in squared interactions; the paper's are between 200 and 1000."""
MAX_BYTES = 4 << 30
"""Most memory that EASE may take: that of 9,459 items."""
_MATRICES = 6  # float64 each, with what the solver holds: 5.3 were measured with 5,000 items.
_LAST = float(np.finfo(np.float32).min)  # the score of an item that is not known
_HIDDEN_SHARE, _CHOSEN_AT = 0.2, 10

_log = logging.getLogger("sluice.training.evaluate")


def read_popularity(trained: TrainedModel, ids: IntArray) -> IntArray:
    """Reads how popular items are in the rows that a run was trained on.

    What the run's objective takes for a positive counts: of a binary one events with a label above
    0, else every event. Drawn negatives never do, nor rows of weight 0 where they are no positives.

    Args:
        trained: The run.
        ids: `[items]`.

    Returns:
        int64 `[items]`.

    Raises:
        InputDataError: The counts or a record are damaged.
    """
    where = trained.version_dir, trained.manifest
    counts = read_train_counts(*where, "item", _leave_out_untaught(trained))
    by_label = learns_label(trained.config.model)
    return counts.place(counts.positives if by_label else counts.events, ids)


def _leave_out_untaught(trained: TrainedModel) -> InputConfig:
    """How train is read, without the rows of weight 0 that `find_relevance` takes for none."""
    config, weight = trained.config.input, find_relevance(trained.config, trained.manifest).weight
    found = trained.manifest.statistics.get(TRAIN, {}).get(weight or "", {})
    if weight is None or not found.get("zeros"):
        return config
    taught = FilterConfig(feature=weight, op=">", value=0)
    return config.model_copy(update={"filter": (*config.filter, taught)})


@dataclass(frozen=True)
class Ease:
    """A fitted EASE.

    Attributes:
        weights: float32 `[known, known]`; column j weighs the items that speak for item j.
        columns: int64 `[known]`, the catalogue's columns that it knows, ascending.
        l2: The penalty of squared weights.
        users: Users that it was learned of.
        pairs: Their distinct known items, of all users together.
        pairs_outside: Distinct pairs of users and items that it does not know.
    """

    weights: NDArray[np.float32]
    columns: IntArray
    l2: float
    users: int
    pairs: int
    pairs_outside: int = 0

    def describe(self) -> dict[str, Any]:
        """Returns what `metrics.json` says of it."""
        names = ("l2", "users", "pairs", "pairs_outside")
        return {"items": len(self.columns), **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True)
class LeftOut:
    """Why a baseline is not measured."""

    reason: str

    def describe(self) -> dict[str, Any]:
        """Returns what `metrics.json` says of it."""
        return {"left_out": self.reason}


def refuse_baselines(trained: TrainedModel) -> None:
    """Refuses baselines of the catalogue where it is not ranked.

    Raises:
        ConfigError: The run's model is a ranking model.
    """
    if isinstance(trained.model, RankingModel):
        raise ConfigError(
            "--baselines rank the catalogue, and a ranking model is measured on its rows",
            received=f"a run of kind {trained.config.model.kind}",
            allowed="runs of retrieval models",
            fix="leave --baselines out: tasks are measured beside the constant",
        )


def fit_baseline(trained: TrainedModel, split: str, items: ItemIds) -> Ease | LeftOut:
    """Fits EASE of the rows that train a run, or says why it cannot be.

    Weights of items by items have to fit into memory: of a larger catalogue EASE knows the items
    that most users have, and the log says how much of train these are.

    Args:
        trained: The run.
        split: The split that is measured.
        items: The catalogue.

    Raises:
        InputDataError: A record is damaged.
    """
    found = _find_obstacle(trained, split)
    if found is None:
        cells = _read_cells(trained, items)
        if len(cells):
            return _fit_frequent(cells, len(items), trained.config.seed)
        found = "no row that trains has both a user and an item with ids of their own"
    _log.warning("baseline %s is left out: %s", EASE, found)
    return LeftOut(found)


def _find_obstacle(trained: TrainedModel, split: str) -> str | None:
    features = find_counted_keys(trained.manifest).features
    missing = [part for part in ("user", "item") if part not in features]
    if missing:
        return f"the dataset has no {' and no '.join(missing)} as one int64 per row"
    if not carries_seen(trained.manifest, split):
        return f"rows of the {split} split do not hold the items that their user had met"
    return None


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
    user = trained.manifest.require_key("user")
    named = find_named_ids(*where, user)
    by_label = learns_label(trained.config.model)
    kept, pending = (np.zeros(0, np.int64), np.zeros(0, np.int64)), 0
    parts = [kept]
    config = _leave_out_untaught(trained)
    for owners, ids in read_train_pairs(*where, config, positives=by_label):
        columns = items.columns_of(ids)
        known = (columns != MISSING) & is_named(owners, named)
        parts.append((owners[known], columns[known]))
        pending += int(known.sum())
        if pending > len(parts[0][0]):  # As many new ones as old ones: memory is that of pairs.
            parts, pending = [_keep_distinct(parts)], 0
    owners, columns = _keep_distinct(parts)
    return Pairs(np.unique(owners, return_inverse=True)[1], columns)


def _keep_distinct(parts: Sequence[tuple[IntArray, IntArray]]) -> tuple[IntArray, IntArray]:
    owners, columns = (np.concatenate(one) for one in zip(*parts, strict=True))
    order = np.lexsort((columns, owners))
    owners, columns = owners[order], columns[order]
    new = np.ones(len(owners), bool)
    new[1:] = (owners[1:] != owners[:-1]) | (columns[1:] != columns[:-1])
    return owners[new], columns[new]


def fit_chosen_ease(cells: Pairs, items: int, seed: int) -> Ease:
    """Chooses the penalty on a fifth of the cells that is hidden, then fits on all of them.

    Nothing of validation or test is looked at.

    Args:
        cells: Users, from 0, and columns of their items; each once, users ascending.
        items: Number of items.
        seed: Seed of the draw of what is hidden.
    """
    l2 = _choose_l2(cells, items, seed)
    weights = solve_ease(multiply_items(cells, items), l2)
    return Ease(weights, np.arange(items), l2, len(np.unique(cells.rows)), len(cells))


def _choose_l2(cells: Pairs, items: int, seed: int) -> float:
    hidden = np.random.default_rng(seed).random(len(cells)) < _HIDDEN_SHARE
    if hidden.all() or not hidden.any():
        return L2_GRID[len(L2_GRID) // 2]
    shown = Pairs(cells.rows[~hidden], cells.columns[~hidden])
    asked = Pairs(cells.rows[hidden], cells.columns[hidden])
    products = multiply_items(shown, items)
    recalls = [_measure_recall(solve_ease(products, l2), shown, asked) for l2 in L2_GRID]
    return L2_GRID[int(np.argmax(recalls))]


def multiply_items(cells: Pairs, items: int) -> FloatArray:
    """Counts the users that two items share: X'X of the binary matrix X of users and items.

    Args:
        cells: Users, ascending, and columns; each once.
        items: Number of items.

    Returns:
        float64 `[items, items]`.
    """
    products = np.zeros((items, items))
    for _, users, block in _read_blocks(cells, items):
        matrix = _lay_out(block, users, items)
        products += matrix.T @ matrix  # float32 holds these counts: a block has at most 2^24 users.
    return products


def solve_ease(products: FloatArray, l2: float) -> NDArray[np.float32]:
    """Solves EASE: the ridge regression of each item on all others, at once.

    With P = (X'X + l2 I)^-1 the weights are -P_ij / P_jj, and 0 on the diagonal (Steck 2019,
    equation 8).

    Args:
        products: float64 `[items, items]`, X'X.
        l2: The penalty, above 0.

    Returns:
        float32 `[items, items]`.
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


class EaseScorer:
    """Scores the catalogue by the items that each row's user had met.

    Items that EASE does not know come last, and speak for none.

    Args:
        ease: The weights.
        items: The catalogue.
        seen: Feature that holds what a user had met.
    """

    name = EASE

    def __init__(self, ease: Ease, items: ItemIds, seen: str) -> None:
        self._ease, self._items, self.seen = ease, len(items), seen
        self._known = ItemIds(items.ids[ease.columns])

    def scores(self, features: Mapping[str, Any], rows: int) -> NDArray[np.float32]:
        """Scores the whole catalogue, `[rows, items]`."""
        met = read_cells(features[self.seen], self._known)
        found = _lay_out(met, rows, len(self._known)) @ self._ease.weights
        if len(self._known) == self._items:
            return found
        scores = np.full((rows, self._items), _LAST, np.float32)
        scores[:, self._ease.columns] = found
        return scores


class EaseLists:
    """Ranks of relevant items in EASE's lists, what each user has seen left out.

    Args:
        scorer: Scores users.
        k: The longest list that is measured.
    """

    name = EASE

    def __init__(self, scorer: EaseScorer, k: int) -> None:
        self._scorer, self._k = scorer, k

    def measure(self, batch: UserBatch) -> FloatArray:
        """Returns the ranks of the relevant items, `[rows, relevant]`."""
        scores = self._scorer.scores(batch.features, len(batch))
        if batch.seen is not None:
            scores[batch.seen.rows, batch.seen.columns] = -np.inf
        values, columns = take_top(scores, self._k + 1)
        columns = np.where(np.isneginf(values), MISSING, columns)
        return rank_in_lists(values, columns, batch.relevant, self._k)
