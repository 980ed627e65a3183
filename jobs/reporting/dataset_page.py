"""The page about a dataset version: contract, statistics, and how it differs from another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from conf.artefacts.dataset import read_manifest
from conf.manifest import Manifest
from etl.quality.drift import NULL, OTHER, Distribution, Overlay, measure_drift, overlay
from etl.quality.version_view import (
    ComparedFeature,
    VersionView,
    compare_feature,
    view_version,
)
from jobs.reporting.page import DATASET_SECTIONS, PageHead, View, render_html, render_sections
from jobs.reporting.quality import Outcome, Verdict
from jobs.reporting.run_data import MissingPartError, RunData
from jobs.support.formatting import MISSING, as_mapping, share_of

TRAIN = "train"
SHIFTED_PSI = 0.2
CARRIED_ROLE = "id"
_SHOWN_BINS = 10
_TOP_VALUES = 10
_NO_DISTRIBUTION = 1e-9
_SHIFTED = "Shifted: PSI above 0.2 in the train split. Features that no model reads do not count."


@dataclass(frozen=True)
class DatasetPageData:
    """A version and, where it is compared, another one.

    Attributes:
        version: Directory of the version.
        manifest: Its manifest.
        other: Directory and manifest of the version that it is compared with, or None.
    """

    version: Path
    manifest: Manifest
    other: tuple[Path, Manifest] | None = None

    @cached_property
    def view(self) -> VersionView:
        """The version's statistics and tokens."""
        return view_version(self.version, self.manifest)

    @cached_property
    def other_view(self) -> VersionView | None:
        """Those of the other version."""
        return None if self.other is None else view_version(*self.other)

    @cached_property
    def roles(self) -> dict[str, str]:
        """Role by feature."""
        return {spec.name: spec.role for spec in self.manifest.schema.features}

    @cached_property
    def shifts(self) -> tuple[FeatureShift, ...]:
        """Every feature that both versions have, the most shifted first."""
        if self.other_view is None:
            return ()
        found = [
            FeatureShift(name, pair.before, pair.after)
            for name, pair in self._compared.items()
            if pair.before is not None and pair.after is not None and pair.gap is None
        ]
        return tuple(sorted(found, key=lambda shift: (-shift.psi, shift.name)))

    @cached_property
    def gaps(self) -> dict[str, str]:
        """Why features that both versions have cannot be compared."""
        return {name: pair.gap for name, pair in self._compared.items() if pair.gap is not None}

    @cached_property
    def _compared(self) -> dict[str, ComparedFeature]:
        before = self.other_view
        if before is None:
            return {}
        names = self.manifest.schema.names
        return {name: compare_feature(before, self.view, TRAIN, name) for name in names}


@dataclass(frozen=True)
class FeatureShift:
    """One feature in both versions."""

    name: str
    before: Distribution
    after: Distribution

    def distance(self, metric: str) -> float | None:
        """Returns a distance of the distributions; None where it is of numbers only."""
        return measure_drift(metric, self.before, self.after)

    @cached_property
    def psi(self) -> float:
        """Population stability index."""
        return self.distance("psi") or 0.0

    @cached_property
    def bars(self) -> Bars:
        """Bins of both versions to plot."""
        return shorten(overlay(self.before, self.after))

    @property
    def is_bound(self) -> bool:
        """Whether a share among the bars is only the most that it may be."""
        laid = overlay(self.before, self.after)
        return not laid.ordered and any(
            laid.bins[place] not in part.counts and not part.is_complete
            for place in self.bars.places
            if laid.bins[place] != NULL
            for part in (self.before, self.after)
        )


def view_changes(data: DatasetPageData) -> dict[str, Any]:
    """Returns the versions; of an earlier one the lead as well."""
    if data.other is None:
        return {"page": data}
    lead = f"Now: this version. Before: {data.other[1].dataset_version}. "
    lead += "Drift is that of the raw values, or tokens, of the train split."
    return {"page": data, "lead": lead, "shifted_psi": SHIFTED_PSI}


