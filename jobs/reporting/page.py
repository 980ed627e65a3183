"""Pages about a run and about a sweep: one self-contained HTML file, no script, nothing fetched."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from conf.errors import SluiceError
from conf.paths import write_text_atomic
from conf.run import REPORT_FILE
from jobs.reporting.blocks import Section, TableCell, TableColumn, build_table, missing
from jobs.reporting.dataset_sections import build_features, build_flow, build_popularity
from jobs.reporting.formatting import (
    MISSING,
    format_bytes,
    format_count,
    format_metric,
    format_seconds,
    format_value,
    metric_title,
)
from jobs.reporting.learning import best_epoch, build_learning, build_steps
from jobs.reporting.plots import COLOURS
from jobs.reporting.provenance import build_provenance, build_shards, build_timings
from jobs.reporting.run_data import RunData, as_mapping
from jobs.reporting.verdict import Verdict, build_lists, build_quality, build_verdict

if TYPE_CHECKING:
    from training.sweep import SweepResult, TrialRecord


SECTIONS = (
    build_quality,
    build_learning,
    build_steps,
    build_lists,
    build_flow,
    build_features,
    build_popularity,
    build_shards,
    build_timings,
    build_provenance,
)
# What code that expects another type raises.
WRONG_TYPES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class Tile:
    """A figure that stands at the top of the page."""

    value: str
    label: str


@dataclass(frozen=True)
class PageHead:
    """What stands above the sections.

    Attributes:
        name: Title.
        subtitle: What the page is about.
        verdict: The sentence that sums it up.
        tiles: Figures of size.
        problem: What has gone wrong, or None.
    """

    name: str
    subtitle: str
    verdict: Verdict
    tiles: tuple[Tile, ...] = ()
    problem: str | None = None


def render_page(data: RunData) -> str:
    """Returns the report as HTML; the same run always gives the same text."""
    head = PageHead(
        name=run_title(data),
        subtitle=_run_subtitle(data),
        verdict=_build_or_else(lambda: build_verdict(data), _unknown_verdict),
        tiles=_build_or_else(lambda: build_run_tiles(data), lambda _: ()),
        problem=_run_problem(data),
    )
    return render_html(head, tuple(build_section(build, data) for build in SECTIONS))


def render_html(head: PageHead, sections: Sequence[Section]) -> str:
    """Returns a page of sections as HTML."""
    environment = Environment(
        loader=PackageLoader("jobs.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("report.html.j2")
    return template.render(**vars(head), sections=sections, colours=COLOURS)


def build_section(build: Callable[[T], Section], data: T) -> Section:
    """Returns a section, or one that says why it cannot be drawn.

    JSON that is readable may still hold text where a number belongs; one such value must not
    take the rest of the report away.
    """
    name = build.__name__.removeprefix("build_")

    def unreadable(error: Exception) -> Section:
        note = missing(f"What the run recorded here cannot be read: {error!r}")
        return Section(name, name.capitalize(), "", (note,))

    return _build_or_else(lambda: build(data), unreadable)


def _build_or_else(build: Callable[[], U], otherwise: Callable[[Exception], U]) -> U:
    try:
        return build()
    except (SluiceError, *WRONG_TYPES) as error:
        return otherwise(error)


def _unknown_verdict(error: Exception) -> Verdict:
    return Verdict("unknown", "The evaluation cannot be read.", repr(error))


def run_title(data: RunData) -> str:
    """Returns the name of the run's series, or of its directory where the card has none."""
    return str(data.config.get("name") or data.run.name)


