"""What would be needed to do it again: configs, versions, inputs, timings, paths."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from conf.manifest import Manifest
from jobs.reporting.blocks import (
    Beside,
    Block,
    Cell,
    Code,
    Column,
    Details,
    Facts,
    Note,
    Section,
    build_table,
    missing,
)
from jobs.reporting.numbers import MISSING, format_bytes, format_number, format_seconds
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
        Column("Source", numeric=False),
        Column("File or table", numeric=False),
        Column("Bytes"),
        Column("Modified, or state", numeric=False),
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
        [Cell(_readable(name)), Cell(format_seconds(value), bar=min(max(value / top, 0), 1))]
        for name, value in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    return build_table(caption, (Column("Stage", numeric=False), Column("Time")), rows)


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
