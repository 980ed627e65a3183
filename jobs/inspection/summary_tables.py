"""Summaries as tables: coloured on a terminal, aligned plain text otherwise."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jobs.reporting.formatting import (
    MISSING,
    format_bytes,
    format_count,
    format_metric,
    format_share,
    metric_order,
    metric_title,
)

_LONGEST_VALUE = 60
_WIDEST_BAR = 40


@dataclass(frozen=True)
class TextTable:
    """A titled table of text; columns named in `numeric` are set flush right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[str] = frozenset()


def print_tables(listings: Sequence[TextTable], console: Console) -> None:
    """Prints tables one below the other."""
    for listing in listings:
        if console.is_terminal:
            console.print(_rich_table(listing), end="\n\n")
        else:
            console.file.write(render_plain(listing))


def render_plain(listing: TextTable) -> str:
    """Returns a table as aligned text that ends in an empty line."""
    header = [listing.columns] if any(listing.columns) else []
    cells = [tuple(map(printable, row)) for row in (*header, *listing.rows)]
    widths = [max((len(row[i]) for row in cells), default=0) for i in range(len(listing.columns))]
    lines = [printable(listing.title)]
    for row in cells:
        parts = [
            text.rjust(width) if name in listing.numeric else text.ljust(width)
            for text, width, name in zip(row, widths, listing.columns, strict=True)
        ]
        lines.append("  " + "  ".join(parts).rstrip())
    return "\n".join(lines) + "\n\n"


