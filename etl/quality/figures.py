"""The figures of a version that show what went wrong without an error, beside those before it.

What joins matched, nulls and unknown tokens of each feature, sizes of vocabularies, rates of
labels: all of them come from statistics and counts that are there anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from conf.encoders import IDENTITY
from conf.manifest import WEIGHTED_MEAN, Manifest, RowCounts
from conf.schema import FeatureSchema, FeatureSpec, Role
from conf.splits import EVENT_SPLITS

READ_BY_MODELS: tuple[Role, ...] = ("user", "item", "context")


@dataclass(frozen=True)
class Share:
    """A part of a whole.

    Attributes:
        part: How many.
        whole: Of how many.
    """

    part: int
    whole: int

    @property
    def value(self) -> float:
        """The share, in [0, 1]; 0 of nothing."""
        return self.part / self.whole if self.whole else 0.0

    def __str__(self) -> str:
        small = 0 < self.value < 0.01
        return f"{100 * self.value:.3g}%" if small else f"{self.value:.2%}"


DEVIATIONS = 4.0
"""Standard errors that chance is given: with a few hundred shares a build, none by chance."""


@dataclass(frozen=True)
class ChangeBound:
    """How much a share may change from one version to the next before it is warned of.

    Attributes:
        relative: Change allowed, relative to the share or to its complement, the smaller one.
        least: Change that is always allowed.
        most: Change that is never allowed.
    """

    relative: float
    least: float
    most: float = 0.1

    def allowed(self, now: Share, before: Share) -> float:
        """Returns the greatest difference that is not far.

        The bound itself, and beyond it what chance makes of as many rows: `DEVIATIONS` standard
        errors of the difference of two binomial shares, pooled, with one success and one failure
        added (Agresti and Caffo, "Simple and effective confidence intervals for proportions",
        The American Statistician 54, 2000).
        """
        smaller = min(before.value, 1 - before.value)
        bound = min(max(self.relative * smaller, self.least), self.most)
        rows = now.whole + before.whole
        pooled = (now.part + before.part + 1) / (rows + 2)
        error = math.sqrt(pooled * (1 - pooled) * (1 / now.whole + 1 / before.whole))
        return bound + DEVIATIONS * error

    def is_far(self, now: Share, before: Share) -> bool:
        """Whether a share is far from the one before; never where either is of nothing."""
        if not now.whole or not before.whole:
            return False
        return abs(now.value - before.value) > self.allowed(now, before)


OF_ROWS = ChangeBound(relative=0.5, least=0.01)
"""Shares matched, null or OOV: half as much again, one point at least."""
OF_LABELS = ChangeBound(relative=0.25, least=0.0)
"""Rates of labels are small and steady: a quarter as much again."""
SIZE_FACTOR = 2.0
"""A vocabulary of half or twice the size is far."""


def is_size_far(now: int, before: int) -> bool:
    """Whether a vocabulary's size is far from the one before, beyond what chance makes of it."""
    low, high = sorted((now, before))
    return high > SIZE_FACTOR * low and high - low > DEVIATIONS * math.sqrt(high + low)


FigureKind = Literal["joined", "converted", "label", "weighted_label", "tokens", "null", "oov"]


@dataclass(frozen=True)
class Figure:
    """One figure of a version.

    Attributes:
        kind: Share of events that a join matched (`joined`), share of a label's conversions that
            make a sample positive (`converted`), rate of a label, the same by the rows' weights
            (`weighted_label`), tokens of a vocabulary, share of nulls or of OOV.
        name: The dictionary, label, vocabulary or feature.
        split: The split, or None for what is of all events.
        now: The share, or the number of tokens.
        before: The same of the version before; None where that does not tell.
    """

    kind: FigureKind
    name: str
    split: str | None
    now: Share | int
    before: Share | int | None = None

    @property
    def title(self) -> str:
        """What it is, in words."""
        where = "" if self.split is None else f" ({self.split})"
        return f"{_TITLES[self.kind]} {self.name}{where}"

    @property
    def is_far(self) -> bool:
        """Whether it is far from that of the version before."""
        if isinstance(self.now, Share) and isinstance(self.before, Share):
            return self.bound.is_far(self.now, self.before)
        if isinstance(self.now, int) and isinstance(self.before, int):
            return is_size_far(self.now, self.before)
        return False

    @property
    def is_telling(self) -> bool:
        """Whether there is anything of it, now or before."""
        values = (self.now, self.before)
        return any((v.part if isinstance(v, Share) else v) for v in values if v is not None)

    @property
    def bound(self) -> ChangeBound:
        """How much it may change, as a share."""
        return OF_LABELS if self.kind in ("label", "weighted_label") else OF_ROWS