def build_run_tiles(data: RunData) -> tuple[Tile, ...]:
    """Returns the figures of size: data, model, training."""
    tiles = []
    if data.manifest is not None:
        train = next((s for s in data.manifest.splits if s.name == "train"), None)
        if train is not None:
            tiles.append(Tile(format_count(train.rows), "training records"))
        total = sum(split.bytes for split in data.manifest.splits)
        tiles.append(Tile(format_bytes(total), "of TFRecord shards"))
    if data.catalogue is not None:
        tiles.append(Tile(format_count(len(data.catalogue.counts)), "items"))
    parameters = as_mapping(data.card.get("model")).get("parameters")
    if isinstance(parameters, int):
        tiles.append(Tile(format_count(parameters), "parameters"))
    if data.epochs:
        best = best_epoch(data)
        seconds = [as_mapping(entry).get("seconds") for entry in data.epochs]
        known = [value for value in seconds if isinstance(value, int | float)]
        kept = f", best {best}" if best is not None else ""
        label = f"of training, {len(data.epochs)} epochs{kept}"
        tiles.append(Tile(format_seconds(sum(known)) if known else MISSING, label))
    return tuple(tiles)


def _run_problem(data: RunData) -> str | None:
    """Says that a run has not ended well, or has not ended."""
    status = data.card.get("status")
    if status in (None, "trained"):
        return None
    error = data.card.get("error")
    return f"The run's status is {status!r}{f': {error}' if error else '.'}"


def _run_subtitle(data: RunData) -> str:
    parts = [data.model_name if data.config else "", f"run {data.run.name}"]
    if data.manifest is not None:
        parts.append(f"dataset {data.manifest.dataset_name} {data.manifest.dataset_version}")
    return " · ".join(part for part in parts if part)


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
        verdict=_sweep_verdict(result),
        tiles=_sweep_tiles(result),
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
        TableColumn("Trial"),
        *(TableColumn(key) for key in keys),
        TableColumn(title),
        TableColumn("Time"),
        TableColumn("State", numeric=False),
    )
    sign = 1 if result.is_minimised else -1
    ordered = sorted(
        result.trials,
        key=lambda trial: (math.inf if trial.value is None else sign * trial.value, trial.number),
    )
    rows = [_trial_row(trial, keys, result) for trial in ordered]
    caption = f"{len(rows)} trials by {title}."
    return Section("trials", "Trials", lead, (build_table(caption, columns, rows),))


def _trial_row(trial: TrialRecord, keys: list[str], result: SweepResult) -> list[TableCell | str]:
    is_best = result.best is not None and result.best.number == trial.number
    state = trial.state if trial.run is not None else f"{trial.state}: {trial.detail}".strip(": ")
    return [
        TableCell(str(trial.number), best=is_best, href=_find_report(trial, result.directory)),
        *(format_value(trial.values.get(key)) for key in keys),
        TableCell("" if trial.value is None else format_metric(trial.value), best=is_best),
        "" if trial.seconds is None else format_seconds(trial.seconds),
        state,
    ]


def _find_report(trial: TrialRecord, directory: Path) -> str | None:
    """Returns the URL of a trial's report, relative to the sweep, so that it may be moved."""
    if trial.run is None or not (trial.run / REPORT_FILE).exists():
        return None
    report = (trial.run / REPORT_FILE).resolve()
    return quote(report.relative_to(directory.resolve()).as_posix())


def _sweep_verdict(result: SweepResult) -> Verdict:
    complete = [trial for trial in result.trials if trial.value is not None]
    if result.best is None or result.best.value is None:
        return Verdict("unknown", "No trial is complete.", "")
    values = ", ".join(f"{key} {format_value(v)}" for key, v in result.best.values.items())
    best = f"{metric_title(result.metric)} {format_metric(result.best.value)}"
    sentence = f"Trial {result.best.number} is the best of {len(complete)}: {best}."
    return Verdict("ahead", sentence, f"With {values}.")


def _sweep_tiles(result: SweepResult) -> tuple[Tile, ...]:
    complete = sum(trial.value is not None for trial in result.trials)
    seconds = sum(trial.seconds or 0.0 for trial in result.trials)
    return (
        Tile(format_count(len(result.trials)), "trials"),
        Tile(format_count(complete), "complete"),
        Tile(format_seconds(seconds), "of training"),
    )
