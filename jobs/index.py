"""`sluice index`: an index of an exported model's items, measured against the exact search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from conf.artefacts.export import (
    INDEX_CARD,
    INDEX_DIR,
    IndexKind,
    IndexOptions,
    list_indexes,
)
from conf.artefacts.run import read_json
from conf.errors import ConfigError
from conf.local_paths import local_path
from conf.paths import ReadablePath
from jobs.support.terminal import LogFormat, LogFormatOption, quiet_tensorflow, setup_logging

app = typer.Typer(add_completion=False)


@app.command()
def main(
    export: Annotated[
        str, typer.Option(help="An exported version, or a model: its newest version.")
    ],
    kind: Annotated[IndexKind | None, typer.Option(help="Default: by the number of items.")] = None,
    items: Annotated[
        Path | None,
        typer.Option(
            parser=local_path, help="Columns of items, to filter by; the first is the key."
        ),
    ] = None,
    k: Annotated[
        int | None, typer.Option(min=1, help="Length of the lists that are measured [50].")
    ] = None,
    recall: Annotated[
        float | None, typer.Option(min=0, max=1, help="Share of them to be found [0.95].")
    ] = None,
    add: Annotated[
        Path | None,
        typer.Option(
            parser=local_path, help="New items with their features, for the newest index."
        ),
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, help="Indexes kept, the newest ones; default: all.")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Build nothing where the version has an index already.")
    ] = False,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Index the items of a retrieval model, or add items to its index; `sluice serve` takes it."""
    from training.export.stored_models import describe, resolve_export

    setup_logging(log_format)
    version = resolve_export(export)
    given = {"kind": kind, "items_file": items, "k": k, "recall": recall}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if add is not None and chosen:
        raise ConfigError(
            "--add keeps the kind, the columns and the goal of the index",
            received=", ".join(f"--{name.removesuffix('_file')}" for name in chosen),
            fix="leave them out, or build a new index without --add",
        )
    index: ReadablePath
    if once and add is None and (numbers := list_indexes(version)):
        index, note = version / INDEX_DIR / str(numbers[-1]), "the version has an index already"
    else:
        index, note = _write_index(version, add, IndexOptions(**chosen, keep=keep))
    if log_format is LogFormat.JSON:
        print(json.dumps({"index": describe(index)}))
    else:
        print_index(index, note)
    return 0


def _write_index(
    version: ReadablePath, add: Path | None, options: IndexOptions
) -> tuple[Path, str]:
    """Builds an index, or adds items to the newest one; returns it, and what there is to say."""
    from training.export.stored_models import hold_version

    with quiet_tensorflow():
        from training.index.index_build import build_index
        from training.serving.lists.added_items import add_items
    with hold_version(version) as directory:
        if add is None:
            return build_index(directory, options), ""
        index, added, repeated = add_items(directory, add, options.keep)
    return index, f"added {added:,} items; {repeated:,} were in the index already"


def print_index(index: ReadablePath, note: str = "") -> None:
    """Prints what an index holds, and what it finds of the exact lists."""
    from rich.console import Console
    from rich.table import Table

    from training.export.stored_models import describe

    about = read_json(index / INDEX_CARD)
    report, console = about["report"], Console(highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in report["recall"].items():
        table.add_row(f"recall {name}", f"{value:.4f}")
    for name, value in report["milliseconds"].items():
        table.add_row(f"milliseconds, {name}", f"{value:.2f}")
    if rebuilt := about.get("rebuilt"):
        missing = rebuilt["added_items_left_out"]
        lacks = f", without {missing:,} items that were added to it" if missing else ""
        built = f"built as the index of version {rebuilt['version']}{lacks}"
        note = f"{note}; {built}" if note else built
    if note:
        console.print(note, soft_wrap=True)
    console.print(_describe(about), soft_wrap=True)
    console.print(table)
    if (reached := report["recall"][f"@{report['k']}"]) < about["goal"]["recall"]:
        console.print(
            f"recall {reached:.4f} is below the goal of {about['goal']['recall']}: "
            + ("build the index anew" if about["added"] else "choose another --kind"),
            soft_wrap=True,
        )
    console.print(f"index {index.name} of {about['export']['name']}: {describe(index)}",
                  soft_wrap=True)  # fmt: skip


def _describe(about: dict[str, Any]) -> str:
    total = sum(info["bytes"] for info in about["files"].values())
    looks = {"ivf": f", looks into {about['effort']} of {about['cells']} cells",
             "hnsw": f", walks with {about['effort']} candidates"}  # fmt: skip
    queries = about["report"]["queries"]
    return (
        f"{about['kind']}{looks.get(about['kind'], '')}: {about['items']:,} items of "
        f"{about['dim']} dimensions, {about['added']:,} of them added, {total / 1e6:.1f} MB; "
        f"measured by {queries['count']} {queries['of']}"
    )


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))
