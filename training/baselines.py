"""The systems that every model is compared with: popularity and chance."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from training.ranks import IntArray


class PopularityScorer:
    """The same list for everyone: items by falling number of training events, ties by id.

    Args:
        counts: `[items]`, training events of each catalogue item, ids ascending.
    """

    name = "popularity"

    def __init__(self, counts: IntArray) -> None:
        order = np.argsort(-counts, kind="stable")
        # Scores are places, not counts, so that no two items tie.
        places = np.empty(len(counts), dtype=np.float32)
        places[order] = np.arange(len(counts), 0, -1, dtype=np.float32)
        self._places = places

    def scores(self, features: Mapping[str, tf.Tensor], rows: int) -> NDArray[np.float32]:
        """Scores the whole catalogue, `[rows, items]`, read-only."""
        return np.broadcast_to(self._places, (rows, len(self._places)))


class RandomScorer:
    """A uniform random order per row; depends on the seed and the row's place in the split.

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
