"""Pages about a run and about a sweep: one self-contained HTML file, no script, nothing fetched."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from conf.atomic_output import write_text_atomic
from conf.errors import SluiceError
from conf.run import REPORT_FILE
from jobs.reporting.dataset_sections import view_features, view_flow, view_popularity, view_shards
from jobs.reporting.formatting import (
    FORMS,
    MISSING,
    Cell,
    as_mapping,
    format_bytes,
    format_count,
    format_metric,
    format_seconds,
    format_value,
    metric_title,
    to_float,
)
from jobs.reporting.learning import best_epoch, view_learning, view_steps
from jobs.reporting.plots import COLOURS
from jobs.reporting.provenance import view_provenance, view_timings
from jobs.reporting.run_data import MissingPartError, RunData
from jobs.reporting.verdict import Verdict, build_verdict, view_lists, view_quality

if TYPE_CHECKING:
    from training.sweep import SweepResult, TrialRecord

T = TypeVar("T")
U = TypeVar("U")

# Errors of code that meets another type than it expects.
WRONG_TYPES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


View = Callable[[T], Mapping[str, Any]]
"""Computes what a section's macro shows; its `lead` replaces the sentence below the heading."""


@dataclass(frozen=True)
class Section:
    """A part of a page; `name` is its anchor, and its macro in `sections.html.j2`."""

    name: str
    title: str
    lead: str
    body: Markup


@dataclass(frozen=True)
class PageHead:
    """The part of a page above its sections.

    Attributes:
        name: Title.
        subtitle: The run, version or sweep of the page.
        verdict: The sentence that sums it up.
        tiles: Figures of size, each with its label.
        problem: A sentence about a failure, or None.
    """

    name: str
    subtitle: str
    verdict: Verdict
    tiles: tuple[tuple[str, str], ...] = ()
    problem: str | None = None


DATASET_SECTIONS: Mapping[str, View[RunData]] = {
    "flow": view_flow,
    "features": view_features,
    "shards": view_shards,
}
RUN_SECTIONS: Mapping[str, View[RunData]] = {
    "quality": view_quality,
    "learning": view_learning,
    "steps": view_steps,
    "lists": view_lists,
    "flow": view_flow,
    "features": view_features,
    "popularity": view_popularity,
    "shards": view_shards,
    "timings": view_timings,
    "provenance": view_provenance,
}


