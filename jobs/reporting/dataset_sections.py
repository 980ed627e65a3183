"""What the dataset holds: where the rows went, what the features hold, how unequal items are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from conf.manifest import Manifest
from conf.schema import FeatureSpec
from jobs.reporting.blocks import (
    Beside,
    Block,
    Details,
    Facts,
    Figure,
    Note,
    Section,
    Table,
    TableCell,
    TableColumn,
    build_table,
    missing,
)
from jobs.reporting.formatting import MISSING, format_count, format_number, format_share, to_float
from jobs.reporting.plots import FlowStep, plot_flow, plot_popularity, render_histogram
from jobs.reporting.run_data import ItemCatalogue, RunData, as_mapping

EVENT_SPLITS = ("train", "validation", "test")


def build_flow(data: RunData) -> Section:
    """Bars from stage to stage beside the reasons of the losses."""
    lead = "Every row of the event log is either a record or has a reason for not being one."
    if data.manifest is None:
        return Section("flow", "Data flow", lead, (missing(data.gaps["dataset"]),))
    steps = event_steps(data.manifest)
    label = "Funnel of event rows: " + "; ".join(
        f"{step.name}: {format_count(sum(step.kept.values()))}" for step in steps
    )
    blocks: list[Block] = [
        Beside(
            (
                Figure(plot_flow(steps, label), "Rows of the event log, stage by stage."),
                _losses(data.manifest),
            )
        ),
        Beside((_sources(data.manifest), _splits(data.manifest))),
    ]
    if any(any(reasons.values()) for reasons in data.manifest.counts.unmatched.values()):
        blocks.append(_unmatched(data.manifest))
    unexplained = unexplained_rows(data.manifest)
    if unexplained:
        blocks.append(
            Note(
                f"{format_count(unexplained)} event rows have no reason: the counts of this "
                "dataset version do not add up.",
                missing=True,
            )
        )
    return Section("flow", "Data flow", lead, tuple(blocks))


def event_sources(manifest: Manifest) -> tuple[str, ...]:
    """Returns the names of the sources whose rows are events."""
    config = manifest.source.config
    named = (
        as_mapping(config.get("events")).get("source"),
        as_mapping(config.get("split")).get("validation_source"),
        as_mapping(config.get("split")).get("test_source"),
    )
    found = tuple(str(name) for name in named if name in manifest.counts.read)
    return found or tuple(manifest.counts.read)[:1]


def event_steps(manifest: Manifest) -> tuple[FlowStep, ...]:
    """Returns the stages that event rows go through, with what each stage lost."""
    counts = manifest.counts
    sources = event_sources(manifest)
    read = sum(counts.read[source] for source in sources)
    bad = sum(sum(counts.quarantined.get(source, {}).values()) for source in sources)
    events = {split: _events_of(manifest, split) for split in EVENT_SPLITS}
    kept = {split: n for split, n in events.items() if n}
    written = sum(kept.values())
    return (
        FlowStep("Read", {"rows": read}),
        FlowStep("Parsed", {"rows": read - bad}, bad, "bad rows"),
        FlowStep(
            "De-duplicated and joined", {"rows": counts.joined}, max(read - bad - counts.joined, 0)
        ),
        FlowStep("Written as records", kept, max(counts.joined - written, 0)),
    )


def unexplained_rows(manifest: Manifest) -> int:
    """Returns how many event rows are neither written, nor quarantined, nor dropped."""
    counts = manifest.counts
    sources = event_sources(manifest)
    read = sum(counts.read[source] for source in sources)
    bad = sum(sum(counts.quarantined.get(source, {}).values()) for source in sources)
    written = sum(_events_of(manifest, split) for split in EVENT_SPLITS)
    return abs(read - bad - written - sum(counts.dropped.values()))


def _events_of(manifest: Manifest, split: str) -> int:
    """Records of a split that are events of the log, and no drawn negatives."""
    return manifest.counts.kept.get(split, 0) - manifest.counts.drawn.get(split, 0)


def _losses(manifest: Manifest) -> Block:
    counts = manifest.counts
    rows: list[tuple[str, str, int, int]] = [
        (source, f"bad row: {_readable(reason)}", n, counts.read.get(source, 0))
        for source, reasons in counts.quarantined.items()
        for reason, n in reasons.items()
        if n
    ]
    events = event_sources(manifest)
    read = sum(counts.read[source] for source in events)
    rows += [("events", _readable(reason), n, read) for reason, n in counts.dropped.items() if n]
    rows.sort(key=lambda row: (-row[2], row[0], row[1]))
    if not rows:
        return Note("No row was left out.")
    top = max(row[2] for row in rows)
    columns = (
        TableColumn("Reason", numeric=False),
        TableColumn("From", numeric=False),
        TableColumn("Rows"),
        TableColumn("Share"),
    )
    return build_table(
        "Rows left out, by reason.",
        columns,
        [
            [
                reason,
                source,
                TableCell(format_count(n), bar=n / top, tone="loss"),
                format_share(n / of if of else None),
            ]
            for source, reason, n, of in rows
        ],
    )


def _unmatched(manifest: Manifest) -> Block:
    """Events without an entry in a dictionary: dropped or kept, as its join says."""
    joins = manifest.source.config.get("joins")
    policies = {
        str(join.get("source")): str(join.get("unmatched"))
        for join in map(as_mapping, joins if isinstance(joins, list | tuple) else ())
    }
    read = sum(manifest.counts.read[source] for source in event_sources(manifest))
    rows: list[list[TableCell | str]] = [
        [
            dictionary,
            _readable(reason),
            {"drop": "left out", "keep": "kept"}.get(policies.get(dictionary, ""), MISSING),
            format_count(n),
            format_share(n / read if read else None),
        ]
        for dictionary, reasons in manifest.counts.unmatched.items()
        for reason, n in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))
        if n
    ]
    columns = (
        TableColumn("Dictionary", numeric=False),
        TableColumn("Reason", numeric=False),
        TableColumn("These events are", numeric=False),
        TableColumn("Events"),
        TableColumn("Share", hint="of the event rows that were read"),
    )
    return build_table("Events without an entry in a dictionary.", columns, rows)


def _sources(manifest: Manifest) -> Block:
    counts = manifest.counts
    rows = []
    for source, read in counts.read.items():
        bad = sum(counts.quarantined.get(source, {}).values())
        share = format_share(bad / read if read else None)
        rows.append([source, format_count(read), format_count(bad), share])
    columns = (
        TableColumn("Source", numeric=False),
        TableColumn("Rows read"),
        TableColumn("Bad rows"),
        TableColumn("Share"),
    )
    return build_table("Inputs.", columns, rows)


def _splits(manifest: Manifest) -> Block:
    written: Mapping[str, int] = {split.name: split.rows for split in manifest.splits}
    top = max(written.values(), default=0) or 1
    rate = manifest.label_rate
    columns = [TableColumn("Split", numeric=False), TableColumn("Records")]
    drawn = manifest.counts.drawn
    columns += (
        [TableColumn("Drawn", hint="negatives drawn, not events of the log")] if drawn else []
    )
    columns += [TableColumn("Label rate", hint="mean label")] if rate else []
    rows = []
    for name, records in written.items():
        cells: list[TableCell | str] = [name, TableCell(format_count(records), bar=records / top)]
        if drawn:
            cells.append(format_count(drawn.get(name, 0)))
        if rate:
            cells.append(format_share(rate[name]) if name in rate else MISSING)
        rows.append(cells)
    return build_table("Records per split.", columns, rows)


def _readable(reason: str) -> str:
    what, colon, column = reason.partition(":")  # a column's name keeps its underscores
    words = what.replace("_", " ")
    return f"{words}: {column.strip()}" if colon else words


_ALARMING_SHARE = 0.2

_NO_CELL = TableCell(MISSING)
_FEATURE_COLUMNS = (
    TableColumn("Feature", numeric=False),
    TableColumn("Type", numeric=False),
    TableColumn("Role", numeric=False),
    TableColumn("Vocabulary", hint="number of ids, pad and OOV included"),
    TableColumn("Distinct", hint="different values in the split; ~ where estimated"),
    TableColumn("Missing", hint="share of the records without the feature"),
    TableColumn("OOV", hint="share of the values outside the vocabulary"),
    TableColumn("Min"),
    TableColumn("Mean"),
    TableColumn("Max"),
    TableColumn("Length", hint="mean and greatest length of lists"),
    TableColumn("Histogram", hint="list lengths, or else values, in bins of powers of two"),
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
            table = _feature_table(manifest, split.name, statistics)
            blocks.append(Details(summary, (table,), is_open=not blocks))
    if not blocks:
        blocks.append(missing("This dataset version carries no statistics."))
    return Section("features", "Features", lead, tuple(blocks))


def _feature_table(manifest: Manifest, split: str, statistics: Mapping[str, Any]) -> Table:
    rows = [
        _feature_row(spec, statistics[spec.name])
        for spec in manifest.schema.features
        if isinstance(statistics.get(spec.name), Mapping) and statistics[spec.name].get("values")
    ]
    return build_table(f"Features of the {split} split that hold values.", _FEATURE_COLUMNS, rows)


def _feature_row(spec: FeatureSpec, found: Mapping[str, Any]) -> list[TableCell]:
    is_plain = spec.vocabulary_size is None  # ids have no meaningful range
    cells = [
        TableCell(spec.name),
        TableCell(f"{spec.dtype}\N{NO-BREAK SPACE}list" if spec.is_list else spec.dtype),
        TableCell(spec.role),
        TableCell(format_count(spec.vocabulary_size)),
        _distinct_cell(as_mapping(found.get("distinct"))),
        _share_cell(found.get("missing"), found.get("rows")),
        _NO_CELL if is_plain else _share_cell(found.get("oov"), found.get("values")),
    ]
    cells += [
        TableCell(format_number(found.get(key)) if is_plain else MISSING)
        for key in ("min", "mean", "max")
    ]
    return [*cells, *_shape_cells(spec, found)]


def _distinct_cell(distinct: Mapping[str, Any]) -> TableCell:
    mark = "~" if distinct.get("exact") is False else ""
    return TableCell(f"{mark}{format_count(distinct.get('count'))}")


def _share_cell(part: Any, whole: Any) -> TableCell:
    numerator, denominator = to_float(part), to_float(whole)
    if numerator is None or not denominator:
        return _NO_CELL
    share = min(numerator / denominator, 1.0)
    tone = "loss" if share >= _ALARMING_SHARE else "rival"
    return TableCell(format_share(share), bar=share or None, tone=tone)


def _shape_cells(spec: FeatureSpec, found: Mapping[str, Any]) -> tuple[TableCell, TableCell]:
    """Length of lists; histogram of the lengths, or of a scalar's values."""
    length = as_mapping(found.get("length"))
    if not spec.is_list:
        return _NO_CELL, _histogram_cell(found.get("histogram"), f"Values of {spec.name}")
    text = f"{format_number(length.get('mean'))}, up to {format_number(length.get('max'))}"
    bins = fill_length_bins(length.get("histogram") or ())
    return TableCell(text if length else MISSING), _histogram_cell(bins, f"Lengths of {spec.name}")