_TITLES: Mapping[FigureKind, str] = {
    "joined": "share of events matched by join",
    "converted": "share of conversions that make a sample positive, of label",
    "label": "rate of label",
    "weighted_label": "rate by weight of label",
    "tokens": "tokens of vocabulary",
    "null": "share of nulls of feature",
    "oov": "share of OOV of feature",
}


@dataclass(frozen=True)
class VersionFigures:
    """What the figures of a version are taken from.

    Attributes:
        schema: Its features.
        statistics: Summarised statistics by split and feature.
        joined: Share of events that each dictionary matched.
        converted: Share of conversions that make a sample positive, by label.
        tokens: Tokens by vocabulary.
    """

    schema: FeatureSchema
    statistics: Mapping[str, Mapping[str, Any]]
    joined: Mapping[str, Share] = field(default_factory=dict)
    converted: Mapping[str, Share] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)

    def find(self) -> Iterator[tuple[FigureKind, str, str | None, Share | int]]:
        """Yields kind, name, split and value of each figure that there is."""
        for name, share in self.joined.items():
            yield "joined", name, None, share
        for name, share in self.converted.items():
            yield "converted", name, None, share
        splits = [split for split in EVENT_SPLITS if self.statistics.get(split)]
        for spec in self.schema.by_role("label"):
            for split in splits:
                rate = find_label_rate(self.statistics[split].get(spec.name, {}))
                if rate is None:
                    continue
                yield "label", spec.name, split, rate
                weighted = self.statistics[split][spec.name].get(WEIGHTED_MEAN)
                if weighted is not None:
                    part = round(weighted * rate.whole)
                    yield "weighted_label", spec.name, split, Share(part, rate.whole)
        for name, tokens in self.tokens.items():
            yield "tokens", name, None, tokens
        for spec in self.schema.by_role(*READ_BY_MODELS):
            for split in splits:
                statistics = self.statistics[split].get(spec.name, {})
                nulls, oov = find_nulls(spec, statistics), find_oov(spec, statistics)
                if nulls is not None:
                    yield "null", spec.name, split, nulls
                if oov is not None:
                    yield "oov", spec.name, split, oov


def read_figures(manifest: Manifest) -> VersionFigures:
    """Returns what a published version's figures are taken from."""
    return VersionFigures(
        manifest.schema,
        manifest.statistics,
        _count_joined(manifest.counts),
        share_kept(manifest.counts.lost_conversions),
        manifest.vocabularies,
    )


def _count_joined(counts: RowCounts) -> dict[str, Share]:
    return {
        name: Share(matched, matched + sum(counts.unmatched.get(name, {}).values()))
        for name, matched in counts.matched.items()
    }


def share_matched(matches: Mapping[str, Mapping[str, int]]) -> dict[str, Share]:
    """Returns the share of events that each dictionary matched, by dictionary and outcome."""
    return {
        name: Share(counts["matched"], sum(counts.values())) for name, counts in matches.items()
    }


def share_kept(conversions: Mapping[str, Mapping[str, int]]) -> dict[str, Share]:
    """Returns the share of conversions that make a sample positive, by label."""
    lost = {
        name: sum(n for reason, n in counts.items() if reason != "rows")
        for name, counts in conversions.items()
    }
    return {
        name: Share(counts["rows"] - lost[name], counts["rows"])
        for name, counts in conversions.items()
    }


def list_figures(now: VersionFigures, before: VersionFigures | None) -> tuple[Figure, ...]:
    """Returns all figures of a version, beside those of the version before."""
    earlier: dict[tuple[str, str, str | None], Share | int] = {}
    if before is not None:
        earlier = {(kind, name, split): value for kind, name, split, value in before.find()}
    return tuple(
        Figure(kind, name, split, value, earlier.get((kind, name, split)))
        for kind, name, split, value in now.find()
    )


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
        nan = 0 if spec.is_list else found.get("nan", 0)
        return Share(found["missing"] + nan, rows)
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
    if not {found.get("min"), found.get("max")} <= {0, 1} or "distinct" not in found:
        return None
    if found["distinct"]["count"] > 2:
        return None
    return Share(round(found["mean"] * found["values"]), found["values"])
