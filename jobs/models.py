"""`sluice models`: list the versions of an exported model, roll back, apply a delta."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from conf.artefacts.dataset import resolve_version
from conf.artefacts.delta import find_delta
from conf.artefacts.export import (
    INDEX_DIR,
    find_published,
    list_indexes,
    read_card,
    read_versions,
    roll_back,
)
from conf.errors import ConfigError, UpstreamNotReadyError
from conf.storage.locations import find_path
from jobs.export import print_new_index
from jobs.support.terminal import LogFormat, LogFormatOption, quiet_tensorflow, setup_logging
from training.export.stored_models import describe, find_place

app = typer.Typer(add_completion=False, no_args_is_help=True)

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Its directory, DIR/MODEL of `sluice export`.")
]


@app.command("list")
def list_command(model: Model, log_format: LogFormatOption = LogFormat.TEXT) -> int:
    """List the versions, oldest first, withdrawn ones too."""
    versions = read_versions(find_place(model))
    newest = max((v.number for v in versions if not v.is_withdrawn), default=None)
    for version in versions:
        about = {
            "version": version.number,
            "run": version.run,
            "dataset_version": version.dataset_version,
            "withdrawn": version.is_withdrawn,
            "published": version.number == newest,
        }
        mark = "-" if version.is_withdrawn else "*" if version.number == newest else " "
        text = "{version}  {run}  on {dataset_version}".format(**about)
        _tell(log_format, about, f"{mark} {text}")
    if log_format is LogFormat.TEXT:
        print("* published, - withdrawn")
    return 0


def _tell(log_format: LogFormat, about: dict[str, Any], text: str) -> None:
    print(json.dumps(about) if log_format is LogFormat.JSON else text)


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
    setup_logging(log_format)
    version = find_published(find_place(model), None if before is None else _read_version(before))
    _tell(log_format, {"version": version.number, "run": version.run}, version.run)
    return 0


def _read_version(before: str) -> str:
    """Returns the id of the version that an id, a version's or a dataset's directory stands for."""
    name = Path(before).name
    if name[:8].isdigit():  # Ids begin with their date.
        return name
    try:
        return resolve_version(find_path(before)).name
    except UpstreamNotReadyError as error:
        allowed = "the id of a version, its directory, or that of a dataset"
        raise ConfigError("--before is none", received=before, allowed=allowed) from error


@app.command("rollback")
def rollback_command(
    model: Model,
    to: Annotated[
        int | None, typer.Option("--to", metavar="N", help="Version; the one before if none.")
    ] = None,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Withdraw the newest versions: servers go back to an earlier one. Refuses a damaged one."""
    setup_logging(log_format)
    place = find_place(model)
    withdrawn = roll_back(place, to)
    number = find_published(place).number
    text = f"published: {number} (withdrawn: {', '.join(map(str, withdrawn)) or 'none'})"
    _tell(log_format, {"published": number, "withdrawn": withdrawn}, text)
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
    folder = find_delta(find_place(delta))  # A wrong path is refused before TensorFlow starts.
    with quiet_tensorflow():
        from training.export.delta import apply_delta

    target = apply_delta(folder, find_place(model), keep)
    card, place = read_card(target), describe(target)
    indexes = [f"{place}/{INDEX_DIR}/{number}" for number in list_indexes(target)]
    if log_format is LogFormat.TEXT:
        print_new_index(target)
    about = {"export": place, "run": card["run_path"], "index": indexes[-1] if indexes else None}
    _tell(log_format, about, f"version {target.name} of {card['name']}, run {card['run']}: {place}")
    return 0


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))
