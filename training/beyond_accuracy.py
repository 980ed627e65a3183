"""What the lists look like: how much of the catalogue they use, and how popular their items are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from training.baselines import popularity_percentiles
from training.protocols import RankingBatch
from training.ranks import IntArray
from training.retrieval import take_top


class ListStatistics:
    """Coverage and popularity of the first k items of every list.

    Coverage is the share of the catalogue that occurs in any list (Ge et al. 2010, section 3.1);
    the popularity percentile is the mean over all recommended items, 0.5 for random lists.

    Args:
        counts: `[items]`, training events of each catalogue item.
        k: Length of the lists.
        mask_seen: Whether items that the user had met are left out.
    """

    def __init__(self, counts: IntArray, k: int, mask_seen: bool) -> None:
        self._percentiles = popularity_percentiles(counts)
        self._shown = np.zeros(len(counts), dtype=bool)
        self._k = k
        self._mask_seen = mask_seen
        self._total = 0.0
        self._items = 0

    def update(self, scores: NDArray[np.float32], batch: RankingBatch) -> None:
        """Adds the lists of a batch.

        Args:
            scores: `[rows, items]`; changed in place where seen items are masked.
            batch: The rows.
        """
        if self._mask_seen and batch.seen is not None:
            scores[batch.seen.rows, batch.seen.columns] = -np.inf
        values, columns = take_top(scores, self._k)
        chosen = columns[~np.isneginf(values)]
        self._shown[chosen] = True
        self._total += float(self._percentiles[chosen].sum())
        self._items += len(chosen)

    def result(self) -> dict[str, float]:
        """Returns `coverage@k` and `popularity_percentile@k`."""
        return {
            f"coverage@{self._k}": float(self._shown.mean()),
            f"popularity_percentile@{self._k}": self._total / max(self._items, 1),
        }
