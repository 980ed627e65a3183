"""Ranking and classification metrics (recall@k, NDCG, MAP, MRR, AUC, log loss), and ranks.

A rank is the 1-based position of a relevant item among its candidates; `inf` marks a relevant
item that was not ranked at all (a miss), `nan` pads rows with fewer relevant items than
others. Ranks are counted from scores without sorting. Ties count against the target: its rank
is the number of candidates, itself included, that do not score strictly below it. A scorer
that gives every item the same score so ranks its target last, and a NaN score can never look
good. All sums are float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
MISSING = -1
"""Column of an item that is not in the catalogue."""


@dataclass(frozen=True)
class Pairs:
    """Row and column of cells in a score matrix, each at most once, in row order.

    Attributes:
        rows: `[pairs]`.
        columns: `[pairs]`.
    """

    rows: IntArray
    columns: IntArray

    def __len__(self) -> int:
        return len(self.rows)


def build_pairs(rows: IntArray, columns: IntArray, targets: IntArray, items: int) -> Pairs:
    """Drops repeated cells, items outside the catalogue, and each row's own target.

    Args:
        rows: `[pairs]`, row of each cell.
        columns: `[pairs]`, catalogue column, or MISSING.
        targets: `[rows]`, column of each row's target, or MISSING.
        items: Number of columns.
    """
    keep = (columns != MISSING) & (columns != targets[rows])
    # A mask is many times faster than sorting the cells, and no larger than the scores.
    marked = np.zeros(len(targets) * items, dtype=bool)
    marked[rows[keep] * np.int64(items) + columns[keep]] = True
    codes = np.flatnonzero(marked)
    return Pairs(*np.divmod(codes, items))


def read_target_scores(scores: NDArray[np.float32], targets: IntArray) -> NDArray[np.float32]:
    """Returns the score of each row's target, `[rows]`; NaN where the target is MISSING."""
    own = scores[np.arange(len(targets)), np.maximum(targets, 0)]
    return np.where(targets == MISSING, np.float32(np.nan), own)


def rank_all(scores: NDArray[np.float32], targets: IntArray) -> NDArray[np.float64]:
    """Ranks each target among all items.

    Args:
        scores: `[rows, items]`.
        targets: `[rows]`, column of each row's target, or MISSING.

    Returns:
        `[rows]`, from 1; `inf` where the target is MISSING.
    """
    below = scores < read_target_scores(scores, targets)[:, None]
    # One call per row: numpy counts a contiguous bool row in SIMD, but not along an axis.
    counts = np.fromiter(map(np.count_nonzero, below), dtype=np.float64, count=len(below))
    return np.where(targets == MISSING, np.inf, scores.shape[1] - counts)


def count_not_below(
    scores: NDArray[np.float32], targets: IntArray, pairs: Pairs
) -> NDArray[np.float64]:
    """Counts, per row, the given cells that do not score strictly below the row's target.

    Args:
        scores: `[rows, items]`.
        targets: `[rows]`, column of each row's target, or MISSING.
        pairs: Cells to count, targets excluded.

    Returns:
        `[rows]`.
    """
    threshold = read_target_scores(scores, targets)[pairs.rows]
    above = ~(scores[pairs.rows, pairs.columns] < threshold)
    return np.bincount(pairs.rows[above], minlength=len(targets)).astype(np.float64)


def rank_without(
    full_ranks: NDArray[np.float64],
    scores: NDArray[np.float32],
    targets: IntArray,
    masked: Pairs,
) -> NDArray[np.float64]:
    """Ranks each target among all items but the masked ones, from its rank among all.

    Args:
        full_ranks: `[rows]`, what `rank_all` returned for the same scores.
        scores: `[rows, items]`.
        targets: `[rows]`, column of each row's target, or MISSING.
        masked: Cells left out, targets excluded.

    Returns:
        `[rows]`, from 1; `inf` where the target is MISSING.
    """
    return full_ranks - count_not_below(scores, targets, masked)


def rank_among(
    scores: NDArray[np.float32], targets: IntArray, candidates: Pairs
) -> NDArray[np.float64]:
    """Ranks each target among its row's candidates alone.

    Args:
        scores: `[rows, items]`.
        targets: `[rows]`, column of each row's target, or MISSING.
        candidates: Cells to rank against, targets excluded.

    Returns:
        `[rows]`, from 1; `inf` where the target is MISSING.
    """
    ranks = 1.0 + count_not_below(scores, targets, candidates)
    return np.where(targets == MISSING, np.inf, ranks)


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
    relevant_ranks = _relevant(ranks)
    relevant = np.sum(~np.isnan(relevant_ranks), axis=1)
    return np.sum(relevant_ranks <= k, axis=1) / np.maximum(relevant, 1)


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
    relevant_ranks = _relevant(ranks)
    gains = np.where(relevant_ranks <= k, 1.0 / np.log2(1.0 + relevant_ranks), 0.0)
    relevant = np.sum(~np.isnan(relevant_ranks), axis=1)
    ideal = np.concatenate(([0.0], np.cumsum(1.0 / np.log2(np.arange(2.0, k + 2.0)))))
    best = ideal[np.minimum(relevant, k)]
    return np.sum(gains, axis=1) / np.where(best > 0, best, 1.0)


def precision(ranks: FloatArray, k: int) -> FloatArray:
    """Share of the first k places that relevant items take (Manning et al. 2008, section 8.4).

    Args:
        ranks: `[rows]` or `[rows, relevant]`, ranks from 1; `inf` miss, `nan` padding.
        k: Cut-off, 1 or more; the denominator also where a list is shorter.

    Returns:
        `[rows]` in [0, 1].
    """
    return np.sum(_relevant(ranks) <= k, axis=1) / k


