"""Ranking and classification metrics, from ranks and from scores, in float64.

A rank is the 1-based position of a relevant item among its candidates; `inf` marks a relevant
item that was not ranked at all (a miss), `nan` pads rows with fewer relevant items than others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def hit_rate(ranks: FloatArray, k: int) -> FloatArray:
    """Whether any relevant item stands in the first k (He et al. 2017, NCF, section 4.1).

    Args:
        ranks: `[rows]` or `[rows, relevant]`, ranks from 1; `inf` miss, `nan` padding.
        k: Cut-off, 1 or more.

    Returns:
        `[rows]`, 0 or 1; the mean over rows is HR@k.
    """
    return np.any(_relevant(ranks) <= k, axis=1).astype(np.float64)


def recall(ranks: FloatArray, k: int) -> FloatArray:
    """Share of the relevant items that stand in the first k.

    The denominator is the number of relevant items, not its minimum with k (Manning et al. 2008,
    Introduction to Information Retrieval, section 8.3).

    Args:
        ranks: `[rows]` or `[rows, relevant]`, ranks from 1; `inf` miss, `nan` padding.
        k: Cut-off, 1 or more.

    Returns:
        `[rows]` in [0, 1]; 0 for a row without any relevant item.
    """
    found = _relevant(ranks)
    relevant = np.sum(~np.isnan(found), axis=1)
    return np.sum(found <= k, axis=1) / np.maximum(relevant, 1)


def ndcg(ranks: FloatArray, k: int) -> FloatArray:
    """Discounted cumulative gain at k over that of the ideal order, gains 0 or 1.

    DCG@k sums 1 / log2(1 + rank) over the relevant items in the first k; the ideal order has
    min(k, relevant) of them on top (Järvelin & Kekäläinen 2002, section 2.2, base 2, with the
    discount that also applies to the first ranks, as is usual since Burges et al. 2005).

    Args:
        ranks: `[rows]` or `[rows, relevant]`, ranks from 1; `inf` miss, `nan` padding.
        k: Cut-off, 1 or more.

    Returns:
        `[rows]` in [0, 1]; 0 for a row without any relevant item.
    """
    found = _relevant(ranks)
    gains = np.where(found <= k, 1.0 / np.log2(1.0 + found), 0.0)
    relevant = np.sum(~np.isnan(found), axis=1)
    ideal = np.concatenate(([0.0], np.cumsum(1.0 / np.log2(np.arange(2.0, k + 2.0)))))
    best = ideal[np.minimum(relevant, k)]
    return np.sum(gains, axis=1) / np.where(best > 0, best, 1.0)


def reciprocal_rank(ranks: FloatArray) -> FloatArray:
    """One over the rank of the first relevant item (Voorhees 1999, TREC-8 question answering).

    Args:
        ranks: `[rows]` or `[rows, relevant]`, ranks from 1; `inf` miss, `nan` padding.

    Returns:
        `[rows]` in [0, 1]; the mean over rows is MRR, over the whole list without a cut-off.
    """
    first = np.fmin.reduce(_relevant(ranks), axis=1)
    return np.where(np.isnan(first), 0.0, 1.0 / first)


@dataclass
class RankingMeans:
    """Running means of the ranking metrics, in memory that does not grow with the rows.

    Attributes:
        ks: Cut-offs of `hit_rate@k`, `recall@k` and `ndcg@k`.
        rows: Rows seen so far.
    """

    ks: Sequence[int]
    rows: int = 0
    _sums: dict[str, float] = field(default_factory=dict)

    def update(self, ranks: FloatArray) -> None:
        """Adds the ranks of a batch, `[rows]` or `[rows, relevant]`."""
        values = {"mrr": reciprocal_rank(ranks)}
        for k in self.ks:
            values[f"hit_rate@{k}"] = hit_rate(ranks, k)
            values[f"recall@{k}"] = recall(ranks, k)
            values[f"ndcg@{k}"] = ndcg(ranks, k)
        for name, per_row in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(per_row.sum())
        self.rows += len(ranks)

    def result(self) -> dict[str, float]:
        """Returns the mean of each metric.

        Raises:
            ValueError: There was not a single row.
        """
        if self.rows == 0:
            raise ValueError("no row was ranked, so there is no mean")
        return {name: total / self.rows for name, total in sorted(self._sums.items())}


def auc(labels: NDArray[np.generic], scores: NDArray[np.floating]) -> float | None:
    """Area under the ROC curve: the chance that a positive outscores a negative, ties a half.

    Exact, from mid-ranks (Hanley & McNeil 1982; the Mann-Whitney U statistic over the pairs).

    Args:
        labels: `[rows]`, 0 or 1.
        scores: `[rows]`, any real scale, no NaN.

    Returns:
        A value in [0, 1], or None where only one class occurs and it is not defined.

    Raises:
        ValueError: Shapes differ, a label is neither 0 nor 1, or a score is NaN.
    """
    positive = _binary(labels, scores)
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if positives == 0 or negatives == 0:
        return None
    if np.isnan(scores).any():
        raise ValueError("scores hold NaN; AUC needs an order")
    _, group, counts = np.unique(scores, return_inverse=True, return_counts=True)
    # Equal scores share the mean of the ranks that they take up together.
    mid_ranks = np.cumsum(counts) - (counts - 1) / 2.0
    rank_sum = float(mid_ranks[group[positive]].sum())
    return (rank_sum - positives * (positives + 1) / 2.0) / positives / negatives


def log_loss(labels: NDArray[np.generic], logits: NDArray[np.floating]) -> float:
    """Mean negative log-likelihood of the labels under sigmoid(logits), in nats.

    softplus(z) - y z, which neither overflows nor needs clipping (Bishop 2006, eq. 4.90).

    Args:
        labels: `[rows]`, 0 or 1.
        logits: `[rows]`, calibrated log-odds.

    Raises:
        ValueError: No rows, shapes differ, or a label is neither 0 nor 1.
    """
    positive = _binary(labels, logits)
    if not len(positive):
        raise ValueError("no row has a label, so there is no mean")
    z = logits.astype(np.float64)
    return float(np.mean(np.logaddexp(0.0, z) - np.where(positive, z, 0.0)))


def constant_log_loss(label_rate: float, rate: float) -> float | None:
    """Log loss of always predicting one probability, or None where it is infinite.

    Args:
        label_rate: Share of positive labels, in [0, 1].
        rate: The probability, in [0, 1].
    """
    if (rate == 0.0 and label_rate > 0.0) or (rate == 1.0 and label_rate < 1.0):
        return None
    positive_part = label_rate * np.log(rate) if label_rate > 0.0 else 0.0
    negative_part = (1.0 - label_rate) * np.log1p(-rate) if label_rate < 1.0 else 0.0
    return float(-(positive_part + negative_part))


def _relevant(ranks: FloatArray) -> FloatArray:
    array = np.asarray(ranks, dtype=np.float64)
    return array[:, None] if array.ndim == 1 else array


def _binary(labels: NDArray[np.generic], scores: NDArray[np.floating]) -> NDArray[np.bool_]:
    if labels.shape != scores.shape or labels.ndim != 1:
        raise ValueError(f"labels {labels.shape} and scores {scores.shape} must both be [rows]")
    positive = labels == 1
    if not np.all(positive | (labels == 0)):
        raise ValueError("labels must be 0 or 1")
    return positive
