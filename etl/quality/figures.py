"""The figures of a version that show what went wrong without an error, beside those before it.

What joins matched, nulls and unknown tokens of each feature, sizes of vocabularies, rates of
labels: all of them come from statistics and counts that are there anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conf.encoders import IDENTITY
from conf.manifest import WEIGHTED_MEAN, Manifest
from conf.schema import FeatureSchema, FeatureSpec, Role
from conf.splits import EVENT_SPLITS

READ_BY_MODELS: tuple[Role, ...] = ("user", "item", "context")
DEVIATIONS = 4.0
"""Standard errors that chance is given: with a few hundred shares a build, none by chance."""
MOST_CHANGE = 0.1
"""Change of a share, beyond chance, that is always far."""
SIZE_FACTOR = 2.0
"""A vocabulary of half or twice the size is far."""


@dataclass(frozen=True)
class Share:
    """A part of a whole, as counts."""

    part: int
    whole: int

    @property
    def value(self) -> float:
        """The share, in [0, 1]; 0 of nothing."""
        return self.part / self.whole if self.whole else 0.0

    def __str__(self) -> str:
        return f"{100 * self.value:.3g}%" if 0 < self.value < 0.01 else f"{self.value:.2%}"


Outcomes = Mapping[str, Mapping[str, int]]
"""How many there are of each outcome, by dictionary (of a join) or label (of conversions)."""
Figures = Mapping[tuple[str, str, str | None], Share | int]
"""Figures of a version by kind, name (dictionary, label, vocabulary or feature) and split."""

_TITLES = {
    "joined": "share of events matched by join",
    "converted": "share of conversions that make a sample positive, of label",
    "label": "rate of label",
    "weighted_label": "rate by weight of label",
    "tokens": "tokens of vocabulary",
    "null": "share of nulls of feature",
    "oov": "share of OOV of feature",
}


@dataclass(frozen=True)
class Figure:
    """One figure of a version, beside that of the version before, if that tells."""

    kind: str
    name: str
    split: str | None
    now: Share | int
    before: Share | int | None = None

    @property
    def title(self) -> str:
        return f"{_TITLES[self.kind]} {self.name}" + (f" ({self.split})" if self.split else "")

    @property
    def is_telling(self) -> bool:
        """Whether there is anything of it, now or before."""
        return any(v.part if isinstance(v, Share) else v for v in (self.now, self.before))

    @property
    def is_far(self) -> bool:
        now, before = self.now, self.before
        if isinstance(now, Share) and isinstance(before, Share):
            if not now.whole or not before.whole:
                return False
            return abs(now.value - before.value) > allowed_change(self.kind, now, before)
        if isinstance(now, int) and isinstance(before, int):
            low, high = sorted((now, before))
            return high > SIZE_FACTOR * low and high - low > DEVIATIONS * math.sqrt(high + low)
        return False


def allowed_change(kind: str, now: Share, before: Share) -> float:
    """Returns the greatest difference of two shares that is not far.

    Half of the share or of its complement, the smaller one, and one point at least; of labels,
    whose rates are small and steady, a quarter. Beyond it what chance makes of as many rows:
    `DEVIATIONS` standard errors of the difference of two binomial shares, pooled, with one success
    and one failure added (Agresti and Caffo, "Simple and effective confidence intervals for
    proportions", The American Statistician 54, 2000).
    """
    relative, least = (0.25, 0.0) if kind in ("label", "weighted_label") else (0.5, 0.01)
    smaller = min(before.value, 1 - before.value)
    pooled = (now.part + before.part + 1) / (now.whole + before.whole + 2)
    error = math.sqrt(pooled * (1 - pooled) * (1 / now.whole + 1 / before.whole))
    return min(max(relative * smaller, least), MOST_CHANGE) + DEVIATIONS * error


def list_figures(now: Figures, before: Figures | None) -> tuple[Figure, ...]:
    return tuple(Figure(*key, value, (before or {}).get(key)) for key, value in now.items())


def read_figures(manifest: Manifest) -> Figures:
    counts = manifest.counts
    matches = {
        name: {"matched": matched, **counts.unmatched.get(name, {})}
        for name, matched in counts.matched.items()
    }
    lost, tokens = counts.lost_conversions, manifest.vocabularies
    return find_figures(manifest.schema, manifest.statistics, matches, lost, tokens)


def find_figures(
    schema: FeatureSchema,
    statistics: Mapping[str, Mapping[str, Any]],
    matches: Outcomes,
    conversions: Outcomes,
    tokens: Mapping[str, int],
) -> Figures:
    """Finds the figures of a version.

    By its statistics, summarised, what became of joins and conversions, sizes of vocabularies.
    """
    found: dict[tuple[str, str, str | None], Share | int | None] = {}
    found |= share_matched(matches, conversions)
    splits = [split for split in EVENT_SPLITS if statistics.get(split)]
    for spec in schema.by_role("label"):
        for split in splits:
            label = statistics[split].get(spec.name, {})
            rate, weighted = find_label_rate(label), label.get(WEIGHTED_MEAN)
            found["label", spec.name, split] = rate
            if rate is not None and weighted is not None:
                by_weight = Share(round(weighted * rate.whole), rate.whole)
                found["weighted_label", spec.name, split] = by_weight
    found |= {("tokens", name, None): size for name, size in tokens.items()}
    for spec in schema.by_role(*READ_BY_MODELS):
        for split in splits:
            feature = statistics[split].get(spec.name, {})
            found["null", spec.name, split] = find_nulls(spec, feature)
            found["oov", spec.name, split] = find_oov(spec, feature)
    return {key: value for key, value in found.items() if value is not None}


def share_matched(
    matches: Outcomes, conversions: Outcomes
) -> dict[tuple[str, str, str | None], Share]:
    """Returns the shares of events that joins matched, and of conversions that count."""
    shares: dict[tuple[str, str, str | None], Share] = {}
    for name, n in matches.items():
        shares["joined", name, None] = Share(n["matched"], sum(n.values()))
    for name, n in conversions.items():
        shares["converted", name, None] = Share(2 * n["rows"] - sum(n.values()), n["rows"])
    return shares


_ID_IS_NULL = ("hash", "bucketize", "date_part", "cross")
"""Encoders that give a missing value the id 1, and nothing else."""


def is_vocabulary(spec: FeatureSpec) -> bool:
    """Whether a feature holds ids of a vocabulary, by what its spec says."""
    return spec.encoding != IDENTITY and ":" not in spec.encoding


def find_nulls(spec: FeatureSpec, found: Mapping[str, Any]) -> Share | None:
    """Returns the share of a feature's rows whose raw value is missing; None where unknown."""
    if "missing" not in found:
        return None
    rows, raw = found["rows"], found.get("raw")
    kind = spec.encoding.partition(":")[0]
    if kind == IDENTITY:
        return Share(found["missing"] + (0 if spec.is_list else found.get("nan", 0)), rows)
    # Of several columns the raw statistics know the first.
    if raw is not None and kind != "cross":
        return Share(raw["missing"] + (0 if spec.is_list else raw["nan"]), rows)
    if kind in _ID_IS_NULL and not spec.is_list:
        return Share(found["missing"] + found["oov"], rows)
    return None


def count_unknown(found: Mapping[str, Any]) -> int:
    """Returns how many ids stand for no token: nulls, and unknown ones with those in buckets."""
    return int(found.get("oov", 0)) + int(found.get("raw", {}).get("bucketed", 0))


def find_oov(spec: FeatureSpec, found: Mapping[str, Any]) -> Share | None:
    """Returns the share of known values that the vocabulary lacks; None where unknown."""
    raw = found.get("raw")
    if raw is None or not (is_vocabulary(spec) or spec.encoding.startswith("sparse_indices:")):
        return None
    nulls = raw["null_values"] if spec.is_list else raw["missing"]
    return Share(max(count_unknown(found) - nulls, 0), max(found["values"] - nulls, 0))


def find_label_rate(found: Mapping[str, Any]) -> Share | None:
    """Returns the rate of a label of zeros and ones; None for any other label."""
    is_binary = {found.get("min"), found.get("max")} <= {0, 1} and found["distinct"]["count"] <= 2
    return Share(round(found["mean"] * found["values"]), found["values"]) if is_binary else None
