"""The page about a dataset version: contract, statistics, and how it differs from another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from conf.atomic_output import write_text_atomic
from conf.errors import ConfigError, did_you_mean
from conf.manifest import Manifest
from conf.paths import (
    ENTRY_NAME_PATTERN,
    VERSIONS_DIR,
    local_path,
    published_versions,
    read_manifest,
    resolve_version,
)
from etl.quality.drift import OTHER, Distribution, Overlay, measure_drift, overlay
from etl.quality.version_view import VersionView, view_version
from jobs.inspection.summary import Target
from jobs.reporting.formatting import (
    MISSING,
    Cell,
    as_mapping,
    format_bytes,
    format_count,
    format_share,
    share_of,
    to_float,
)
from jobs.reporting.page import DATASET_SECTIONS, PageHead, View, render_html, render_sections
from jobs.reporting.plots import plot_bars
from jobs.reporting.run_data import MissingPartError, RunData
from jobs.reporting.verdict import Outcome, Verdict

TRAIN = "train"
SHIFTED_PSI = 0.2
_PLOTTED = 8
_SHOWN_BINS = 10
_NO_DISTRIBUTION = 1e-9
CARRIED_ROLE = "id"


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
    def shifts(self) -> tuple[FeatureShift, ...]:
        """Every feature that both versions have, the most shifted first."""
        if self.other_view is None:
            return ()
        found = []
        for name in self.manifest.schema.names:
            before = self.other_view.distribution(TRAIN, name)
            after = self.view.distribution(TRAIN, name)
            if before is not None and after is not None:
                found.append(FeatureShift(name, before, after))
        return tuple(sorted(found, key=lambda shift: (-shift.psi, shift.name)))


@dataclass(frozen=True)
class FeatureShift:
    """One feature in both versions."""

    name: str
    before: Distribution
    after: Distribution

    @cached_property
    def psi(self) -> float:
        """Population stability index."""
        return measure_drift("psi", self.before, self.after) or 0.0


def count_shifted(data: DatasetPageData) -> int:
    """Returns how many features have shifted, without those that no model reads."""
    roles = {spec.name: spec.role for spec in data.manifest.schema.features}
    return sum(s.psi > SHIFTED_PSI for s in data.shifts if roles[s.name] != CARRIED_ROLE)


def view_changes(data: DatasetPageData) -> dict[str, Any]:
    """Returns rows and label rate of both versions, drift by feature, plots of the most shifted."""
    if data.other is None:
        return {"is_compared": False}
    schema, earlier = data.manifest.schema, data.other[1]
    roles = {spec.name: spec.role for spec in schema.features}
    return {
        "is_compared": True,
        "lead": f"Now: this version. Before: {earlier.dataset_version}. "
        "Drift is that of the train split.",
        "splits": list(_compare_splits(data.manifest, earlier)),
        "drift": [_drift_row(shift, roles[shift.name]) for shift in data.shifts],
        "new": ", ".join(name for name in schema.names if name not in earlier.schema),
        "gone": ", ".join(name for name in earlier.schema.names if name not in schema),
        "plots": [_plot_drift(i, shift) for i, shift in enumerate(data.shifts[:_PLOTTED])],
    }


def _compare_splits(manifest: Manifest, other: Manifest) -> Iterator[list[Any]]:
    earlier = {split.name: split.rows for split in other.splits}
    for split in manifest.splits:
        before = earlier.get(split.name)
        change = f"{100 * (split.rows / before - 1):+.1f}%" if before else MISSING
        rates = (other.label_rate.get(split.name), manifest.label_rate.get(split.name))
        yield [split.name, before, split.rows, change, *rates]


def _drift_row(shift: FeatureShift, role: str) -> list[Any]:
    tone = "loss" if shift.psi > SHIFTED_PSI else "model"
    distances = [measure_drift(metric, shift.before, shift.after) for metric in ("js", "ks")]
    psi = Cell(shift.psi, bar=min(shift.psi, 1.0) or None, tone=tone)
    return [shift.name, role, psi, *distances, shift.before.total, shift.after.total]


def _plot_drift(index: int, shift: FeatureShift) -> tuple[Any, str]:
    """A plot and its caption."""
    laid = overlay(shift.before, shift.after)
    bars = shorten(laid)
    label = f"Bar chart: shares of the values of {shift.name} before and now; PSI {shift.psi:.4f}."
    shares = {"before": bars.before, "now": bars.after}
    caption = f"{shift.name}: PSI {shift.psi:.4f}."
    if bars.has_rest:
        before, now = map(format_share, bars.rest)
        caption += f" All other values: {before} before, {now} now."
    if not laid.ordered and any(
        laid.bins[place] not in part.counts and not part.is_complete
        for place in bars.places
        for part in (shift.before, shift.after)
    ):
        caption += " A value too rare to have been counted by itself has the most it may have."
    return _plot_shares(f"shift-{index}", label, shares, bars.names), caption


def _plot_shares(
    name: str, label: str, shares: Mapping[str, Sequence[float]], ticks: Sequence[str]
) -> Any:
    return plot_bars(name, label, {"share of the values": shares}, ticks, as_shares=True)


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


def count_violated(manifest: Manifest) -> int:
    """Returns how many rules are violated."""
    return sum(not rule.get("passed") for rule in manifest.contract)


def view_contract(data: DatasetPageData) -> dict[str, Any]:
    """Returns the rules, violated ones first."""
    rules = sorted(data.manifest.contract, key=lambda rule: bool(rule["passed"]))
    return {
        "rules": [
            [
                rule["rule"],
                Cell("holds" if rule["passed"] else "violated", best=not rule["passed"]),
                *(rule[key] for key in ("severity", "received", "allowed")),
            ]
            for rule in rules
        ]
    }


def view_label(data: DatasetPageData) -> dict[str, Any]:
    """Returns a table per slice, and the association of every feature with the label."""
    statistics = as_mapping(data.manifest.statistics.get(TRAIN))
    found = {name: as_mapping(as_mapping(s).get("label")) for name, s in statistics.items()}
    compared = {name: label for name, label in found.items() if label}
    roles = {spec.name: spec.role for spec in data.manifest.schema.features}
    ordered = sorted(compared.items(), key=lambda item: (-_strength(item[1]), item[0]))
    values = ("correlation", "correlation_ratio", "rows")
    return {
        "slices": [
            _view_slices(data, name, label) for name, label in compared.items() if "slices" in label
        ],
        "associations": [
            [name, roles.get(name, MISSING), *(label.get(value) for value in values)]
            for name, label in ordered
        ],
    }


def _strength(label: Mapping[str, Any]) -> float:
    return max(abs(label.get("correlation") or 0), label.get("correlation_ratio") or 0)


def _view_slices(data: DatasetPageData, name: str, label: Mapping[str, Any]) -> dict[str, Any]:
    """The label rate by value; no rows where the feature has too many values."""
    before: dict[str, float] = {}
    if data.other is not None and data.other_view is not None:
        statistics = as_mapping(data.other[1].statistics.get(TRAIN))
        earlier = as_mapping(as_mapping(statistics.get(name)).get("label")).get("slices") or ()
        named = _name_slices(data.other_view, name, earlier)
        before = {shown: rate for shown, _, rate in named}
    columns = [[name], ["Records", "count"], ["Label rate", "share"]]
    columns += [["Rate before", "share"]] if before else []
    rows = []
    for shown, count, rate in _name_slices(data.view, name, label["slices"] or ()):
        share = to_float(rate)
        bar = share if share is not None and 0 < share <= 1 else None
        rows.append([shown, count, Cell(rate, bar=bar), *([before.get(shown)] if before else [])])
    too_many = label["slices"] is None
    return {"name": name, "too_many": too_many, "columns": columns, "rows": rows}


def _name_slices(
    view: VersionView, name: str, slices: Sequence[tuple[Any, int, float]]
) -> Iterator[tuple[str, int, float]]:
    """Slices with tokens in the place of ids."""
    tokens = view.tokens(name, [value for value, _, _ in slices if isinstance(value, int)]) or {}
    for value, count, rate in slices:
        yield "(null)" if value is None else tokens.get(value, str(value)), count, rate


_TOP_VALUES = 10


def view_values(data: DatasetPageData) -> dict[str, Any]:
    """Returns the quantiles of the numbers, and each feature's top values and distribution."""
    statistics = as_mapping(data.manifest.statistics.get(TRAIN))
    if not statistics:
        raise MissingPartError("This dataset version carries no statistics of its train split.")
    quantiles = [
        (name, feature["quantiles"])
        for name, feature in statistics.items()
        if as_mapping(feature.get("quantiles")).get("values") and not data.view.is_vocabulary(name)
    ]
    points = quantiles[0][1]["values"] if quantiles else ()
    return {
        "columns": [["Feature"], *([f"{100 * share:g}%", "number"] for share, _ in points)],
        "quantiles": [
            [name if found["exact"] else f"{name} ~", *(value for _, value in found["values"])]
            for name, found in quantiles
        ],
        "features": [
            _view_feature(data, index, name, feature)
            for index, (name, feature) in enumerate(statistics.items())
            if feature.get("values")
        ],
    }


