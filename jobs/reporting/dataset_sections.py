"""Sections about the dataset: the flow of its rows, features, item popularity, shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from conf.manifest import Manifest, SplitInfo
from conf.schema import FeatureSpec
from jobs.reporting.formatting import (
    MISSING,
    Cell,
    as_mapping,
    format_count,
    format_number,
    format_share,
    plain_words,
    share_of,
)
from jobs.reporting.plots import FlowStep, plot_curves, plot_flow
from jobs.reporting.run_data import ItemCatalogue, MissingPartError, RunData

EVENT_SPLITS = ("train", "validation", "test")


def view_flow(data: RunData) -> dict[str, Any]:
    """Returns the stages that event rows go through, and the reasons of the losses."""
    manifest = data.require_manifest()
    steps = event_steps(manifest)
    label = "Funnel of event rows: " + "; ".join(
        f"{step.name}: {format_count(sum(step.kept.values()))}" for step in steps
    )
    return {
        "plot": plot_flow("flow", label, steps),
        "losses": _losses(manifest),
        "sources": [_source_row(manifest, source) for source in manifest.counts.read],
        "splits": _splits(manifest),
        "unmatched": list(_unmatched(manifest)),
        "unexplained": unexplained_rows(manifest),
    }


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


def _losses(manifest: Manifest) -> list[list[Any]]:
    """Reason, source, rows and share of each loss, the greatest first."""
    counts = manifest.counts
    rows = [
        (source, f"bad row: {_reason(reason)}", n, counts.read.get(source, 0))
        for source, reasons in counts.quarantined.items()
        for reason, n in reasons.items()
        if n
    ]
    read = sum(counts.read[source] for source in event_sources(manifest))
    rows += [("events", _reason(reason), n, read) for reason, n in counts.dropped.items() if n]
    rows.sort(key=lambda row: (-row[2], row[0], row[1]))
    return [
        [reason, source, Cell(n, bar=n / rows[0][2], tone="loss"), n / of if of else None]
        for source, reason, n, of in rows
    ]


def _unmatched(manifest: Manifest) -> Iterator[list[Any]]:
    """Events without an entry in a dictionary, dropped or kept by its join."""
    joins = manifest.source.config.get("joins")
    policies = {
        join.get("source"): {"drop": "left out", "keep": "kept"}.get(str(join.get("unmatched")))
        for join in map(as_mapping, joins if isinstance(joins, list | tuple) else ())
    }
    read = sum(manifest.counts.read[source] for source in event_sources(manifest))
    for dictionary, reasons in manifest.counts.unmatched.items():
        for reason, n in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
            if n:
                policy = policies.get(dictionary) or MISSING
                yield [dictionary, _reason(reason), policy, n, n / read if read else None]


def _source_row(manifest: Manifest, source: str) -> list[Any]:
    read = manifest.counts.read[source]
    bad = sum(manifest.counts.quarantined.get(source, {}).values())
    return [source, read, bad, bad / read if read else None]


def _splits(manifest: Manifest) -> dict[str, Any]:
    top = max((split.rows for split in manifest.splits), default=0) or 1
    drawn, rate = manifest.counts.drawn, manifest.label_rate
    columns = [["Split"], ["Records", "count"]]
    columns += [["Drawn", "count", "negatives drawn, not events of the log"]] if drawn else []
    columns += [["Label rate", "share", "mean label"]] if rate else []
    rows: list[list[Any]] = []
    for split in manifest.splits:
        rows.append([split.name, Cell(split.rows, bar=split.rows / top)])
        rows[-1] += [drawn.get(split.name, 0)] if drawn else []
        rows[-1] += [rate.get(split.name)] if rate else []
    return {"columns": columns, "rows": rows}


def _reason(reason: str) -> str:
    what, colon, column = reason.partition(":")  # a column's name keeps its underscores
    words = plain_words(what)
    return f"{words}: {column.strip()}" if colon else words


_ALARMING_SHARE = 0.2


def view_features(data: RunData) -> dict[str, Any]:
    """Returns the rows of one table of features per split."""
    manifest = data.require_manifest()
    splits = [
        (split.name, split.rows, _feature_rows(manifest, statistics))
        for split in manifest.splits
        if (statistics := as_mapping(manifest.statistics.get(split.name)))
    ]
    if not splits:
        raise MissingPartError("This dataset version carries no statistics.")
    return {"splits": splits}


def _feature_rows(manifest: Manifest, statistics: Mapping[str, Any]) -> list[list[Any]]:
    found = [(spec, as_mapping(statistics.get(spec.name))) for spec in manifest.schema.features]
    return [_feature_row(spec, held) for spec, held in found if held.get("values")]


def _feature_row(spec: FeatureSpec, found: Mapping[str, Any]) -> list[Any]:
    is_plain = spec.vocabulary_size is None  # ids have no meaningful range
    distinct = as_mapping(found.get("distinct"))
    return [
        spec.name,
        f"{spec.dtype}\N{NO-BREAK SPACE}list" if spec.is_list else spec.dtype,
        spec.role,
        spec.vocabulary_size,
        ("~" if distinct.get("exact") is False else "") + format_count(distinct.get("count")),
        _share_cell(found.get("missing"), found.get("rows")),
        _share_cell(None if is_plain else found.get("oov"), found.get("values")),
        *(found.get(key) if is_plain else None for key in ("min", "mean", "max")),
        *_shape_cells(spec, found),
    ]


def _share_cell(part: Any, whole: Any) -> Cell:
    share = share_of(part, whole)
    tone = "loss" if (share or 0) >= _ALARMING_SHARE else "rival"
    return Cell(share, bar=share or None, tone=tone)


def _shape_cells(spec: FeatureSpec, found: Mapping[str, Any]) -> tuple[str, Cell]:
    """Length of lists; histogram of the lengths, or of a scalar's values."""
    length = as_mapping(found.get("length"))
    if not spec.is_list:
        return MISSING, _histogram_cell(found.get("histogram"), f"Values of {spec.name}")
    text = f"{format_number(length.get('mean'))}, up to {format_number(length.get('max'))}"
    bins = fill_length_bins(length.get("histogram") or ())
    return text if length else MISSING, _histogram_cell(bins, f"Lengths of {spec.name}")