class Bars(NamedTuple):
    """Bins to plot: their places and names, and their shares before and after.

    The rest has no bar: of a feature with many values it would dwarf all the others.
    """

    places: list[int]
    names: list[str]
    before: list[float]
    after: list[float]
    rest: tuple[float, float]

    @property
    def has_rest(self) -> bool:
        """Whether anything is not shown."""
        return max(self.rest) > _NO_DISTRIBUTION


def shorten(laid: Overlay) -> Bars:
    """Returns the bins to show; of many values the most frequent."""
    p, q = (part / max(part.sum(), 1) for part in (laid.before, laid.after))
    named = [i for i, name in enumerate(laid.bins) if name != OTHER]
    if len(named) > _SHOWN_BINS + 1:
        named = sorted(named, key=lambda i: -(p[i] + q[i]))[:_SHOWN_BINS]
        named = sorted(named) if laid.ordered else named
    names = [name if len(name) <= 14 else f"{name[:13]}…" for name in laid.bins]
    shown_p, shown_q = p[named].tolist(), q[named].tolist()
    rest = (max(float(p.sum()) - sum(shown_p), 0.0), max(float(q.sum()) - sum(shown_q), 0.0))
    return Bars(named, [names[i] for i in named], shown_p, shown_q, rest)


def view_label(data: DatasetPageData) -> dict[str, Any]:
    """Returns a table per slice, and the association of every feature with the label."""
    compared = _read_label(data.manifest)
    ordered = sorted(compared.items(), key=lambda item: (-_strength(item[1]), item[0]))
    values = ("correlation", "correlation_ratio", "rows")
    return {
        "slices": [
            _view_slices(data, name, label) for name, label in compared.items() if "slices" in label
        ],
        "associations": [
            [name, data.roles.get(name, MISSING), *map(label.get, values)]
            for name, label in ordered
        ],
    }


def _read_label(manifest: Manifest) -> dict[str, Mapping[str, Any]]:
    """What the train split's statistics say of the label beside each feature."""
    statistics = as_mapping(manifest.statistics.get(TRAIN))
    found = {name: as_mapping(as_mapping(s).get("label")) for name, s in statistics.items()}
    return {name: label for name, label in found.items() if label}


def _strength(label: Mapping[str, Any]) -> float:
    return max(abs(label.get("correlation") or 0), label.get("correlation_ratio") or 0)


def _view_slices(data: DatasetPageData, name: str, label: Mapping[str, Any]) -> dict[str, Any]:
    """The label rate by value, of both versions; None where the feature has too many values."""
    before = []
    if data.other is not None and data.other_view is not None:
        before = _name_slices(data.other_view, name, _read_label(data.other[1]).get(name, {}))
    rates = {shown: rate for shown, _, rate in before}
    rows = [(*found, rates.get(found[0])) for found in _name_slices(data.view, name, label)]
    is_short = label["slices"] is not None
    return {"name": name, "rows": rows if is_short else None, "before": bool(before)}


def _name_slices(
    view: VersionView, name: str, label: Mapping[str, Any]
) -> list[tuple[str, int, float]]:
    """Value, records and label rate of each slice, with tokens in the place of ids."""
    slices = label.get("slices") or ()
    tokens = view.tokens(name, [value for value, _, _ in slices if isinstance(value, int)]) or {}
    return [
        ("(null)" if value is None else tokens.get(value, str(value)), count, rate)
        for value, count, rate in slices
    ]


