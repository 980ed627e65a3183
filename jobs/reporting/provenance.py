"""How to repeat a run: configs, versions, inputs and paths; and what it took: time, memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from conf.manifest import Manifest
from jobs.reporting.formatting import (
    MISSING,
    Cell,
    as_mapping,
    capital_words,
    format_bytes,
    format_number,
    plain_words,
    to_float,
)
from jobs.reporting.run_data import MissingPartError, RunData


def view_timings(data: RunData) -> dict[str, Any]:
    """Returns seconds per stage of the build and of the run, and peak memory."""
    built = {} if data.manifest is None else data.manifest.stage_seconds
    seconds, facts = _split_timing(as_mapping(data.card.get("timing")))
    training = as_mapping(data.card.get("training"))
    if data.manifest is not None:
        facts += _memory_facts("build", data.manifest.peak_memory_bytes)
    facts += _memory_facts("training", training.get("peak_memory_bytes"))
    facts += _memory_facts("training", training.get("peak_device_memory_bytes"))
    stages = (("Dataset build.", built), ("Run.", seconds))
    tables = [(caption, _stage_rows(found)) for caption, found in stages if found]
    if not tables and not facts:
        raise MissingPartError("No timings were recorded.")
    return {"tables": tables, "facts": facts}


def _stage_rows(seconds: Mapping[str, float]) -> list[list[Any]]:
    top = max(seconds.values()) or 1
    return [
        [capital_words(name), Cell(value, bar=min(max(value / top, 0), 1))]
        for name, value in sorted(seconds.items(), key=lambda item: -item[1])
    ]


def _split_timing(timing: Mapping[str, Any]) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """A card's durations by stage, and its other figures (rates, times of day) as facts."""
    seconds: dict[str, float] = {}
    facts = []
    for name, value in timing.items():
        is_number = to_float(value) is not None
        is_rate = "per_s" in name or "per_second" in name
        if is_number and not is_rate and (name.endswith("seconds") or name.endswith("_s")):
            seconds[name.removesuffix("_seconds").removesuffix("_s")] = float(value)
        elif is_number:
            facts.append((capital_words(name), format_number(value)))
        elif isinstance(value, str):
            facts.append((capital_words(name), value))
    return seconds, facts


def _memory_facts(job: str, found: Any) -> Iterator[tuple[str, str]]:
    """Peak memory of a job: one number, or one per process."""
    if isinstance(found, Mapping):
        for process, peak in found.items():
            yield f"Peak memory, {job}: {plain_words(process)}", format_bytes(peak)
    elif found is not None:
        yield f"Peak memory, {job}", format_bytes(found)


def view_provenance(data: RunData) -> dict[str, Any]:
    """Returns paths, inputs, versions, and the resolved configs."""
    card = {key: value for key, value in data.card.items() if key != "config"}
    codes = [("Training config, resolved", data.config)] if data.config else []
    if data.manifest is not None:
        codes.append(("Dataset config, resolved", data.manifest.source.config))
    codes.append(("Run card", card))
    return {
        "facts": list(_identity(data)),
        "gap": data.gaps["dataset"] if data.manifest is None else None,
        "inputs": [] if data.manifest is None else _input_rows(data.manifest),
        "versions": sorted((str(k), str(v)) for k, v in as_mapping(card.get("versions")).items()),
        "codes": [
            (title, json.dumps(value, indent=2, sort_keys=True, default=str, ensure_ascii=False))
            for title, value in codes
        ],
    }


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
            yield "Events", f"{_at(span[0]):%Y-%m-%d} to {_at(span[1]):%Y-%m-%d}"


def _input_rows(manifest: Manifest) -> list[list[Any]]:
    files = [
        [item.source, item.path, item.bytes, f"{_at(item.modified_ms):%Y-%m-%d %H:%M} UTC"]
        for item in manifest.source.inputs
    ]
    tables = [
        [item.source, item.place, None, item.state or MISSING] for item in manifest.source.tables
    ]
    return [*files, *tables]


def _at(ts_ms: int) -> datetime:
    return datetime.fromtimestamp(ts_ms / 1000, UTC)
