"""`sluice build`: logs and dictionaries to a published TFRecord dataset version, or to rows."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from conf.dates import DateRange
from conf.errors import ConfigError
from conf.etl.build import BuildConfig
from conf.load import load_config
from conf.local_paths import local_path
from conf.manifest import Manifest
from jobs.reporting.build_summary import print_counts, print_figures
from jobs.support.build_plan import check_build, list_lines, plan
from jobs.support.lineage import LineageRun
from jobs.support.row_output import print_rows
from jobs.support.terminal import (
    CONFIG_HELP,
    DryRun,
    LogFormat,
    LogFormatOption,
    Overrides,
    list_overrides,
    setup_logging,
)

if TYPE_CHECKING:
    from etl.quality.figures import Figure
    from etl.versions.run_fingerprint import RunRequest

app = typer.Typer(add_completion=False)


@app.command()
def main(
    config: Annotated[str, typer.Argument(help=CONFIG_HELP)],
    data: Annotated[
        str | None, typer.Option(help="Folder that the sources' paths start from.")
    ] = None,
    date: Annotated[
        datetime | None, typer.Option(formats=["%Y-%m-%d"], help="Day to build (UTC).")
    ] = None,
    date_to: Annotated[
        datetime | None,
        typer.Option(formats=["%Y-%m-%d"], help="Last day, to build several at once."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Build although nothing has changed.")
    ] = False,
    refit: Annotated[
        bool,
        typer.Option(
            "--refit/--no-refit",
            help="Fit numbers anew; a run with --date keeps those of the version before.",
        ),
    ] = False,
    rows_to: Annotated[
        Path | None,
        typer.Option(
            "--rows-to",
            metavar="NAME.parquet",
            parser=local_path,
            help="Write the days' rows for predict, score and the server instead; without labels.",
        ),
    ] = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    full: Annotated[
        bool, typer.Option("--full", help="With --dry-run: all of the plan, as JSON.")
    ] = False,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Build a dataset version: ETL, encoders, TFRecord shards, manifest, publish."""
    from etl.versions.run_fingerprint import RunRequest

    setup_logging(log_format)
    settings = list_overrides(overrides, {"data_dir": data})
    resolved = load_config(BuildConfig, "etl", config, settings)
    request = RunRequest(parse_dates(date, date_to), force, refit)
    if rows_to is not None:
        given = {"--force": force, "--refit": refit, "--full": full}
        _refuse_options_of_versions(given)
        print_rows(resolved, request.dates, local_path(rows_to), log_format, dry_run=dry_run)
        return 0
    if dry_run:
        planned = plan(resolved, request)
        if full or log_format is LogFormat.JSON:
            print(json.dumps(planned, indent=None if log_format is LogFormat.JSON else 1))
        else:
            print("\n".join(list_lines(planned)))
        return 0
    built = build(resolved, request)
    if log_format is LogFormat.JSON:
        print(json.dumps(built.to_json()))
    else:
        _print_summary(built)
    return 0


def _refuse_options_of_versions(given: Mapping[str, bool]) -> None:
    wrong = [option for option, is_given in given.items() if is_given]
    if wrong:
        raise ConfigError(
            "rows to score are no dataset version",
            received=f"--rows-to with {' '.join(wrong)}",
            fix="leave it out: rows are written anew each time, and nothing is fitted",
        )


def parse_dates(date: datetime | None, date_to: datetime | None) -> DateRange | None:
    """Returns the days of a run: one, a range, or None.

    Raises:
        ConfigError: A last day without a first one, or before it.
    """
    if date is None:
        if date_to is not None:
            raise ConfigError("--date-to needs --date", received=f"--date-to {date_to.date()}")
        return None
    return DateRange(date.date(), (date_to or date).date())


