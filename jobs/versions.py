"""`sluice versions`: list, compare, roll back and remove the versions of a dataset."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer

from conf.artefacts.dataset import read_manifest, resolve_version
from conf.errors import ConfigError
from conf.manifest import MANIFEST_FILE
from etl.versions.history import (
    VersionInfo,
    collect_garbage,
    diff_manifests,
    find_previous,
    list_versions,
    roll_back,
)
from etl.versions.publish import Dataset, open_dataset, read_current
from jobs.support.terminal import LogFormat, LogFormatOption, setup_logging

app = typer.Typer(add_completion=False, no_args_is_help=True)

Directory = Annotated[
    str, typer.Argument(metavar="DATASET", help="Its directory, <root>/<name>, or URI.")
]


@app.command("list")
def list_command(dataset: Directory, log_format: LogFormatOption = LogFormat.TEXT) -> int:
    """List the published versions, oldest first."""
    for version in list_versions(_find_dataset(dataset)):
        show(log_format, asdict(version), render_version(version))
    show(log_format, None, "* current")
    return 0


@app.command("current")
def current_command(dataset: Directory, log_format: LogFormatOption = LogFormat.TEXT) -> int:
    """Print the directory of the current version; exit code 4 where there is none."""
    version = str(resolve_version(open_dataset(dataset).base))
    show(log_format, {"version": version}, version)
    return 0


@app.command("diff")
def diff_command(
    dataset: Directory,
    old: Annotated[str | None, typer.Argument(help="Version; NEW's parent if none.")] = None,
    new: Annotated[str | None, typer.Argument(help="Version; the current one if none.")] = None,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Compare two versions: rows, schema, vocabularies, config, statistics."""
    versions = _find_dataset(dataset)
    pair = choose_pair(versions, old, new)
    found = diff_manifests(*(read_manifest(versions.version(version_id)) for version_id in pair))
    text = "\n".join([" -> ".join(pair), *(render_diff(found) or ["no differences"])])
    show(log_format, {"old": pair[0], "new": pair[1], "diff": found}, text)
    return 0


@app.command("rollback")
def rollback_command(
    dataset: Directory,
    to: Annotated[
        str | None, typer.Option("--to", metavar="ID", help="Version; the previous one if none.")
    ] = None,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Make an earlier version current again; refuses a damaged one."""
    setup_logging(log_format)
    before, after = roll_back(_find_dataset(dataset), to)
    changed = {"before": before, "current": after}
    show(log_format, changed, f"current: {after} (before: {before})")
    return 0


@app.command("gc")
def gc_command(
    dataset: Directory,
    keep: Annotated[
        int | None, typer.Option(metavar="N", help="Newest versions that stay.")
    ] = None,
    older_than: Annotated[
        float | None, typer.Option(metavar="DAYS", help="Younger versions stay.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing.")] = False,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Remove old versions, never the current one; with both limits both must allow it."""
    setup_logging(log_format)
    removed = collect_garbage(_find_dataset(dataset), keep, older_than, dry_run=dry_run)
    ids = [version.version_id for version in removed]
    done = "would remove" if dry_run else "removed"
    text = "\n".join(f"{done} {name}" for name in ids) or "nothing to remove"
    show(log_format, {"removed": [] if dry_run else ids, "would_remove": ids}, text)
    return 0


def show(log_format: LogFormat, value: Any, text: str) -> None:
    """Prints a result as a line of JSON, unless it is None, or as text."""
    if log_format is not LogFormat.JSON:
        print(text)
    elif value is not None:
        print(json.dumps(value))


def _find_dataset(directory: str) -> Dataset:
    dataset = open_dataset(directory)
    if (dataset.base / MANIFEST_FILE).is_file():
        raise ConfigError(
            "this is one version, not a dataset",
            received=dataset.base,
            fix=f"give {str(dataset.base).rsplit('/', 2)[0]}",
        )
    return dataset


def choose_pair(dataset: Dataset, old: str | None, new: str | None) -> tuple[str, str]:
    """Returns the ids of the versions to compare; by default the current one and its parent."""
    ids = [version.version_id for version in list_versions(dataset)]
    new = new or read_current(dataset) or ids[-1]
    pair = old or find_previous(dataset, ids, new) or f"none before {new}", new
    for name in set(pair) - set(ids):
        raise ConfigError("there is no such version", received=name, allowed=", ".join(ids))
    return pair


def render_version(version: VersionInfo) -> str:
    """Shows a version in a few lines: an id is there to be copied, so no column breaks it."""
    facts = [
        f"{'*' if version.is_current else ' '} {version.version_id}",
        " to ".join(dict.fromkeys(version.dates or ())),
        "" if version.bytes is None else f"{version.bytes / 1e6:,.1f} MB",
    ]
    lines = [
        "  ".join(filter(None, facts)),
        f"damaged: {version.damage}" if version.damage else "",
        ", ".join(f"{split} {n:,}" for split, n in (version.rows or {}).items()),
        f"after {version.parent}" if version.parent else "",
    ]
    return "\n    ".join(filter(None, lines))


def render_diff(found: dict[str, dict[str, Any]]) -> list[str]:
    """Shows the differences, part by part."""
    lines = []
    for part, changes in found.items():
        lines.append(f"{part}:")
        for name, change in changes.items():
            pairs = change.items() if isinstance(change, dict) else [("", change)]
            shown = (f"{key} {' -> '.join(map(_show, pair))}".strip() for key, pair in pairs)
            lines.append(f"  {name}: {', '.join(shown)}")
    return lines


def _show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict) and "count" in value:
        return f"{value['count']:,}" if value.get("exact", True) else f"about {value['count']:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))
