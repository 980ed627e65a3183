"""Summaries as tables of aligned text.

Tables follow the keys of the summary: single values first, then a table of each group of values
and of each list of entries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from conf.json_text import flatten
from jobs.support.formatting import (
    MISSING,
    describe_filter,
    format_bytes,
    format_count,
    format_metric,
    format_seconds,
    format_share,
    metric_order,
    metric_title,
    plain_words,
    read_task_metrics,
)

_LONGEST_VALUE = 60
# How values are shown, by the last part of their key; others as they are.
_FORMS: Mapping[str, Callable[[Any], str]] = {
    "bytes": format_bytes,
    "rows": format_count,
    "records": format_count,
    "files": format_count,
    "seconds": format_seconds,
    "task_seconds": format_seconds,
    "rows_read": format_count,
    "bytes_read": format_bytes,
    "rows_written": format_count,
    "bytes_written": format_bytes,
    "spilled_memory": format_bytes,
    "spilled_disk": format_bytes,
    "vocabulary_size": format_count,
    "label_rate": format_share,
    "weighted_label_rate": format_share,
    "share": format_share,
    "share_before": format_share,
    "tokens": format_count,
    "tokens_before": format_count,
    "shape": lambda shape: ("scalar", "list", "list of lists")[len(shape)],
}
_COUNTS = "counts"


@dataclass(frozen=True)
class TextTable:
    """A titled table of text; columns named in `numeric` are set flush right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[str] = frozenset()


def print_tables(listings: Sequence[TextTable], console: Console) -> None:
    """Prints tables one below the other, their titles bold on a terminal."""
    for listing in listings:
        title, _, rest = render_plain(listing).partition("\n")
        console.print(Text(title, "bold"), soft_wrap=True)
        console.print(Text(rest), end="", soft_wrap=True)


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
    """Returns text with control characters as escapes: data must not steer the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def list_summary(summary: Mapping[str, Any]) -> tuple[TextTable, ...]:
    """Returns the tables of a summary of any kind."""
    own = {"kind", "verification", "head", "card", "metrics"}
    shown = {key: value for key, value in summary.items() if key not in own}
    tables = list(_list_values(str(summary["kind"]), {**shown, **summary.get("card", {})}))
    if summary["kind"] == "run":
        tables += _list_evaluation(summary["metrics"])
    if "verification" in summary:
        tables.append(_verification(summary["verification"]))
    for number, record in enumerate(summary.get("head", ())):
        rows = tuple((name, _short(value)) for name, value in record.items())
        tables.append(TextTable(f"record {number}", ("feature", "value"), rows))
    return tuple(tables)


def _list_values(title: str, values: Mapping[str, Any]) -> Iterator[TextTable]:
    single = {plain_words(key): value for key, value in values.items()}
    yield _facts(title, {key: v for key, v in single.items() if not isinstance(v, Mapping)})
    for key, value in values.items():
        nested = {key: value}
        if isinstance(value, Mapping):
            yield _facts(plain_words(key), dict(flatten(value)), is_count=key == _COUNTS)
            nested = {f"{key}, {name}": inner for name, inner in value.items()}
        for name, inner in nested.items():
            if _is_entries(inner):
                yield _list_entries(plain_words(name), inner)


def _is_entries(value: Any) -> bool:
    """Whether a value is a list of JSON objects."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _list_entries(title: str, entries: Sequence[Mapping[str, Any]]) -> TextTable:
    """A row per entry, and a column per key that any entry has a value of."""
    keys = dict.fromkeys(key for entry in entries for key, v in entry.items() if v is not None)
    titles = {key: plain_words(key) for key in keys}
    rows = tuple(tuple(_show(key, entry.get(key)) for key in keys) for entry in entries)
    numeric = {
        titles[key]
        for key in keys
        if all(isinstance(entry.get(key), int | float | None) for entry in entries)
    }
    return TextTable(title, tuple(titles.values()), rows, frozenset(numeric))


def _list_evaluation(metrics: Mapping[str, Any] | None) -> Iterator[TextTable]:
    if metrics is None:
        yield _facts("evaluation", {"state": "none that can be read: `sluice evaluate` writes one"})
        return
    if (filtered := describe_filter(metrics)) is not None:
        yield _facts("evaluation", {"filter": filtered})
    for task, values in metrics.get("tasks", {}).items():
        lines = [(metric_title(name), *map(format_metric, pair))
                 for name, pair in read_task_metrics(values).items()]  # fmt: skip
        yield TextTable(f"task {task}", ("metric", "model", "constant"), tuple(lines))
    for protocol in metrics.get("protocols", ()):
        is_headline = protocol.get("name") == metrics.get("headline")
        systems = protocol.get("systems", {})
        measured = sorted({m for values in systems.values() for m in values}, key=metric_order)
        rows = tuple(
            (metric_title(metric), *(format_metric(v.get(metric)) for v in systems.values()))
            for metric in measured
        )
        title = f"{protocol.get('name')}{' (headline)' if is_headline else ''}"
        yield TextTable(title, ("metric", *systems), rows, frozenset(systems))


def _verification(result: Mapping[str, Any]) -> TextTable:
    if result["ok"]:
        read = {key: result[key] for key in ("files", "rows", "bytes")}
        return _facts("verification", {"result": "every byte is as it was written", **read})
    return _list_entries("verification: FAILED", result["problems"])


def _facts(title: str, values: Mapping[str, Any], is_count: bool = False) -> TextTable:
    rows = tuple(
        (key, format_count(value) if is_count else _show(key, value))
        for key, value in values.items()
        if value not in (None, []) and not _is_entries(value)
    )
    return TextTable(title, ("", ""), rows)


def _show(key: str, value: Any) -> str:
    form = _FORMS.get(key.rpartition(".")[2], _short)
    return MISSING if value is None else form(value)


def _short(value: Any) -> str:
    if not isinstance(value, list | tuple):
        return str(value)
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= _LONGEST_VALUE:
        return text
    return f"{text[:_LONGEST_VALUE].rstrip()}… ({len(value)} values)"
