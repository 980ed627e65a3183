"""`sluice inspect`: shows what a dataset, a shard or a run holds, and checks every byte of it."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn

from conf.artefacts.dataset import read_manifest
from conf.errors import ConfigError, InputDataError
from conf.local_paths import list_visible_files, local_path
from conf.manifest import MANIFEST_FILE, Manifest
from conf.storage.atomic_output import write_text_atomic
from jobs.inspection.records import read_dataset_head
from jobs.inspection.summary import (
    Target,
    find_target,
    summarize_dataset,
    summarize_files,
    summarize_run,
    summarize_shard,
)
from jobs.inspection.summary_tables import list_summary, print_tables
from jobs.inspection.variables import summarize_key, summarize_variable
from jobs.inspection.verify import OnBytes, verify_dataset
from jobs.reporting.dataset_page import render_dataset
from jobs.support.terminal import show_progress

app = typer.Typer(add_completion=False)


@app.command()
def main(
    path: Annotated[
        str,
        typer.Argument(help="A dataset or version, TFRecord files, or a run."),
    ],
    verify: Annotated[
        bool, typer.Option("--verify", help="Recompute every CRC-32C and row count.")
    ] = False,
    head: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Show the first N records, decoded.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split that --head reads.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write a page about a dataset.")
    ] = None,
    variable: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Show a run's variable; --head N: its first N rows."),
    ] = None,
    table: Annotated[
        str | None, typer.Option(metavar="NAME", help="Table of a run that --key is looked up in.")
    ] = None,
    key: Annotated[
        int | None, typer.Option(help="Show the row of a key, as the dataset holds it.")
    ] = None,
) -> None:
    """Show what a dataset, a shard or a run holds."""
    target = find_target(path)
    reads_records = verify or (head is not None and variable is None)
    _check_switches(target, reads_records, variable, table, key)
    if html is not None:
        print(write_dataset_page(target, html))
        return
    if variable is not None:
        summary = summarize_variable(target.path, variable, head)
    elif table is not None and key is not None:
        summary = summarize_key(target.path, table, key)
    else:
        summary = inspect(target, verify=verify, head=head, split=split)
    if as_json:
        print(json.dumps(summary, indent=1, default=str))
    else:
        print_tables(list_summary(summary), Console())
    _refuse_problems(target, summary)


def _check_switches(
    target: Target, reads_records: bool, variable: str | None, table: str | None, key: int | None
) -> None:
    """Refuses switches that are not for the target."""
    if (table is None) != (key is None) or (table is not None and target.kind != "run"):
        raise ConfigError(
            "--table and --key together show the row of a key in a run",
            received=f"a {target.kind}, --table {table}, --key {key}",
            allowed="sluice inspect RUN --table NAME --key K",
        )
    if target.kind == "run" and reads_records:
        raise ConfigError(
            "--verify and --head are for datasets and shards",
            received=f"{target.kind}: {target.path}",
            fix="give the dataset: a run's card names it",
        )
    if variable is not None and target.kind != "run":
        raise ConfigError(
            "--variable is for runs", received=f"a {target.kind}: {target.path}", allowed="a run"
        )


def write_dataset_page(target: Target, html: str) -> Path:
    """Writes the page about a dataset version: one self-contained file.

    Args:
        target: The dataset to show.
        html: File to write; an earlier one is replaced whole or not at all.

    Returns:
        The file.

    Raises:
        ConfigError: The target is not a dataset.
        InputDataError: A manifest or the statistics are damaged.
    """
    if target.kind != "dataset":
        raise ConfigError(
            "--html writes a page about a dataset",
            received=f"a {target.kind}: {target.path}",
            allowed="--html FILE with a dataset or one of its versions",
            fix="a run's page is written by `sluice report`",
        )
    file = local_path(html)
    write_text_atomic(file, render_dataset(target.path))
    return file


def inspect(
    target: Target, *, verify: bool = False, head: int | None = None, split: str | None = None
) -> dict[str, Any]:
    """Returns what a target holds, with `verification` and `head` where they are asked for.

    Raises:
        InputDataError: A file is damaged; while verifying, the problems are listed instead.
    """
    if target.kind == "run":
        return summarize_run(target.path)
    if target.kind == "dataset":
        return _inspect_dataset(target.path, verify, head, split)
    if target.kind == "files":
        size = sum(file.stat().st_size for file in list_visible_files(target.path))
        with _show_verifying(size) as on_bytes:
            return summarize_files(target.path, head, on_bytes)
    manifest = _load_manifest(target.version) if target.version else None
    return summarize_shard(target, manifest, verify=verify, head=head)


def _inspect_dataset(
    version: Path, verify: bool, head: int | None, split: str | None
) -> dict[str, Any]:
    # While verifying, a missing or truncated shard is one finding among others.
    manifest = _load_manifest(version) if verify else read_manifest(version)
    summary = summarize_dataset(version, manifest)
    if verify:
        with _show_verifying(manifest.bytes) as on_bytes:
            result = verify_dataset(version, manifest, on_bytes)
        summary["verification"] = result.to_json()
        if result.problems:
            return summary
    if head is not None:
        summary["head"] = read_dataset_head(version, manifest, head, split)
    return summary


def _load_manifest(version: Path) -> Manifest:
    file = version / MANIFEST_FILE
    return Manifest.loads(file.read_text(encoding="utf-8"), origin=str(file))


def _show_verifying(total_bytes: int) -> AbstractContextManager[OnBytes]:
    columns = ("verifying", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return show_progress(total_bytes, *columns)


def _refuse_problems(target: Target, summary: dict[str, Any]) -> None:
    problems = summary.get("verification", {}).get("problems", ())
    if not problems:
        return
    sys.stdout.flush()
    lines = [f"{problem['file']}: {problem['what']}" for problem in problems]
    raise InputDataError(
        f"{target.path} failed the verification",
        received="\n            ".join(lines),
        fix="restore the files, point CURRENT at an earlier version, or build again",
    )


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))
