"""AUC of a stream of scores: exact while they are few, then from a histogram, with its error."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.metrics import auc

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


class StreamedAUC:
    """Area under the ROC curve in memory that does not grow with the rows.

    Up to `exact_rows` rows are kept and the value is exact. Beyond that scores are counted in
    2^20 bins of float32: sign, exponent and the first 11 bits of the mantissa, so that bins keep
    the order of scores whatever their range and are 1 / 2048 of a score wide. A pair of a positive
    and a negative in the same bin counts a half, which is what bounds the error: half of the
    share of such pairs.

    Args:
        exact_rows: Rows up to which the value is exact: 5 bytes each; the bins take 16 MiB.
    """

    def __init__(self, exact_rows: int = EXACT_ROWS) -> None:
        self._exact_rows = exact_rows
        self._kept: list[tuple[NDArray[np.bool_], NDArray[np.float32]]] = []
        self._rows = 0
        self._bins: NDArray[np.int64] | None = None

    def update(self, labels: NDArray[np.bool_], scores: NDArray[np.float32]) -> None:
        """Adds rows.

        Args:
            labels: `[rows]`, whether each is a positive.
            scores: `[rows]`, any range, no NaN.

        Raises:
            ValueError: A score is NaN.
        """
        if np.isnan(scores).any():
            raise ValueError("scores hold NaN; AUC needs an order")
        self._rows += len(labels)
        if self._bins is None:
            self._kept.append((labels, scores))
            if self._rows > self._exact_rows:
                self._bins = np.zeros((2, 1 << BIN_BITS), dtype=np.int64)
                for kept in self._kept:
                    _count(self._bins, *kept)
                self._kept = []
        else:
            _count(self._bins, labels, scores)

    def result(self) -> AUCEstimate | None:
        """Returns the AUC; None where only one class occurs and it is not defined."""
        if self._bins is not None:
            return _integrate(self._bins)
        if not self._kept:
            return None
        labels, scores = (np.concatenate(part) for part in zip(*self._kept, strict=True))
        value = auc(labels, scores)
        return None if value is None else AUCEstimate(value, 0.0)


def _count(bins: NDArray[np.int64], labels: NDArray[np.bool_], scores: NDArray[np.float32]) -> None:
    bits = (scores.astype(np.float32) + np.float32(0.0)).view(np.uint32)  # -0.0 becomes 0.0
    # Of IEEE 754 numbers, positive ones are in the order of their bits, negative ones reversed.
    keys = np.where(bits & _SIGN, ~bits, bits | _SIGN) >> np.uint32(32 - BIN_BITS)
    np.add.at(bins, (labels.astype(np.intp), keys.astype(np.intp)), 1)


def _integrate(bins: NDArray[np.int64]) -> AUCEstimate | None:
    negatives, positives = bins.astype(np.float64)
    pairs = float(positives.sum()) * float(negatives.sum())
    if not pairs:
        return None
    below = np.cumsum(negatives) - negatives
    same_bin = float(positives @ negatives)
    return AUCEstimate((float(positives @ below) + same_bin / 2) / pairs, same_bin / 2 / pairs)
