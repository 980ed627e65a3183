"""`sluice index`: an index of an exported model's items, measured against the exact search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

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
        Path | None, typer.Option(parser=local_path, help="Columns to filter by, the key first.")
    ] = None,
    add: Annotated[
        Path | None, typer.Option(parser=local_path, help="New items with their features.")
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
    if add is not None and (kind, items) != (None, None):
        raise ConfigError("--add keeps the kind and the columns of the index")
    version = resolve_export(export)
    index: ReadablePath
    if once and add is None and (numbers := list_indexes(version)):
        index, note = version / INDEX_DIR / str(numbers[-1]), "the version has an index already"
    else:
        index, note = _write_index(version, add, IndexOptions(kind, items, keep))
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
        from training.index.index_build import add_items, build_index
    with hold_version(version) as directory:
        if add is None:
            return build_index(directory, options), ""
        index, added, repeated = add_items(directory, add, options.keep)
    return index, f"added {added:,} items; {repeated:,} were in the index already"


def print_index(index: ReadablePath, note: str = "") -> None:
    """Prints what an index holds, and what it finds of the exact lists."""
    from training.export.stored_models import describe

    about = read_json(index / INDEX_CARD)
    if note:
        print(note)
    if rebuilt := about.get("rebuilt"):
        print("built as the index of version {version}, without {added_items_left_out:,} items "
              "that were added to it".format(**rebuilt))  # fmt: skip
    print("{kind}: {items:,} items of {dim} dimensions, {added:,} of them added".format(**about))
    print("recall@{k} {recall:.4f}, {milliseconds} ms a search".format(**about))
    print(f"index {index.name} of {about['export']['name']}: {describe(index)}")


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))
