"""Paired differences of two systems on the same rows, with 95 % confidence intervals.

Means of rows: percentile bootstrap over users, who bring all their rows (Efron & Tibshirani 1993,
section 13.3; resampling of clusters: Davison & Hinkley 1997, section 3.8; of topics in retrieval:
Sakai 2006). AUC: the variance of DeLong, DeLong & Clarke-Pearson 1988 for correlated curves, with
the users as clusters (Obuchowski 1997, equation 4); where each row is a user of its own, both are
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conf.manifest import Manifest
from conf.metrics import METRICS, find_family, is_minimised
from conf.paths import ReadablePath
from training.encoders.vocabularies import find_named_ids, is_named
from training.evaluation.metrics import FloatArray, IntArray
from training.reader.filters import hash_keys

DRAWS = 2000
LEVEL = 0.95
GROUPS = 1 << 14
"""Groups that the users of an evaluation are drawn in; up to so many users are a group each."""
FEWEST_GROUPS = 20
"""Of fewer users a bootstrap's interval is too narrow (Cameron, Gelbach & Miller 2008)."""
BOOTSTRAP = "bootstrap over users"
CONSTANT = "constant"
"""A prediction that is the same for all rows: the mean label of train."""
_Z = 1.959963984540054
_CELLS_AT_ONCE = 1 << 22

Pair = tuple[FloatArray, FloatArray]
Ends = tuple[float | None, float | None]
"""Both ends of an interval; None where there are too few users for one."""
Compute = Callable[[FloatArray], FloatArray]
"""From totals over users, `[draws, columns]`, to statistics, `[draws, statistics]`."""


@dataclass(frozen=True)
class Difference:
    """What one system is ahead of another on a metric.

    Attributes:
        run: Value of the first.
        other: Value of the second.
        difference: First minus second.
        low: Lower end of its 95 % interval; None: there are fewer than `FEWEST_GROUPS` users.
        high: Upper end, or None likewise.
        method: How the interval was found.
    """

    run: float
    other: float
    difference: float
    low: float | None
    high: float | None
    method: str


def find_lead(metric: str, difference: Mapping[str, Any]) -> float | None:
    """Returns what the first is ahead at least: the end of the interval that is worse for it.

    None where there is no interval.

    Args:
        metric: Its name; of errors lower values are better.
        difference: The fields of a `Difference`.
    """
    end = difference["high" if is_minimised(metric) else "low"]
    return None if end is None else -float(end) if is_minimised(metric) else float(end)


@dataclass
class UserGroups:
    """Puts rows into groups of users, so that all rows of a user are in one.

    Up to `GROUPS` users are a group each, more of them share groups by hash: drawing these groups
    is drawing clusters too, only larger ones. Unknown users who share an id are one group: nothing
    tells their rows apart. In a dataset without users each row is a user.

    Attributes:
        feature: The user's id; None: there are no users.
        ids: Ids that name one user each; None: keys without a vocabulary.
        seed: Seed of the draws of groups.
        rows: Rows seen so far.
    """

    feature: str | None = None
    ids: range | None = None
    seed: int = 0
    rows: int = 0

    @property
    def inputs(self) -> tuple[str, ...]:
        """Features of a batch that are read."""
        return () if self.feature is None else (self.feature,)

    def find(self, features: Mapping[str, Any], rows: int) -> IntArray:
        """Returns the group of each row of a batch, `[rows]`; from `GROUPS` on of unknown users.

        Args:
            features: The batch.
            rows: Its rows.
        """
        if self.feature is None:
            alone = (self.rows + np.arange(rows)) % GROUPS
            self.rows += rows
            return alone
        ids = np.asarray(features[self.feature], np.int64)
        groups = ids
        if self.ids is None or self.ids.stop > GROUPS:
            groups = (hash_keys(ids) % np.uint64(GROUPS)).astype(np.int64)
        return np.where(self.are_named(ids), groups, GROUPS + groups)

    def are_named(self, ids: IntArray) -> NDArray[np.bool_]:
        """Tells ids that name one user each, of those that many share."""
        return is_named(ids, self.ids)


