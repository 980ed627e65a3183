"""`sluice models`: list the versions of an exported model, roll back, apply a delta."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from conf.artefacts.dataset import resolve_version
from conf.artefacts.delta import find_delta
from conf.artefacts.export import INDEX_DIR, find_published, list_indexes, read_card, read_versions
from conf.errors import ConfigError, UpstreamNotReadyError
from conf.storage.locations import find_path
from jobs.index import print_index
from jobs.support.terminal import LogFormat, LogFormatOption, quiet_tensorflow, setup_logging

app = typer.Typer(add_completion=False, no_args_is_help=True)

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Its directory, DIR/MODEL of `sluice export`.")
]


@app.command("list")
def list_command(model: Model, log_format: LogFormatOption = LogFormat.TEXT) -> int:
    """List the versions, oldest first, withdrawn ones too."""
    from training.export.stored_models import find_place

    versions = read_versions(find_place(model))
    newest = max((v.number for v in versions if not v.is_withdrawn), default=None)
    for version in versions:
        if log_format is LogFormat.JSON:
            card = {
                "version": version.number,
                "run": version.run,
                "dataset_version": version.dataset_version,
                "withdrawn": version.is_withdrawn,
                "published": version.number == newest,
            }
            print(json.dumps(card))
            continue
        mark = "-" if version.is_withdrawn else "*" if version.number == newest else " "
        print(f"{mark} {version.number}  {version.run}  on {version.dataset_version}")
    if log_format is LogFormat.TEXT:
        print("* published, - withdrawn")
    return 0


@app.command("published")
def published_command(
    model: Model,
    before: Annotated[
        str | None,
        typer.Option(
            metavar="VERSION",
            help="Dataset version, its id or directory, or a dataset (its current one): models of "
            "earlier ones alone count.",
        ),
    ] = None,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Print the run behind the newest version; exit code 4 where there is none."""
    from training.export.stored_models import find_place

    setup_logging(log_format)
    version = find_published(find_place(model), None if before is None else _read_version(before))
    if log_format is LogFormat.JSON:
        print(json.dumps({"version": version.number, "run": version.run}))
    else:
        print(version.run)
    return 0


def _read_version(before: str) -> str:
    """Returns the id of the version that an id, a version's or a dataset's directory stands for."""
    name = Path(before).name
    if name[:8].isdigit():  # Ids begin with their date.
        return name
    try:
        return resolve_version(find_path(before)).name
    except UpstreamNotReadyError as error:
        raise ConfigError(
            "--before is no dataset version",
            received=before,
            allowed="the id of a version, its directory, or that of a dataset",
            fix="`sluice versions list DATASET` shows the ids",
        ) from error


@app.command("rollback")
def rollback_command(
    model: Model,
    to: Annotated[
        int | None, typer.Option("--to", metavar="N", help="Version; the one before if none.")
    ] = None,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Withdraw the newest versions: servers go back to an earlier one. Refuses a damaged one."""
    from conf.artefacts.export import roll_back
    from training.export.stored_models import find_place

    setup_logging(log_format)
    place = find_place(model)
    withdrawn = roll_back(place, to)
    version = find_published(place)
    if log_format is LogFormat.JSON:
        print(json.dumps({"published": version.number, "withdrawn": withdrawn}))
    else:
        told = ", ".join(map(str, withdrawn)) or "none"
        print(f"published: {version.number} (withdrawn: {told})")
    return 0


@app.command("apply")
def apply_command(
    model: Model,
    delta: Annotated[
        str,
        typer.Option(
            help="Of `sluice export --delta-since`; of a directory of deltas the newest one."
        ),
    ],
    keep: Annotated[
        int | None, typer.Option(min=1, help="Versions kept, the newest ones; default: all.")
    ] = None,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Write the next version: the newest one with the changes of a delta, its index built anew."""
    setup_logging(log_format)
    from training.export.stored_models import describe, find_place

    folder = find_delta(find_place(delta))  # A wrong path is refused before TensorFlow starts.
    with quiet_tensorflow():
        from training.export.delta import apply_delta

    target = apply_delta(folder, find_place(model), keep)
    card, numbers = read_card(target), list_indexes(target)
    index = target / INDEX_DIR / str(numbers[-1]) if numbers else None
    if log_format is LogFormat.JSON:
        told = {"export": describe(target), "run": card["run_path"]}
        print(json.dumps({**told, "index": None if index is None else describe(index)}))
    else:
        if index is not None:
            print_index(index)
        print(f"version {card['version']} of {card['name']}, run {card['run']}: {describe(target)}")
    return 0


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))
