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
    from training.export.stored_models import describe, find_place

    setup_logging(log_format)
    indexing = _plan_index(index, items, delta_since)
    base = None if to is None else find_place(to)
    options = ExportOptions(base, name, keep, k, tables, once, indexing)
    if delta_since is not None:
        delta = export_delta(run, delta_since, checkpoint=checkpoint, options=options)
        print_delta(delta, log_format)
        return 0
    target = export(run, checkpoint=checkpoint, options=options)
    if log_format is LogFormat.JSON:
        print(json.dumps({"export": describe(target)}))
    else:
        print_summary(target)
        if index and (numbers := list_indexes(target)):
            print_index(target / INDEX_DIR / str(numbers[-1]))
        if not list_indexes(target) and (before := _find_indexed(target)) is not None:
            print(
                f"no index, as version {before} has one: every item is compared until there is "
                f"one: sluice index --export {describe(target)}"
            )
    return 0


def _find_indexed(target: Path) -> int | None:
    """Returns the version before one where it has an index; None: it has none, or is not there."""
    from training.export.stored_models import describe, find_place

    model = find_place(describe(target).rpartition("/")[0])
    earlier = [number for number in list_versions(model) if number < int(target.name)]
    newest = max(earlier, default=None)
    has_index = newest is not None and bool(list_indexes(model / str(newest)))
    return newest if has_index else None


def _plan_index(index: bool, items: Path | None, delta_since: str | None) -> IndexOptions | None:
    if items is not None and not index:
        raise ConfigError("--items are columns of the index", fix="give --index too")
    if index and delta_since is not None:
        raise ConfigError(
            "a delta has no index of its own",
            fix="leave --index out: `sluice models apply` gives the new version an index like that "
            "of the version before",
        )
    return IndexOptions(items_file=items) if index else None


def export(
    run_dir: str | Path,
    *,
    checkpoint: str = CheckpointChoice.BEST,
    options: ExportOptions | None = None,
) -> Path:
    """Writes the next version of a run's model; earlier ones stay.

    Args:
        run_dir: A run's directory, or a series' (its last finished run).
        checkpoint: `best` or `last`.
        options: Where it goes.

    Returns:
        Directory of the version.

    Raises:
        UpstreamNotReadyError: There is no such run or checkpoint, or it is being exported now.
        InputDataError: The run's data or checkpoint is damaged.
    """
    trained = restore_run(run_dir, checkpoint)
    from training.export.saved_model import write_export

    with _lineage("export", trained) as told, timed(trained.run_dir, "export"):
        target = write_export(trained, options)
        told.outputs = [_describe_written(target)]
        return target


def export_delta(
    run_dir: str | Path, since: str, *, checkpoint: str, options: ExportOptions
) -> Path:
    """Writes what has changed of a run's model since an earlier checkpoint.

    Args:
        run_dir: A run's directory, or a series' (its last finished run).
        since: A run, a series, a checkpoint, or `start`.
        checkpoint: `best` or `last`, of the run.
        options: Where it goes.

    Returns:
        Directory of the delta.

    Raises:
        ConfigError: Tables or an index were asked for, or there is no delta between the two.
        UpstreamNotReadyError: There is no such run or checkpoint.
        InputDataError: A run's data or checkpoint is damaged.
    """
    if options.tables or options.index is not None:
        raise ConfigError(
            "a delta holds the changed rows of every table, and no index",
            received=f"--delta-since with {'--tables' if options.tables else '--index'}",
            fix="leave it out; `sluice models apply` makes both of those of the version before",
        )
    trained = restore_run(run_dir, checkpoint)
    from training.export.delta import find_base, write_delta

    with _lineage("delta", trained) as told, timed(trained.run_dir, "delta"):
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
    from training.export.stored_models import describe

    model, _, number = describe(target).rpartition("/")
    files = [file for file in target.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    return LineageDataset.at(model, version=number, size_bytes=size, files=len(files))


def print_delta(target: Path, log_format: LogFormat) -> None:
    """Prints what a delta holds, and where it is."""
    from training.export.stored_models import describe

    if log_format is LogFormat.JSON:
        print(json.dumps({"delta": describe(target)}))
        return
    about = read_json(target / DELTA_FILE)
    for name, table in sorted(about["tables"].items()):
        print(
            f"{name}: {table['changed']:,} rows new or changed, {table['removed']:,} keys "
            f"removed; {table['rows']:,} rows now"
        )
    sizes = (sum(file["bytes"] for file in part["files"].values())
             for part in (about, about["version"]))  # fmt: skip
    print("{:.1f} MB; a full version has {:.1f} MB".format(*(size / 1e6 for size in sizes)))
    print(f"delta of {about['name']} since run {about['since']['run']}: {describe(target)}")


def print_summary(target: Path) -> None:
    """Prints what was written, and where."""
    from rich.console import Console

    from training.export.stored_models import describe

    card = read_card(target)
    total_bytes = sum(info["bytes"] for info in card["files"].values())
    console = Console(highlight=False)
    what = _describe_ranker(card) if "outputs" in card else _describe_towers(card["embeddings"])
    console.print(f"{card['model']}{what}, {total_bytes / 1e6:.1f} MB", soft_wrap=True)
    console.print(f"signatures: {', '.join(card['signatures'])}", soft_wrap=True)
    if reason := card.get("no_item_scores"):
        console.print(f"no signature {SCORE_ITEMS}: {reason}", soft_wrap=True)
    users = card.get("embeddings", {}).get("users")
    if users and users["users_outside_vocabulary"]:
        console.print(
            f"left out: {users['users_outside_vocabulary']:,} users outside the vocabulary"
        )
    console.print(
        f"version {card['version']} of {card['name']}: {describe(target)}", soft_wrap=True
    )


def _describe_ranker(card: Mapping[str, Any]) -> str:
    inputs = card["signatures"][DEFAULT_SIGNATURE]["inputs"]
    outputs = ", ".join(output["name"] for output in card["outputs"])
    return f", {len(inputs)} raw inputs, outputs: {outputs}"


def _describe_towers(embeddings: Mapping[str, Any]) -> str:
    counts = [f"{embeddings[kind]['rows']:,} {kind}" for kind in ("items", "users")
              if embeddings[kind] is not None]  # fmt: skip
    several = f", {n} vectors of a user" if (n := embeddings.get("interests")) else ""
    return f", {embeddings['dim']} dimensions{several}: {', '.join(counts) or 'towers alone'}"


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))
