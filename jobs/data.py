"""`sluice data`: generate sample logs, or fetch a public data set."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from conf.errors import ConfigError, did_you_mean
from etl.sample_data.archive import ARCHIVES, BASE_URL, DownloadOptions, fetch_archive
from etl.sample_data.clicks import CLICKS_NAME, ClickSampleConfig, write_clicks
from etl.sample_data.config import DirtRates, SampleConfig
from etl.sample_data.movielens import write_sample

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
_DEFAULTS = SampleConfig()
_CLICKS = ClickSampleConfig()


@app.command()
def generate(
    out: Annotated[Path, typer.Option(help="Directory to create.")],
    ratings: Annotated[int, typer.Option(help="Valid ratings, e.g. 100_000.")] = _DEFAULTS.ratings,
    users: Annotated[int | None, typer.Option(help="Users; scales with ratings.")] = None,
    movies: Annotated[int | None, typer.Option(help="Movies; scales with ratings.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of every random stream.")] = _DEFAULTS.seed,
    workers: Annotated[
        int | None,
        typer.Option(help="Processes; default one per core. The bytes do not depend on it."),
    ] = None,
    dirty_rate: Annotated[
        float, typer.Option(help="Malformed lines per valid rating.")
    ] = _DEFAULTS.dirt.dirty,
    duplicate_rate: Annotated[
        float, typer.Option(help="Exact copies per valid rating.")
    ] = _DEFAULTS.dirt.duplicate,
    unknown_rate: Annotated[
        float, typer.Option(help="Lines with unknown ids per valid rating.")
    ] = _DEFAULTS.dirt.unknown,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier sample.")
    ] = False,
) -> None:
    """Writes MovieLens-like users.dat, movies.dat and ratings.dat with structure to learn."""
    config = SampleConfig(
        ratings=ratings,
        users=users,
        movies=movies,
        seed=seed,
        dirt=DirtRates(dirty_rate, duplicate_rate, unknown_rate),
    )
    with _progress("ratings", config.ratings) as (progress, task):
        card = write_sample(
            config,
            out,
            workers,
            overwrite=overwrite,
            on_progress=lambda done: progress.update(task, completed=done),
        )
    size = config.size
    lines = card["lines"]
    extra = lines["ratings.dat"] - size.ratings if isinstance(lines, dict) else 0
    print(
        f"wrote {out}: {size.users:,} users, {size.movies:,} movies, {size.ratings:,} ratings "
        f"and {extra:,} lines of dirt (counts in {out / 'SAMPLE.json'})"
    )


@app.command()
def clicks(
    out: Annotated[Path, typer.Option(help="Directory to create.")],
    sessions: Annotated[int, typer.Option(help="Well-formed sessions.")] = _CLICKS.sessions,
    videos: Annotated[int | None, typer.Option(help="Videos; scales with sessions.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of every random stream.")] = _CLICKS.seed,
    dirty_rate: Annotated[
        float, typer.Option(help="Malformed sessions per well-formed one.")
    ] = _CLICKS.dirty,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier sample.")
    ] = False,
) -> None:
    """Writes sessions of clicks on videos, some in a column of the page: clicks.tsv."""
    config = ClickSampleConfig(sessions, videos, seed, dirty_rate)
    card = write_clicks(config, out, overwrite=overwrite)
    lines = card["lines"]
    extra = lines[CLICKS_NAME] - sessions if isinstance(lines, dict) else 0
    print(
        f"wrote {out}: {sessions:,} sessions of {config.events.size.movies:,} videos and "
        f"{extra:,} malformed ones (counts in {out / 'SAMPLE.json'})"
    )


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(ARCHIVES)}.")],
    out: Annotated[
        Path | None, typer.Option(help="Directory to create; default data/NAME.")
    ] = None,
    base_url: Annotated[str, typer.Option(help="Where the archives lie.")] = BASE_URL,
    retries: Annotated[int, typer.Option(min=0, max=10, help="Attempts after the first.")] = 2,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier download.")
    ] = False,
) -> None:
    """Downloads a public data set, checks its published checksum and unpacks it."""
    if name not in ARCHIVES:
        raise ConfigError(
            "no such data set",
            received=name,
            allowed=", ".join(ARCHIVES),
            fix=did_you_mean(name, ARCHIVES),
        )
    target = out if out is not None else Path("data") / name
    with _progress(f"{name}.zip", None) as (progress, task):
        options = DownloadOptions(
            base_url=base_url,
            retries=retries,
            on_progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
        fetch_archive(ARCHIVES[name], target, options, overwrite=overwrite)
    print(f"wrote {target}: checksum verified; its README states the terms of use")


@contextmanager
def _progress(label: str, total: int | None) -> Iterator[tuple[Progress, TaskID]]:
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not sys.stderr.isatty(),
        transient=True,
    ) as progress:
        yield progress, progress.add_task(label, total=total)


if __name__ == "__main__":
    from jobs.cli import run_app

    raise SystemExit(run_app(app))
