"""How a dataset version differs from another one: rows, label rate, drift of each feature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from conf.manifest import Manifest
from etl.quality.distribution import OTHER, Distribution, Overlay, measure_drift, overlay
from etl.quality.versions import VersionView, view_version
from jobs.reporting.blocks import (
    Beside,
    Block,
    Cell,
    Column,
    Figure,
    Note,
    Section,
    build_table,
    missing,
)
from jobs.reporting.numbers import MISSING, format_count, format_metric, format_share
from jobs.reporting.plots import plot_shares

TRAIN = "train"
SHIFTED_PSI = 0.2
_PLOTTED = 8
_SHOWN_BINS = 10
_NOTHING = 1e-9
CARRIED_ROLE = "id"


@dataclass(frozen=True)
class DatasetData:
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


def count_shifted(data: DatasetData) -> int:
    """Returns how many features have shifted; what is only carried along, as a time, may."""
    roles = {spec.name: spec.role for spec in data.manifest.schema.features}
    return sum(s.psi > SHIFTED_PSI for s in data.shifts if roles[s.name] != CARRIED_ROLE)


def build_changes(data: DatasetData) -> Section:
    """Rows and label rate of both versions, drift by feature, plots of the most shifted."""
    title, lead = "Changes", "How this version differs from another one."
    if data.other is None:
        note = Note("No version to compare with was named; --against does that.")
        return Section("changes", title, lead, (note,))
    earlier = data.other[1].dataset_version
    lead = f"Now: this version. Before: {earlier}. Drift is that of the train split."
    blocks: list[Block] = [_split_table(data.manifest, data.other[1])]
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
    blocks.append(Beside(tuple(_plot(i, s) for i, s in enumerate(data.shifts[:_PLOTTED]))))
    return Section("changes", title, lead, tuple(blocks))


def _split_table(manifest: Manifest, other: Manifest) -> Block:
    columns = (Column("Split", numeric=False), Column("Records before"), Column("Records now"),
               Column("Change"), Column("Label rate before"), Column("Label rate now"))  # fmt: skip
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
        Column("Feature", numeric=False),
        Column("Role", numeric=False, hint="id is carried along: no model reads it"),
        Column("PSI", hint="population stability index; above 0.2 is a shift"),
        Column("JS", hint="Jensen-Shannon divergence, base 2, 0 to 1"),
        Column("KS", hint="Kolmogorov-Smirnov distance of numbers, 0 to 1"),
        Column("Values before"),
        Column("Values now"),
    )
    rows: list[list[Cell | str]] = [
        [
            shift.name,
            roles[shift.name],
            Cell(format_metric(shift.psi), bar=min(shift.psi, 1.0) or None,
                 tone="loss" if shift.psi > SHIFTED_PSI else "model"),
            format_metric(measure_drift("js", shift.before, shift.after)),
            format_metric(measure_drift("ks", shift.before, shift.after)),
            format_count(shift.before.total),
            format_count(shift.after.total),
        ]
        for shift in shifts
    ]  # fmt: skip
    return build_table("Drift by feature, the greatest first.", columns, rows)


def _plot(index: int, shift: FeatureShift) -> Block:
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
        return max(self.rest) > _NOTHING


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
