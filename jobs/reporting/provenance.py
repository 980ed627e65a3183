"""What would be needed to do it again: configs, versions, inputs, timings, paths, shard files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from conf.manifest import Manifest
from jobs.reporting.blocks import (
    Beside,
    Block,
    Code,
    Details,
    Facts,
    Note,
    Section,
    TableCell,
    TableColumn,
    build_table,
    missing,
)
from jobs.reporting.formatting import (
    MISSING,
    format_bytes,
    format_count,
    format_number,
    format_seconds,
)
from jobs.reporting.run_data import RunData, as_mapping


def build_timings(data: RunData) -> Section:
    """Seconds per stage of the build and of the run, peak memory."""
    lead = "Wall-clock time per stage, the longest first."
    tables: list[Block] = []
    if data.manifest is not None and data.manifest.stage_seconds:
        tables.append(_seconds_table("Dataset build.", data.manifest.stage_seconds))
    seconds, facts = _split_timing(as_mapping(data.card.get("timing")))
    if seconds:
        tables.append(_seconds_table("Run.", seconds))
    training = as_mapping(data.card.get("training"))
    built = {} if data.manifest is None else data.manifest.peak_memory_bytes
    facts += _memory_facts("build", built)
    facts += _memory_facts("training", training.get("peak_memory_bytes"))
    facts += _memory_facts("training", training.get("peak_device_memory_bytes"))
    if not tables and not facts:
        return Section("timings", "Timings", lead, (missing("No timings were recorded."),))
    blocks: list[Block] = [Beside(tuple(tables))] if tables else []
    blocks += [Facts(tuple(facts))] if facts else []
    return Section("timings", "Timings", lead, tuple(blocks))


def build_provenance(data: RunData) -> Section:
    """Paths, inputs, versions, and the resolved configs behind summaries."""
    blocks: list[Block] = [Facts(tuple(_identity(data)))]
    manifest = data.manifest
    if manifest is None:
        blocks.append(missing(data.gaps["dataset"]))
    else:
        blocks.append(_inputs_table(manifest))
    versions = as_mapping(data.card.get("versions"))
    if versions:
        blocks.append(Details("Versions", (Facts(_scalars(versions)),), is_open=False))
    if data.config:
        blocks.append(Details("Training config, resolved", (Code(_pretty(data.config)),)))
    if manifest is not None:
        config = Code(_pretty(manifest.source.config))
        blocks.append(Details("Dataset config, resolved", (config,)))
    rest = {key: value for key, value in data.card.items() if key != "config"}
    blocks.append(Details("Run card", (Code(_pretty(rest)),)))
    lead = "Everything needed to do it again."
    return Section("provenance", "Provenance", lead, tuple(blocks))


def _identity(data: RunData) -> Iterator[tuple[str, str]]:
    yield "Run", str(data.run)
    yield "Status", str(data.card.get("status", MISSING))
    if data.version is not None:
        yield "Dataset version", str(data.version)
    if data.manifest is not None:
        yield "Built", data.manifest.created_at
        yield "Sluice at build", data.manifest.code_version
        yield "Schema", data.manifest.schema.fingerprint[:16]
        yield "Encoders", data.manifest.encoders_fingerprint[:16]
        span = data.manifest.source.event_ts_ms_range
        if span is not None:
            yield "Events", f"{_day(span[0])} to {_day(span[1])}"


def _inputs_table(manifest: Manifest) -> Block:
    inputs, tables = manifest.source.inputs, manifest.source.tables
    if not inputs and not tables:
        return Note("The dataset version names no inputs.")
    columns = (
        TableColumn("Source", numeric=False),
        TableColumn("File or table", numeric=False),
        TableColumn("Bytes"),
        TableColumn("Modified, or state", numeric=False),
    )
    return build_table(
        "Inputs, as they stood when they were read.",
        columns,
        [
            [item.source, item.path, format_bytes(item.bytes), _minute(item.modified_ms)]
            for item in inputs
        ]
        + [[item.source, item.place, MISSING, item.state or MISSING] for item in tables],
    )


def _seconds_table(caption: str, seconds: Mapping[str, float]) -> Block:
    top = max(seconds.values(), default=0) or 1
    rows = [
        [
            TableCell(_readable(name)),
            TableCell(format_seconds(value), bar=min(max(value / top, 0), 1)),
        ]
        for name, value in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    return build_table(caption, (TableColumn("Stage", numeric=False), TableColumn("Time")), rows)


def _split_timing(timing: Mapping[str, Any]) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """Durations apart from the other figures (rates, times of day) of a card's timing."""
    seconds: dict[str, float] = {}
    facts = []
    for name, value in timing.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_rate = "per_s" in name or "per_second" in name
        if is_number and not is_rate and (name.endswith("seconds") or name.endswith("_s")):
            seconds[name.removesuffix("_seconds").removesuffix("_s")] = float(value)
        elif is_number:
            facts.append((_readable(name), format_number(value)))
        elif isinstance(value, str):
            facts.append((_readable(name), value))
    return seconds, facts


