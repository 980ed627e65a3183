"""The page about a sweep: its trials, the best first, each with a link to its report."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from conf.dataset import write_text_atomic
from conf.run import REPORT_FILE
from jobs.reporting.blocks import Cell, Column, Section, build_table, missing
from jobs.reporting.metric_names import metric_title
from jobs.reporting.numbers import format_count, format_metric, format_seconds, format_value
from jobs.reporting.page import PageHead, Tile, render_html
from jobs.reporting.verdict import Verdict

if TYPE_CHECKING:
    from training.sweep.runner import SweepResult, TrialRecord


def write_sweep_page(result: SweepResult) -> Path:
    """Writes `report.html` beside the trials; an earlier one is replaced whole or not at all."""
    file = result.directory / REPORT_FILE
    write_text_atomic(file, render_sweep(result))
    return file


def render_sweep(result: SweepResult) -> str:
    """Returns the page as HTML; links go to the reports that there are by now."""
    head = PageHead(
        name="Sweep",
        subtitle=f"sweep {result.directory.name}",
        verdict=_verdict(result),
        tiles=_tiles(result),
    )
    return render_html(head, (build_trials(result),))


def build_trials(result: SweepResult) -> Section:
    """The table of trials: values, metric, time, and how those ended that are not complete."""
    title = metric_title(result.metric)
    lead = f"Best {title} first; a trial's number leads to its report."
    if not result.trials:
        return Section("trials", "Trials", lead, (missing("No trial has begun."),))
    keys = list(dict.fromkeys(key for trial in result.trials for key in trial.values))
    columns = (
        Column("Trial"),
        *(Column(key) for key in keys),
        Column(title),
        Column("Time"),
        Column("State", numeric=False),
    )
    sign = 1 if result.is_minimised else -1
    ordered = sorted(
        result.trials,
        key=lambda trial: (math.inf if trial.value is None else sign * trial.value, trial.number),
    )
    rows = [_row(trial, keys, result) for trial in ordered]
    caption = f"{len(rows)} trials by {title}."
    return Section("trials", "Trials", lead, (build_table(caption, columns, rows),))


def _row(trial: TrialRecord, keys: list[str], result: SweepResult) -> list[Cell | str]:
    is_best = result.best is not None and result.best.number == trial.number
    state = trial.state if trial.run is not None else f"{trial.state}: {trial.detail}".strip(": ")
    return [
        Cell(str(trial.number), best=is_best, href=_find_report(trial, result.directory)),
        *(format_value(trial.values.get(key)) for key in keys),
        Cell("" if trial.value is None else format_metric(trial.value), best=is_best),
        "" if trial.seconds is None else format_seconds(trial.seconds),
        state,
    ]


def _find_report(trial: TrialRecord, directory: Path) -> str | None:
    """Returns the URL of a trial's report, relative to the sweep, so that it may be moved."""
    if trial.run is None or not (trial.run / REPORT_FILE).exists():
        return None
    report = (trial.run / REPORT_FILE).resolve()
    return quote(report.relative_to(directory.resolve()).as_posix())


def _verdict(result: SweepResult) -> Verdict:
    complete = [trial for trial in result.trials if trial.value is not None]
    if result.best is None or result.best.value is None:
        return Verdict("unknown", "No trial is complete.", "")
    values = ", ".join(f"{key} {format_value(v)}" for key, v in result.best.values.items())
    best = f"{metric_title(result.metric)} {format_metric(result.best.value)}"
    sentence = f"Trial {result.best.number} is the best of {len(complete)}: {best}."
    return Verdict("ahead", sentence, f"With {values}.")


def _tiles(result: SweepResult) -> tuple[Tile, ...]:
    complete = sum(trial.value is not None for trial in result.trials)
    seconds = sum(trial.seconds or 0.0 for trial in result.trials)
    return (
        Tile(format_count(len(result.trials)), "trials"),
        Tile(format_count(complete), "complete"),
        Tile(format_seconds(seconds), "of training"),
    )
