"""The page about a dataset version: contract, statistics, and how it differs from another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from conf.errors import ConfigError, did_you_mean
from conf.manifest import Manifest
from conf.paths import (
    ENTRY_NAME_PATTERN,
    VERSIONS_DIR,
    local_path,
    published_versions,
    read_manifest,
    resolve_version,
    write_text_atomic,
)
from etl.quality.drift import OTHER, Distribution, Overlay, measure_drift, overlay
from etl.quality.version_view import VersionView, view_version
from jobs.inspection.summary import Target
from jobs.reporting.blocks import (
    Beside,
    Block,
    Details,
    Figure,
    Note,
    Section,
    TableCell,
    TableColumn,
    build_table,
    missing,
)
from jobs.reporting.dataset_sections import build_features, build_flow
from jobs.reporting.formatting import (
    MISSING,
    format_bytes,
    format_count,
    format_metric,
    format_number,
    format_share,
    to_float,
)
from jobs.reporting.page import PageHead, Tile, build_section, render_html
from jobs.reporting.plots import plot_shares
from jobs.reporting.provenance import build_shards
from jobs.reporting.run_data import RunData, as_mapping
from jobs.reporting.verdict import Verdict, VerdictKind

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
    """Returns how many features have shifted; what is only carried along, as a time, may."""
    roles = {spec.name: spec.role for spec in data.manifest.schema.features}
    return sum(s.psi > SHIFTED_PSI for s in data.shifts if roles[s.name] != CARRIED_ROLE)


def build_changes(data: DatasetPageData) -> Section:
    """Rows and label rate of both versions, drift by feature, plots of the most shifted."""
    title, lead = "Changes", "How this version differs from another one."
    if data.other is None:
        note = Note("No version to compare with was named; --against does that.")
        return Section("changes", title, lead, (note,))
    earlier = data.other[1].dataset_version
    lead = f"Now: this version. Before: {earlier}. Drift is that of the train split."
    blocks: list[Block] = [_compared_splits_table(data.manifest, data.other[1])]
    if not data.shifts:
        blocks.append(missing("One of the versions carries no unabridged statistics to compare."))
        return Section("changes", title, lead, tuple(blocks))
    roles = {spec.name: spec.role for spec in data.manifest.schema.features}
    blocks.append(_drift_table(data.shifts, roles))
    names = [name for name in data.manifest.schema.names if name not in data.other[1].schema]
    gone = [name for name in data.other[1].schema.names if name not in data.manifest.schema]
    for what, found in (("New", names), ("Gone", gone)):
        if found:
            blocks.append(Note(f"{what} features: {', '.join(found)}."))
    blocks.append(Beside(tuple(_plot_drift(i, s) for i, s in enumerate(data.shifts[:_PLOTTED]))))
    return Section("changes", title, lead, tuple(blocks))


def _compared_splits_table(manifest: Manifest, other: Manifest) -> Block:
    columns = (
        TableColumn("Split", numeric=False),
        TableColumn("Records before"),
        TableColumn("Records now"),
        TableColumn("Change"),
        TableColumn("Label rate before"),
        TableColumn("Label rate now"),
    )
    earlier = {split.name: split.rows for split in other.splits}
    rows = []
    for split in manifest.splits:
        before = earlier.get(split.name)
        change = f"{100 * (split.rows / before - 1):+.1f}%" if before else MISSING
        rows.append(
            [
                split.name,
                format_count(before),
                format_count(split.rows),
                change,
                format_share(other.label_rate.get(split.name)),
                format_share(manifest.label_rate.get(split.name)),
            ]
        )
    return build_table("Records and label rate by split.", columns, rows)


def _drift_table(shifts: Sequence[FeatureShift], roles: Mapping[str, str]) -> Block:
    columns = (
        TableColumn("Feature", numeric=False),
        TableColumn("Role", numeric=False, hint="id is carried along: no model reads it"),
        TableColumn("PSI", hint="population stability index; above 0.2 is a shift"),
        TableColumn("JS", hint="Jensen-Shannon divergence, base 2, 0 to 1"),
        TableColumn("KS", hint="Kolmogorov-Smirnov distance of numbers, 0 to 1"),
        TableColumn("Values before"),
        TableColumn("Values now"),
    )
    rows: list[list[TableCell | str]] = [
        [
            shift.name,
            roles[shift.name],
            TableCell(
                format_metric(shift.psi),
                bar=min(shift.psi, 1.0) or None,
                tone="loss" if shift.psi > SHIFTED_PSI else "model",
            ),
            format_metric(measure_drift("js", shift.before, shift.after)),
            format_metric(measure_drift("ks", shift.before, shift.after)),
            format_count(shift.before.total),
            format_count(shift.after.total),
        ]
        for shift in shifts
    ]
    return build_table("Drift by feature, the greatest first.", columns, rows)


def _plot_drift(index: int, shift: FeatureShift) -> Block:
    laid = overlay(shift.before, shift.after)
    bars = shorten(laid)
    label = f"Bar chart: shares of the values of {shift.name} before and now; PSI {shift.psi:.4f}."
    shares = {"before": bars.before, "now": bars.after}
    svg = plot_shares(shares, bars.names, f"shift-{index}", label)
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
    return Figure(svg, caption)


@dataclass(frozen=True)
class Bars:
    """What a plot of two distributions shows.

    Attributes:
        places: Which bins.
        names: Their names, shortened.
        before: Their shares in the earlier distribution.
        after: Their shares in the later one.
        rest: Shares of all that is not shown. It has no bar: of a feature with many values it
            would dwarf all the others.
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


