"""Scorers that are compared: the model, popularity, chance; what their lists look like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from training.evaluation.item_index import (
    ItemIndex,
    check_finite,
    score_cells,
    score_items,
    take_top,
)
from training.evaluation.metrics import MISSING, IntArray
from training.evaluation.protocols import RankingBatch

if TYPE_CHECKING:
    from training.models.retrieval import RetrievalModel


class Scorer(Protocol):
    """A system that can be evaluated.

    Attributes:
        name: Name of the system in the metrics.
    """

    name: str

    def scores(self, features: Mapping[str, tf.Tensor], rows: int) -> NDArray[np.float32]:
        """Scores the whole catalogue for a batch of users.

        Batches come in the order of the split, each once.

        Args:
            features: The batch.
            rows: Its number of rows.

        Returns:
            `[rows, items]` float32, higher is better; may be read-only.
        """
        ...


class ModelScorer:
    """Scores of a trained model: its user vectors beside the item index.

    Args:
        model: Trained model.
        index: Its item vectors.
    """

    name = "model"

    def __init__(self, model: RetrievalModel, index: ItemIndex) -> None:
        self._model, self._items = model, index.vectors

    def scores(self, features: Mapping[str, tf.Tensor], rows: int) -> NDArray[np.float32]:
        """Scores the whole catalogue, `[rows, items]`.

        Raises:
            InputDataError: A user vector holds NaN or infinity.
        """
        inputs = {name: features[name] for name in self._model.user_inputs}
        vectors = np.asarray(self._model.embed_users(inputs), dtype=np.float32)
        check_finite("user", np.arange(rows), vectors, inputs)
        return score_items(vectors, self._items)


def score_pairs(model: RetrievalModel, features: Mapping[str, tf.Tensor]) -> NDArray[np.float32]:
    """Returns the score of each row's user and its own target item, `[rows]`.

    Raises:
        InputDataError: A vector holds NaN or infinity.
    """
    users = np.asarray(model.embed_users({name: features[name] for name in model.user_inputs}))
    items = np.asarray(model.embed_items({name: features[name] for name in model.item_inputs}))
    for side, vectors in (("user", users), ("item", items)):
        check_finite(side, np.arange(len(vectors)), vectors, features)
    return score_cells(users, items)


class PopularityScorer:
    """The same list for everyone: items by falling number of training events, which may tie.

    Args:
        counts: `[items]`, training events of each catalogue item, ids ascending.
    """

    name = "popularity"

    def __init__(self, counts: IntArray) -> None:
        # An order by id would be one by all events: ids fall with them. And float32 holds the
        # places of distinct counts where it would round the counts.
        self._scores = np.unique(counts, return_inverse=True)[1].astype(np.float32)

    def scores(self, features: Mapping[str, tf.Tensor], rows: int) -> NDArray[np.float32]:
        """Scores the whole catalogue, `[rows, items]`, read-only."""
        return np.broadcast_to(self._scores, (rows, len(self._scores)))


class RandomScorer:
    """A uniform random order per row; depends on the seed and the row's number in the split.

    Args:
        items: Number of catalogue items.
        seed: Seed of the scores.
    """

    name = "random"

    def __init__(self, items: int, seed: int) -> None:
        self._items = items
        self._rng = np.random.default_rng(seed)

    def scores(self, features: Mapping[str, tf.Tensor], rows: int) -> NDArray[np.float32]:
        """Scores the whole catalogue, `[rows, items]`."""
        return self._rng.random((rows, self._items), dtype=np.float32)


def popularity_percentiles(counts: IntArray) -> NDArray[np.float64]:
    """Returns each item's percentile by training events, in (0, 1); equal counts share theirs.

    Args:
        counts: `[items]`.

    Returns:
        `[items]`: the share of items with fewer events, plus half of those with as many.
    """
    ordered = np.sort(counts)
    fewer = np.searchsorted(ordered, counts, side="left")
    not_more = np.searchsorted(ordered, counts, side="right")
    return (fewer + not_more) / (2.0 * len(counts))


class ListStatistics:
    """Coverage, concentration and popularity of the first items of every list.

    Coverage is the share of the catalogue that occurs in any list (Ge et al. 2010, section 3.1).
    The Gini coefficient is that of the number of lists that each item is in: 0 where all are in
    equally many, towards 1 where few are in all (Fleder & Hosanagar 2009, section 3). The
    popularity percentile is the mean over all recommended items, 0.5 for random lists.

    Args:
        counts: `[items]`, training events of each catalogue item.
        ks: Lengths of the lists that coverage is measured at; all else at the first of them.
        mask_seen: Whether items that the user had met are left out.
    """

    def __init__(self, counts: IntArray, ks: Sequence[int], mask_seen: bool) -> None:
        self._percentiles = popularity_percentiles(counts)
        self._first = ks[0]
        self._shown = {k: np.zeros(len(counts), np.int64) for k in sorted(set(ks))}
        self._mask_seen = mask_seen

    def update(self, scores: NDArray[np.float32], batch: RankingBatch) -> None:
        """Adds the lists of a batch.

        Args:
            scores: `[rows, items]`; changed in place where seen items are masked.
            batch: The rows.
        """
        if self._mask_seen and batch.seen is not None:
            scores[batch.seen.rows, batch.seen.columns] = -np.inf
        values, columns = take_top(scores, max(self._shown))
        self.add(np.where(np.isneginf(values), MISSING, columns))

    def add(self, lists: IntArray) -> None:
        """Adds lists of catalogue columns, `[rows, length]`; MISSING where one has ended."""
        for k, shown in self._shown.items():
            chosen = lists[:, :k]
            np.add.at(shown, chosen[chosen != MISSING], 1)

    def result(self) -> dict[str, float]:
        """Returns `coverage@k`, `gini@k` and `popularity_percentile@k`."""
        shown, k = self._shown[self._first], self._first
        popularity = float(shown @ self._percentiles) / max(int(shown.sum()), 1)
        coverage = {f"coverage@{k}": float(np.mean(n > 0)) for k, n in self._shown.items()}
        return {**coverage, f"gini@{k}": _gini(shown), f"popularity_percentile@{k}": popularity}


def _gini(counts: IntArray) -> float:
    ordered, size = np.sort(counts).astype(np.float64), len(counts)
    weights = 2.0 * np.arange(1, size + 1) - size - 1
    return float(weights @ ordered / (size * max(ordered.sum(), 1.0)))
