"""Label metrics: AUC, grouped AUC (GAUC), log loss and calibration of rows' scores.

All are sums that do not grow with the rows: AUC is exact while rows are few, then from a
histogram, with its error; GAUC is the mean of the users' own AUCs, weighted by their rows,
from rows in any order. Where rows have weights, each counts by its own as it does in the loss: a
row of weight 2 is as good as the row twice.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from conf.errors import InputDataError
from conf.manifest import Manifest
from training.encoders.vocabularies import is_named
from training.evaluation.confidence_intervals import (
    CONSTANT,
    GROUPS,
    ROWS,
    GroupSums,
    Interval,
    UserGroups,
    compare_auc,
    compare_sums,
    describe_differences,
    place_values,
)
from training.evaluation.metrics import (
    FloatArray,
    IntArray,
    auc,
    constant_log_loss,
    find_log_losses,
)
from training.input.batches import Features

CALIBRATION_BINS = 20


@dataclass
class StreamedCalibration:
    """How far predicted probabilities are those of the labels.

    Attributes:
        bins: Bins of equal width that [0, 1] is cut into.
        rows: Rows seen so far.
    """

    bins: int = CALIBRATION_BINS
    rows: int = 0
    _log_loss: float = 0.0
    _counts: NDArray[np.int64] = field(init=False)
    _weights: NDArray[np.float64] = field(init=False)
    _sums: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        """Starts with empty bins."""
        self._counts = np.zeros(self.bins, dtype=np.int64)
        self._weights = np.zeros(self.bins)
        self._sums = np.zeros((2, self.bins))

    def update(
        self,
        labels: NDArray[np.bool_],
        logits: NDArray[np.floating],
        weights: FloatArray | None = None,
    ) -> None:
        """Adds rows.

        Args:
            labels: `[rows]`, whether each is a positive.
            logits: `[rows]`, log-odds that were predicted.
            weights: `[rows]`, what each counts for; None: 1.
        """
        if not len(labels):
            return
        w = np.ones(len(labels)) if weights is None else weights
        self._log_loss += float(w @ find_log_losses(labels, logits))
        predicted = np.exp(-np.logaddexp(0.0, -logits.astype(np.float64)))
        bins = np.minimum((predicted * self.bins).astype(np.intp), self.bins - 1)
        self._counts += np.bincount(bins, minlength=self.bins)
        self._weights += np.bincount(bins, weights=w, minlength=self.bins)
        for row, values in enumerate((predicted, labels.astype(np.float64))):
            self._sums[row] += np.bincount(bins, weights=w * values, minlength=self.bins)
        self.rows += len(labels)

    @property
    def log_loss(self) -> float | None:
        """Mean negative log-likelihood in nats; None without a row."""
        return self._log_loss / float(self._weights.sum()) if self.rows else None

    def result(self) -> dict[str, Any] | None:
        """Returns what was predicted beside what was found; None without a row.

        `ratio` is the mean prediction over the rate of positives (He et al. 2014, section 2), None
        without a positive. `expected_error` is the distance between both in a bin, weighted by
        the bin's rows (Guo et al. 2017, equation 3, with the positive's probability). `bins` has
        rows, mean prediction and rate of each bin that is not empty.
        """
        if not self.rows:
            return None
        predicted, positives = self._sums
        filled = np.flatnonzero(self._counts)
        return {
            "ratio": float(predicted.sum() / positives.sum()) if positives.any() else None,
            "expected_error": float(np.abs(predicted - positives).sum() / self._weights.sum()),
            "bins": [
                {
                    "rows": int(self._counts[bin_]),
                    "predicted": float(predicted[bin_] / self._weights[bin_]),
                    "rate": float(positives[bin_] / self._weights[bin_]),
                }
                for bin_ in filled
            ],
        }


EXACT_ROWS = 1 << 20
BIN_BITS = 20
_SIGN = np.uint32(1 << 31)


@dataclass(frozen=True)
class AUCEstimate:
    """An AUC and how far it can be from that of all rows.

    Attributes:
        value: In [0, 1].
        error: The exact value lies within `value - error` and `value + error`; 0 where `value` is
            exact.
    """

    value: float
    error: float


@dataclass(frozen=True)
class _KeptRows:
    labels: NDArray[np.bool_]
    scores: NDArray[np.float32]
    groups: IntArray
    weights: FloatArray | None


class StreamedAUC:
    """Area under the ROC curve in memory that does not grow with the rows.

    Up to `exact_rows` rows are kept and the value is exact. Beyond that scores are counted in
    2^20 bins of float32: sign, exponent and the first 11 bits of the mantissa, so that bins keep
    the order of scores whatever their range and are 1 / 2048 of a score wide. A pair of a positive
    and a negative in the same bin counts a half, which is what bounds the error: half of the
    share of such pairs.

    Args:
        exact_rows: Rows up to which the value is exact: 5 bytes each, 13 with weights; the bins
            take 16 MiB.
    """

    def __init__(self, exact_rows: int = EXACT_ROWS) -> None:
        self._exact_rows = exact_rows
        self._kept: list[_KeptRows] = []
        self._rows = 0
        self._bins: FloatArray | None = None

    def update(
        self,
        labels: NDArray[np.bool_],
        scores: NDArray[np.float32],
        groups: IntArray | None = None,
        weights: FloatArray | None = None,
    ) -> None:
        """Adds rows.

        Args:
            labels: `[rows]`, whether each is a positive.
            scores: `[rows]`, any range, no NaN.
            groups: `[rows]`, the group of users of each, for `compare`; None: they have none.
            weights: `[rows]`, above 0, what each counts for; None, of all updates: 1.

        Raises:
            ValueError: A score is NaN.
        """
        if np.isnan(scores).any():
            raise ValueError("scores hold NaN; AUC needs an order")
        self._rows += len(labels)
        if self._bins is None:
            owners = np.zeros(len(labels), np.int64) if groups is None else groups
            self._kept.append(_KeptRows(labels, scores, owners, weights))
            if self._rows > self._exact_rows:
                self._bins = np.zeros((2, 1 << BIN_BITS))
                for kept in self._kept:
                    _count(self._bins, kept.labels, kept.scores, kept.weights)
                self._kept = []
        else:
            _count(self._bins, labels, scores, weights)

    def result(self) -> AUCEstimate | None:
        """Returns the AUC; None where only one class occurs and it is not defined."""
        if self._bins is not None:
            return _integrate(self._bins)
        if not self._kept:
            return None
        rows = _join(self._kept)
        if rows.labels.all() or not rows.labels.any():
            return None
        if rows.weights is None:
            value = auc(rows.labels, rows.scores)
        else:
            placed = place_values(rows.labels, rows.scores, rows.weights)[rows.labels]
            value = float(np.average(placed, weights=rows.weights[rows.labels]))
        return None if value is None else AUCEstimate(value, 0.0)

    def compare(self) -> Interval | None:
        """Returns how far the AUC is from 0.5, that of a constant, with its interval.

        None where the AUC is not defined, or not exact: the rows are not kept.
        """
        if not self._kept:
            return None
        rows = _join(self._kept)
        if rows.labels.all() or not rows.labels.any():
            return None
        pair = rows.scores.astype(np.float64), np.zeros(len(rows.scores))
        difference = compare_auc(rows.labels, pair, rows.groups, rows.weights)
        return {
            "difference": difference.difference,
            "low": difference.low,
            "high": difference.high,
            "method": difference.method,
        }


def _join(parts: list[_KeptRows]) -> _KeptRows:
    weights = [part.weights for part in parts if part.weights is not None]
    return _KeptRows(
        np.concatenate([part.labels for part in parts]),
        np.concatenate([part.scores for part in parts]),
        np.concatenate([part.groups for part in parts]),
        np.concatenate(weights) if weights else None,
    )


def _count(
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
PARTITIONS = 64
_ROW = np.dtype([("user", "<i8"), ("score", "<f4"), ("weight", "<f4"), ("positive", "?")])
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class GroupedAUC:
    """AUC per user, weighted by the user's rows (Zhou et al. 2018, DIN, section 6.2).

    It measures how well the rows of one user are ordered, and ignores differences between users.
    Users with rows of one class alone have no AUC and are left out.

    Exact, whatever order rows come in. Up to `kept_rows` rows are in memory; beyond that they go to
    temporary files, 17 bytes a row, partitioned by user, and one partition is read at a time. So
    memory is bounded by `kept_rows`, a 64th of the rows, or the rows of one user, whichever is
    the largest.

    Args:
        kept_rows: Rows in memory before they are written.
    """

    def __init__(self, kept_rows: int = KEPT_ROWS) -> None:
        self._kept_rows = kept_rows
        self._kept: list[NDArray[np.void]] = []
        self._rows = 0
        self._files: list[IO[bytes]] = []

    def update(
        self,
        users: IntArray,
        labels: NDArray[np.bool_],
        scores: NDArray[np.float32],
        weights: FloatArray | None = None,
    ) -> None:
        """Adds rows, each `[rows]`; no score is NaN; without weights a row counts for 1."""
        if not len(users):
            return
        rows = np.empty(len(users), dtype=_ROW)
        rows["user"], rows["score"], rows["positive"] = users, scores, labels
        rows["weight"] = 1.0 if weights is None else weights
        self._kept.append(rows)
        self._rows += len(rows)
        if self._rows > self._kept_rows:
            self._spill()

    def result(self) -> dict[str, float | int | None]:
        """Returns `value` (None where no user has both classes), and its users and rows."""
        return self.sum_users()[0]

    def sum_users(self) -> tuple[dict[str, float | int | None], FloatArray]:
        """Returns the result, and what it is the mean of.

        Returns:
            The result; sums over groups of users, `[GROUPS, 2]`: AUC less 0.5 by weight, and
            weight.
        """
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
        if not self._files:
            if self._kept:
                yield np.concatenate(self._kept)
            return
        if self._kept:
            self._spill()
        for file in self._files:
            file.seek(0)
            rows = np.frombuffer(file.read(), dtype=_ROW)
            if len(rows):
                yield rows


class GroupAUCs(NamedTuple):
    """AUC, weight and number of rows of each group that has both classes, `[groups]`."""

    values: FloatArray
    weights: FloatArray
    rows: IntArray


def auc_by_group(
    groups: IntArray,
    labels: NDArray[np.bool_],
    scores: NDArray[np.float32],
    weights: FloatArray,
) -> GroupAUCs:
    """AUC of each group that has both classes, ties a half.

    Args:
        groups: `[rows]`, which group each row is of.
        labels: `[rows]`, whether each is a positive.
        scores: `[rows]`, no NaN.
        weights: `[rows]`, above 0, what each counts for.
    """
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


@dataclass
class LabelScores:
    """Takes one score and one label per row, in memory that does not grow with the rows.

    Attributes:
        label: Name of the label feature.
        user: Name of the feature that rows are grouped by for GAUC; None: no GAUC.
        temperature: Divisor of the scores that gives logits; None where the objective does not
            calibrate them, which leaves log loss and calibration undefined.
        groups: The groups of users whose draws give intervals; None: no intervals.
        weight: Name of the feature of the rows' weights, as in the loss; None: all weigh the same.
        user_ids: Ids that name one user each, where no groups say it; None: all but padding and
            OOV.
    """

    label: str
    user: str | None = None
    temperature: float | None = None
    groups: UserGroups | None = None
    weight: str | None = None
    user_ids: range | None = None
    _rows: int = 0
    _unnamed: int = 0
    _weights: float = 0.0
    _positives: float = 0.0
    _auc: StreamedAUC = field(default_factory=StreamedAUC)
    _gauc: GroupedAUC = field(default_factory=GroupedAUC)
    _calibration: StreamedCalibration = field(default_factory=StreamedCalibration)
    _sums: GroupSums = field(default_factory=GroupSums)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Features that are read."""
        users = () if self.user is None else (self.user,)
        grouped = () if self.groups is None else self.groups.inputs
        weights = () if self.weight is None else (self.weight,)
        return tuple(dict.fromkeys((self.label, *users, *grouped, *weights)))

    def update(self, features: Features, scores: NDArray[np.floating]) -> None:
        """Adds a batch.

        Args:
            features: Features by name. The label is `[rows]`, or ragged `[rows, None]` where
                records may lack it; rows without one, and rows of weight 0, are left out.
            scores: `[rows]`.

        Raises:
            InputDataError: A weight is below 0, or no number.
        """
        weights = read_weights(features, self.weight, len(scores))
        ids = None if self.user is None else np.asarray(features[self.user])
        groups = None if self.groups is None else self.groups.find(features, len(scores))
        label = features[self.label]
        if isinstance(label, tf.RaggedTensor):
            rows = label.value_rowids().numpy()
            scores, label = scores[rows], label.flat_values
            ids = None if ids is None else ids[rows]
            groups = None if groups is None else groups[rows]
            weights = None if weights is None else weights[rows]
        labels, scores = np.asarray(label) > 0.5, scores.astype(np.float32)
        if weights is not None and not weights.all():
            kept = np.flatnonzero(weights)
            labels, scores, weights = labels[kept], scores[kept], weights[kept]
            ids = None if ids is None else ids[kept]
            groups = None if groups is None else groups[kept]
        self._add(ids, labels, scores, groups, weights)
        if groups is not None:
            columns: dict[str, NDArray[np.generic]] = {"positives": labels}
            if self.temperature is not None:
                columns["log_loss"] = find_log_losses(labels, scores / self.temperature)
            self._sums.add(groups, columns, weights)

    def _add(
        self,
        ids: NDArray[np.int64] | None,
        labels: NDArray[np.bool_],
        scores: NDArray[np.float32],
        groups: IntArray | None,
        weights: FloatArray | None,
    ) -> None:
        self._rows += len(labels)
        self._weights += len(labels) if weights is None else float(weights.sum())
        self._positives += float(labels.sum() if weights is None else weights[labels].sum())
        self._auc.update(labels, scores, groups, weights)
        if ids is not None:
            # Users outside the vocabulary share an id or a bucket, and are many.
            named = self.user_ids if self.groups is None else self.groups.ids
            known = is_named(ids, named)
            self._unnamed += int(np.count_nonzero(~known))
            own = None if weights is None else weights[known]
            self._gauc.update(ids[known], labels[known], scores[known], own)
        if self.temperature is not None:
            self._calibration.update(labels, scores / self.temperature, weights)

    def result(self, train_rate: float | None) -> dict[str, Any] | None:
        """Returns the metrics beside those of a constant prediction; None without a label.

        Args:
            train_rate: Share of positive labels in the train split, by weight, which the constant
                predicts; None: that of the rows themselves.
        """
        if not self._rows:
            return None
        positive_rate = self._positives / self._weights
        rate = positive_rate if train_rate is None else train_rate
        auc = self._auc.result()
        gauc, users = (None, None) if self.user is None else self._gauc.sum_users()
        if gauc is not None:
            gauc["rows_of_unknown_users"] = self._unnamed
        values = {
            "rows": self._rows,
            **({} if self.weight is None else {"weighted_by": self.weight}),
            "auc": None if auc is None else auc.value,
            "auc_error": None if auc is None else auc.error,
            "gauc": gauc,
            "log_loss": self._calibration.log_loss,
            "calibration": self._calibration.result(),
            "constant": {
                "auc": 0.5,
                "log_loss": constant_log_loss(positive_rate, rate),
                "rate": rate,
            },
        }
        if self.groups is not None:
            values["differences"] = self._compare(self.groups.seed, rate, users)
        return values

    def _compare(self, seed: int, rate: float, users: FloatArray | None) -> dict[str, Any]:
        """Compares with a constant prediction of the label's rate."""
        intervals: dict[str, Interval] = {}
        if (auc := self._auc.compare()) is not None:
            intervals["auc"] = auc
        if users is not None and users.any():
            [intervals["gauc"]] = compare_sums(users[:, 1], [users[:, 0]], seed)
        if self.temperature is not None and 0.0 < rate < 1.0:
            rows, positives = self._sums[ROWS], self._sums["positives"]
            constant = -positives * np.log(rate) - (rows - positives) * np.log1p(-rate)
            [intervals["log_loss"]] = compare_sums(rows, [self._sums["log_loss"] - constant], seed)
        return describe_differences(self._sums[ROWS], {CONSTANT: intervals})


