"""What the features hold: quantiles, the most frequent values, and their distribution."""

from __future__ import annotations

from typing import Any

from jobs.reporting.blocks import (
    Beside,
    Block,
    Cell,
    Column,
    Details,
    Figure,
    Section,
    build_table,
    missing,
)
from jobs.reporting.numbers import MISSING, format_count, format_number, format_share
from jobs.reporting.plots import plot_shares
from jobs.reporting.run_data import as_mapping
from jobs.reporting.sections.changes import TRAIN, DatasetData, overlay, shorten

_TOP = 10


def build_values(data: DatasetData) -> Section:
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
    columns = [Column("Feature", numeric=False)]
    columns += [Column(f"{100 * probability:g}%") for probability, _ in first["values"]]
    rows = [
        [
            name if found["exact"] else f"{name} ~",
            *(format_number(value) for _, value in found["values"]),
        ]
        for name, found in quantiles.items()
    ]
    return build_table("Quantiles; ~ where estimated from a sample.", columns, rows)


def _feature_blocks(
    data: DatasetData, index: int, name: str, feature: dict[str, Any]
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


def _top_table(data: DatasetData, name: str, feature: dict[str, Any]) -> Block:
    top = as_mapping(feature.get("top"))
    values = [(value, count) for value, count in top.get("values", ())][:_TOP]
    tokens = data.view.tokens(name, [v for v, _ in values if isinstance(v, int)]) or {}
    total = feature["values"]
    columns = (Column("Value", numeric=False), Column("Times"), Column("Share"))
    rows: list[list[Cell | str]] = [
        [
            str(tokens.get(value, value)),
            Cell(format_count(count), bar=min(count / total, 1.0) or None),
            format_share(count / total) if total else MISSING,
        ]
        for value, count in values
    ]
    mark = "" if top.get("exact", True) else ", counts estimated"
    return build_table(f"Most frequent values of {name}{mark}.", columns, rows)
