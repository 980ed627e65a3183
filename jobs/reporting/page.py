"""The page: one self-contained HTML file, no script, nothing fetched from anywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jinja2 import Environment, PackageLoader, StrictUndefined

from conf.errors import SluiceError
from jobs.reporting.blocks import Section, missing
from jobs.reporting.figure import COLOURS
from jobs.reporting.numbers import MISSING, format_bytes, format_count, format_seconds
from jobs.reporting.run_data import RunData, as_mapping
from jobs.reporting.sections.features import build_features
from jobs.reporting.sections.flow import build_flow
from jobs.reporting.sections.learning import best_epoch, build_learning
from jobs.reporting.sections.lists import build_lists
from jobs.reporting.sections.popularity import build_popularity
from jobs.reporting.sections.provenance import build_provenance, build_timings
from jobs.reporting.sections.quality import build_quality
from jobs.reporting.sections.shards import build_shards
from jobs.reporting.sections.steps import build_steps
from jobs.reporting.verdict import Verdict, build_verdict

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
        subtitle=_subtitle(data),
        verdict=_survive(lambda: build_verdict(data), _unknown_verdict),
        tiles=_survive(lambda: build_tiles(data), lambda _: ()),
        problem=_problem(data),
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

    return _survive(lambda: build(data), unreadable)


def _survive(build: Callable[[], U], otherwise: Callable[[Exception], U]) -> U:
    try:
        return build()
    except (SluiceError, *WRONG_TYPES) as error:
        return otherwise(error)


def _unknown_verdict(error: Exception) -> Verdict:
    return Verdict("unknown", "The evaluation cannot be read.", repr(error))


def run_title(data: RunData) -> str:
    """Returns the name of the run's series, or of its directory where the card has none."""
    return str(data.config.get("name") or data.run.name)


def build_tiles(data: RunData) -> tuple[Tile, ...]:
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


def _problem(data: RunData) -> str | None:
    """Says that a run has not ended well, or has not ended."""
    status = data.card.get("status")
    if status in (None, "trained"):
        return None
    error = data.card.get("error")
    return f"The run's status is {status!r}{f': {error}' if error else '.'}"


def _subtitle(data: RunData) -> str:
    parts = [data.model_name if data.config else "", f"run {data.run.name}"]
    if data.manifest is not None:
        parts.append(f"dataset {data.manifest.dataset_name} {data.manifest.dataset_version}")
    return " · ".join(part for part in parts if part)
