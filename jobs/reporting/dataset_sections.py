"""Sections about the dataset and the way to it: rows, features, items, shards, time, provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from conf.manifest import Manifest
from conf.schema import FeatureSpec
from conf.splits import EVENT_SPLITS
from etl.quality.figures import count_unknown
from jobs.reporting.run_data import MissingPartError, RunData
from jobs.support.formatting import (
    MISSING,
    as_mapping,
    format_count,
    format_number,
    reason_words,
    share_of,
    to_float,
)

_ALARMING_SHARE = 0.2
_TOP_ITEMS = 10
_CURVE_POINTS = 160


@dataclass(frozen=True)
class FlowStep:
    """A stage of the data flow.

    Attributes:
        name: The last step that these rows have passed.
        kept: Rows that go on, by part (one part, or one per split).
        lost: Rows that stop here.
        why: Reasons, for the label.
    """

    name: str
    kept: Mapping[str, int]
    lost: int = 0
    why: str = ""

    @property
    def rows(self) -> int:
        """Rows that go on."""
        return sum(self.kept.values())


def view_flow(data: RunData) -> dict[str, Any]:
    """Returns the stages that event rows go through, and the reasons of the losses."""
    manifest = data.require_manifest()
    joins = manifest.source.config.get("joins")
    described = map(as_mapping, joins if isinstance(joins, list | tuple) else ())
    return {
        "manifest": manifest,
        "read": _count_events(manifest)[0],
        "steps": event_steps(manifest),
        "losses": _losses(manifest),
        "policies": {join.get("source"): join.get("unmatched") for join in described},
        "unexplained": unexplained_rows(manifest),
    }


def _count_events(manifest: Manifest) -> tuple[int, int, dict[str, int]]:
    """Event rows that were read, bad ones of them, and records by split without drawn negatives."""
    config, counts = manifest.source.config, manifest.counts
    events, split = as_mapping(config.get("events")), as_mapping(config.get("split"))
    named = (events.get("source"), split.get("validation"), split.get("test"))
    sources = [name for name in named if isinstance(name, str) and name in counts.read] or list(
        counts.read
    )[:1]
    bad = sum(sum(counts.quarantined.get(source, {}).values()) for source in sources)
    kept = {name: counts.kept.get(name, 0) - counts.drawn.get(name, 0) for name in EVENT_SPLITS}
    read = sum(counts.read[source] for source in sources)
    return read, bad, {name: rows for name, rows in kept.items() if rows}


def event_steps(manifest: Manifest) -> tuple[FlowStep, ...]:
    """Returns the stages that event rows go through, with what each stage lost."""
    read, bad, kept = _count_events(manifest)
    joined, written = manifest.counts.joined, sum(kept.values())
    return (
        FlowStep("Read", {"rows": read}),
        FlowStep("Parsed", {"rows": read - bad}, bad, "bad rows"),
        FlowStep("De-duplicated and joined", {"rows": joined}, max(read - bad - joined, 0)),
        FlowStep("Written as records", kept, max(joined - written, 0)),
    )


def unexplained_rows(manifest: Manifest) -> int:
    """Returns how many event rows are neither written, nor quarantined, nor dropped."""
    read, bad, kept = _count_events(manifest)
    return abs(read - bad - sum(kept.values()) - sum(manifest.counts.dropped.values()))


def _losses(manifest: Manifest) -> list[list[Any]]:
    """Reason, source, rows and share of each loss, the greatest first."""
    counts, read = manifest.counts, _count_events(manifest)[0]
    rows = [
        (f"bad row: {reason_words(reason)}", source, n, counts.read.get(source, 0))
        for source, reasons in counts.quarantined.items()
        for reason, n in reasons.items()
    ]
    rows += [(reason_words(reason), "events", n, read) for reason, n in counts.dropped.items()]
    rows = sorted((row for row in rows if row[2]), key=lambda row: (-row[2], row[1], row[0]))
    return [[reason, source, n, n / whole if whole else None] for reason, source, n, whole in rows]


def view_features(data: RunData) -> dict[str, Any]:
    """Returns the rows of one table of features per split."""
    manifest = data.require_manifest()
    splits = []
    for split in manifest.splits:
        if statistics := as_mapping(manifest.statistics.get(split.name)):
            described = {
                spec: as_mapping(statistics.get(spec.name)) for spec in manifest.schema.features
            }
            rows = [
                _feature_row(spec, held) for spec, held in described.items() if held.get("values")
            ]
            splits.append((split.name, split.rows, rows))
    if not splits:
        raise MissingPartError("This dataset version carries no statistics.")
    return {"splits": splits}


def _feature_row(spec: FeatureSpec, found: Mapping[str, Any]) -> list[Any]:
    is_plain = spec.vocabulary_size is None  # ids have no meaningful range
    distinct, length = as_mapping(found.get("distinct")), as_mapping(found.get("length"))
    bins, size = fill_length_bins(length.get("histogram") or ()), MISSING
    if spec.is_list:
        size = f"{format_number(length.get('mean'))}, up to {format_number(length.get('max'))}"
    return [
        spec.name,
        f"{spec.dtype}\N{NO-BREAK SPACE}list" if spec.is_list else spec.dtype,
        spec.role,
        spec.vocabulary_size,
        ("~" if distinct.get("exact") is False else "") + format_count(distinct.get("count")),
        _share_cell(found.get("missing"), found.get("rows")),
        _share_cell(None if is_plain else count_unknown(found), found.get("values")),
        *(found.get(key) if is_plain else None for key in ("min", "mean", "max")),
        size if length else MISSING,
        {"value": f"Lengths of {spec.name}", "bins": [*map(_name_bin, bins)]} if bins else MISSING,
    ]


def _share_cell(part: Any, whole: Any) -> dict[str, Any]:
    share = share_of(part, whole)
    tone = "loss" if (share or 0) >= _ALARMING_SHARE else "rival"
    return {"value": share, "bar": share or None, "tone": tone}


def _name_bin(found: Mapping[str, Any]) -> tuple[str, float]:
    low, high = format_number(found["low"]), format_number(found["high"])
    return low if found["low"] == found["high"] else f"{low} to {high}", float(found["count"])


def fill_length_bins(bins: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """Returns the length bins 0, 1, 2 to 3, 4 to 7, … up to the last filled one, without gaps."""
    counts = {item["low"]: item["count"] for item in bins}
    low, filled = 0, []
    while counts and low <= max(counts):
        high = max(2 * low - 1, low)
        filled.append({"low": low, "high": high, "count": counts.get(low, 0)})
        low = high + 1
    return filled


def view_popularity(data: RunData) -> dict[str, Any]:
    """Returns the curve of counts by rank, how concentrated they are, and the top items."""
    catalogue = data.catalogue
    if catalogue is None or not len(catalogue.tokens):
        reason = data.gaps.get("catalogue") or data.gaps.get("dataset")
        raise MissingPartError(reason or "The item vocabulary of this dataset version is empty.")
    counts = catalogue.counts
    if counts is None:
        raise MissingPartError(
            "This dataset version was built without counts of its train rows; build it again."
        )
    seen = counts[counts > 0]  # a logarithm has no place for 0
    ranks = np.unique(np.geomspace(1, max(len(seen), 1), _CURVE_POINTS).round().astype(int))
    ranks = ranks[: len(seen)]
    return {
        "catalogue": catalogue,
        "total": int(counts.sum()),
        "tokens": catalogue.tokens[:_TOP_ITEMS].to_pylist(),
        "ranks": ranks,
        "curves": {"occurrences in train": seen[ranks - 1]},
    }


def view_shards(data: RunData) -> dict[str, Any]:
    """Returns the splits, and their shards."""
    manifest = data.require_manifest()
    how = f"{manifest.compression} compressed" if manifest.compression else "uncompressed"
    how += ", with scalars that share a list" if manifest.slots else ""
    lead = f"Standard TFRecord files of {manifest.record_type} records, {how}."
    return {"lead": lead, "splits": manifest.splits}


def view_timings(data: RunData) -> dict[str, Any]:
    """Returns seconds per stage of the build and of the run, other figures, and peak memory."""
    manifest, training = data.manifest, as_mapping(data.card.get("training"))
    seconds, figures = _split_timing(as_mapping(data.card.get("timing")))
    built = {} if manifest is None else manifest.stage_seconds
    peaks = [
        ("build", None if manifest is None else manifest.peak_memory_bytes),
        ("training", training.get("peak_memory_bytes")),
        ("training", training.get("peak_device_memory_bytes")),
    ]
    if not (built or seconds or figures or any(peak for _, peak in peaks)):
        raise MissingPartError("No timings were recorded.")
    return {"built": built, "seconds": seconds, "figures": figures, "peaks": peaks}


def _split_timing(timing: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """A card's durations by stage, and its other figures (rates, times of day)."""
    seconds: dict[str, float] = {}
    figures: dict[str, Any] = {}
    for name, value in timing.items():
        is_rate = "per_s" in name or "per_second" in name
        if to_float(value) is None:
            figures.update({name: value} if isinstance(value, str) else {})
        elif not is_rate and name.endswith(("seconds", "_s")):
            seconds[name.removesuffix("_seconds").removesuffix("_s")] = float(value)
        else:
            figures[name] = format_number(value)
    return seconds, figures


def view_provenance(data: RunData) -> dict[str, Any]:
    """Returns the run, its card without the config, and the versions of packages."""
    card = {key: value for key, value in data.card.items() if key != "config"}
    versions = sorted(as_mapping(card.get("versions")).items())
    return {"run": data, "card": card, "versions": versions}