def _view_feature(
    data: DatasetPageData, index: int, name: str, feature: Mapping[str, Any]
) -> dict[str, Any]:
    top, total = as_mapping(feature.get("top")), feature["values"]
    values = list(top.get("values", ()))[:_TOP_VALUES]
    tokens = data.view.tokens(name, [v for v, _ in values if isinstance(v, int)]) or {}
    rows = [
        [tokens.get(value, value), Cell(count, bar=share_of(count, total) or None), count / total]
        for value, count in values
    ]
    plot, caption = None, f"{name}."
    if (distribution := data.view.distribution(TRAIN, name)) is not None:
        bars = shorten(overlay(distribution, distribution))
        label = f"Bar chart: shares of the values of {name}."
        plot = _plot_shares(f"values-{index}", label, {"now": bars.after}, bars.names)
        caption += f" All other values: {format_share(bars.rest[0])}." if bars.has_rest else ""
    mark = "" if top.get("exact", True) else ", counts estimated"
    title = f"Most frequent values of {name}{mark}."
    return {"name": name, "is_open": index == 0, "title": title, "rows": rows, "plot": plot,
            "caption": caption}  # fmt: skip


COMPARISON_SECTIONS: Mapping[str, View[DatasetPageData]] = {
    "contract": view_contract,
    "changes": view_changes,
    "label": view_label,
    "values": view_values,
}


