"""`sluice versions`: list, compare, roll back and remove the versions of a dataset."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from conf.artefacts.dataset import read_manifest, resolve_version
from conf.errors import ConfigError
from conf.manifest import MANIFEST_FILE
from conf.paths import CURRENT_FILE
from etl.versions.diff import diff_manifests
from etl.versions.retention import (
    VersionInfo,
    collect_garbage,
    find_previous,
    list_versions,
    roll_back,
)
from etl.versions.stored import Dataset, find_current, open_dataset
from jobs.support.terminal import LogFormat, LogFormatOption, setup_logging

app = typer.Typer(add_completion=False, no_args_is_help=True)

Directory = Annotated[
    str, typer.Argument(metavar="DATASET", help="Its directory, <root>/<name>, or URI.")
]


@app.command("list")
def list_command(dataset: Directory, log_format: LogFormatOption = LogFormat.TEXT) -> int:
    """List the published versions, oldest first."""
    versions = list_versions(find_dataset(dataset))
    if log_format is LogFormat.JSON:
        for version in versions:
            print(json.dumps(version.to_json()))
    else:
        print_versions(versions)
    return 0


@app.command("current")
def current_command(dataset: Directory, log_format: LogFormatOption = LogFormat.TEXT) -> int:
    """Print the directory of the current version; exit code 4 where there is none."""
    version = resolve_version(find_dataset(dataset).base)
    print(json.dumps({"version": str(version)}) if log_format is LogFormat.JSON else version)
    return 0


@app.command("diff")
def diff_command(
    dataset: Directory,
    old: Annotated[str | None, typer.Argument(help="Version; NEW's parent if none.")] = None,
    new: Annotated[str | None, typer.Argument(help="Version; the current one if none.")] = None,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Compare two versions: rows, schema, vocabularies, config, statistics."""
    versions = find_dataset(dataset)
    old_id, new_id = choose_pair(versions, old, new)
    differences = diff_manifests(
        read_manifest(versions.version(old_id)), read_manifest(versions.version(new_id))
    )
    if log_format is LogFormat.JSON:
        print(json.dumps({"old": old_id, "new": new_id, "diff": differences}))
    else:
        print_diff(old_id, new_id, differences)
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
    before, after = roll_back(find_dataset(dataset), to)
    if log_format is LogFormat.JSON:
        print(json.dumps({"before": before, "current": after}))
    else:
        print(f"current: {after} (before: {before})")
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
    removed = collect_garbage(find_dataset(dataset), keep, older_than, dry_run=dry_run)
    if log_format is LogFormat.JSON:
        ids = [version.version_id for version in removed]
        print(json.dumps({"removed": [] if dry_run else ids, "would_remove": ids}))
    elif not removed:
        print("nothing to remove")
    else:
        for version in removed:
            print(f"{'would remove' if dry_run else 'removed'} {version.version_id}")
    return 0


def find_dataset(directory: str) -> Dataset:
    """Returns a dataset by its directory, local or in a store.

    Raises:
        ConfigError: It is not the directory of a dataset.
    """
    dataset = open_dataset(directory)
    if (dataset.base / MANIFEST_FILE).is_file():
        raise ConfigError(
            "this is one version, not a dataset",
            received=dataset.base,
            allowed=f"the directory that holds {CURRENT_FILE}",
            fix=f"give {str(dataset.base).rsplit('/', 2)[0]}",
        )
    return dataset


def choose_pair(dataset: Dataset, old: str | None, new: str | None) -> tuple[str, str]:
    """Returns the ids of the versions to compare; by default the current one and its parent.

    Raises:
        ConfigError: An id is unknown, or there is no version before the new one.
    """
    ids = [version.version_id for version in list_versions(dataset)]
    new = new or find_current(dataset) or ids[-1]
    for name in (new, old):
        if name is not None and name not in ids:
            raise ConfigError(
                "there is no such version to compare", received=name, allowed=", ".join(ids)
            )
    old = old or find_previous(dataset, ids, new)
    if old is None:
        raise ConfigError(
            "there is no version before this one to compare it with",
            received=new,
            allowed=", ".join(ids),
        )
    return old, new


def print_versions(versions: list[VersionInfo]) -> None:
    """Prints versions, a few lines each: an id is there to be copied, so no column breaks it."""
    for version in versions:
        facts = [f"{'*' if version.is_current else ' '} {version.version_id}"]
        if version.dates is not None:
            facts.append(" to ".join(dict.fromkeys(version.dates)))
        if version.bytes is not None:
            facts.append(f"{version.bytes / 1e6:,.1f} MB")
        print("  ".join(facts))
        if version.damage is not None:
            print(f"    damaged: {version.damage}")
        elif version.rows:
            print("    " + ", ".join(f"{split} {n:,}" for split, n in version.rows.items()))
        if version.parent is not None:
            print(f"    after {version.parent}")
    print("* current")


def print_diff(old_id: str, new_id: str, found: dict[str, dict[str, Any]]) -> None:
    """Prints the differences, part by part."""
    print(f"{old_id} -> {new_id}")
    if not found:
        print("no differences")
    for part, changes in found.items():
        print(f"{part}:")
        for name, change in changes.items():
            if isinstance(change, dict):
                shown = ", ".join(f"{key} {_pair(pair)}" for key, pair in change.items())
            else:
                shown = _pair(change)
            print(f"  {name}: {shown}")


def _pair(pair: list[Any]) -> str:
    return " -> ".join(_show(value) for value in pair)


def _show(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict) and "count" in value:
        return f"{value['count']:,}" if value.get("exact", True) else f"about {value['count']:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))