def average_precision(ranks: FloatArray, k: int) -> FloatArray:
    """Mean, over the relevant items, of the precision at the rank of each; 0 past the first k.

    The denominator is the number of relevant items, not its minimum with k (Manning et al. 2008,
    section 8.4; `map_cut` of trec_eval).

    Args:
        ranks: `[rows]` or `[rows, relevant]`, distinct ranks from 1; `inf` miss, `nan` padding.
        k: Cut-off, 1 or more.

    Returns:
        `[rows]` in [0, 1]; the mean over rows is MAP@k.
    """
    sorted_ranks = np.sort(_relevant(ranks), axis=1)
    relevant = np.sum(~np.isnan(sorted_ranks), axis=1)
    precisions = np.where(
        sorted_ranks <= k, np.arange(1.0, sorted_ranks.shape[1] + 1) / sorted_ranks, 0.0
    )
    return np.sum(precisions, axis=1) / np.maximum(relevant, 1)


def reciprocal_rank(ranks: FloatArray, k: float = np.inf) -> FloatArray:
    """One over the rank of the first relevant item (Voorhees 1999, TREC-8 question answering).

    Args:
        ranks: `[rows]` or `[rows, relevant]`, ranks from 1; `inf` miss, `nan` padding.
        k: Cut-off; 0 for ranks behind it.

    Returns:
        `[rows]` in [0, 1]; the mean over rows is MRR.
    """
    first = np.fmin.reduce(_relevant(ranks), axis=1)
    return np.where(first <= k, 1.0 / first, 0.0)


Per = Literal["event", "user"]
"""What a row stands for: an event with its one target, or a user with a set of items."""


@dataclass(frozen=True)
class RankingMetric:
    """How a metric of ranks is computed.

    Attributes:
        at_cutoff: From ranks and a cut-off to the value of each row.
        per: What rows may stand for where it is measured at each cut-off.
        of_list: From ranks alone, of the whole list, for rows that are events; None: not measured.
    """

    at_cutoff: Callable[[FloatArray, int], FloatArray]
    per: tuple[Per, ...] = ("event", "user")
    of_list: Callable[[FloatArray], FloatArray] | None = None


RANKING_METRICS = {
    "hit_rate": RankingMetric(hit_rate),
    "recall": RankingMetric(recall),
    "ndcg": RankingMetric(ndcg),
    "precision": RankingMetric(precision, ("user",)),
    "map": RankingMetric(average_precision, ("user",)),
    "mrr": RankingMetric(reciprocal_rank, ("user",), reciprocal_rank),
}
"""How those of `conf.metrics` are computed that are of ranked rows."""


@dataclass(frozen=True)
class RankMeasures:
    """What is measured of ranked rows.

    Attributes:
        ks: Cut-offs.
        own: Metrics of one's own beside `RANKING_METRICS`, by name: from ranks
            `[rows, relevant]`, one row or more, and a cut-off to the value of each row.
    """

    ks: Sequence[int]
    own: Mapping[str, Callable[[FloatArray, int], FloatArray]] = field(default_factory=dict)


def measure(ranks: FloatArray, measures: RankMeasures, per: Per = "event") -> dict[str, FloatArray]:
    """Returns the metrics of each row.

    Args:
        ranks: `[rows]` or `[rows, relevant]`.
        measures: What is measured; metrics of one's own of either kind of rows.
        per: `event`: hit rate, recall and NDCG at each cut-off, and `mrr` of the whole list;
            `user`: also precision, MAP, and MRR at each cut-off, as ranks end with the list.

    Returns:
        `[rows]` by name, as in `ndcg@10`.
    """
    values = {
        family: metric.of_list(ranks)
        for family, metric in RANKING_METRICS.items()
        if metric.of_list is not None and per == "event"
    }
    for k in measures.ks:
        for family, metric in RANKING_METRICS.items():
            if per in metric.per:
                values[f"{family}@{k}"] = metric.at_cutoff(ranks, k)
        for name, compute in measures.own.items():
            # Of no rows there is nothing to ask a function that may not expect it.
            values[f"{name}@{k}"] = compute(_relevant(ranks), k) if len(ranks) else np.zeros(0)
    return values


@dataclass
class RankingMeans:
    """Running means of the ranking metrics, in memory that does not grow with the rows.

    Attributes:
        measures: What is measured.
        per: What a row stands for; decides the metrics, see `measure`.
        rows: Rows seen so far.
    """

    measures: RankMeasures
    per: Per = "event"
    rows: int = 0
    _sums: dict[str, float] = field(default_factory=dict)

    def update(self, ranks: FloatArray) -> None:
        """Adds the ranks of a batch, `[rows]` or `[rows, relevant]`."""
        self.add(measure(ranks, self.measures, self.per))

    def add(self, values: Mapping[str, FloatArray]) -> None:
        """Adds a batch of rows by their metrics, `[rows]` by name."""
        for name, per_row in values.items():
            self._sums[name] = self._sums.get(name, 0.0) + float(per_row.sum())
        self.rows += len(next(iter(values.values())))

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
    return float(np.mean(find_log_losses(positive, logits)))


def find_log_losses(positive: NDArray[np.bool_], logits: NDArray[np.floating]) -> FloatArray:
    """Returns the negative log-likelihood of each row's label, `[rows]`; see `log_loss`."""
    z = logits.astype(np.float64)
    return np.asarray(np.logaddexp(0.0, z) - np.where(positive, z, 0.0))


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
