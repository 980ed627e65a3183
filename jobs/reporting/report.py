"""`sluice report`: writes the HTML report of a run."""

from __future__ import annotations

import logging
from pathlib import Path

import typer

from conf.artefacts.run import REPORT_FILE
from conf.storage.atomic_output import write_text_atomic
from jobs.reporting.page import render_page
from jobs.reporting.run_data import read_run
from jobs.support.trained_run import RunOption

_log = logging.getLogger("sluice.jobs.report")

app = typer.Typer(add_completion=False, help="Write the HTML report of a run.")


def write_report(run_dir: str | Path) -> Path:
    """Writes `report.html` into a run: one self-contained file.

    Parts of the run that are missing are named in the report; an earlier report is replaced
    whole or not at all.

    Args:
        run_dir: A run's directory, or a series' (its last finished run).

    Returns:
        Path of the report.

    Raises:
        UpstreamNotReadyError: There is no run.
        InputDataError: The run card is damaged.
    """
    from training.checkpoint.stored_runs import bring_back, find_run

    run = find_run(run_dir)
    target = run / REPORT_FILE
    write_text_atomic(target, render_page(read_run(run)))
    bring_back(run)
    return target


def try_report(run: Path) -> Path | None:
    """As `write_report`, of a run that is trained: a failure is logged and no more."""
    try:
        return write_report(run)
    except Exception as error:
        _log.warning("the report of %s could not be written: %r", run, error)
        return None


@app.command()
def report(run: RunOption) -> None:
    """Write the HTML report of a run."""
    typer.echo(write_report(run))


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))
