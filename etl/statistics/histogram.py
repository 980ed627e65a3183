"""Histograms whose bins are fixed powers of two, so that merging them is adding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

FLOAT_BINS = 512
"""Bins of a float32: one per sign and exponent."""
LENGTH_BINS = 33
"""Bins of a list's length: one per number of binary digits."""


def length_bins(lengths: np.ndarray) -> np.ndarray:
    """Counts lengths by their number of binary digits: 0, 1, 2-3, 4-7, ...

    Args:
        lengths: Integers in [0, 2**32), `[rows]`.

    Returns:
        Counts, int64 `[LENGTH_BINS]`.
    """
    return np.bincount(np.frexp(lengths)[1], minlength=LENGTH_BINS)


def length_histogram(bins: np.ndarray) -> list[dict[str, Any]]:
    """Returns the bins that are not empty: least and greatest length, and count."""
    return [
        {"low": (1 << k) >> 1, "high": (1 << k) - 1, "count": int(bins[k])}
        for k in np.flatnonzero(bins).tolist()
    ]


def float_histogram(bins: np.ndarray) -> list[dict[str, Any]]:
    """Returns the bins that are not empty, rising.

    Args:
        bins: Counts by sign and exponent of a float32 (its bits, shifted right by 23), int64
            `[FLOAT_BINS]`; infinity and NaN left out.

    Returns:
        Bins with the bound nearest to zero included and the other excluded: `low`, `high`,
        `count`. Zero is in the bin from 0.
    """
    result = []
    for k in np.flatnonzero(bins).tolist():
        near, far = _magnitudes(k & 255)
        low, high = (-far, -near) if k >= 256 else (near, far)
        result.append({"low": low, "high": high, "count": int(bins[k])})
    return sorted(result, key=lambda item: item["low"])


def _magnitudes(exponent: int) -> tuple[float, float]:
    if exponent == 0:  # zero and the subnormal numbers
        return 0.0, 2.0**-126
    return 2.0 ** (exponent - 127), 2.0 ** (exponent - 126)


def merge_histograms(parts: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Returns the histogram of all parts' values together, rising."""
    merged: dict[tuple[float, float], int] = {}
    for part in parts:
        for item in part:
            key = (item["low"], item["high"])
            merged[key] = merged.get(key, 0) + item["count"]
    return [
        {"low": low, "high": high, "count": count} for (low, high), count in sorted(merged.items())
    ]
