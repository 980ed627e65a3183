"""`sluice export`: a trained run as the next version of a model of TensorFlow Serving.

With `--delta-since`, what has changed since an earlier run, for `sluice models apply`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conf.artefacts.delta import DELTA_FILE
from conf.artefacts.export import (
    DEFAULT_SIGNATURE,
    INDEX_DIR,
    SCORE_ITEMS,
    ExportOptions,
    IndexOptions,
    list_indexes,
    list_versions,
    read_card,
)
from conf.artefacts.run import RUN_CARD_FILE, read_json
from conf.errors import ConfigError
from conf.local_paths import local_path
from jobs.index import print_index
from jobs.support.lineage import LineageDataset, LineageRun, emit_lineage
from jobs.support.terminal import LogFormat, LogFormatOption, setup_logging
from jobs.support.trained_run import (
    CheckpointChoice,
    CheckpointOption,
    RunOption,
    restore_run,
    timed,
)
from training.export.stored_models import describe, find_place

if TYPE_CHECKING:
    from training.checkpoint.restore import TrainedModel

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
    if delta_since is not None:
        _refuse_with_delta({"--tables": tables, "--index": index, "--once": once})
    base = None if to is None else find_place(to)
    indexing = IndexOptions(items_file=items) if index else None
    options = ExportOptions(base, name, keep, k, tables, once, indexing)
    target = export(run, checkpoint=checkpoint, options=options, since=delta_since)
    if log_format is LogFormat.JSON:
        print(json.dumps({"export" if delta_since is None else "delta": describe(target)}))
    elif delta_since is not None:
        print_delta(target)
    else:
        print_summary(target)
        print_new_index(target, index)
    return 0


def _refuse_with_delta(given: Mapping[str, bool]) -> None:
    if named := [option for option, is_given in given.items() if is_given]:
        raise ConfigError(
            "a delta holds the changed rows of every table, and no index",
            received=f"--delta-since with {named[0]}",
            fix="leave it out; `sluice models apply` makes tables and index as the version before",
        )


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
    from training.export.delta import find_base, write_delta
    from training.export.saved_model import write_export

    command = "export" if since is None else "delta"
    with _lineage(command, trained) as told, timed(trained.run_dir, command):
        if since is None:
            target = write_export(trained, options)
        else:
            target = write_delta(trained, find_base(trained, since), options)
        told.outputs = [_describe_written(target)]
    return target


@contextmanager
def _lineage(command: str, trained: TrainedModel) -> Iterator[LineageRun]:
    """Emits the lineage of what is made of a run."""
    from training.checkpoint.stored_runs import describe_run

    with emit_lineage(f"{command}.{trained.config.name}") as told:
        dataset = read_json(trained.run_dir / RUN_CARD_FILE)["dataset"]["path"]
        read = (describe_run(trained.run_dir), dataset)
        told.inputs = [LineageDataset.version_at(place) for place in read]
        yield told


def _describe_written(target: Path) -> LineageDataset:
    model, _, number = describe(target).rpartition("/")
    files = [file for file in target.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    return LineageDataset.at(model, version=number, size_bytes=size, files=len(files))


def print_delta(target: Path) -> None:
    about = read_json(target / DELTA_FILE)
    text = "{}: {changed:,} rows new or changed, {removed:,} keys removed; {rows:,} rows now"
    for name, table in sorted(about["tables"].items()):
        print(text.format(name, **table))
    sizes = (_sum_megabytes(part) for part in (about, about["version"]))
    print("{:.1f} MB; a full version has {:.1f} MB".format(*sizes))
    print(f"delta of {about['name']} since run {about['since']['run']}: {describe(target)}")


def _sum_megabytes(card: Mapping[str, Any]) -> float:
    return float(sum(file["bytes"] for file in card["files"].values()) / 1e6)


def print_summary(target: Path) -> None:
    """Prints what was written, and where."""
    card = read_card(target)
    what = _describe_ranker(card) if "outputs" in card else _describe_towers(card["embeddings"])
    print(f"{card['model']}{what}, {_sum_megabytes(card):.1f} MB")
    print(f"signatures: {', '.join(card['signatures'])}")
    if reason := card.get("no_item_scores"):
        print(f"no signature {SCORE_ITEMS}: {reason}")
    users = card.get("embeddings", {}).get("users")
    if users and users["users_outside_vocabulary"]:
        print(f"left out: {users['users_outside_vocabulary']:,} users outside the vocabulary")
    print(f"version {card['version']} of {card['name']}: {describe(target)}")


def _describe_ranker(card: Mapping[str, Any]) -> str:
    count = len(card["signatures"][DEFAULT_SIGNATURE]["inputs"])
    outputs = ", ".join(output["name"] for output in card["outputs"])
    return f", {count} raw inputs, outputs: {outputs}"


def _describe_towers(embeddings: Mapping[str, Any]) -> str:
    found = {kind: embeddings[kind] for kind in ("items", "users")}
    counts = [f"{about['rows']:,} {kind}" for kind, about in found.items() if about is not None]
    several = f", {n} vectors of a user" if (n := embeddings.get("interests")) else ""
    return f", {embeddings['dim']} dimensions{several}: {', '.join(counts) or 'towers alone'}"


def print_new_index(target: Path, is_new: bool = True) -> None:
    """Prints the index of a new version, or that it has none where the version before has one."""
    if numbers := list_indexes(target):
        if is_new:
            print_index(target / INDEX_DIR / str(numbers[-1]))
        return
    model = find_place(describe(target).rpartition("/")[0])
    before = max((n for n in list_versions(model) if n < int(target.name)), default=None)
    if before is not None and list_indexes(model / str(before)):
        print(
            f"no index, as version {before} has one: every item is compared until there is one: "
            f"sluice index --export {describe(target)}"
        )


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))
