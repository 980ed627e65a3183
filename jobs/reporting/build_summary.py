"""What `sluice build` prints at its end: rows read, dropped and written, and figures of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from conf.manifest import Manifest
from jobs.support.formatting import MISSING, format_share

if TYPE_CHECKING:
    from rich.console import Console

    from etl.quality.figures import Figure, Share

_HOUR_MS = 3_600_000
FAR = "!"
"""Stands before a figure that is far from the one of the version before."""
MANY_FEATURES = 40
"""From this number on, features without nulls and OOV are only counted."""
_FEATURE_COLUMNS = {
    "null, train": ("null", "train"),
    "null, test": ("null", "test"),
    "OOV, train": ("oov", "train"),
    "OOV, test": ("oov", "test"),
}


def print_counts(manifest: Manifest, console: Console) -> None:
    """Prints how many rows were read, dropped and written."""
    from rich.table import Table

    table = Table(title=f"dataset {manifest.dataset_name}", title_justify="left")
    table.add_column("rows")
    table.add_column("count", justify="right")
    for what, count in _list_counts(manifest):
        table.add_row(what, f"{count:,}")
    console.print(table)


def _list_counts(manifest: Manifest) -> Iterator[tuple[str, int]]:
    counts = manifest.counts
    for source, rows in counts.read.items():
        yield f"read from {source}", rows
        for reason, bad in counts.quarantined[source].items():
            yield f"  bad: {reason}", bad
    for reason, rows in counts.dropped.items():
        yield f"dropped: {reason}", rows
    yield "joined", counts.joined
    for label, reasons in counts.lost_conversions.items():
        for reason, rows in reasons.items():
            shown = "conversions" if reason == "rows" else f"  make no sample positive: {reason}"
            yield f"{shown} ({label})", rows
    for label, known in counts.maturity.items():
        yield from _list_maturity(label, known)
    if counts.short_users:
        yield "users with too few events to hold one out, in train alone", counts.short_users
    if counts.test_in_log:
        yield "test events whose user and item the log has too", counts.test_in_log
    if counts.ties:
        yield "at the time of an earlier event of their user", counts.ties
    if counts.late:
        yield "in files of these days, but of earlier ones: no samples", counts.late
    for name, rows in counts.drawn.items():
        yield f"negatives drawn for {name}", rows
    for split in manifest.splits:
        size = f"{len(split.shards)} shards, {split.bytes / 1e6:.1f} MB"
        yield f"written to {split.name} ({size})", split.rows


def _list_maturity(label: str, known: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """What is not known of a label made of conversions."""
    last_event_ms, last_ms = known.get("last_event_ts_ms"), known.get("last_conversion_ts_ms")
    if last_event_ms is not None and last_ms is not None and last_ms < last_event_ms:
        yield (
            f"  hours from the last one to the last event ({label})",
            round((last_event_ms - last_ms) / _HOUR_MS),
        )
    if "unknown_as_0" in known:
        yield f"written as 0, but not known yet ({label})", known["unknown_as_0"]


def print_figures(figures: Sequence[Figure], console: Console) -> None:
    """Prints what was matched, and of each feature the nulls and what its vocabulary lacks."""
    from rich.table import Table

    whole, of_features = list_figure_rows(figures)
    for title, columns, rows in (
        ("matched, labels, vocabularies", ("", "now", "before"), whole),
        ("features; in brackets the version before", ("", *_FEATURE_COLUMNS), of_features),
    ):
        if rows:
            table = Table(title=title, title_justify="left")
            for column in columns:
                table.add_column(column, justify="right" if column else "left")
            for row in rows:
                table.add_row(*row)
            console.print(table)
    if any(figure.is_far for figure in figures):
        console.print(f"{FAR} far from that of the version before", soft_wrap=True)


def list_figure_rows(
    figures: Sequence[Figure],
) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Returns the rows of two tables: figures of the whole version, and figures by feature."""
    whole: list[tuple[str, ...]] = [
        (figure.title, f"{_mark(figure)}{_show(figure.now)}", _show(figure.before))
        for figure in figures
        if figure.kind not in ("null", "oov")
    ]
    by_feature: dict[str, dict[tuple[str, str | None], Figure]] = {}
    for figure in figures:
        if figure.kind in ("null", "oov"):
            by_feature.setdefault(figure.name, {})[figure.kind, figure.split] = figure
    shown = {
        name: found
        for name, found in by_feature.items()
        if len(by_feature) < MANY_FEATURES or any(f.is_telling for f in found.values())
    }
    rows = [
        (name, *(_show_beside(found.get(place)) for place in _FEATURE_COLUMNS.values()))
        for name, found in shown.items()
    ]
    if len(shown) < len(by_feature):
        rows.append((f"{len(by_feature) - len(shown)} more: none", *[""] * len(_FEATURE_COLUMNS)))
    return whole, rows


def _show_beside(figure: Figure | None) -> str:
    if figure is None:
        return MISSING
    now, before = _show(figure.now), _show(figure.before)
    is_known = figure.before is not None and now != before
    return f"{_mark(figure)}{now} ({before})" if is_known else f"{_mark(figure)}{now}"


def _mark(figure: Figure) -> str:
    return f"{FAR} " if figure.is_far else ""


def _show(value: Share | int | None) -> str:
    if value is None:
        return MISSING
    return f"{value:,}" if isinstance(value, int) else format_share(value.value)
