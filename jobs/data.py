"""`sluice data`: generate sample logs, fetch a public data set, or import TFRecord files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from conf.errors import ConfigError, did_you_mean
from conf.etl.imported import ImportConfig
from conf.load import load_config
from conf.local_paths import local_path
from etl.sample_data.archive import ARCHIVES, BASE_URL, fetch_archive
from etl.sample_data.logs import CLICKS_NAME, plan_clicks, write_clicks, write_sample
from etl.sample_data.ratings import MIN_MOVIES, DirtRates, plan_sample
from jobs.support.terminal import (
    DryRun,
    LogFormat,
    LogFormatOption,
    Overrides,
    list_overrides,
    setup_logging,
    show_progress,
)

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)
_DEFAULTS, _RATES, _CLICKS = plan_sample(), DirtRates(), plan_clicks()

Out = Annotated[Path, typer.Option(parser=local_path, help="Directory to create.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of every random stream.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier output.")]


@app.command()
def generate(
    out: Out,
    ratings: Annotated[
        int, typer.Option(min=100, max=10**9, help="Valid ratings, e.g. 100_000.")
    ] = _DEFAULTS.ratings,
    users: Annotated[
        int | None, typer.Option(min=2, max=10**8, help="Users; scales with ratings.")
    ] = None,
    movies: Annotated[
        int | None, typer.Option(min=MIN_MOVIES, max=10**6, help="Movies; scales with ratings.")
    ] = None,
    seed: Seed = _DEFAULTS.seed,
    dirty_rate: Annotated[
        float, typer.Option(min=0, max=0.5, help="Malformed lines per valid rating.")
    ] = _RATES.dirty,
    duplicate_rate: Annotated[
        float, typer.Option(min=0, max=0.5, help="Exact copies per valid rating.")
    ] = _RATES.duplicate,
    unknown_rate: Annotated[
        float, typer.Option(min=0, max=0.5, help="Lines with unknown ids per valid rating.")
    ] = _RATES.unknown,
    overwrite: Overwrite = False,
) -> None:
    """Writes MovieLens-like users.dat, movies.dat and ratings.dat with structure to learn."""
    dirt = DirtRates(dirty_rate, duplicate_rate, unknown_rate)
    config = plan_sample(ratings, users, movies, seed, dirt)
    with show_progress(ratings) as on_ratings:
        card = write_sample(config, out, overwrite=overwrite, on_ratings=on_ratings)
    extra = card["lines"]["ratings.dat"] - ratings
    print(
        f"wrote {out}: {config.users:,} users, {config.movies:,} movies, {ratings:,} ratings "
        f"and {extra:,} lines of dirt (counts in {out / 'SAMPLE.json'})"
    )


@app.command()
def clicks(
    out: Out,
    sessions: Annotated[
        int, typer.Option(min=50, max=10**7, help="Well-formed sessions.")
    ] = _CLICKS.users,
    videos: Annotated[
        int | None, typer.Option(min=MIN_MOVIES, max=10**6, help="Videos; scales with sessions.")
    ] = None,
    seed: Seed = _CLICKS.seed,
    dirty_rate: Annotated[
        float, typer.Option(min=0, max=0.5, help="Malformed sessions per well-formed one.")
    ] = _CLICKS.dirt.dirty,
    overwrite: Overwrite = False,
) -> None:
    """Writes sessions of clicks on videos, some in a column of the page: clicks.tsv."""
    config = plan_clicks(sessions, videos, seed, dirty_rate)
    card = write_clicks(config, out, overwrite=overwrite)
    print(
        f"wrote {out}: {sessions:,} sessions of {config.movies:,} videos and "
        f"{card['lines'][CLICKS_NAME] - sessions:,} malformed ones "
        f"(counts in {out / 'SAMPLE.json'})"
    )


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(ARCHIVES)}.")],
    out: Annotated[
        Path | None, typer.Option(parser=local_path, help="Directory to create; default data/NAME.")
    ] = None,
    base_url: Annotated[str, typer.Option(help="Where the archives lie.")] = BASE_URL,
    overwrite: Overwrite = False,
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
    fetch_archive(name, target, base_url, overwrite=overwrite)
    print(f"wrote {target}: checksum verified; its README states the terms of use")


@app.command("import")
def import_files(
    config: Annotated[str, typer.Argument(help="Path of a YAML file.")],
    data: Annotated[
        str | None, typer.Option(help="Folder that the paths of the files start from.")
    ] = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Publishes TFRecord files of one's own as a dataset version, for `sluice train`."""
    from conf.publication.working_copy import describe_place
    from etl.import_dataset import import_dataset
    from etl.imported.mapping import find_files, map_records

    setup_logging(log_format)
    settings = list_overrides(overrides, {"data_dir": data})
    resolved = load_config(ImportConfig, "import", config, settings)
    if dry_run:
        files = find_files(resolved)
        found = map_records(resolved, files)
        wire = [feature.wire for feature in found.features]
        planned = {
            "config": resolved.resolved(),
            "files": {
                split: [file.path for file in files if file.source == split]
                for split in resolved.splits
            },
            "record_type": found.record_type,
            "features": {f.name: f"list of {f.kind}" if f.is_list else f.kind for f in wire},
        }
        print(json.dumps(planned, indent=None if log_format is LogFormat.JSON else 1))
        return
    result = import_dataset(resolved)
    kept, place = dict(result.manifest.counts.kept), describe_place(result.version)
    if log_format is LogFormat.JSON:
        card = {"version": place, "kept": kept, "is_new": result.is_new}
        print(json.dumps(card))
        return
    rows = ", ".join(f"{count:,} {split}" for split, count in kept.items())
    state = ", written anew as ids move or lists turn" if resolved.writes_anew else ""
    state = state if result.is_new else "; nothing has changed since this version was imported"
    print(f"version: {place}: {rows} records{state}")


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))