def build_contract(data: DatasetPageData) -> Section:
    """A table of the rules, violated ones first."""
    lead = "What was declared of sources and features, checked before the version was published."
    rules = data.manifest.contract
    if not rules:
        note = Note("No rule is declared; `contract.rules` of the build's config does that.")
        return Section("contract", "Data contract", lead, (note,))
    columns = [
        TableColumn(title, numeric=False)
        for title in ("Rule", "Outcome", "Severity", "Received", "Allowed")
    ]
    rows: list[list[TableCell | str]] = [
        [
            str(rule["rule"]),
            TableCell("holds" if rule["passed"] else "violated", best=not rule["passed"]),
            str(rule["severity"]),
            str(rule["received"]),
            str(rule["allowed"]),
        ]
        for rule in sorted(rules, key=lambda rule: bool(rule["passed"]))
    ]
    table = build_table("Rules, violated ones first.", columns, rows)
    return Section("contract", "Data contract", lead, (table,))


def build_slices(data: DatasetPageData) -> Section:
    """A table per slice, then the association of every feature with the label."""
    lead = "The label in the train split: its rate by slice, and what goes along with it."
    statistics = as_mapping(data.manifest.statistics.get(TRAIN))
    found = {name: as_mapping(as_mapping(s).get("label")) for name, s in statistics.items()}
    compared = {name: label for name, label in found.items() if label}
    if not compared:
        note = Note("This version has no label, or was built before labels were compared.")
        return Section("label", "Label", lead, (note,))
    blocks: list[Block] = [
        _slice_table(data, name, label) for name, label in compared.items() if "slices" in label
    ]
    roles = {spec.name: spec.role for spec in data.manifest.schema.features}
    blocks.append(_association_table(compared, roles))
    return Section("label", "Label", lead, tuple(blocks))