@cache
def load_templates() -> Environment:
    """Returns the templates; they escape every text that is not `Markup`."""
    environment = Environment(
        loader=PackageLoader("jobs.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["form"] = lambda value, name: FORMS[name](value)
    environment.filters["cell"] = lambda value: value if isinstance(value, Cell) else Cell(value)
    return environment


def render_html(head: PageHead, sections: Sequence[Section]) -> str:
    """Returns a page of sections as HTML."""
    template = load_templates().get_template("page.html.j2")
    return template.render(**vars(head), sections=sections, colours=COLOURS)


def render_sections(views: Mapping[str, View[T]], data: T) -> list[Section]:
    """Returns each section as HTML, or a note that says why it has nothing to show.

    JSON that is readable may still hold text where a number belongs; one such value must not
    take the rest of the page away.
    """
    return [render_section(name, view, data) for name, view in views.items()]


def render_section(name: str, view: View[T], data: T) -> Section:
    """Returns one section; see `render_sections`."""
    macros: Any = load_templates().get_template("sections.html.j2").module
    title, lead = macros.headings[name]
    try:
        found = view(data)
        return Section(name, title, found.get("lead", lead), getattr(macros, name)(found))
    except MissingPartError as error:
        reason = str(error)
    except (SluiceError, *WRONG_TYPES) as error:
        reason = f"What the run recorded here cannot be read: {error!r}"
    blocks: Any = load_templates().get_template("blocks.html.j2").module
    return Section(name, title, lead, blocks.missing(reason))


def render_page(data: RunData) -> str:
    """Returns the report as HTML; the same run always gives the same text."""
    head = PageHead(
        name=run_title(data),
        subtitle=_run_subtitle(data),
        verdict=_build_or_else(lambda: build_verdict(data), _unknown_verdict),
        tiles=_build_or_else(lambda: tuple(_run_tiles(data)), lambda _: ()),
        problem=_run_problem(data),
    )
    return render_html(head, render_sections(RUN_SECTIONS, data))


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


def _run_tiles(data: RunData) -> Iterator[tuple[str, str]]:
    """Figures of size: data, model, training."""
    if data.manifest is not None:
        if data.manifest.has_split("train"):
            yield format_count(data.manifest.split("train").rows), "training records"
        size = sum(split.bytes for split in data.manifest.splits)
        yield format_bytes(size), "of TFRecord shards"
    if data.catalogue is not None:
        yield format_count(len(data.catalogue.counts)), "items"
    parameters = as_mapping(data.card.get("model")).get("parameters")
    if isinstance(parameters, int):
        yield format_count(parameters), "parameters"
    if data.epochs:
        best = best_epoch(data)
        seconds = [to_float(as_mapping(entry).get("seconds")) for entry in data.epochs]
        known = [value for value in seconds if value is not None]
        kept = f", best {best}" if best is not None else ""
        label = f"of training, {len(data.epochs)} epochs{kept}"
        yield format_seconds(sum(known)) if known else MISSING, label


def _run_problem(data: RunData) -> str | None:
    """A sentence about a run that has failed or not ended yet, else None."""
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
    """Returns the page as HTML; it links to the reports that exist by now."""
    complete = sum(trial.value is not None for trial in result.trials)
    seconds = sum(trial.seconds or 0.0 for trial in result.trials)
    tiles = (
        (format_count(len(result.trials)), "trials"),
        (format_count(complete), "complete"),
        (format_seconds(seconds), "of training"),
    )
    head = PageHead(
        "Sweep", f"sweep {result.directory.name}", _sweep_verdict(result, complete), tiles
    )
    return render_html(head, render_sections({"trials": view_trials}, result))


def view_trials(result: SweepResult) -> dict[str, Any]:
    """Returns the trials: values, metric, time, and why those ended that are not complete."""
    if not result.trials:
        raise MissingPartError("No trial has begun.")
    keys = list(dict.fromkeys(key for trial in result.trials for key in trial.values))
    title = metric_title(result.metric)
    sign = 1 if result.is_minimised else -1
    ordered = sorted(
        result.trials,
        key=lambda trial: (math.inf if trial.value is None else sign * trial.value, trial.number),
    )
    return {
        "lead": f"Best {title} first; a trial's number leads to its report.",
        "caption": f"{len(ordered)} trials by {title}.",
        "columns": [["Trial", "right"], *([key, "value"] for key in keys), [title, "right"],
                    ["Time", "right"], ["State"]],
        "rows": [_trial_row(trial, keys, result) for trial in ordered],
    }  # fmt: skip


def _trial_row(trial: TrialRecord, keys: list[str], result: SweepResult) -> list[Any]:
    is_best = result.best is not None and result.best.number == trial.number
    state = trial.state if trial.run is not None else f"{trial.state}: {trial.detail}".strip(": ")
    return [
        Cell(trial.number, best=is_best, href=_find_report(trial, result.directory)),
        *(trial.values.get(key) for key in keys),
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


def _sweep_verdict(result: SweepResult, complete: int) -> Verdict:
    if result.best is None or result.best.value is None:
        return Verdict("unknown", "No trial is complete.", "")
    values = ", ".join(f"{key} {format_value(v)}" for key, v in result.best.values.items())
    best = f"{metric_title(result.metric)} {format_metric(result.best.value)}"
    sentence = f"Trial {result.best.number} is the best of {complete}: {best}."
    return Verdict("ahead", sentence, f"With {values}.")
