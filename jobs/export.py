"""`sluice export`: a trained run as the next version of a model of TensorFlow Serving.

With `--delta-since`, what has changed since an earlier run, for `sluice models apply`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from conf.artefacts.delta import DELTA_FILE
from conf.artefacts.export import (
    EXPORT_FILE,
    INDEX_DIR,
    SCORE_ITEMS,
    ExportOptions,
    IndexOptions,
    list_indexes,
    list_versions,
)
from conf.artefacts.run import RUN_CARD_FILE, read_json
from conf.errors import ConfigError
from conf.local_paths import local_path
from jobs.index import print_index
from jobs.support.lineage import LineageRun
from jobs.support.terminal import LogFormat, LogFormatOption, setup_logging
from jobs.support.trained_run import (
    CheckpointChoice,
    CheckpointOption,
    RunOption,
    restore_run,
    timed,
)
from training.export.stored_models import describe, find_place

app = typer.Typer(add_completion=False)


@app.command()
def main(
    run: RunOption,
    to: Annotated[
        str | None,
        typer.Option(
            help="Directory of models, also in s3://, gs://, az:// or hdfs://; default: export/ "
            "(deltas: delta/) of the run."
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the model; default: that of the run.")
    ] = None,
    keep: Annotated[
        int | None, typer.Option(min=1, help="Versions kept, the newest ones; default: all.")
    ] = None,
    k: Annotated[
        int, typer.Option(min=1, help="Items that a retrieval model returns by default.")
    ] = 100,
    tables: Annotated[
        bool, typer.Option("--tables", help="Write every embedding table too, as files of rows.")
    ] = False,
    once: Annotated[
        bool,
        typer.Option("--once", help="Write nothing where this run has a version there already."),
    ] = False,
    index: Annotated[
        bool, typer.Option("--index", help="Publish it with an index of its items.")
    ] = False,
    items: Annotated[
        Path | None,
        typer.Option(parser=local_path, help="Columns of that index; the first one is the key."),
    ] = None,
    delta_since: Annotated[
        str | None,
        typer.Option(
            help="Write a delta, not a version: what has changed since an earlier run or "
            "checkpoint; start: the one that this run started from."
        ),
    ] = None,
    checkpoint: CheckpointOption = CheckpointChoice.BEST,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Write the next version of a SavedModel that takes raw values, with all embeddings."""
    setup_logging(log_format)
    if items is not None and not index:
        raise ConfigError("--items are columns of the index", fix="give --index too")
    if delta_since is not None and (tables or index or once):
        raise ConfigError(
            "a delta holds the changed rows of every table, and no index",
            received="--delta-since with --tables, --index or --once",
            fix="leave it out; `sluice models apply` makes tables and index as the version before",
        )
    indexing = IndexOptions(items_file=items) if index else None
    base = None if to is None else find_place(to)
    options = ExportOptions(base, name, keep, k, tables, once, indexing)
    target = export(run, checkpoint=checkpoint, options=options, since=delta_since)
    if log_format is LogFormat.JSON:
        print(json.dumps({"export" if delta_since is None else "delta": describe(target)}))
    elif delta_since is not None:
        print_delta(read_json(target / DELTA_FILE), target)
    else:
        print_version(read_json(target / EXPORT_FILE), target)
        print_new_index(target, index)
    return 0


def export(
    run_dir: str | Path,
    *,
    checkpoint: str = CheckpointChoice.BEST,
    options: ExportOptions | None = None,
    since: str | None = None,
) -> Path:
    """Writes the next version of a run's or series' model and returns it; earlier ones stay.

    With `since`, a run, a series, a checkpoint or `start`, it is the delta that leads from there.
    """
    trained, options = restore_run(run_dir, checkpoint), options or ExportOptions()
    from conf.publication.working_copy import describe_place
    from training.export.delta import find_base, write_delta
    from training.export.saved_model import write_export

    command = "export" if since is None else "delta"
    job = f"{command}.{trained.config.name}"
    with LineageRun(job) as told, timed(trained.run_dir, command):
        dataset = read_json(trained.run_dir / RUN_CARD_FILE)["dataset"]["path"]
        told.inputs = {describe_place(trained.run_dir): {}, dataset: {}}
        if since is None:
            target = write_export(trained, options)
        else:
            target = write_delta(trained, find_base(trained, since), options)
        told.outputs = {describe(target): {}}
    return target


def _sum_bytes(card: Mapping[str, Any]) -> int:
    return sum(file["bytes"] for file in card["files"].values())


def print_delta(about: Mapping[str, Any], target: Path) -> None:
    text = "{}: {changed:,} rows new or changed, {removed:,} keys removed; {rows:,} rows now"
    for name, table in sorted(about["tables"].items()):
        print(text.format(name, **table))
    part, whole = (_sum_bytes(card) / 1e6 for card in (about, about["version"]))
    print(f"{part:.1f} MB; a full version has {whole:.1f} MB")
    print(f"delta of {about['name']} since run {about['since']['run']}: {describe(target)}")


def print_version(card: Mapping[str, Any], target: Path) -> None:
    if outputs := card.get("outputs"):
        what = f"outputs: {', '.join(output['name'] for output in outputs)}"
    else:
        found = {kind: card["embeddings"][kind] or {"rows": 0} for kind in ("items", "users")}
        what = ", ".join(f"{about['rows']:,} {kind}" for kind, about in found.items())
        if unknown := found["users"].get("users_outside_vocabulary"):
            print(f"left out: {unknown:,} users outside the vocabulary")
    print(f"{card['model']}, {what}, {_sum_bytes(card) / 1e6:.1f} MB")
    print(f"signatures: {', '.join(card['signatures'])}")
    if reason := card.get("no_item_scores"):
        print(f"no signature {SCORE_ITEMS}: {reason}")
    print(f"version {card['version']} of {card['name']}: {describe(target)}")


def print_new_index(target: Path, is_new: bool = True) -> None:
    """Prints the index of a new version, or that it has none where the version before has one."""
    if numbers := list_indexes(target):
        if is_new:
            print_index(target / INDEX_DIR / str(numbers[-1]))
        return
    place = describe(target)
    model = find_place(place.rpartition("/")[0])
    before = max((n for n in list_versions(model) if n < int(target.name)), default=None)
    if before is not None and list_indexes(model / str(before)):
        print(f"no index, as version {before} has one; make one: sluice index --export {place}")


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))