def _slice_table(data: DatasetPageData, name: str, label: Mapping[str, Any]) -> Block:
    slices = label["slices"]
    if slices is None:
        return Note(f"{name} has too many values to be a slice.")
    ids = [value for value, _, _ in slices if isinstance(value, int)]
    tokens = data.view.tokens(name, ids) or {}
    before = _earlier_rates(data, name)
    columns = [TableColumn(name, numeric=False), TableColumn("Records"), TableColumn("Label rate")]
    columns += [TableColumn("Rate before")] if before else []
    rows = []
    for value, count, rate in slices:
        shown = "(null)" if value is None else tokens.get(value, str(value))
        share = to_float(rate)
        bar = share if share is not None and 0 < share <= 1 else None
        cells = [
            TableCell(shown),
            TableCell(format_count(count)),
            TableCell(format_share(rate), bar=bar),
        ]
        if before:
            cells.append(TableCell(format_share(before[shown]) if shown in before else MISSING))
        rows.append(cells)
    return build_table(f"Label rate by {name}.", columns, rows)


def _earlier_rates(data: DatasetPageData, name: str) -> dict[str, float]:
    if data.other is None or data.other_view is None:
        return {}
    statistics = as_mapping(data.other[1].statistics.get(TRAIN))
    slices = as_mapping(as_mapping(statistics.get(name)).get("label")).get("slices") or ()
    ids = [value for value, _, _ in slices if isinstance(value, int)]
    tokens = data.other_view.tokens(name, ids) or {}
    return {
        "(null)" if value is None else tokens.get(value, str(value)): rate
        for value, _, rate in slices
    }


def _association_table(
    compared: Mapping[str, Mapping[str, Any]], roles: Mapping[str, str]
) -> Block:
    columns = (
        TableColumn("Feature", numeric=False),
        TableColumn("Role", numeric=False, hint="models read user, item and context, nothing else"),
        TableColumn("Correlation", hint="Pearson, of numbers"),
        TableColumn("Correlation ratio", hint="how far equal values have equal labels, 0 to 1"),
        TableColumn("Records compared"),
    )

    def strength(item: tuple[str, Mapping[str, Any]]) -> float:
        label = item[1]
        return max(abs(label.get("correlation") or 0), label.get("correlation_ratio") or 0)

    rows = [
        [
            name,
            roles.get(name, MISSING),
            format_metric(label.get("correlation")),
            format_metric(label.get("correlation_ratio")),
            format_count(label.get("rows")),
        ]
        for name, label in sorted(compared.items(), key=lambda item: (-strength(item), item[0]))
    ]
    return build_table("How each feature goes with the label, the closest first.", columns, rows)


_TOP_VALUES = 10


def build_values(data: DatasetPageData) -> Section:
    """Quantiles of the numbers, then each feature's top values beside its distribution."""
    lead = "The values of the train split; ids are shown as the tokens that they stand for."
    statistics = as_mapping(data.manifest.statistics.get(TRAIN))
    if not statistics:
        note = missing("This dataset version carries no statistics of its train split.")
        return Section("values", "Values", lead, (note,))
    blocks: list[Block] = []
    quantiles = {
        name: feature["quantiles"]
        for name, feature in statistics.items()
        if as_mapping(feature.get("quantiles")).get("values") and not data.view.is_vocabulary(name)
    }
    if quantiles:
        blocks.append(_quantile_table(quantiles))
    for index, (name, feature) in enumerate(statistics.items()):
        if feature.get("values"):
            inner = _feature_blocks(data, index, name, feature)
            blocks.append(Details(name, inner, is_open=index == 0))
    return Section("values", "Values", lead, tuple(blocks))


def _quantile_table(quantiles: dict[str, Any]) -> Block:
    first = next(iter(quantiles.values()))
    columns = [TableColumn("Feature", numeric=False)]
    columns += [TableColumn(f"{100 * probability:g}%") for probability, _ in first["values"]]
    rows = [
        [
            name if found["exact"] else f"{name} ~",
            *(format_number(value) for _, value in found["values"]),
        ]
        for name, found in quantiles.items()
    ]
    return build_table("Quantiles; ~ where estimated from a sample.", columns, rows)


