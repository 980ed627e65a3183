"""What the features hold, per split: missing values, OOV, range, list lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conf.manifest import Manifest
from conf.schema import FeatureSpec
from jobs.reporting.blocks import (
    Block,
    Cell,
    Column,
    Details,
    Section,
    Table,
    build_table,
    missing,
)
from jobs.reporting.figure import render_histogram
from jobs.reporting.numbers import (
    MISSING,
    format_count,
    format_number,
    format_share,
    to_float,
)
from jobs.reporting.run_data import RunData, as_mapping

_ALARMING_SHARE = 0.2

_NONE = Cell(MISSING)
_COLUMNS = (
    Column("Feature", numeric=False),
    Column("Type", numeric=False),
    Column("Role", numeric=False),
    Column("Vocabulary", hint="number of ids, pad and OOV included"),
    Column("Distinct", hint="different values in the split; ~ where estimated"),
    Column("Missing", hint="share of the records without the feature"),
    Column("OOV", hint="share of the values outside the vocabulary"),
    Column("Min"),
    Column("Mean"),
    Column("Max"),
    Column("Length", hint="mean and greatest length of lists"),
    Column("Histogram", hint="list lengths, or else values, in bins of powers of two"),
)


def build_features(data: RunData) -> Section:
    """One table per split, the first open."""
    lead = "What each feature holds, counted while the shards were written."
    manifest = data.manifest
    if manifest is None:
        return Section("features", "Features", lead, (missing(data.gaps["dataset"]),))
    blocks: list[Block] = []
    for split in manifest.splits:
        statistics = as_mapping(manifest.statistics.get(split.name))
        if statistics:
            summary = f"{split.name}: {format_count(split.rows)} records"
            table = _split_table(manifest, split.name, statistics)
            blocks.append(Details(summary, (table,), is_open=not blocks))
    if not blocks:
        blocks.append(missing("This dataset version carries no statistics."))
    return Section("features", "Features", lead, tuple(blocks))


def _split_table(manifest: Manifest, split: str, statistics: Mapping[str, Any]) -> Table:
    rows = [
        _row(spec, statistics[spec.name])
        for spec in manifest.schema.features
        if isinstance(statistics.get(spec.name), Mapping) and statistics[spec.name].get("values")
    ]
    return build_table(f"Features of the {split} split that hold values.", _COLUMNS, rows)


def _row(spec: FeatureSpec, found: Mapping[str, Any]) -> list[Cell]:
    is_plain = spec.vocabulary_size is None  # ids have no meaningful range
    cells = [
        Cell(spec.name),
        Cell(f"{spec.dtype}\N{NO-BREAK SPACE}list" if spec.is_list else spec.dtype),
        Cell(spec.role),
        Cell(format_count(spec.vocabulary_size)),
        _distinct_cell(as_mapping(found.get("distinct"))),
        _share_cell(found.get("missing"), found.get("rows")),
        _NONE if is_plain else _share_cell(found.get("oov"), found.get("values")),
    ]
    cells += [
        Cell(format_number(found.get(key)) if is_plain else MISSING)
        for key in ("min", "mean", "max")
    ]
    return [*cells, *_shape_cells(spec, found)]


def _distinct_cell(distinct: Mapping[str, Any]) -> Cell:
    mark = "~" if distinct.get("exact") is False else ""
    return Cell(f"{mark}{format_count(distinct.get('count'))}")


def _share_cell(part: Any, whole: Any) -> Cell:
    numerator, denominator = to_float(part), to_float(whole)
    if numerator is None or not denominator:
        return _NONE
    share = min(numerator / denominator, 1.0)
    tone = "loss" if share >= _ALARMING_SHARE else "rival"
    return Cell(format_share(share), bar=share or None, tone=tone)


def _shape_cells(spec: FeatureSpec, found: Mapping[str, Any]) -> tuple[Cell, Cell]:
    """Length of lists; histogram of the lengths, or of a scalar's values."""
    length = as_mapping(found.get("length"))
    if not spec.is_list:
        return _NONE, _histogram_cell(found.get("histogram"), f"Values of {spec.name}")
    text = f"{format_number(length.get('mean'))}, up to {format_number(length.get('max'))}"
    bins = fill_length_bins(length.get("histogram") or ())
    return Cell(text if length else MISSING), _histogram_cell(bins, f"Lengths of {spec.name}")


def _histogram_cell(bins: Any, label: str) -> Cell:
    if not bins:
        return _NONE
    named = [(_bin_name(item["low"], item["high"]), float(item["count"])) for item in bins]
    return Cell("", svg=render_histogram(named, label))


def _bin_name(low: float, high: float) -> str:
    return format_number(low) if low == high else f"{format_number(low)} to {format_number(high)}"


def fill_length_bins(bins: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """Returns length bins 0, 1, 2 to 3, 4 to 7, ... without gaps, up to the last that is filled."""
    counts = {item["low"]: item["count"] for item in bins}
    low, filled = 0, []
    while counts and low <= max(counts):
        high = max(2 * low - 1, low)
        filled.append({"low": low, "high": high, "count": counts.get(low, 0)})
        low = high + 1
    return filled