def view_values(data: DatasetPageData) -> dict[str, Any]:
    """Returns the quantiles of the numbers, and each feature's top values and distribution."""
    statistics = as_mapping(data.manifest.statistics.get(TRAIN))
    if not statistics:
        raise MissingPartError("This dataset version carries no statistics of its train split.")
    quantiles = [
        (name if found["exact"] else f"{name} ~", found["values"])
        for name, feature in statistics.items()
        if (found := as_mapping(feature.get("quantiles"))).get("values")
        and not data.view.is_vocabulary(name)
    ]
    points = quantiles[0][1] if quantiles else ()
    return {
        "columns": [["Feature"], *([f"{100 * share:g}%", "number"] for share, _ in points)],
        "quantiles": [[name, *(value for _, value in values)] for name, values in quantiles],
        "features": [
            _view_feature(data, name, feature, index)
            for index, (name, feature) in enumerate(statistics.items())
            if feature.get("values")
        ],
    }


def _view_feature(
    data: DatasetPageData, name: str, feature: Mapping[str, Any], index: int
) -> dict[str, Any]:
    top, total = as_mapping(feature.get("top")), feature["values"]
    values = list(top.get("values", ()))[:_TOP_VALUES]
    tokens = data.view.tokens(name, [v for v, _ in values if isinstance(v, int)]) or {}
    distribution = data.view.distribution(TRAIN, name)
    return {
        "name": name,
        "index": index,
        "is_exact": top.get("exact", True),
        "rows": [
            [tokens.get(v, v), {"value": n, "bar": share_of(n, total) or None}, n / total]
            for v, n in values
        ],
        "bars": None if distribution is None else shorten(overlay(distribution, distribution)),
    }


COMPARISON_SECTIONS: Mapping[str, View[DatasetPageData]] = {
    "contract": lambda data: {"rules": data.manifest.contract},
    "changes": view_changes,
    "label": view_label,
    "values": view_values,
}


def render_dataset(version: Path, other: Path | None = None) -> str:
    """Returns the page as HTML; the same versions always give the same text."""
    before = None if other is None else (other, read_manifest(other))
    data = DatasetPageData(version, read_manifest(version), before)
    run = RunData(version, {}, version=version, manifest=data.manifest)
    sections = render_sections(COMPARISON_SECTIONS, data)
    sections += render_sections(DATASET_SECTIONS, run)
    return render_html(_head(data), sections)


def _head(data: DatasetPageData) -> PageHead:
    manifest = data.manifest
    subtitle = f"dataset version {manifest.dataset_version} · {manifest.created_at}"
    if data.other is not None:
        subtitle += f" · compared with {data.other[1].dataset_version}"
    tiles = (
        *((f"{split.name} records", split.rows, "count") for split in manifest.splits),
        ("of TFRecord shards", sum(split.bytes for split in manifest.splits), "bytes"),
        ("label rate in train", manifest.label_rate.get(TRAIN), "share"),
        *_weigh_label(manifest),
    )
    return PageHead(manifest.dataset_name, subtitle, _verdict(data), tiles)


def _weigh_label(manifest: Manifest) -> tuple[tuple[str, float, str], ...]:
    """The label's rate by the rows' weights, which models learn, where rows have weights."""
    label = manifest.keys.label
    if label is None or manifest.find_weight() is None:
        return ()
    rate = manifest.find_label_mean(label, TRAIN)
    return () if rate is None else (("label rate in train by weight", rate, "share"),)


def _verdict(data: DatasetPageData) -> Verdict:
    rules = len(data.manifest.contract)
    violated = sum(not rule.get("passed") for rule in data.manifest.contract)
    kept = f"All {rules} rules of its contract hold." if rules else "It has no contract."
    if violated:
        kept = f"{violated} of {rules} rules of its contract are violated."
    if data.other is None:
        return Verdict("behind" if violated else "ahead" if rules else "unknown", kept)
    shifted = sum(s.psi > SHIFTED_PSI for s in data.shifts if data.roles[s.name] != CARRIED_ROLE)
    moved = f"{shifted} features have shifted." if shifted != 1 else "1 feature has shifted."
    outcome: Outcome = "behind" if violated else "level" if shifted else "ahead"
    return Verdict(outcome, f"{kept} {moved}", _SHIFTED)