@dataclass(frozen=True)
class Built:
    """What a build leaves.

    Attributes:
        version: The version's directory or URI.
        manifest: Its manifest.
        is_new: Whether it is new.
        figures: Shares and sizes beside those of the version before.
    """

    version: str
    manifest: Manifest
    is_new: bool
    figures: tuple[Figure, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns what a scheduler reads."""
        warned = [rule for rule in self.manifest.contract if not rule["passed"]]
        return {
            "version": self.version,
            "kept": dict(self.manifest.counts.kept),
            "is_new": self.is_new,
            "warnings": [{key: rule[key] for key in _OF_WARNING} for rule in warned],
        }


_SHORT_BUILD_BYTES = 8 << 20
"""Inputs, compressed ones too, up to which Java compiles lightly: docs/adr/0010."""
_OF_WARNING = ("rule", "received", "allowed")


def build(config: BuildConfig, request: RunRequest) -> Built:
    """Runs the build in a Spark session of its own, or the submitter's.

    Args:
        config: What to build.
        request: The days to build, and what the run is asked for beside.

    Raises:
        SluiceError: The build was refused or failed for a known reason.
    """
    with LineageRun(f"build.{config.name}") as told:
        built = _build(config, request, told)
        columns = {feature.name: feature.dtype for feature in built.manifest.schema.features}
        told.outputs = {built.version: columns}
        return built


def _build(config: BuildConfig, request: RunRequest, told: LineageRun) -> Built:
    from conf.publication.working_copy import describe_place
    from etl.build import build_dataset
    from etl.versions.publish import find_dataset, hold_lock, read_current
    from jobs.support.spark_session import (
        build_session,
        check_executors,
        check_work_dir,
        is_on_this_machine,
        warm_workers,
    )

    told.inputs = _list_read(config)
    # What is wrong with the config or the paths is said before a JVM is started.
    _, inputs = check_build(config, request)
    dataset = find_dataset(config.output.root, config.name)
    # Another build, or a place that cannot be reached, is said before a session is started.
    with hold_lock(dataset):
        read_current(dataset)
    input_bytes = sum(file.bytes for file in inputs)
    has_files_alone = all(source.path is not None for source in config.used_sources.values())
    is_short = has_files_alone and input_bytes <= _SHORT_BUILD_BYTES
    name = f"sluice build {config.name}"
    session = build_session(config.spark, name, is_short=is_short)
    try:
        check_executors(session)
        if is_short and is_on_this_machine(str(session.sparkContext.master)):
            warm_workers(session)
        check_work_dir(session, config.output.root)
        result = build_dataset(session, config, functools.partial(_peak_memory, session), request)
    finally:
        # After a crash of the JVM this fails too, and would hide what happened.
        with contextlib.suppress(Exception):
            session.stop()
    place = describe_place(result.version)
    return Built(place, result.manifest, result.is_new, result.figures)


def _list_read(config: BuildConfig) -> dict[str, Mapping[str, str]]:
    """The sources that a build reads, and their columns."""
    read: dict[str, Mapping[str, str]] = {}
    for name, source in config.used_sources.items():
        place = f"catalog:{source.table or name}"
        if source.path is not None:
            place = _find_root(config.data_dir, source.path)
        elif source.jdbc is not None:
            url = urlsplit(source.jdbc["url"].removeprefix("jdbc:"))
            place = f"{url.scheme}://{url.netloc}/{url.path.strip('/')}.{source.jdbc['dbtable']}"
        read[place] = source.column_types
    return read


def _find_root(data_dir: str, path: str) -> str:
    """The part of a source's path that is the same on each day: without patterns and dates."""
    parts = Path(path).parts
    fixed = itertools.takewhile(lambda part: not set("*?[{") & set(part), parts)
    return str(Path(local_path(data_dir), local_path(str(Path(*fixed)))))


def _peak_memory(session: object) -> dict[str, int]:
    """Peak resident bytes of the driver's JVM and of this process, where the kernel tells."""
    jvm_pid = session._jvm.java.lang.ProcessHandle.current().pid()  # type: ignore[attr-defined]
    peaks = {"driver_jvm": _peak_of(jvm_pid), "driver_python": _peak_of(os.getpid())}
    return {name: peak for name, peak in peaks.items() if peak is not None}


def _peak_of(pid: int) -> int | None:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return None
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(match[1]) * 1024 if match else None


def _print_summary(built: Built) -> None:
    from rich.console import Console

    console = Console()
    print_counts(built.manifest, console)
    print_figures(built.figures, console)
    if not built.is_new:
        console.print("nothing has changed since this version was built; --force builds anyway")
    console.print(f"version: {built.version}", soft_wrap=True)


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))
