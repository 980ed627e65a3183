"""Paired differences of two systems on the same rows, with 95 % confidence intervals.

Means of rows, and roots of means such as RMSE: a bootstrap that draws users with all their rows
(percentile method: Efron & Tibshirani 1993, An Introduction to the Bootstrap, section 13.3; over
paired values, as Sakai 2006 does). AUC: the variance of DeLong et al. (1988) with users as clusters
(Obuchowski 1997). Fewer than 20 users have no interval (Cameron, Gelbach & Miller 2008).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conf.metrics import METRICS, find_family

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
Interval = dict[str, Any]
"""`difference` (first minus second), its `low` and `high` end, None of too few users, `method`."""

DRAWS, LEVEL = 2000, 0.95
GROUPS = 1 << 14
"""Groups of users that streamed sums are kept of."""
FEWEST_GROUPS = 20
CONSTANT = "constant"
_Z = 1.959963984540054  # the normal quantile of LEVEL
_CELLS_AT_ONCE = 1 << 22


def describe_differences(
    rows: FloatArray, against: Mapping[str, Mapping[str, Interval]]
) -> dict[str, Any]:
    """Differences as `metrics.json` holds them; `rows` `[2 * GROUPS]` of each group of users."""
    return {
        "level": LEVEL,
        "groups": int(np.count_nonzero(rows[:GROUPS])),
        "against": dict(against),
    }


def find_means(totals: FloatArray) -> FloatArray:
    """Means `[draws, statistics]` of totals `[draws, statistics + 1]`, the rows last."""
    return totals[:, :-1] / totals[:, -1:]


def find_gap(totals: FloatArray) -> FloatArray:
    """First mean minus the second, `[draws, 1]`, of totals of both and the rows."""
    means = find_means(totals)
    return means[:, :1] - means[:, 1:]


def find_root_gap(totals: FloatArray) -> FloatArray:
    """As `find_gap`, of the roots of both means."""
    roots = np.sqrt(find_means(totals))
    return roots[:, :1] - roots[:, 1:]


def compare_groups(
    sums: FloatArray, compute: Callable[[FloatArray], FloatArray], seed: int
) -> list[Interval]:
    """Differences of two systems, with intervals by a bootstrap over groups of rows.

    `sums` is `[groups, columns]`, the rows (or their weight) last; groups without any are left out.
    `compute` goes from totals `[draws, columns]` to differences `[draws, statistics]`.
    """
    sums = sums[sums[:, -1] > 0]
    values = compute(sums.sum(axis=0, keepdims=True))[0].tolist()
    ends: list[Any] = [(None, None)] * len(values)
    if len(sums) >= FEWEST_GROUPS:
        ends = _draw_ends(sums, compute, seed).tolist()
    return [
        {"difference": value, "low": low, "high": high, "method": "bootstrap over users"}
        for value, (low, high) in zip(values, ends, strict=True)
    ]


def _draw_ends(
    sums: FloatArray, compute: Callable[[FloatArray], FloatArray], seed: int
) -> FloatArray:
    """Percentile intervals of statistics when groups are drawn again, `[statistics, 2]`."""
    rng, groups = np.random.default_rng(seed), len(sums)
    found, step = [], max(1, _CELLS_AT_ONCE // groups)
    for start in range(0, DRAWS, step):
        draws = min(step, DRAWS - start)
        drawn = rng.integers(0, groups, (draws, groups))
        drawn += np.arange(draws)[:, np.newaxis] * groups
        times = np.bincount(drawn.ravel(), minlength=draws * groups).reshape(draws, groups)
        found.append(compute(times.astype(np.float64) @ sums))
    tails = (50 * (1 - LEVEL), 50 * (1 + LEVEL))
    return np.percentile(np.concatenate(found), tails, axis=0).T


def compare_rows(
    metric: str,
    values: Sequence[FloatArray],
    owners: IntArray,
    seed: int,
    weights: FloatArray | None = None,
) -> Interval:
    """Compares two systems, `run` and `other`, on a metric that is a mean of rows, or its root.

    `values` are `[rows]` of each (of `rmse` the squared errors), `owners` the user of each row.
    """
    is_root = METRICS[find_family(metric)].interval == "root_mean"
    group = np.unique(owners, return_inverse=True)[1]
    w = np.ones(len(owners)) if weights is None else weights
    columns = (values[0] * w, values[1] * w, w)
    sums = np.array([np.bincount(group, weights=each) for each in columns], np.float64).T
    means = find_means(sums.sum(axis=0, keepdims=True))[0]
    run, other = map(float, np.sqrt(means) if is_root else means)
    [found] = compare_groups(sums, find_root_gap if is_root else find_gap, seed)
    return {"run": run, "other": other, **found}


def compare_auc(
    positive: NDArray[np.bool_],
    scores: Sequence[NDArray[np.floating]],
    owners: IntArray,
    weights: FloatArray | None = None,
) -> Interval:
    """Compares the AUCs of two systems on the same rows, as `compare_rows`; both classes occur.

    With weights both the shares that are counted and the means over rows are weighted, and so are
    the sums over clusters that the variance is made of: its linear term is the same.
    """
    w = np.ones(len(positive)) if weights is None else weights
    parts = [place_values(positive, own, w) for own in scores]
    run, other = (float(np.average(part[positive], weights=w[positive])) for part in parts)
    difference = run - other
    rest = w * (parts[0] - parts[1] - difference)
    group = np.unique(owners, return_inverse=True)[1]
    clusters = int(group.max()) + 1
    sides = (positive, ~positive)
    sums = [np.bincount(group[side], rest[side], clusters) / w[side].sum() for side in sides]
    sizes = [clusters, *(len(np.unique(group[side])) for side in sides)]
    unbias = [size / max(size - 1, 1) for size in sizes]
    products = (2.0 * float(sums[0] @ sums[1]), *(float(each @ each) for each in sums))
    variance = float(np.dot(unbias, products))
    half = _Z * float(np.sqrt(max(variance, 0.0)))
    ends = (None, None) if clusters < FEWEST_GROUPS else (difference - half, difference + half)
    return {
        "run": run,
        "other": other,
        "difference": difference,
        "low": ends[0],
        "high": ends[1],
        "method": "DeLong, users as clusters",
    }


def place_values(
    positive: NDArray[np.bool_], scores: NDArray[np.floating], weights: FloatArray
) -> FloatArray:
    """Share of the other class that each row is on the right side of, ties a half, `[rows]`.

    Placement values: their weighted mean over positives, as over negatives, is the AUC.
    """
    found = np.empty(len(scores))
    for side in (positive, ~positive):
        order = np.argsort(scores[~side], kind="stable")
        others, sums = scores[~side][order], np.cumsum(weights[~side][order])
        sums = np.concatenate(([0.0], sums))
        below, not_above = (
            sums[np.searchsorted(others, scores[side], at)] for at in ("left", "right")
        )
        found[side] = (below + not_above) / (2.0 * sums[-1])
    found[~positive] = 1.0 - found[~positive]
    return found