def read_weights(features: Features, weight: str | None, rows: int) -> FloatArray | None:
    """Returns the weight of each row of a batch, `[rows]`; None where all weigh the same.

    Args:
        features: The batch.
        weight: The feature that holds the weights, or None.
        rows: Rows of the batch.

    Raises:
        InputDataError: A weight is below 0, or no number.
    """
    if weight is None:
        return None
    weights = np.asarray(features[weight], np.float64).reshape(rows)  # A scalar, or a list of one.
    bad = ~(np.isfinite(weights) & (weights >= 0.0))
    if bad.any():
        raise InputDataError(
            f"weight {weight!r} of a row is none",
            received=str(weights[int(bad.argmax())]),
            allowed="finite numbers, 0 or more",
            fix="correct the weight in the build",
        )
    return weights


def find_labelled(manifest: Manifest, label: str, values: NDArray[np.generic]) -> NDArray[np.bool_]:
    """Returns which rows have a label, `[rows]`: of several labels a row may lack one (NaN).

    Such rows weigh 0 in the label's own task.

    Args:
        manifest: The rows' dataset version.
        label: Name of the label.
        values: `[rows]`.
    """
    if manifest.may_lack(manifest.schema[label]):
        return ~np.isnan(values)
    return np.ones(len(values), bool)


def find_user_ids(manifest: Manifest) -> str | None:
    """Returns the feature whose ids of a vocabulary name the users, or None."""
    user = manifest.keys.user
    if user is None:
        return None
    spec = manifest.schema[user]
    return user if spec.vocabulary_size is not None and spec.shape == () else None
