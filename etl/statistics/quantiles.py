"""Quantiles of numbers in bounded memory, made to be merged.

While a shard is written, one of each `stride` values is kept, the stride doubling whenever too
many are kept: a stratified sample, the same however the values come in batches. A shard hands over
an equi-depth summary of its sample, at most `SUMMARY_POINTS` weighted values. The rank of a
quantile is then off by about half over the root of the sampled values (0.5 % for one shard, less
for more) plus one half over the points (0.2 %); quantiles of few distinct values are exact.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from etl.statistics.sketch import FrequencySketch

SAMPLED_VALUES = 1 << 14
SUMMARY_POINTS = 256
_WINDOW_BITS = 10
PROBABILITIES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


class StratifiedSample:
    """One of each `2**level` successive values, `SAMPLED_VALUES` at most.

    Which one of them is drawn from its place by a hash: a fixed one would see but one element of
    each vector whose length is a power of two.
    """

    def __init__(self) -> None:
        self._level = self._seen = self._size = 0
        self._kept: list[np.ndarray] = []

    def add(self, values: np.ndarray) -> None:
        """Adds values.

        Args:
            values: Numbers `[values]`; NaN and infinities take part in the counting only.
        """
        first, self._seen = self._seen, self._seen + len(values)
        taken = values if self._level == 0 else values[_places(first, self._seen, self._level)]
        if not len(taken):
            return
        self._kept.append(taken.astype(np.float64))
        self._size += len(taken)
        while self._size > SAMPLED_VALUES:
            self._halve()

    def _halve(self) -> None:
        """Keeps one of each two blocks."""
        self._level += 1
        kept = np.concatenate(self._kept)
        pairs = np.arange((len(kept) + 1) // 2, dtype=np.int64)
        chosen = 2 * pairs + _coins(pairs, self._level)
        self._kept = [kept[chosen[chosen < len(kept)]]]  # the last may be yet to come
        self._size = len(self._kept[0])

    def summarize(self, count: int) -> QuantileSummary:
        """Returns the summary of the finite values.

        Args:
            count: How many finite values the sample stands for.
        """
        values = np.concatenate(self._kept) if self._kept else np.empty(0)
        values = values[np.isfinite(values)]
        weights = np.full(len(values), count / max(len(values), 1))
        return build_summary(values, weights, self._level == 0)


def _coins(blocks: np.ndarray, level: int) -> np.ndarray:
    """Draws 0 or 1 for each block of a level, always the same (the mixing of SplitMix64)."""
    mixed = blocks.astype(np.uint64) + np.uint64(level << 56)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed >> np.uint64(31)) & np.uint64(1)).astype(np.int64)


def _places(first: int, last: int, level: int) -> np.ndarray:
    """The places drawn from `first` up to `last`, counted from `first`."""
    bits = level + _WINDOW_BITS
    parts = []
    for window in range(first >> bits, (last - 1 >> bits) + 1):
        drawn = _drawn(window, level)
        low, high = np.searchsorted(drawn, (first, last))
        parts.append(drawn[low:high])
    return np.concatenate(parts) - first if parts else np.empty(0, np.int64)


@lru_cache(maxsize=64)
def _drawn(window: int, level: int) -> np.ndarray:
    """The place drawn from each block of a window; the same for all features of a shard."""
    places = np.arange(window << _WINDOW_BITS, (window + 1) << _WINDOW_BITS, dtype=np.int64)
    for below in range(level, 0, -1):
        places = 2 * places + _coins(places, below)
    return places


@dataclass(frozen=True)
class QuantileSummary:
    """A distribution as weighted points.

    Attributes:
        values: Distinct numbers, rising, float64 `[points]`.
        weights: How many values each stands for, float64 `[points]`.
        exact: Whether these are the values themselves.
    """

    values: np.ndarray
    weights: np.ndarray
    exact: bool = True

    def quantile(self, probability: float) -> float | None:
        """Returns the least value that this share of the values does not exceed; None if empty."""
        if not len(self.values):
            return None
        cumulated = np.cumsum(self.weights)
        # A weight is a sum of equal fractions: its rounding must not move a rank.
        wanted = probability * cumulated[-1] * (1 - 1e-12)
        return float(self.values[min(np.searchsorted(cumulated, wanted), len(cumulated) - 1)])

    def to_json(self) -> dict[str, Any]:
        """Returns `quantiles` and, for merging, the whole as the opaque `summary`."""
        points = [[p, self.quantile(p)] for p in PROBABILITIES] if len(self.values) else []
        return {
            "quantiles": {"values": points, "exact": self.exact},
            "summary": self._dumps(),
        }

    def _dumps(self) -> str:
        text = json.dumps([self.values.tolist(), self.weights.tolist(), self.exact])
        return base64.b64encode(zlib.compress(text.encode(), 6)).decode()

    @classmethod
    def loads(cls, text: str) -> QuantileSummary:
        """Builds a summary from the `summary` of its JSON form."""
        values, weights, exact = json.loads(zlib.decompress(base64.b64decode(text)))
        return cls(np.array(values, np.float64), np.array(weights, np.float64), exact)


def build_summary(values: np.ndarray, weights: np.ndarray, exact: bool) -> QuantileSummary:
    """Builds a summary of `SUMMARY_POINTS` points at most.

    Args:
        values: Finite numbers in any order, float64 `[values]`.
        weights: How many values each stands for, `[values]`.
        exact: Whether they are all the values.
    """
    distinct, places = np.unique(values, return_inverse=True)
    summed = np.bincount(places, weights=weights, minlength=len(distinct)).astype(np.float64)
    if len(distinct) <= SUMMARY_POINTS:
        return QuantileSummary(distinct, summed, exact)
    cumulated = np.cumsum(summed)
    ranks = (np.arange(SUMMARY_POINTS) + 0.5) / SUMMARY_POINTS * cumulated[-1]
    chosen = distinct[np.searchsorted(cumulated, ranks)]
    points, times = np.unique(chosen, return_counts=True)
    return QuantileSummary(points, times * (cumulated[-1] / SUMMARY_POINTS), exact=False)


def merge_summaries(parts: Sequence[QuantileSummary]) -> QuantileSummary:
    """Returns the summary of all parts' values together."""
    return build_summary(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.weights for part in parts]),
        all(part.exact for part in parts),
    )


def summarize_counted(sketch: FrequencySketch) -> QuantileSummary | None:
    """Returns the exact summary of numbers that a sketch has all counted, or None."""
    if sketch.bound:
        return None
    values = np.array([value for value, _, _ in sketch.entries], np.float64)
    counts = np.array([count for _, count, _ in sketch.entries], np.float64)
    return build_summary(values, counts, exact=True)
