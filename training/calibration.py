"""Log loss and calibration of predicted probabilities, in sums that do not grow with the rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from training.metrics import log_loss

BINS = 20


@dataclass
class Calibration:
    """How far predicted probabilities are those of the labels.

    Attributes:
        bins: Bins of equal width that [0, 1] is cut into.
        rows: Rows seen so far.
    """

    bins: int = BINS
    rows: int = 0
    _log_loss: float = 0.0
    _counts: NDArray[np.int64] = field(init=False)
    _sums: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        """Starts with empty bins."""
        self._counts = np.zeros(self.bins, dtype=np.int64)
        self._sums = np.zeros((2, self.bins))

    def update(self, labels: NDArray[np.bool_], logits: NDArray[np.floating]) -> None:
        """Adds rows.

        Args:
            labels: `[rows]`, whether each is a positive.
            logits: `[rows]`, log-odds that were predicted.
        """
        if not len(labels):
            return
        self._log_loss += log_loss(labels, logits) * len(labels)
        predicted = np.exp(-np.logaddexp(0.0, -logits.astype(np.float64)))
        bins = np.minimum((predicted * self.bins).astype(np.intp), self.bins - 1)
        self._counts += np.bincount(bins, minlength=self.bins)
        for row, values in enumerate((predicted, labels.astype(np.float64))):
            self._sums[row] += np.bincount(bins, weights=values, minlength=self.bins)
        self.rows += len(labels)

    @property
    def log_loss(self) -> float | None:
        """Mean negative log-likelihood in nats; None without a row."""
        return self._log_loss / self.rows if self.rows else None

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
            "expected_error": float(np.abs(predicted - positives).sum() / self.rows),
            "bins": [
                {
                    "rows": int(self._counts[bin_]),
                    "predicted": float(predicted[bin_] / self._counts[bin_]),
                    "rate": float(positives[bin_] / self._counts[bin_]),
                }
                for bin_ in filled
            ],
        }