def build_user_groups(version_dir: ReadablePath, manifest: Manifest, seed: int) -> UserGroups:
    """Builds the groups of users of a dataset version's rows.

    Args:
        version_dir: Directory of the version.
        manifest: Its manifest.
        seed: Seed of the draws of groups.

    Raises:
        InputDataError: The encoder plan is damaged, or does not make the user's feature.
    """
    user = manifest.keys.user
    if user is None or manifest.schema[user].shape != ():
        return UserGroups(seed=seed)
    return UserGroups(user, find_named_ids(version_dir, manifest, user), seed)


ROWS = "rows"
"""Column of `GroupSums` that counts the rows of a group, each by its weight."""


@dataclass
class GroupSums:
    """Sums over the rows of each group, in memory that does not grow with the rows.

    Attributes:
        names: Names of the columns, `ROWS` last.
    """

    names: tuple[str, ...] = ()
    _sums: FloatArray = field(default_factory=lambda: np.zeros((2 * GROUPS, 0)))

    def add(
        self,
        groups: IntArray,
        values: Mapping[str, NDArray[np.generic]],
        weights: FloatArray | None = None,
    ) -> None:
        """Adds a batch of rows.

        Args:
            groups: `[rows]`, the group of each.
            values: `[rows]` by name, the same names each time.
            weights: `[rows]`; None: all weigh 1.
        """
        if not self.names:
            self.names = (*values, ROWS)
            self._sums = np.zeros((2 * GROUPS, len(self.names)))
        columns = [values[name] for name in self.names[:-1]]
        rows = np.stack([*columns, np.ones(len(groups))], axis=1)
        np.add.at(self._sums, groups, rows if weights is None else rows * weights[:, np.newaxis])

    def __getitem__(self, name: str) -> FloatArray:
        """Returns the sums of a column, `[2 * GROUPS]`."""
        return self._sums[:, self.names.index(name)]


Interval = dict[str, Any]
"""`difference`, its `low` and `high` end, None of too few users, and the `method`."""


class SystemSums:
    """Metrics of several systems on the same rows, by group of users."""

    def __init__(self) -> None:
        self._systems: dict[str, GroupSums] = {}

    def add(self, system: str, groups: IntArray, values: Mapping[str, FloatArray]) -> None:
        """Adds a system's metrics of a batch, `[rows]` by name; all systems get the same rows."""
        self._systems.setdefault(system, GroupSums()).add(groups, values)

    def compare(self, system: str, seed: int) -> dict[str, Any]:
        """Compares the means of a system with those of the others; see `describe_differences`."""
        own = self._systems[system]
        metrics, others = own.names[:-1], [name for name in self._systems if name != system]
        pairs = [(other, metric) for other in others for metric in metrics]
        gaps = [own[metric] - self._systems[other][metric] for other, metric in pairs]
        against: dict[str, dict[str, Interval]] = {other: {} for other in others}
        for (other, metric), found in zip(pairs, compare_sums(own[ROWS], gaps, seed), strict=True):
            against[other][metric] = found
        return describe_differences(own[ROWS], against)


def describe_differences(
    rows: FloatArray, against: Mapping[str, Mapping[str, Interval]]
) -> dict[str, Any]:
    """Returns differences as `metrics.json` holds them.

    Args:
        rows: `[groups]`, rows of each group of users; those of unknown users are not counted.
        against: By the system compared with, by metric.
    """
    known = int(np.count_nonzero(rows[:GROUPS]))
    return {"level": LEVEL, "groups": known, "against": dict(against)}


def compare_sums(weights: FloatArray, gaps: Sequence[FloatArray], seed: int) -> list[Interval]:
    """Compares means of paired rows by a bootstrap over groups.

    Args:
        weights: `[groups]`: rows, or their weight.
        gaps: `[groups]` each: sums of the rows' differences.
        seed: Seed of the draws.

    Returns:
        The difference of each, with its interval.
    """

    def find_means(totals: FloatArray) -> FloatArray:
        return totals[:, :-1] / totals[:, -1:]

    return bootstrap_groups(np.stack([*gaps, weights], axis=1), find_means, seed)


