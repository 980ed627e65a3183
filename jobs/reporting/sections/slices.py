"""The label rate by slice, and how each feature goes with the label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jobs.reporting.blocks import Block, Cell, Column, Note, Section, build_table
from jobs.reporting.numbers import MISSING, format_count, format_metric, format_share, to_float
from jobs.reporting.run_data import as_mapping
from jobs.reporting.sections.changes import TRAIN, DatasetData


def build_slices(data: DatasetData) -> Section:
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


def _slice_table(data: DatasetData, name: str, label: Mapping[str, Any]) -> Block:
    slices = label["slices"]
    if slices is None:
        return Note(f"{name} has too many values to be a slice.")
    ids = [value for value, _, _ in slices if isinstance(value, int)]
    tokens = data.view.tokens(name, ids) or {}
    before = _earlier_rates(data, name)
    columns = [Column(name, numeric=False), Column("Records"), Column("Label rate")]
    columns += [Column("Rate before")] if before else []
    rows = []
    for value, count, rate in slices:
        shown = "(null)" if value is None else tokens.get(value, str(value))
        share = to_float(rate)
        bar = share if share is not None and 0 < share <= 1 else None
        cells = [Cell(shown), Cell(format_count(count)), Cell(format_share(rate), bar=bar)]
        if before:
            cells.append(Cell(format_share(before[shown]) if shown in before else MISSING))
        rows.append(cells)
    return build_table(f"Label rate by {name}.", columns, rows)


def _earlier_rates(data: DatasetData, name: str) -> dict[str, float]:
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
        Column("Feature", numeric=False),
        Column("Role", numeric=False, hint="models read user, item and context, nothing else"),
        Column("Correlation", hint="Pearson, of numbers"),
        Column("Correlation ratio", hint="how far equal values have equal labels, 0 to 1"),
        Column("Records compared"),
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
