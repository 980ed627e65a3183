"""The page about a dataset version: its contract and its statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from conf.artefacts.dataset import read_manifest
from conf.manifest import Manifest
from conf.splits import TRAIN
from etl.quality.drift import OTHER, Overlay, overlay
from etl.quality.version_view import VersionView, view_version
from jobs.reporting.page import DATASET_SECTIONS, PageHead, View, render_html, render_sections
from jobs.reporting.quality import Verdict
from jobs.reporting.run_data import MissingPartError, RunData
from jobs.support.formatting import MISSING, as_mapping, share_of

_SHOWN_BINS = 10
_TOP_VALUES = 10
_NO_DISTRIBUTION = 1e-9


@dataclass(frozen=True)
class DatasetPageData:
    """A version.

    Attributes:
        version: Directory of the version.
        manifest: Its manifest.
    """

    version: Path
    manifest: Manifest

    @cached_property
    def view(self) -> VersionView:
        """The version's statistics and tokens."""
        return view_version(self.version, self.manifest)

    @cached_property
    def roles(self) -> dict[str, str]:
        """Role by feature."""
        return {spec.name: spec.role for spec in self.manifest.schema.features}


class Bars(NamedTuple):
    """Bins to plot: their names and shares.

    The rest has no bar: of a feature with many values it would dwarf all the others.
    """

    names: list[str]
    shares: list[float]
    rest: float

    @property
    def has_rest(self) -> bool:
        """Whether anything is not shown."""
        return self.rest > _NO_DISTRIBUTION


def shorten(laid: Overlay) -> Bars:
    """Returns the bins of a distribution to show; of many values the most frequent."""
    shares = laid.after / max(laid.after.sum(), 1)
    named = [i for i, name in enumerate(laid.bins) if name != OTHER]
    if len(named) > _SHOWN_BINS + 1:
        named = sorted(named, key=lambda i: -shares[i])[:_SHOWN_BINS]
        named = sorted(named) if laid.ordered else named
    names = [name if len(name) <= 14 else f"{name[:13]}…" for name in laid.bins]
    shown = shares[named].tolist()
    rest = max(float(shares.sum()) - sum(shown), 0.0)
    return Bars([names[i] for i in named], shown, rest)


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
    """The label rate by value; None where the feature has too many values."""
    is_short = label["slices"] is not None
    return {"name": name, "rows": _name_slices(data.view, name, label) if is_short else None}


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


VERSION_SECTIONS: Mapping[str, View[DatasetPageData]] = {
    "contract": lambda data: {"rules": data.manifest.contract},
    "label": view_label,
    "values": view_values,
}


def render_dataset(version: Path) -> str:
    """Returns the page as HTML; the same version always gives the same text."""
    data = DatasetPageData(version, read_manifest(version))
    run = RunData(version, {}, version=version, manifest=data.manifest)
    sections = render_sections(VERSION_SECTIONS, data)
    sections += render_sections(DATASET_SECTIONS, run)
    return render_html(_head(data), sections)


def _head(data: DatasetPageData) -> PageHead:
    manifest = data.manifest
    subtitle = f"dataset version {manifest.dataset_version} · {manifest.created_at}"
    tiles = (
        *((f"{split.name} records", split.rows, "count") for split in manifest.splits),
        ("of TFRecord shards", sum(split.bytes for split in manifest.splits), "bytes"),
        ("label rate in train", manifest.label_rate.get(TRAIN), "share"),
        *_weigh_label(manifest),
    )
    return PageHead(manifest.dataset_name, subtitle, _verdict(manifest), tiles)


def _weigh_label(manifest: Manifest) -> tuple[tuple[str, float, str], ...]:
    """The label's rate by the rows' weights, which models learn, where rows have weights."""
    label = manifest.keys.label
    if label is None or manifest.find_weight() is None:
        return ()
    rate = manifest.find_label_mean(label, TRAIN)
    return () if rate is None else (("label rate in train by weight", rate, "share"),)


def _verdict(manifest: Manifest) -> Verdict:
    rules = len(manifest.contract)
    violated = sum(not rule.get("passed") for rule in manifest.contract)
    kept = f"All {rules} rules of its contract hold." if rules else "It has no contract."
    if violated:
        kept = f"{violated} of {rules} rules of its contract are violated."
    return Verdict("behind" if violated else "ahead" if rules else "unknown", kept)