def _histogram_cell(bins: Any, label: str) -> Cell:
    if not bins:
        return Cell(MISSING)
    named = [(_bin_name(item["low"], item["high"]), float(item["count"])) for item in bins]
    return Cell(label, bins=named)


def _bin_name(low: float, high: float) -> str:
    return format_number(low) if low == high else f"{format_number(low)} to {format_number(high)}"


def fill_length_bins(bins: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """Returns the length bins 0, 1, 2 to 3, 4 to 7, … up to the last filled one, without gaps."""
    counts = {item["low"]: item["count"] for item in bins}
    low, filled = 0, []
    while counts and low <= max(counts):
        high = max(2 * low - 1, low)
        filled.append({"low": low, "high": high, "count": counts.get(low, 0)})
        low = high + 1
    return filled


_TOP_ITEMS = 10
_CURVE_POINTS = 160


def view_popularity(data: RunData) -> dict[str, Any]:
    """Returns the curve of counts by rank, how concentrated they are, and the top items."""
    catalogue = data.catalogue
    if catalogue is None or not len(catalogue.counts):
        reason = data.gaps.get("catalogue") or data.gaps.get("dataset")
        raise MissingPartError(reason or "The item vocabulary of this dataset version is empty.")
    total = int(catalogue.counts.sum())
    facts = [
        ("Items", format_count(len(catalogue.counts))),
        ("Occurrences", format_count(total)),
        ("Held by the top 1%", format_share(catalogue.share_of_top(0.01))),
        ("Held by the top 10%", format_share(catalogue.share_of_top(0.1))),
    ]
    tokens = catalogue.tokens[:_TOP_ITEMS].to_pylist()
    top = zip(tokens, catalogue.counts[:_TOP_ITEMS].tolist(), strict=True)
    rows = [[catalogue.name(str(token)), count, count / (total or 1)] for token, count in top]
    return {"facts": facts, "plot": draw_popularity(catalogue), "rows": rows}


def draw_popularity(catalogue: ItemCatalogue) -> Markup:
    """Returns a plot of occurrences by rank, both axes logarithmic."""
    counts = catalogue.counts
    label = (
        f"Line chart, both axes logarithmic: occurrences of {format_count(len(counts))} "
        f"items by rank, from {format_count(counts[0])} down to {format_count(counts[-1])}."
    )
    seen = counts[counts > 0]  # a logarithm has no place for 0
    ranks = np.unique(np.geomspace(1, max(len(seen), 1), _CURVE_POINTS).round().astype(int))
    ranks = ranks[: len(seen)]
    curves = {"occurrences in train": seen[ranks - 1]}
    return plot_curves("popularity", label, ("item, by rank", ranks), curves, is_log=True)


_LISTED_SHARDS = 200
_OPEN_UP_TO_SHARDS = 24


def view_shards(data: RunData) -> dict[str, Any]:
    """Returns the sizes of the splits, and the shards."""
    manifest = data.require_manifest()
    how = f"{manifest.compression} compressed" if manifest.compression else "uncompressed"
    how += ", scalars of one type packed into one list" if manifest.slots else ""
    shards = [(split.name, shard) for split in manifest.splits for shard in split.shards]
    top = max((shard.bytes for _, shard in shards), default=0) or 1
    return {
        "lead": f"Standard TFRecord files of {manifest.record_type} records, {how}.",
        "splits": [_shards_row(split) for split in manifest.splits],
        "total": len(shards),
        "is_open": len(shards) <= _OPEN_UP_TO_SHARDS,
        "shards": [
            [shard.path, split, shard.rows, Cell(shard.bytes, bar=shard.bytes / top), shard.crc32c]
            for split, shard in shards[:_LISTED_SHARDS]
        ],
    }


def _shards_row(split: SplitInfo) -> list[Any]:
    sizes = [shard.rows for shard in split.shards]
    low, high = min(sizes, default=0), max(sizes, default=0)
    spread = f"{low:,} to {high:,}" if low < high else f"{low:,} each" if sizes else MISSING
    each = split.bytes / split.rows if split.rows else None
    return [split.name, len(sizes), split.rows, split.bytes, spread, each]
