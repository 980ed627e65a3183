"""Metrics: functions of arrays, each registered once, and AUCs that are streamed.

A rank is the 1-based position of a relevant item among its candidates; `inf` marks a relevant item
that was not ranked at all (a miss), `nan` pads rows with fewer relevant items than others. Metrics
of ranks take them as `[rows]` or `[rows, relevant]` and give `[rows]`; all sums are float64. The
AUC of many rows is streamed in bounded memory: exact up to about a million rows, then counted in
bins of float32 scores, within an error that is known. Calibration counts predictions and labels in
bins of equal width (Guo et al. 2017).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from training.evaluation.intervals import GROUPS, Interval, compare_auc

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


def hit_rate(ranks: FloatArray, k: int) -> FloatArray:
    """Whether any relevant item stands in the first k (He et al. 2017, NCF, section 4.1)."""
    return np.any(_relevant(ranks) <= k, axis=1).astype(np.float64)


def recall(ranks: FloatArray, k: int) -> FloatArray:
    """Share of the relevant items that stand in the first k.

    The denominator is the number of relevant items, not its minimum with k (Manning et al. 2008,
    Introduction to Information Retrieval, section 8.3).
    """
    return np.sum(_relevant(ranks) <= k, axis=1) / np.maximum(_count(ranks), 1)


def ndcg(ranks: FloatArray, k: int) -> FloatArray:
    """Discounted cumulative gain at k over that of the ideal order, gains 0 or 1.

    DCG@k sums 1 / log2(1 + rank) over the relevant items in the first k; the ideal order has
    min(k, relevant) of them on top (Järvelin & Kekäläinen 2002, section 2.2, base 2, with the
    discount that also applies to the first ranks, as is usual since Burges et al. 2005).
    """
    relevant = _relevant(ranks)
    gains = np.where(relevant <= k, 1.0 / np.log2(1.0 + relevant), 0.0)
    ideal = np.concatenate(([0.0], np.cumsum(1.0 / np.log2(np.arange(2.0, k + 2.0)))))
    best = ideal[np.minimum(_count(ranks), k)]
    return np.sum(gains, axis=1) / np.where(best > 0, best, 1.0)


def precision(ranks: FloatArray, k: int) -> FloatArray:
    """Share of the first k places that relevant items take (Manning et al. 2008, section 8.4)."""
    return np.sum(_relevant(ranks) <= k, axis=1) / k


def average_precision(ranks: FloatArray, k: int) -> FloatArray:
    """Mean, over the relevant items, of the precision at the rank of each; 0 past the first k.

    The denominator is the number of relevant items, not its minimum with k (Manning et al. 2008,
    section 8.4; `map_cut` of trec_eval).
    """
    ordered = np.sort(_relevant(ranks), axis=1)
    places = np.arange(1.0, ordered.shape[1] + 1)
    return np.sum(np.where(ordered <= k, places / ordered, 0.0), axis=1) / np.maximum(
        _count(ranks), 1
    )


def reciprocal_rank(ranks: FloatArray, k: float = np.inf) -> FloatArray:
    """One over the rank of the first relevant item (Voorhees 1999, TREC-8); 0 behind k."""
    first = np.fmin.reduce(_relevant(ranks), axis=1)
    return np.where(first <= k, 1.0 / first, 0.0)


def _relevant(ranks: FloatArray) -> FloatArray:
    array = np.asarray(ranks, np.float64)
    return array if array.ndim == 2 else array[:, np.newaxis]


def _count(ranks: FloatArray) -> IntArray:
    return np.asarray(np.sum(~np.isnan(_relevant(ranks)), axis=1))


Per = Literal["event", "user"]
"""What a row stands for: an event with its one target, or a user with a set of items."""


EVENT_METRICS = {"hit_rate": hit_rate, "recall": recall, "ndcg": ndcg}
RANKING_METRICS = {
    **EVENT_METRICS,
    "precision": precision,
    "map": average_precision,
    "mrr": reciprocal_rank,
}
"""How those of `conf.metrics` are computed that are of ranked rows, at each cut-off: of users."""


@dataclass(frozen=True)
class RankMeasures:
    """What is measured of ranked rows: at which cut-offs, and which user metrics, by name."""

    ks: Sequence[int]
    own: Mapping[str, Callable[[FloatArray, int], FloatArray]] = field(default_factory=dict)


def measure(ranks: FloatArray, measures: RankMeasures, per: Per = "event") -> dict[str, FloatArray]:
    """The metrics of each row, `[rows]` by name, as in `ndcg@10`; per user MRR has cut-offs too."""
    is_event = per == "event"
    values = {"mrr": reciprocal_rank(ranks)} if is_event else {}
    for k in measures.ks:
        for family, metric in (EVENT_METRICS if is_event else RANKING_METRICS).items():
            values[f"{family}@{k}"] = metric(ranks, k)
        for name, compute in measures.own.items():
            # Of no rows there is nothing to ask a function that may not expect it.
            values[f"{name}@{k}"] = compute(_relevant(ranks), k) if len(ranks) else np.zeros(0)
    return values


def find_log_losses(positive: NDArray[np.bool_], logits: NDArray[np.floating]) -> FloatArray:
    """Negative log-likelihood of each row's label under sigmoid(logits), in nats, `[rows]`.

    softplus(z) - y z, which neither overflows nor needs clipping (Bishop 2006, eq. 4.90).
    """
    z = logits.astype(np.float64)
    return np.asarray(np.logaddexp(0.0, z) - np.where(positive, z, 0.0))


def square_errors(labels: FloatArray, scores: NDArray[np.floating]) -> FloatArray:
    """Squared error of each row, `[rows]`."""
    return np.asarray(np.square(scores.astype(np.float64) - labels))


def absolute_errors(labels: FloatArray, scores: NDArray[np.floating]) -> FloatArray:
    """Absolute error of each row, `[rows]`."""
    return np.asarray(np.abs(scores.astype(np.float64) - labels))


BINARY_METRICS = {"log_loss": find_log_losses}
VALUE_METRICS = {"mse": square_errors, "rmse": square_errors, "mae": absolute_errors}
"""How those of `conf.metrics` are computed whose mean over rows, or its root, is the metric."""


def constant_log_loss(label_rate: float, rate: float) -> float | None:
    """Log loss of always predicting `rate`, or None where it is infinite."""
    if (rate == 0.0 and label_rate > 0.0) or (rate == 1.0 and label_rate < 1.0):
        return None
    positive = label_rate * np.log(rate) if label_rate > 0.0 else 0.0
    negative = (1.0 - label_rate) * np.log1p(-rate) if label_rate < 1.0 else 0.0
    return float(-positive - negative)


def auc(
    labels: NDArray[Any], scores: NDArray[np.floating], weights: FloatArray | None = None
) -> float | None:
    """Area under the ROC curve: the chance that a positive outscores a negative, ties a half.

    Exact (Hanley & McNeil 1982; the Mann-Whitney U statistic over the pairs). Labels are 0 or 1,
    weights above 0, scores of any scale. None where only one class occurs.
    """
    positive = labels.astype(bool)
    if positive.all() or not positive.any():
        return None
    w = np.ones(len(positive)) if weights is None else weights
    _, place = np.unique(scores, return_inverse=True)
    positives, negatives = (np.bincount(place, w * side) for side in (positive, ~positive))
    below = np.cumsum(negatives) - negatives / 2
    return float(positives @ below / positives.sum() / negatives.sum())


CALIBRATION_BINS = 20


class StreamedCalibration:
    """Mean prediction and rate of positives in bins of equal width, batch by batch."""

    def __init__(self, bins: int = CALIBRATION_BINS) -> None:
        self._bins, self._rows = bins, np.zeros(bins, np.int64)
        self._sums = np.zeros((3, bins))  # weights, predictions, positives

    def update(
        self,
        labels: NDArray[np.bool_],
        logits: NDArray[np.floating],
        weights: FloatArray | None = None,
    ) -> None:
        w = np.ones(len(labels)) if weights is None else weights
        predicted = np.exp(-np.logaddexp(0.0, -logits.astype(np.float64)))
        bins = np.minimum((predicted * self._bins).astype(np.intp), self._bins - 1)
        self._rows += np.bincount(bins, minlength=self._bins)
        for row, values in enumerate((w, w * predicted, w * labels)):
            self._sums[row] += np.bincount(bins, weights=values, minlength=self._bins)

    def result(self) -> dict[str, Any] | None:
        """Mean prediction over rate (`ratio`), the expected error, and the filled `bins`."""
        if not self._rows.any():
            return None
        weights, predicted, positives = self._sums
        return {
            "ratio": float(predicted.sum() / positives.sum()) if positives.any() else None,
            "expected_error": float(np.abs(predicted - positives).sum() / weights.sum()),
            "bins": [
                {
                    "rows": int(self._rows[bin_]),
                    "predicted": float(predicted[bin_] / weights[bin_]),
                    "rate": float(positives[bin_] / weights[bin_]),
                }
                for bin_ in np.flatnonzero(self._rows)
            ],
        }


EXACT_ROWS = 1 << 20
"""Rows up to which an AUC is exact: 17 bytes each."""
BIN_BITS = 20
_SIGN = np.uint32(1 << 31)


class AUCEstimate(NamedTuple):
    """An AUC, and how far it can be from the exact one."""

    value: float
    error: float


class StreamedAUC:
    """AUC of rows that arrive in batches, in memory that ends: exact at first, then binned.

    Bins are those of the first 20 bits of float32 scores, so that equal scores share one wherever
    they lie. The value counts the pairs of a bin a half, as ties; the error bounds what is lost.
    """

    def __init__(self, exact_rows: int = EXACT_ROWS) -> None:
        self._exact_rows, self._rows = exact_rows, 0
        self._kept: list[tuple[Any, ...]] = []
        self._bins: FloatArray | None = None

    def update(
        self,
        labels: NDArray[np.bool_],
        scores: NDArray[np.float32],
        groups: IntArray | None = None,
        weights: FloatArray | None = None,
    ) -> None:
        """Adds a batch of rows; `groups` are the clusters of the interval.

        Raises:
            ValueError: A score is NaN.
        """
        if np.isnan(scores).any():
            raise ValueError("scores hold NaN; AUC needs an order")
        self._rows += len(labels)
        if self._bins is None:
            self._kept.append((labels, scores, groups, weights))
            if self._rows > self._exact_rows:
                self._bins = np.zeros((2, 1 << BIN_BITS))
                for kept_labels, kept_scores, _, kept_weights in self._kept:
                    _fill_bins(self._bins, kept_labels, kept_scores, kept_weights)
                self._kept = []
        else:
            _fill_bins(self._bins, labels, scores, weights)

    def _join(self) -> Sequence[Any]:
        columns = zip(*self._kept, strict=True)
        return [None if parts[0] is None else np.concatenate(parts) for parts in columns]

    def result(self) -> AUCEstimate | None:
        if self._bins is not None:
            return _integrate(self._bins)
        if not self._kept:
            return None
        labels, scores, _, weights = self._join()
        value = auc(labels, scores, weights)
        return None if value is None else AUCEstimate(value, 0.0)

    def compare(self) -> Interval | None:
        """The AUC less 0.5, with its interval over groups; None of one class, or of binned rows."""
        if not self._kept:
            return None
        labels, scores, groups, weights = self._join()
        if labels.all() or not labels.any():
            return None
        pair = (scores.astype(np.float64), np.zeros(len(scores)))
        found = compare_auc(labels, pair, groups, weights)
        return {name: found[name] for name in ("difference", "low", "high", "method")}


def _fill_bins(
    bins: FloatArray,
    labels: NDArray[np.bool_],
    scores: NDArray[np.float32],
    weights: FloatArray | None,
) -> None:
    bits = (scores.astype(np.float32) + np.float32(0.0)).view(np.uint32)  # -0.0 becomes 0.0
    # Of IEEE 754 numbers, positive ones are in the order of their bits, negative ones reversed.
    keys = np.where(bits & _SIGN, ~bits, bits | _SIGN) >> np.uint32(32 - BIN_BITS)
    added = 1.0 if weights is None else weights
    np.add.at(bins, (labels.astype(np.intp), keys.astype(np.intp)), added)


def _integrate(bins: FloatArray) -> AUCEstimate | None:
    negatives, positives = bins
    pairs = float(positives.sum()) * float(negatives.sum())
    if not pairs:
        return None
    below = np.cumsum(negatives) - negatives
    same_bin = float(positives @ negatives)
    return AUCEstimate((float(positives @ below) + same_bin / 2) / pairs, same_bin / 2 / pairs)


KEPT_ROWS = 1 << 20
"""Rows that a grouped AUC holds in memory; more are spilled to files without a name."""
PARTITIONS = 64
_ROW = np.dtype([("user", "<i8"), ("score", "<f4"), ("weight", "<f4"), ("positive", "?")])
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio spreads ids over partitions


class GroupedAUC:
    """GAUC: the AUC of each user with both labels, weighted by rows (Zhou et al. 2018)."""

    def __init__(self, kept_rows: int = KEPT_ROWS) -> None:
        self._kept_rows, self._rows = kept_rows, 0
        self._kept: list[NDArray[np.void]] = []
        self._files: list[IO[bytes]] = []

    def update(
        self,
        users: IntArray,
        labels: NDArray[np.bool_],
        scores: NDArray[np.float32],
        weights: FloatArray | None = None,
    ) -> None:
        """Adds a batch of rows."""
        rows = np.empty(len(users), dtype=_ROW)
        rows["user"], rows["score"], rows["positive"] = users, scores, labels
        rows["weight"] = 1.0 if weights is None else weights
        self._kept.append(rows)
        self._rows += len(rows)
        if self._rows > self._kept_rows:
            self._spill()

    def result(self) -> tuple[dict[str, float | int | None], FloatArray]:
        """Value, users and rows; and `[GROUPS, 2]`: sums of the gaps to 0.5, and of the weights."""
        total, whole, users, rows = 0.0, 0.0, 0, 0
        sums = np.zeros((GROUPS, 2))
        for part in self._partitions():
            weights = part["weight"].astype(np.float64)
            aucs = auc_by_group(part["user"], part["positive"], part["score"], weights)
            groups = (users + np.arange(len(aucs.rows))) % GROUPS
            gaps = (aucs.values - 0.5) * aucs.weights
            np.add.at(sums, groups, np.stack([gaps, aucs.weights], axis=1))
            total += float(aucs.values @ aucs.weights)
            whole += float(aucs.weights.sum())
            users += len(aucs.rows)
            rows += int(aucs.rows.sum())
        return {"value": total / whole if whole else None, "users": users, "rows": rows}, sums

    def _spill(self) -> None:
        if not self._files:
            # Without a name: nothing is left behind, however the process ends.
            self._files = [tempfile.TemporaryFile() for _ in range(PARTITIONS)]  # noqa: SIM115
        rows = np.concatenate(self._kept)
        shift = np.uint64(64 - PARTITIONS.bit_length() + 1)
        # Bytes are sorted by radix.
        parts = (rows["user"].astype(np.uint64) * _GOLDEN >> shift).astype(np.uint8)
        order = np.argsort(parts, kind="stable")
        ends = np.cumsum(np.bincount(parts, minlength=PARTITIONS))
        for file, piece in zip(self._files, np.split(rows[order], ends[:-1]), strict=True):
            file.write(piece.tobytes())
        self._kept, self._rows = [], 0

    def _partitions(self) -> Iterator[NDArray[np.void]]:
        if self._files and self._kept:
            self._spill()
        parts = iter(self._kept and [np.concatenate(self._kept)])
        for file in self._files:
            file.seek(0)
        files = (np.frombuffer(file.read(), dtype=_ROW) for file in self._files)
        yield from (rows for each in (parts, files) for rows in each if len(rows))


class GroupAUCs(NamedTuple):
    """AUCs of the groups with both labels, in the order of their ids: weight and rows of each."""

    values: FloatArray
    weights: FloatArray
    rows: IntArray


def auc_by_group(
    groups: IntArray,
    labels: NDArray[np.bool_],
    scores: NDArray[np.float32],
    weights: FloatArray,
) -> GroupAUCs:
    """AUC of each group, in one sort of all rows; at least one row."""
    order = np.lexsort((scores, groups))
    groups, labels, scores, weights = groups[order], labels[order], scores[order], weights[order]
    new_group = np.concatenate(([True], groups[1:] != groups[:-1]))
    starts = np.flatnonzero(new_group)
    ties = np.flatnonzero(new_group | np.concatenate(([True], scores[1:] != scores[:-1])))
    sizes = np.diff(np.append(starts, len(groups)))
    tie_sizes = np.diff(np.append(ties, len(groups)))
    # A row stands above the negatives of its group with lower scores, and half of those with its
    # own: what is above none of the whole sorted list, less what is before the group.
    negatives = np.where(labels, 0.0, weights)
    tied = np.add.reduceat(negatives, ties)
    below = np.repeat(np.cumsum(tied) - tied / 2.0, tie_sizes)
    own = np.add.reduceat(negatives, starts)
    below -= np.repeat(np.cumsum(own) - own, sizes)
    positives = np.add.reduceat(np.where(labels, weights, 0.0), starts)
    won = np.add.reduceat(np.where(labels, weights * below, 0.0), starts)
    counts = np.add.reduceat(labels.astype(np.int64), starts)
    both = (counts > 0) & (counts < sizes)
    p, n = positives[both], own[both]
    return GroupAUCs(won[both] / p / n, p + n, sizes[both])