def printable(text: str) -> str:
    """Returns text with control characters spelt out: data must not steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _rich_table(listing: TextTable) -> Table:
    table = Table(
        title=escape(printable(listing.title)),
        title_justify="left",
        title_style="bold",
        header_style="dim",
        show_header=any(listing.columns),
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for name in listing.columns:
        right = name in listing.numeric
        table.add_column(name, justify="right" if right else "left", no_wrap=right,
                         overflow="fold")  # fmt: skip
    for row in listing.rows:
        table.add_row(*(escape(printable(text)) for text in row))
    return table


def list_summary(summary: Mapping[str, Any]) -> tuple[TextTable, ...]:
    """Returns the tables of a summary of any kind."""
    build = {
        "dataset": _list_dataset,
        "shard": _list_shard,
        "files": _list_files,
        "run": _list_run,
    }[summary["kind"]]
    tables = list(build(summary))
    if "verification" in summary:
        tables.append(_verification(summary["verification"]))
    for number, record in enumerate(summary.get("head", ())):
        rows = tuple((name, _short(value)) for name, value in record.items())
        tables.append(TextTable(f"record {number}", ("feature", "value"), rows))
    return tuple(tables)


def _list_dataset(summary: Mapping[str, Any]) -> Iterator[TextTable]:
    span = summary["event_ts_ms_range"]
    yield _facts(f"dataset {summary['name']}", {
        "version": summary["version"],
        "path": summary["path"],
        "published versions": len(summary["published_versions"]),
        "built": f"{summary['created_at']} by Sluice {summary['code_version']}",
        "records": f"{summary['record_type']}, {summary['compression'] or 'uncompressed'}"
        + (", packed" if summary["packed_columns"] else ""),
        "unlisted files": _describe_unlisted(summary["unlisted"]),
        "event time, ms": None if span is None else f"{span[0]} to {span[1]}",
        "schema": summary["schema_fingerprint"][:16],
        "encoders": summary["encoders_fingerprint"][:16],
    })  # fmt: skip
    yield TextTable(
        "splits",
        ("split", "rows", "bytes", "shards", "label rate"),
        tuple(
            (s["name"], format_count(s["rows"]), format_bytes(s["bytes"]), str(s["shards"]),
             format_share(s["label_rate"]))
            for s in summary["splits"]
        ),
        frozenset({"rows", "bytes", "shards", "label rate"}),
    )  # fmt: skip
    yield _features(summary["features"])
    if summary["packed_columns"]:
        yield _packed_columns(summary["packed_columns"])
    yield _facts("keys", summary["keys"])
    yield _counts(summary["counts"], [split["name"] for split in summary["splits"]])


def _list_shard(summary: Mapping[str, Any]) -> Iterator[TextTable]:
    yield _facts("shard", {
        "path": summary["path"],
        "dataset version": summary["manifest"] or "(no manifest beside it)",
        "split": summary.get("split"),
        "rows": format_count(summary["rows"]),
        "bytes": format_bytes(summary["bytes"]),
        "crc32c": summary["crc32c"],
        "compression": summary["compression"] or "none",
    })  # fmt: skip
    yield _features(summary["features"])


def _list_files(summary: Mapping[str, Any]) -> Iterator[TextTable]:
    unlisted = summary["not_in_manifest"]
    yield _facts("TFRecord files", {
        "path": summary["path"],
        "files": format_count(summary["files"]),
        "records": f"{format_count(summary['rows'])}, {summary['record_type']}",
        "bytes": format_bytes(summary["bytes"]),
        "compression": ", ".join(summary["compressions"]),
        "partition columns": ", ".join(f"{n} {t}" for n, t in summary["partition_columns"]) or None,
        "manifest": "as it says" if summary["manifest"] else "(none beside them)",
        "not in the manifest": f"{len(unlisted)}: {', '.join(unlisted[:3])}" if unlisted else None,
    })  # fmt: skip
    if summary["features"]:
        yield _features(summary["features"])
    yield _record_sizes(summary["record_sizes"])


def _packed_columns(columns: Sequence[Mapping[str, Any]]) -> TextTable:
    """Which column stands where in the lists of the packed features."""
    rows = []
    for column in columns:
        first, last = column["places"]
        place = str(first) if first == last else f"{first} to {last}"
        rows.append((column["name"], column["type"], column["feature"], place))
    header = ("column", "type", "packed in", "place")
    return TextTable("packed columns", header, tuple(rows), frozenset({"place"}))


def _record_sizes(sizes: Mapping[str, Any]) -> TextTable:
    """A histogram, the widest bar standing for the fullest bin."""
    most = max((bin_["records"] for bin_ in sizes["bins"]), default=1)
    total = sum(bin_["records"] for bin_ in sizes["bins"])
    rows = tuple(
        (f"{bin_['from']:,} to {bin_['to']:,}", format_count(bin_["records"]),
         format_share(bin_["records"] / total),
         "\N{FULL BLOCK}" * math.ceil(_WIDEST_BAR * bin_["records"] / most))
        for bin_ in sizes["bins"]
    )  # fmt: skip
    mean = (
        ""
        if sizes["mean"] is None
        else (f": {sizes['shortest']:,} to {sizes['longest']:,}, mean {sizes['mean']:,.1f}")
    )
    columns = ("bytes", "records", "share", " ")
    return TextTable(f"record sizes{mean}", columns, rows, frozenset({"bytes", "records", "share"}))


def _list_run(summary: Mapping[str, Any]) -> Iterator[TextTable]:
    card = summary["card"]
    plain = {k: v for k, v in card.items() if not isinstance(v, dict | list)}
    yield _facts("run", {"path": summary["path"], **plain})
    for key, value in card.items():
        if isinstance(value, dict):
            yield _facts(key, dict(_flatten(value)))
    metrics = summary["metrics"]
    if metrics is None:
        state = summary.get("metrics_problem", "not yet: run `sluice evaluate`")
        yield _facts("evaluation", {"state": state})
        return
    for protocol in metrics.get("protocols", ()):
        yield _protocol(protocol, protocol.get("name") == metrics.get("headline"))


def _protocol(protocol: Mapping[str, Any], is_headline: bool) -> TextTable:
    systems = protocol.get("systems", {})
    metrics = sorted({m for values in systems.values() for m in values}, key=metric_order)
    rows = tuple(
        (metric_title(metric), *(format_metric(values.get(metric)) for values in systems.values()))
        for metric in metrics
    )
    title = f"{protocol.get('name')}{' (headline)' if is_headline else ''}"
    return TextTable(title, ("metric", *systems), rows, frozenset(systems))


def _features(features: Sequence[Mapping[str, Any]]) -> TextTable:
    columns = ("feature", "type", "role", "vocabulary", "table", "max length")
    rows = tuple(
        (
            feature["name"],
            _type_name(feature["dtype"], len(feature["shape"])),
            feature.get("role", MISSING),
            format_count(feature.get("vocabulary_size")),
            str(feature.get("shared_embedding") or feature["name"])
            if feature.get("vocabulary_size")
            else MISSING,
            format_count(feature.get("max_len")),
        )
        for feature in features
    )
    return TextTable("features", columns, rows, frozenset({"vocabulary", "max length"}))


def _type_name(dtype: str, dimensions: int) -> str:
    return "list<" * dimensions + dtype + ">" * dimensions


def _counts(counts: Mapping[str, Any], splits: Sequence[str]) -> TextTable:
    rows: list[tuple[str, str, str]] = []
    for source, read in counts["read"].items():
        rows.append(("read", source, format_count(read)))
    for source, reasons in counts["quarantined"].items():
        rows += [("quarantined", f"{source}: {r}", format_count(n)) for r, n in reasons.items()]
    rows += [("dropped", reason, format_count(n)) for reason, n in counts["dropped"].items()]
    rows.append(("joined", "events", format_count(counts["joined"])))
    rows += [("kept", split, format_count(counts["kept"].get(split))) for split in splits]
    return TextTable("counts", ("stage", "what", "rows"), tuple(rows), frozenset({"rows"}))


def _describe_unlisted(files: Sequence[str]) -> str | None:
    """Says which files beside the shards nobody reads; None where there are none."""
    return f"{len(files)}, not in the manifest and never read, first: {files[0]}" if files else None


def _verification(result: Mapping[str, Any]) -> TextTable:
    if result["ok"]:
        return _facts("verification", {
            "result": "every byte is as it was written",
            "files": format_count(result["files"]),
            "records": format_count(result["rows"]),
            "bytes": format_bytes(result["bytes"]),
        })  # fmt: skip
    rows = tuple((problem["file"], problem["what"]) for problem in result["problems"])
    return TextTable("verification: FAILED", ("file", "problem"), rows)


def _facts(title: str, facts: Mapping[str, Any]) -> TextTable:
    rows = tuple((name, _short(value)) for name, value in facts.items() if value is not None)
    return TextTable(title, ("", ""), rows)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _short(value: Any) -> str:
    if not isinstance(value, list):
        return str(value)
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= _LONGEST_VALUE:
        return text
    return f"{text[:_LONGEST_VALUE].rstrip()}… ({len(value)} values)"
