"""What `sluice build --rows-to` does: the rows of some days for predict, score and the server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from conf.dates import DateRange
from conf.etl.build import BuildConfig
from conf.local_paths import absolute_path
from jobs.support.build_plan import find_inputs
from jobs.support.terminal import LogFormat


def print_rows(
    config: BuildConfig,
    dates: DateRange | None,
    target: Path,
    log_format: LogFormat,
    *,
    dry_run: bool,
) -> None:
    """Writes rows, or with `dry_run` nothing, and prints what they are of.

    Raises:
        SluiceError: The rows were refused or failed for a known reason.
    """
    from etl.rows_to_score import check_rows_to_score, leave_out_labels

    target = absolute_path(target)
    columns = check_rows_to_score(config, dates, target)
    # What is wrong with the paths is said before a JVM is started.
    inputs = find_inputs(leave_out_labels(config), dates)
    as_json = log_format is LogFormat.JSON
    if dry_run:
        planned = {"rows": str(target), "columns": list(columns),
                   "inputs": [file.path for file in inputs]}  # fmt: skip
        print(json.dumps(planned, indent=None if as_json else 1))
        return
    written = write_rows(config, dates, target)
    if as_json:
        told = {"rows": str(target), "written": written["rows"], "dropped": written["dropped"]}
        print(json.dumps(told))
        return
    _print_counts(target, written)


def write_rows(config: BuildConfig, dates: DateRange | None, target: Path) -> dict[str, Any]:
    """Writes rows in a Spark session of its own, or the submitter's.

    Raises:
        SluiceError: The rows were refused or failed for a known reason.
    """
    from etl.rows_to_score import write_rows_to_score
    from etl.tfrecord.spark.failures import known_failures
    from jobs.support.spark_session import build_session, check_executors

    session = build_session(config.spark, f"sluice build {config.name}: rows")
    try:
        with known_failures():
            check_executors(session)
            return write_rows_to_score(session, config, dates, target)
    finally:
        # After a crash of the JVM this fails too, and would hide what happened.
        with contextlib.suppress(Exception):
            session.stop()


def _print_counts(target: Path, written: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="rows to score", title_justify="left")
    table.add_column("rows")
    table.add_column("count", justify="right")
    for what, count in _list_counts(written):
        table.add_row(what, f"{count:,}")
    console = Console()
    console.print(table)
    console.print(f"rows: {target}", soft_wrap=True)


def _list_counts(written: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for source, rows in written["read"].items():
        yield f"read from {source}", rows
        for reason, bad in written["bad"].get(source, {}).items():
            yield f"  bad: {reason}", bad
    for reason, rows in written["dropped"].items():
        yield f"dropped: {reason}", rows
    yield "written", written["rows"]