PREVIOUS = "previous"
_SHIFTED = "Shifted: PSI above 0.2 in the train split. Features that no model reads do not count."


def write_dataset_page(target: Target, html: str | None, against: str | None) -> Path:
    """Writes the page about a dataset version: one self-contained file.

    Args:
        target: The dataset to show.
        html: File to write; an earlier one is replaced whole or not at all.
        against: Version to compare with: its id, its path, a dataset, or `previous`; or None.

    Returns:
        The file.

    Raises:
        ConfigError: No file is given, or the target is not a dataset, or there is no such version.
        InputDataError: A manifest or the statistics are damaged.
    """
    if target.kind != "dataset" or html is None:
        raise ConfigError(
            "--html writes a page about a dataset, and --against goes with it",
            received=f"a {target.kind}: {target.path}",
            allowed="--html FILE with a dataset or one of its versions",
            fix="a run's page is written by `sluice report`",
        )
    other = None if against is None else find_other(target.path, against)
    file = local_path(html)
    write_text_atomic(file, render_dataset(target.path, other))
    return file


def find_other(version: Path, against: str) -> Path:
    """Returns the directory of the version to compare with.

    Raises:
        ConfigError: There is no such version.
    """
    base = version.resolve().parent.parent
    known = published_versions(base)
    if against == PREVIOUS:
        earlier = [name for name in known if name < version.resolve().name]
        if earlier:
            return base / VERSIONS_DIR / earlier[-1]
    elif ENTRY_NAME_PATTERN.fullmatch(against) and against in known:
        return base / VERSIONS_DIR / against
    elif local_path(against).exists():
        return resolve_version(local_path(against))
    raise ConfigError(
        "there is no such version to compare with",
        received=against,
        allowed=f"a version's id or path, a dataset's path, or {PREVIOUS}",
        fix=did_you_mean(against, known),
    )


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
    tiles = [(format_count(split.rows), f"{split.name} records") for split in manifest.splits]
    tiles.append(
        (format_bytes(sum(split.bytes for split in manifest.splits)), "of TFRecord shards")
    )
    if TRAIN in manifest.label_rate:
        tiles.append((format_share(manifest.label_rate[TRAIN]), "label rate in train"))
    return PageHead(manifest.dataset_name, subtitle, _verdict(data), tuple(tiles))


def _verdict(data: DatasetPageData) -> Verdict:
    violated, rules = count_violated(data.manifest), len(data.manifest.contract)
    kept = f"All {rules} rules of its contract hold." if rules else "It has no contract."
    if violated:
        kept = f"{violated} of {rules} rules of its contract are violated."
    if data.other is None:
        return Verdict("behind" if violated else "ahead" if rules else "unknown", kept, "")
    shifted = count_shifted(data)
    moved = f"{shifted} features have shifted." if shifted != 1 else "1 feature has shifted."
    outcome: Outcome = "behind" if violated else "level" if shifted else "ahead"
    return Verdict(outcome, f"{kept} {moved}", _SHIFTED)