def _memory_facts(job: str, found: Any) -> Iterator[tuple[str, str]]:
    """Peak memory of a job: one number, or one per process."""
    if isinstance(found, Mapping):
        for process, peak in found.items():
            yield f"Peak memory, {job}: {process.replace('_', ' ')}", format_bytes(peak)
    elif found is not None:
        yield f"Peak memory, {job}", format_bytes(found)


def _scalars(values: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple((str(key), str(value)) for key, value in sorted(values.items()))


def _pretty(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True, default=str, ensure_ascii=False)


def _readable(name: str) -> str:
    text = name.replace("_", " ")
    return text[:1].upper() + text[1:]


def _day(ts_ms: int) -> str:
    return datetime.fromtimestamp(ts_ms / 1000, UTC).strftime("%Y-%m-%d")


def _minute(ts_ms: int) -> str:
    return datetime.fromtimestamp(ts_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")


_LISTED_SHARDS = 200
_OPEN_UP_TO_SHARDS = 24


def build_shards(data: RunData) -> Section:
    """Splits with their sizes, then each shard."""
    manifest = data.manifest
    if manifest is None:
        return Section("shards", "Shards", "The TFRecord files.", (missing(data.gaps["dataset"]),))
    compression = f"{manifest.compression} compressed" if manifest.compression else "uncompressed"
    packed = ", scalars of one type packed into one list" if manifest.slots else ""
    lead = f"Standard TFRecord files of {manifest.record_type} records, {compression}{packed}."
    total = sum(len(split.shards) for split in manifest.splits)
    listing: list[Block] = [_shard_table(manifest)]
    if total > _LISTED_SHARDS:
        listing.append(Note(f"The first {_LISTED_SHARDS} of {total:,}; the manifest lists all."))
    details = Details(f"All {total:,} shards", tuple(listing), is_open=total <= _OPEN_UP_TO_SHARDS)
    return Section("shards", "Shards", lead, (_shards_by_split_table(manifest), details))


def _shards_by_split_table(manifest: Manifest) -> Block:
    columns = (
        TableColumn("Split", numeric=False),
        TableColumn("Shards"),
        TableColumn("Rows"),
        TableColumn("Bytes"),
        TableColumn("Rows per shard", hint="least to most"),
        TableColumn("Bytes per row"),
    )
    rows = []
    for split in manifest.splits:
        sizes = [shard.rows for shard in split.shards]
        rows.append(
            [
                split.name,
                format_count(len(sizes)),
                format_count(split.rows),
                format_bytes(split.bytes),
                _spread(sizes),
                format_count(split.bytes / split.rows if split.rows else None),
            ]
        )
    return build_table("Records and bytes of each split.", columns, rows)


def _spread(sizes: Sequence[int]) -> str:
    if not sizes:
        return MISSING
    low, high = min(sizes), max(sizes)
    return f"{low:,} to {high:,}" if low < high else f"{low:,} each"


def _shard_table(manifest: Manifest) -> Block:
    shards = [(split.name, shard) for split in manifest.splits for shard in split.shards]
    top = max((shard.bytes for _, shard in shards), default=0) or 1
    columns = (
        TableColumn("File", numeric=False),
        TableColumn("Split", numeric=False),
        TableColumn("Rows"),
        TableColumn("Bytes"),
        TableColumn("CRC-32C", numeric=False),
    )
    return build_table(
        "Files in the order in which they are listed.",
        columns,
        [
            [
                shard.path,
                name,
                format_count(shard.rows),
                TableCell(format_bytes(shard.bytes), bar=shard.bytes / top),
                shard.crc32c,
            ]
            for name, shard in shards[:_LISTED_SHARDS]
        ],
    )