def _feature_blocks(
    data: DatasetPageData, index: int, name: str, feature: dict[str, Any]
) -> tuple[Block, ...]:
    table = _top_table(data, name, feature)
    distribution = data.view.distribution(TRAIN, name)
    if distribution is None:
        return (table,)
    bars = shorten(overlay(distribution, distribution))
    label = f"Bar chart: shares of the values of {name}."
    caption = f"{name}."
    if bars.has_rest:
        caption = f"{name}. All other values: {format_share(bars.rest[0])}."
    svg = plot_shares({"now": bars.after}, bars.names, f"values-{index}", label)
    figure = Figure(svg, caption)
    return (Beside((table, figure)),)


def _top_table(data: DatasetPageData, name: str, feature: dict[str, Any]) -> Block:
    top = as_mapping(feature.get("top"))
    values = [(value, count) for value, count in top.get("values", ())][:_TOP_VALUES]
    tokens = data.view.tokens(name, [v for v, _ in values if isinstance(v, int)]) or {}
    total = feature["values"]
    columns = (TableColumn("Value", numeric=False), TableColumn("Times"), TableColumn("Share"))
    rows: list[list[TableCell | str]] = [
        [
            str(tokens.get(value, value)),
            TableCell(format_count(count), bar=min(count / total, 1.0) or None),
            format_share(count / total) if total else MISSING,
        ]
        for value, count in values
    ]
    mark = "" if top.get("exact", True) else ", counts estimated"
    return build_table(f"Most frequent values of {name}{mark}.", columns, rows)


PREVIOUS = "previous"
_SHIFTED = "Shifted: PSI above 0.2 in the train split. What is only carried along does not count."


def write_dataset_page(target: Target, html: str | None, against: str | None) -> Path:
    """Writes the page about a dataset version: one self-contained file.

    Args:
        target: What `sluice inspect` was given.
        html: File to write; an earlier one is replaced whole or not at all.
        against: Version to compare with: its id, its path, a dataset, or `previous`; or None.

    Returns:
        The file.

    Raises:
        ConfigError: No file is given, or the target is no dataset, or there is no such version.
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
    sections = (
        build_section(build_contract, data),
        build_section(build_changes, data),
        build_section(build_slices, data),
        build_section(build_values, data),
        build_section(build_flow, run),
        build_section(build_features, run),
        build_section(build_shards, run),
    )
    return render_html(_dataset_head(data), sections)


def _dataset_head(data: DatasetPageData) -> PageHead:
    manifest = data.manifest
    subtitle = f"dataset version {manifest.dataset_version} · {manifest.created_at}"
    if data.other is not None:
        subtitle += f" · compared with {data.other[1].dataset_version}"
    return PageHead(
        manifest.dataset_name, subtitle, _dataset_verdict(data), _dataset_tiles(manifest)
    )


def _dataset_verdict(data: DatasetPageData) -> Verdict:
    violated, rules = count_violated(data.manifest), len(data.manifest.contract)
    kept = f"All {rules} rules of its contract hold." if rules else "It has no contract."
    if violated:
        kept = f"{violated} of {rules} rules of its contract are violated."
    if data.other is None:
        return Verdict("behind" if violated else "ahead" if rules else "unknown", kept, "")
    shifted = count_shifted(data)
    moved = f"{shifted} features have shifted." if shifted != 1 else "1 feature has shifted."
    standing: VerdictKind = "behind" if violated else "level" if shifted else "ahead"
    return Verdict(standing, f"{kept} {moved}", _SHIFTED)


def _dataset_tiles(manifest: Manifest) -> tuple[Tile, ...]:
    tiles = [Tile(format_count(split.rows), f"{split.name} records") for split in manifest.splits]
    tiles.append(Tile(format_bytes(sum(s.bytes for s in manifest.splits)), "of TFRecord shards"))
    if "train" in manifest.label_rate:
        tiles.append(Tile(format_share(manifest.label_rate["train"]), "label rate in train"))
    return tuple(tiles)
