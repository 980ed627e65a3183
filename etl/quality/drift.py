"""Drift between two versions: PSI, Jensen-Shannon divergence, Kolmogorov-Smirnov distance.

Distributions come from the statistics that the writer gathered: the most frequent values of
anything, an equi-depth summary of numbers. What is compared does not depend on what a build has
fitted (`etl.quality.version_view`): two versions may number the same token, or scale the same
number, differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from etl.quality.sketches import FrequencySketch, QuantileSummary

PSI_FLOOR = 1e-4
"""Least share of a bin: an empty one would make the index infinite."""


def population_stability_index(first: np.ndarray, second: np.ndarray) -> float:
    """Population stability index: sum over bins of (p - q) ln(p / q); symmetric, 0 for equal.

    Siddiqi, "Credit Risk Scorecards" (2006), chapter 6. Rules of thumb: below 0.1 stable, above
    0.2 (or 0.25) shifted. Takes counts or weights `[bins]`; where either has none it is 0.
    """
    p, q = (np.maximum(shares, PSI_FLOOR) for shares in _shares(first, second))
    return float(np.sum((p - q) * np.log(p / q)))


def jensen_shannon_divergence(first: np.ndarray, second: np.ndarray) -> float:
    """Jensen-Shannon divergence to base 2; symmetric, 0 for equal, 1 for disjoint.

    Lin, "Divergence measures based on the Shannon entropy" (IEEE Trans. Inf. Theory 37, 1991),
    equation 4.1 with equal weights. Takes counts or weights `[bins]`; where either has none it
    is 0.
    """
    p, q = _shares(first, second)
    middle = (p + q) / 2
    divergence = (_relative_entropy(p, middle) + _relative_entropy(q, middle)) / 2
    return min(max(divergence, 0.0), 1.0)


def kolmogorov_smirnov_distance(first: np.ndarray, second: np.ndarray) -> float:
    """Kolmogorov-Smirnov distance: the greatest difference of the cumulated shares, in [0, 1].

    Takes weights by value, `[values]`, the same rising values for both; where either has none it
    is 0.
    """
    p, q = _shares(first, second)
    return min(float(np.abs(np.cumsum(p) - np.cumsum(q)).max()), 1.0)


def _shares(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if min(np.sum(first), np.sum(second)) <= 0:
        return np.zeros(1), np.zeros(1)
    return first / np.sum(first), second / np.sum(second)


def _relative_entropy(p: np.ndarray, q: np.ndarray) -> float:
    held = p > 0
    return float(np.sum(p[held] * np.log2(p[held] / q[held])))


BINS = 10
MAX_CATEGORIES = 50
OTHER = "(other)"
NULL = "(null)"


@dataclass(frozen=True)
class Distribution:
    """One feature's values in one split.

    Attributes:
        counts: Occurrences by value, of the most frequent ones.
        bound: The most occurrences that any other value may have; 0 where every value is listed.
        total: Occurrences of all values.
        numbers: Summary of the numbers, or None for ids and texts.
        nulls: Missing values, NaN among them, beside `total`: a bin of their own.
    """

    counts: Mapping[str, float]
    bound: int
    total: int
    numbers: QuantileSummary | None = None
    nulls: int = 0

    def count_of(self, value: str, unlisted: int) -> float:
        """Occurrences of a value; of one that is not listed, the most that there can be."""
        if value in self.counts:
            return self.counts[value]
        rest = max(self.total - sum(self.counts.values()), 0.0)
        return min(float(self.bound), rest / max(unlisted, 1))


@dataclass(frozen=True)
class Overlay:
    """Weights of two distributions over the same bins, float64 `[bins]`.

    Where the bins are `ordered`, they rise, and shares may be cumulated.
    """

    bins: tuple[str, ...]
    before: np.ndarray
    after: np.ndarray
    ordered: bool

    def add(self, name: str, before: float, after: float, *, ordered: bool) -> Overlay:
        """Returns it with another bin, unless nothing is in there."""
        if not before and not after:
            return self
        p, q = np.append(self.before, before), np.append(self.after, after)
        return Overlay((*self.bins, name), p, q, ordered)


def build_distribution(
    feature: Mapping[str, Any],
    tokens: Mapping[int, str] | None = None,
    *,
    are_numbers: bool = True,
    nulls: int = 0,
) -> Distribution:
    sketch = FrequencySketch.loads(feature["sketch"])
    counts: dict[str, float] = {}
    for value, count, _ in sketch.listed:
        name = _name(value) if tokens is None else tokens.get(int(value), _name(value))
        counts[name] = counts.get(name, 0.0) + count
    nan = feature.get("nan", 0)
    numbers = None
    if tokens is None and are_numbers and "summary" in feature:
        numbers = QuantileSummary.loads(feature["summary"])
    total = feature["values"] - nan - feature.get("infinite", 0)
    nulls += nan + (0 if "length" in feature else feature["missing"])
    return Distribution(counts, sketch.bound, total, numbers, nulls)


def _name(value: int | float | str) -> str:
    return value if isinstance(value, str) else f"{value:.9g}" if value % 1 else f"{int(value)}"


def overlay(before: Distribution, after: Distribution) -> Overlay:
    """Lays two distributions over each other.

    Numbers of many values fall into the deciles of the first distribution; anything else is
    compared value by value, the rarer ones together. Nulls, where there are any, come last.
    """
    few = len(before.counts.keys() | after.counts.keys()) <= MAX_CATEGORIES
    is_listed = few and not before.bound and not after.bound
    if is_listed or before.numbers is None or after.numbers is None:
        laid = _overlay_values(before, after)
    else:
        laid = _overlay_numbers(before.numbers, after.numbers)
    return laid.add(NULL, before.nulls, after.nulls, ordered=laid.ordered)


def _overlay_values(before: Distribution, after: Distribution) -> Overlay:
    ordered = before.numbers is not None and after.numbers is not None
    names = sorted(before.counts.keys() | after.counts.keys(), key=float if ordered else None)
    p, q = (
        np.array([side.count_of(name, len(names) - len(side.counts)) for name in names])
        for side in (before, after)
    )
    if len(names) > MAX_CATEGORIES:
        share = p / max(before.total, 1) + q / max(after.total, 1)
        chosen = sorted(range(len(names)), key=lambda i: (-share[i], names[i]))[:MAX_CATEGORIES]
        names, p, q = [names[i] for i in chosen], p[chosen], q[chosen]
    rest = max(before.total - p.sum(), 0.0), max(after.total - q.sum(), 0.0)
    return Overlay(tuple(names), p, q, ordered).add(OTHER, *rest, ordered=False)


def _overlay_numbers(before: QuantileSummary, after: QuantileSummary) -> Overlay:
    reference = before if len(before.values) else after
    cuts = [reference.quantile(k / BINS) for k in range(1, BINS)]
    edges = np.unique(np.array(cuts, np.float64))
    shown = [f"{edge:.6g}" for edge in edges]
    between = [f"{low} to {high}" for low, high in pairwise(shown)]
    p, q = (
        np.bincount(np.searchsorted(edges, part.values), part.weights, len(edges) + 1)
        for part in (before, after)
    )
    return Overlay((f"up to {shown[0]}", *between, f"above {shown[-1]}"), p, q, True)


def measure_drift(metric: str, before: Distribution, after: Distribution) -> float | None:
    """Returns how far two distributions are from each other; None: KS of no numbers."""
    if metric != "ks":
        laid = overlay(before, after)
        measure = population_stability_index if metric == "psi" else jensen_shannon_divergence
        return measure(laid.before, laid.after)
    if before.numbers is None or after.numbers is None:
        return None
    first, second = before.numbers, after.numbers
    values = np.union1d(first.values, second.values)
    p, q = (
        np.bincount(np.searchsorted(values, part.values), part.weights, len(values))
        for part in (first, second)
    )
    return kolmogorov_smirnov_distance(p, q)