def _histogram_cell(bins: Any, label: str) -> TableCell:
    if not bins:
        return _NO_CELL
    named = [(_bin_name(item["low"], item["high"]), float(item["count"])) for item in bins]
    return TableCell("", svg=render_histogram(named, label))


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


_TOP_ITEMS = 10


def build_popularity(data: RunData) -> Section:
    """Rank curve beside the most frequent items."""
    lead = "How often each item occurs in the train split, from the item vocabulary."
    catalogue = data.catalogue
    if catalogue is None or not len(catalogue.counts):
        reason = data.gaps.get("catalogue") or data.gaps.get("dataset")
        text = reason or "The item vocabulary of this dataset version is empty."
        return Section("popularity", "Item popularity", lead, (missing(text),))
    label = (
        f"Line chart, both axes logarithmic: occurrences of {format_count(len(catalogue.counts))} "
        f"items by rank, from {format_count(catalogue.counts[0])} "
        f"down to {format_count(catalogue.counts[-1])}."
    )
    plot = Figure(plot_popularity(catalogue.counts, label), "Both axes are logarithmic.")
    return Section(
        "popularity",
        "Item popularity",
        lead,
        (_concentration(catalogue), Beside((plot, _top_items(catalogue)))),
    )


def _concentration(catalogue: ItemCatalogue) -> Facts:
    return Facts(
        (
            ("Items", format_count(len(catalogue.counts))),
            ("Occurrences", format_count(int(catalogue.counts.sum()))),
            ("Held by the top 1%", format_share(catalogue.share_of_top(0.01))),
            ("Held by the top 10%", format_share(catalogue.share_of_top(0.1))),
        )
    )


def _top_items(catalogue: ItemCatalogue) -> Table:
    total = int(catalogue.counts.sum()) or 1
    rows = []
    for token, count in zip(
        catalogue.tokens[:_TOP_ITEMS].to_pylist(),
        catalogue.counts[:_TOP_ITEMS].tolist(),
        strict=True,
    ):
        rows.append([catalogue.name(str(token)), format_count(count), format_share(count / total)])
    columns = (TableColumn("Item", numeric=False), TableColumn("Occurrences"), TableColumn("Share"))
    return build_table("The most frequent items.", columns, rows)
