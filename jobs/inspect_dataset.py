"""`sluice inspect`: shows what a dataset, a shard or a run holds, and checks every byte of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from conf.errors import ConfigError, InputDataError
from conf.manifest import MANIFEST_FILE, Manifest
from conf.paths import read_manifest
from jobs.inspection.records import read_dataset_head, read_first, wire_features
from jobs.inspection.summary import (
    Target,
    find_shard,
    find_target,
    list_record_files,
    summarize_dataset,
    summarize_files,
    summarize_run,
    summarize_shard,
)
from jobs.inspection.summary_tables import list_summary, print_tables
from jobs.inspection.verify import (
    OnBytes,
    Problem,
    Verification,
    count_records,
    verify_dataset,
    verify_shard,
)
from jobs.reporting.dataset_page import write_dataset_page

app = typer.Typer(add_completion=False)


@app.command()
def main(
    path: Annotated[str, typer.Argument(help="A dataset, a version, TFRecord files or a run.")],
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
    against: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="Version that --html compares with; or `previous`."),
    ] = None,
) -> None:
    """Show what a dataset, a shard or a run holds."""
    target = find_target(path)
    if target.kind == "run" and (verify or head is not None):
        raise ConfigError(
            "--verify and --head are for datasets and shards",
            received=f"a run: {target.path}",
            fix="give the dataset that the run's card names",
        )
    if html is not None or against is not None:
        print(write_dataset_page(target, html, against))
        return
    summary = inspect(target, verify=verify, head=head, split=split)
    if as_json:
        print(json.dumps(summary, indent=1, default=str))
    else:
        print_tables(list_summary(summary), Console())
    _refuse_problems(target, summary)


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
        return _inspect_files(target.path, head)
    return _inspect_shard(target, verify, head)


def _inspect_dataset(
    version: Path, verify: bool, head: int | None, split: str | None
) -> dict[str, Any]:
    # While verifying, a missing or truncated shard is one finding among others.
    manifest = _load_manifest(version) if verify else read_manifest(version)
    summary = summarize_dataset(version, manifest)
    if verify:
        with _show_progress(manifest.bytes) as on_bytes:
            result = verify_dataset(version, manifest, on_bytes)
        summary["verification"] = result.to_json()
        if result.problems:
            return summary
    if head is not None:
        summary["head"] = read_dataset_head(version, manifest, head, split)
    return summary


def _inspect_files(directory: Path, head: int | None) -> dict[str, Any]:
    """Reads, and so verifies, every file: nothing else can tell what they hold."""
    files = list_record_files(directory)
    with _show_progress(sum(file.stat().st_size for file in files)) as on_bytes:
        summary, result = summarize_files(directory, on_bytes)
    summary["verification"] = result.to_json()
    if head is not None and not result.problems:
        summary["head"] = read_first(files, head, record_type=summary["record_type"])
    return summary


def _inspect_shard(target: Target, verify: bool, head: int | None) -> dict[str, Any]:
    manifest = _load_manifest(target.version) if target.version else None
    if verify:
        result = _verify_file(target, manifest)
        if result.problems:
            return {"kind": "shard", "path": str(target.path), "manifest": None, "features": [],
                    "rows": result.rows, "bytes": result.bytes, "crc32c": None,
                    "compression": None, "verification": result.to_json()}  # fmt: skip
    summary = summarize_shard(target.path, target.version, manifest)
    if verify:
        summary["verification"] = result.to_json()
    if head is not None:
        if manifest is not None and summary["listed"]:
            wanted = wire_features(manifest.schema)
            summary["head"] = read_first([target.path], head, wanted, slots=manifest.slots)
        else:
            summary["head"] = read_first([target.path], head)
    return summary


def _verify_file(target: Target, manifest: Manifest | None) -> Verification:
    """Checks a shard against its manifest, or only for damage where no manifest lists it."""
    size = target.path.stat().st_size
    found = find_shard(target.path, target.version, manifest)
    if found is not None and manifest is not None and target.version is not None:
        shard = found[1]
        rows, whats = verify_shard(target.version, shard, manifest.compression)
        return Verification(1, rows, size, tuple(Problem(shard.path, what) for what in whats))
    rows, damage = count_records(target.path, "auto")
    problems = () if damage is None else (Problem(str(target.path), damage),)
    return Verification(1, rows, size, problems)


def _load_manifest(version: Path) -> Manifest:
    file = version / MANIFEST_FILE
    return Manifest.loads(file.read_text(encoding="utf-8"), origin=str(file))


@contextmanager
def _show_progress(total_bytes: int) -> Iterator[OnBytes]:
    """Shows a bar on a terminal's standard error; elsewhere nothing."""
    console = Console(stderr=True)
    columns = ("verifying", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("", total=total_bytes)
        yield lambda count: bar.advance(task, count)


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
    from jobs.cli import run_app

    raise SystemExit(run_app(app))
