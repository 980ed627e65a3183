"""How far two distributions are from each other."""

from __future__ import annotations

import numpy as np

PSI_FLOOR = 1e-4
"""Least share of a bin: an empty one would make the index infinite."""


def population_stability_index(first: np.ndarray, second: np.ndarray) -> float:
    """Population stability index: sum over bins of (p - q) ln(p / q); symmetric, 0 for equal.

    Siddiqi, "Credit Risk Scorecards" (2006), chapter 6. Rules of thumb: below 0.1 stable, above
    0.2 (or 0.25) shifted.

    Args:
        first: Counts or weights by bin, `[bins]`, not negative.
        second: The same of the other distribution.

    Returns:
        The index, in [0, infinity); 0 where either holds nothing.
    """
    p, q = _shares(first), _shares(second)
    if p is None or q is None:
        return 0.0
    p, q = np.maximum(p, PSI_FLOOR), np.maximum(q, PSI_FLOOR)
    return float(np.sum((p - q) * np.log(p / q)))


def jensen_shannon_divergence(first: np.ndarray, second: np.ndarray) -> float:
    """Jensen-Shannon divergence to base 2; symmetric, 0 for equal, 1 for disjoint.

    Lin, "Divergence measures based on the Shannon entropy" (IEEE Trans. Inf. Theory 37, 1991),
    equation 4.1 with equal weights.

    Args:
        first: Counts or weights by bin, `[bins]`, not negative.
        second: The same of the other distribution.

    Returns:
        The divergence, in [0, 1]; 0 where either holds nothing.
    """
    p, q = _shares(first), _shares(second)
    if p is None or q is None:
        return 0.0
    middle = (p + q) / 2
    divergence = (_relative_entropy(p, middle) + _relative_entropy(q, middle)) / 2
    return min(max(divergence, 0.0), 1.0)


def kolmogorov_smirnov_distance(first: np.ndarray, second: np.ndarray) -> float:
    """Kolmogorov-Smirnov distance: the greatest difference of the cumulated shares.

    Args:
        first: Weights by value, `[values]`, values rising, the same for both.
        second: The same of the other distribution.

    Returns:
        The distance, in [0, 1]; 0 where either holds nothing.
    """
    p, q = _shares(first), _shares(second)
    if p is None or q is None:
        return 0.0
    return min(float(np.abs(np.cumsum(p) - np.cumsum(q)).max()), 1.0)


def _shares(weights: np.ndarray) -> np.ndarray | None:
    total = float(np.sum(weights))
    return np.asarray(weights, np.float64) / total if total > 0 else None


def _relative_entropy(p: np.ndarray, q: np.ndarray) -> float:
    held = p > 0
    return float(np.sum(p[held] * np.log2(p[held] / q[held])))
