"""Pages about a run and about a sweep: one self-contained HTML file, no script, nothing fetched."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError
from markupsafe import Markup

from conf.artefacts.run import REPORT_FILE
from conf.errors import SluiceError
from conf.storage.atomic_output import write_text_atomic
from jobs.reporting import dataset_sections, plots, quality, run_sections
from jobs.reporting.quality import Verdict, build_verdict
from jobs.reporting.run_data import MissingPartError, RunData
from jobs.support import formatting
from jobs.support.formatting import (
    as_mapping,
    format_metric,
    format_value,
    metric_title,
    to_float,
)

if TYPE_CHECKING:
    from training.trials import Study, Trial

T = TypeVar("T")

# Errors of code that meets another type than it expects.
WRONG_TYPES = (ArithmeticError, AttributeError, LookupError, TypeError, UndefinedError, ValueError)

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
        tiles: Figures of size: label, value, and its form (a key of `formatting.FORMS`).
        problem: A sentence about a failure, or None.
    """

    name: str
    subtitle: str
    verdict: Verdict
    tiles: Sequence[tuple[str, Any, str]] = ()
    problem: str | None = None


RUN_SECTIONS: Mapping[str, View[RunData]] = {
    "quality": quality.view_quality,
    "learning": run_sections.view_learning,
    "steps": run_sections.view_steps,
    "lists": run_sections.view_lists,
    "flow": dataset_sections.view_flow,
    "features": dataset_sections.view_features,
    "popularity": dataset_sections.view_popularity,
    "shards": dataset_sections.view_shards,
    "timings": dataset_sections.view_timings,
    "provenance": dataset_sections.view_provenance,
}
DATASET_SECTIONS = {name: RUN_SECTIONS[name] for name in ("flow", "features", "shards")}


@cache
def load_templates() -> Environment:
    """Returns the templates; they escape every text that is not `Markup`."""
    environment = Environment(
        loader=PackageLoader("jobs.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        extensions=["jinja2.ext.do"],
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "form": lambda value, name: formatting.FORMS[name](value),
        "json": partial(json.dumps, indent=2, sort_keys=True, default=str, ensure_ascii=False),
        "reason_words": formatting.reason_words,
        "utc": formatting.utc,
    }
    environment.globals["plots"] = plots
    return environment


def render_html(head: PageHead, sections: Sequence[Section]) -> str:
    """Returns a page of sections as HTML."""
    template = load_templates().get_template("page.html.j2")
    return template.render(**vars(head), sections=sections)


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
        content = view(data)
        return Section(name, title, content.get("lead", lead), getattr(macros, name)(content))
    except MissingPartError as error:
        reason = str(error)
    except (SluiceError, *WRONG_TYPES) as error:
        reason = f"What the run recorded here cannot be read: {error!r}"
    return Section(name, title, lead, macros.nothing(reason))


def render_page(data: RunData) -> str:
    """Returns the report as HTML; the same run always gives the same text."""
    try:
        summary = build_verdict(data)
    except (SluiceError, *WRONG_TYPES) as error:
        summary = Verdict("unknown", "The evaluation cannot be read.", repr(error))
    tiles: list[tuple[str, Any, str]] = []
    with suppress(SluiceError, *WRONG_TYPES):
        tiles.extend(_run_tiles(data))
    head = PageHead(run_title(data), _run_subtitle(data), summary, tiles, _run_problem(data))
    return render_html(head, render_sections(RUN_SECTIONS, data))


def run_title(data: RunData) -> str:
    """Returns the name of the run's series, or of its directory where the card has none."""
    return str(data.config.get("name") or data.run.name)


def _run_tiles(data: RunData) -> Iterator[tuple[str, Any, str]]:
    """Figures of size: data, model, training."""
    if data.manifest is not None:
        if data.manifest.has_split("train"):
            yield "training records", data.manifest.split("train").rows, "count"
        yield "of TFRecord shards", sum(split.bytes for split in data.manifest.splits), "bytes"
    if data.catalogue is not None:
        yield "items", len(data.catalogue.tokens), "count"
    parameters = as_mapping(data.card.get("model")).get("parameters")
    if isinstance(parameters, int):
        yield "parameters", parameters, "count"
    if data.epochs:
        best = run_sections.best_epoch(data)
        seconds = [to_float(as_mapping(entry).get("seconds")) for entry in data.epochs]
        known = [value for value in seconds if value is not None]
        label = f"of training, {len(data.epochs)} epochs{'' if best is None else f', best {best}'}"
        yield label, sum(known) if known else math.nan, "seconds"


def _run_problem(data: RunData) -> str | None:
    """A sentence about a run that has failed or not ended yet, else None."""
    status, error = data.card.get("status"), data.card.get("error")
    if status in (None, "trained"):
        return None
    return f"The run's status is {status!r}{f': {error}' if error else '.'}"


def _run_subtitle(data: RunData) -> str:
    parts = [data.model_name if data.config else "", f"run {data.run.name}"]
    if data.manifest is not None:
        parts.append(f"dataset {data.manifest.dataset_name} {data.manifest.dataset_version}")
    return " · ".join(part for part in parts if part)


def write_sweep_page(result: Study) -> Path:
    """Writes `report.html` beside the trials; an earlier one is replaced whole or not at all."""
    file = result.directory / REPORT_FILE
    write_text_atomic(file, render_sweep(result))
    return file


def render_sweep(result: Study) -> str:
    """Returns the page as HTML; it links to the reports that exist by now."""
    complete = sum(trial.value is not None for trial in result.trials)
    tiles = (
        ("trials", len(result.trials), "count"),
        ("complete", complete, "count"),
        ("of training", sum(trial.seconds for trial in result.trials), "seconds"),
    )
    subtitle = f"sweep {result.directory.name}"
    head = PageHead("Sweep", subtitle, _sweep_verdict(result, complete), tiles)
    return render_html(head, render_sections({"trials": view_trials}, result))


def view_trials(result: Study) -> dict[str, Any]:
    """Returns the trials: values, metric, time, and why those ended that are not complete."""
    if not result.trials:
        raise MissingPartError("No trial has begun.")
    sign = 1 if result.is_minimised else -1
    ordered = sorted(
        result.trials,
        key=lambda trial: (math.inf if trial.value is None else sign * trial.value, trial.number),
    )
    title = metric_title(result.metric)
    return {
        "lead": f"Best {title} first; a trial's number leads to its report.",
        "title": title,
        "result": result,
        "trials": [(trial, _find_report(trial, result.directory)) for trial in ordered],
    }


def _find_report(trial: Trial, directory: Path) -> str | None:
    """Returns the URL of a trial's report, relative to the sweep, so that it may be moved."""
    if trial.run is None or not (trial.run / REPORT_FILE).exists():
        return None
    report = (trial.run / REPORT_FILE).resolve()
    return quote(report.relative_to(directory.resolve()).as_posix())


def _sweep_verdict(result: Study, complete: int) -> Verdict:
    if result.best is None or result.best.value is None:
        return Verdict("unknown", "No trial is complete.")
    values = [f"{key} {format_value(value)}" for key, value in result.best.values.items()]
    best = f"{metric_title(result.metric)} {format_metric(result.best.value)}"
    sentence = f"Trial {result.best.number} is the best of {complete}: {best}."
    return Verdict("ahead", sentence, f"With {', '.join(values)}.")
