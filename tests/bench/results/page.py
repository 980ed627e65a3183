"""The page of results, made from the records."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from tests.bench.results.experiments import EXPERIMENTS, Experiment
from tests.bench.results.records import Record, format_figure
from tests.docs_site.markdown import join_blocks, render_table

PAGE = Path(__file__).parents[3] / "docs" / "results.md"
HEAD = """# Results

What the presets give on public data. `python -m tests.bench.results run PRESET --seeds 1 2 3`
trains and measures one and writes its record, or adds seeds to the one of the same rows, settings
and metrics; `python -m tests.bench.results page` makes this page from the records. A run that was
stopped by hand has no record.

± is the standard deviation over seeds. The test split is read once, after training, but where an
entry says otherwise. The digest is of the rows and checksums of all shards: the same log and the
same preset give the same digest anywhere. CPU time is of all processes that trained a run (one that
was killed outright adds none); memory is the peak of the last of them, the only one that is kept.
"""
MISSING = "## Not measured on this code\n\nThese presets have no record: "


def render_page(records: dict[str, Record]) -> str:
    """Returns the text of the page.

    Args:
        records: By name of the experiment.
    """
    measured = [experiment for experiment in EXPERIMENTS if experiment.name in records]
    missing = [f"`{e.name}`" for e in EXPERIMENTS if e.name not in records]
    by_protocol = groupby(measured, key=lambda experiment: (experiment.data, experiment.protocol))
    sections = [_render_section(list(group), records) for _, group in by_protocol]
    end = [MISSING + ", ".join(missing) + "."] if missing else []
    return join_blocks([HEAD.strip(), *sections, *end])


def _render_section(experiments: list[Experiment], records: dict[str, Record]) -> str:
    first = experiments[0]
    titles = [metric.title for metric in first.metrics]
    quality = [_quality_row(experiment, records[experiment.name]) for experiment in experiments]
    published = {(row.model, row.source): row for e in experiments for row in e.published}
    theirs = [
        [row.model, *(_plain(figure) for figure in row.figures), "", f"published: {row.source}"]
        for row in published.values()
    ]
    floors = _floor_row(first, records[first.name])
    runs = [row for e in experiments for row in _run_rows(records[e.name])]
    return join_blocks(
        [
            f"## {first.protocol.rstrip('.')}",
            render_table(["", *titles, "seeds", "how"], [*quality, *theirs, *floors]),
            "\n".join(f"- `{e.name}`: {e.chosen_by}" for e in experiments),
            render_table(
                ["run", "figures", "epochs", "CPU seconds", "memory", "commit", "machine", "day"],
                runs,
            ),
            *(f"Digest of `{e.name}`: `{records[e.name].split_sha256}`" for e in experiments),
        ]
    )


def _quality_row(experiment: Experiment, record: Record) -> list[str]:
    figures = [f"**{format_figure(record, metric)}**" for metric in experiment.metrics]
    command = f"`{experiment.command}`"
    return [f"`{experiment.name}`", *figures, str(len(record.seeds)), command]


def _floor_row(experiment: Experiment, record: Record) -> list[list[str]]:
    floor = record.seeds[0].popularity
    if not floor:
        return []
    name = "popularity" if experiment.metrics[0].key not in {"auc", "rmse"} else "a constant"
    figures = [_plain(floor.get(metric.title)) for metric in experiment.metrics]
    return [[name, *figures, "", "the same rows"]]


def _run_rows(record: Record) -> list[list[str]]:
    return [
        [
            f"`{record.experiment}`, seed {seed.seed}",
            ", ".join(f"{value:.4f}" for value in seed.figures.values()),
            f"{seed.best_epoch or seed.epochs} of {seed.epochs}, plan {seed.plan_epochs}",
            f"{seed.cpu_seconds:,.0f}",
            f"{seed.peak_memory_bytes / 1e9:.1f} GB",
            f"`{seed.commit[:8]}`",
            seed.processor,
            seed.finished_on,
        ]
        for seed in record.seeds
    ]


def _plain(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.4f}"