def bootstrap_groups(sums: FloatArray, compute: Compute, seed: int) -> list[Interval]:
    """Returns differences of two systems, with intervals by a bootstrap over groups.

    Args:
        sums: `[groups, columns]`, the rows of each group last; groups without rows are left out.
        compute: From totals of columns to differences.
        seed: Seed of the draws.
    """
    sums = sums[sums[:, -1] > 0]
    values = compute(sums.sum(axis=0, keepdims=True))[0].tolist()
    ends: list[Any] = [(None, None)] * len(values)
    if len(sums) >= FEWEST_GROUPS:
        ends = bootstrap(sums, compute, seed).tolist()
    return [
        {"difference": value, "low": low, "high": high, "method": BOOTSTRAP}
        for value, (low, high) in zip(values, ends, strict=True)
    ]


def bootstrap(sums: FloatArray, compute: Compute, seed: int) -> FloatArray:
    """Returns the 95 % percentile intervals of statistics when users are drawn again.

    Args:
        sums: `[users, columns]`, sums over each user's rows.
        compute: From totals of columns to statistics.
        seed: Seed of the draws.

    Returns:
        `[statistics, 2]`: the lower and the upper end.
    """
    rng, users = np.random.default_rng(seed), len(sums)
    found, step = [], max(1, _CELLS_AT_ONCE // users)
    for start in range(0, DRAWS, step):
        draws = min(step, DRAWS - start)
        drawn = rng.integers(0, users, (draws, users))
        drawn += np.arange(draws)[:, np.newaxis] * users
        times = np.bincount(drawn.ravel(), minlength=draws * users).reshape(draws, users)
        found.append(compute(times.astype(np.float64) @ sums))
    tails = (50 * (1 - LEVEL), 50 * (1 + LEVEL))
    return np.percentile(np.concatenate(found), tails, axis=0).T


def bootstrap_mean(sums: FloatArray, counts: FloatArray, seed: int) -> Ends:
    """Returns the 95 % percentile interval of a mean of rows when users are drawn again.

    None and None where they are fewer than `FEWEST_GROUPS`.

    Args:
        sums: `[users]`, sum over each user's rows.
        counts: `[users]`, number, or weight, of each user's rows.
        seed: Seed of the draws.
    """
    table = np.stack([sums, counts], axis=1)
    return _find_ends(table, lambda totals: totals[:, :1] / totals[:, 1:], seed)


def _find_ends(sums: FloatArray, compute: Compute, seed: int) -> Ends:
    """The interval of one statistic, where there are users enough for one."""
    if len(sums) < FEWEST_GROUPS:
        return None, None
    low, high = bootstrap(sums, compute, seed)[0]
    return float(low), float(high)


def compare_means(
    run: FloatArray,
    other: FloatArray,
    owners: IntArray,
    seed: int,
    weights: FloatArray | None = None,
) -> Difference:
    """Compares the means of paired rows by a bootstrap over users.

    Args:
        run: `[rows]`, values of the first.
        other: `[rows]`, of the second.
        owners: `[rows]`, the user of each.
        seed: Seed of the draws.
        weights: `[rows]`, what each counts for; None: 1.
    """
    sums, counts = _sum_by_owner(run - other, owners, weights)
    low, high = bootstrap_mean(sums, counts, seed)
    columns = (run, other, run - other)
    a, b, difference = (float(np.average(values, weights=weights)) for values in columns)
    return Difference(a, b, difference, low, high, BOOTSTRAP)


def compare_root_means(
    run: FloatArray,
    other: FloatArray,
    owners: IntArray,
    seed: int,
    weights: FloatArray | None = None,
) -> Difference:
    """Compares the roots of means of paired rows, such as RMSEs; arguments as `compare_means`."""
    (own, counts), (rival, _) = (_sum_by_owner(values, owners, weights) for values in (run, other))
    sums = np.stack([own, rival, counts], axis=1)
    low, high = _find_ends(sums[sums[:, -1] > 0], find_root_gap, seed)
    a, b = (float(np.sqrt(np.average(values, weights=weights))) for values in (run, other))
    return Difference(a, b, a - b, low, high, BOOTSTRAP)


def compare_rows(
    metric: str,
    values: tuple[FloatArray, FloatArray],
    owners: IntArray,
    seed: int,
    weights: FloatArray | None = None,
) -> Difference:
    """Compares two runs on a metric of rows, by the interval that the metric has.

    Args:
        metric: Its name.
        values: `[rows]` of each run: of `rmse` the squared errors.
        owners: `[rows]`, the user of each.
        seed: Seed of the draws.
        weights: `[rows]`, what each counts for; None: 1.
    """
    is_root = METRICS[find_family(metric)].interval == "root_mean"
    compare = compare_root_means if is_root else compare_means
    return compare(*values, owners, seed, weights)


def find_root_gap(totals: FloatArray) -> FloatArray:
    """Returns the difference of two roots of means, `[draws, 1]`.

    Args:
        totals: `[draws, 3]`: both sums, and the rows.
    """
    roots = np.sqrt(totals[:, :2] / totals[:, 2:])
    return roots[:, :1] - roots[:, 1:]


def _sum_by_owner(
    values: FloatArray, owners: IntArray, weights: FloatArray | None = None
) -> tuple[FloatArray, FloatArray]:
    _, group = np.unique(owners, return_inverse=True)
    sums, counts = np.zeros(int(group.max()) + 1), np.zeros(int(group.max()) + 1)
    np.add.at(sums, group, values if weights is None else values * weights)
    np.add.at(counts, group, 1.0 if weights is None else weights)
    return sums, counts


def compare_auc(
    positive: NDArray[np.bool_],
    scores: Pair,
    owners: IntArray,
    weights: FloatArray | None = None,
) -> Difference:
    """Compares two AUCs of the same rows.

    With weights both the shares that are counted and the means over rows are weighted, and so are
    the sums over clusters that the variance is made of: its linear term is the same.

    Args:
        positive: `[rows]`; both classes occur.
        scores: Two of `[rows]`, any scale.
        owners: `[rows]`, the cluster of each row.
        weights: `[rows]`, above 0, what each counts for; None: 1.
    """
    w = np.ones(len(positive)) if weights is None else weights
    parts = [place_values(positive, own, w) for own in scores]
    run, other = (float(np.average(part[positive], weights=w[positive])) for part in parts)
    difference = run - other
    rest = w * (parts[0] - parts[1] - difference)
    _, group = np.unique(owners, return_inverse=True)
    clusters = int(group.max()) + 1
    sums = [
        np.bincount(group[side], rest[side], clusters) / w[side].sum()
        for side in (positive, ~positive)
    ]
    have = [len(np.unique(group[wanted])) for wanted in (positive, ~positive)]
    variance = sum(_unbias(n) * float(s @ s) for n, s in zip(have, sums, strict=True))
    variance += 2.0 * _unbias(clusters) * float(sums[0] @ sums[1])
    half = _Z * float(np.sqrt(max(variance, 0.0)))
    low, high = (None, None) if clusters < FEWEST_GROUPS else (difference - half, difference + half)
    return Difference(run, other, difference, low, high, "DeLong, users as clusters")


def _unbias(clusters: int) -> float:
    return clusters / max(clusters - 1, 1)


def place_values(
    positive: NDArray[np.bool_], scores: NDArray[np.floating], weights: FloatArray
) -> FloatArray:
    """Share of the other class that each row is on the right side of, ties a half, `[rows]`.

    Placement values: their weighted mean over positives, as over negatives, is the AUC.

    Args:
        positive: `[rows]`; both classes occur.
        scores: `[rows]`.
        weights: `[rows]`, above 0.
    """
    found = np.empty(len(scores))
    for side in (positive, ~positive):
        order = np.argsort(scores[~side], kind="stable")
        others = scores[~side][order]
        sums = np.concatenate(([0.0], np.cumsum(weights[~side][order])))
        below = sums[np.searchsorted(others, scores[side], side="left")]
        not_above = sums[np.searchsorted(others, scores[side], side="right")]
        found[side] = (below + not_above) / (2.0 * sums[-1])
    found[~positive] = 1.0 - found[~positive]
    return found
