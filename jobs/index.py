"""`sluice index`: an index of an exported model's items, measured against the exact search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from conf.artefacts.export import INDEX_CARD, INDEX_DIR, IndexKind, IndexOptions, list_indexes
from conf.artefacts.run import read_json
from conf.errors import ConfigError
from conf.local_paths import local_path
from conf.paths import ReadablePath
from jobs.support.terminal import LogFormat, LogFormatOption, quiet_tensorflow, setup_logging

app = typer.Typer(add_completion=False)


@app.command()
def main(
    export: Annotated[str, typer.Option(help="A version, or a model: its newest version.")],
    kind: Annotated[IndexKind | None, typer.Option(help="Default: by the number of items.")] = None,
    items: Annotated[
        Path | None, typer.Option(parser=local_path, help="Columns to filter by, the key first.")
    ] = None,
    add: Annotated[
        Path | None, typer.Option(parser=local_path, help="New items with their features.")
    ] = None,
    keep: Annotated[int | None, typer.Option(min=1, help="Newest ones kept; default: all.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Only where there is no index yet.")] = False,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Index the items of a retrieval model, or add items to its index; `sluice serve` takes it."""
    from training.export.stored_models import describe, hold_version, resolve_export

    setup_logging(log_format)
    if add is not None and (kind, items) != (None, None):
        raise ConfigError("--add keeps the kind and the columns of the index")
    version, note = resolve_export(export), ""
    index: ReadablePath
    if once and add is None and (numbers := list_indexes(version)):
        index = version / INDEX_DIR / str(numbers[-1])
    else:
        with quiet_tensorflow():
            from training.index.index_build import add_items, build_index
        with hold_version(version) as directory:
            if add is None:
                index = build_index(directory, IndexOptions(kind, items, keep))
            else:
                index, added, others = add_items(directory, add, keep)
                note = f"added {added:,} items; {others:,} were in the index already\n"
    if log_format is LogFormat.JSON:
        print(json.dumps({"index": describe(index)}))
    else:
        print(note, end="")
        print_index(index)
    return 0


def print_index(index: ReadablePath) -> None:
    from training.export.stored_models import describe

    about = read_json(index / INDEX_CARD)
    print("{kind}: {items:,} items of {dim} dimensions, {added:,} of them added".format(**about))
    print("recall@{k} {recall:.4f}, {milliseconds} ms a search".format(**about))
    print(f"index {index.name} of {about['export']['name']}: {describe(index)}")


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))
