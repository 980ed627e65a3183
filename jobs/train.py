"""`sluice train`: a dataset version to a trained model in a run directory."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from conf.errors import ConfigError
from conf.load import load_config
from conf.training import TrainConfig
from jobs.logs import LogFormat, setup_logging
from jobs.options import CONFIG_HELP, DryRun, LogFormatOption, Overrides, list_overrides
from jobs.quiet import quiet_tensorflow

app = typer.Typer(add_completion=False)


class Launcher(StrEnum):
    """Who starts the workers of a run."""

    NONE = "none"
    SPARK = "spark"


@app.command()
def main(
    config: Annotated[str | None, typer.Argument(help=CONFIG_HELP)] = None,
    dataset: Annotated[
        str | None, typer.Option(help="Dataset directory (its current version), or a version's.")
    ] = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with this config's newest run, if unfinished.")
    ] = False,
    launcher: Annotated[
        Launcher, typer.Option(help="Who starts the workers: nobody, or a Spark barrier job.")
    ] = Launcher.NONE,
    workers: Annotated[
        int | None, typer.Option(min=2, help="Workers that --launcher spark starts.")
    ] = None,
    spark_master: Annotated[
        str, typer.Option(help="Master of --launcher spark, unless under spark-submit.")
    ] = "local[*]",
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Train a model on a dataset version."""
    setup_logging(log_format)
    settings = list_overrides(overrides, {"dataset": dataset})
    resolved = load_config(TrainConfig, "training", config, settings)
    if (launcher is Launcher.SPARK) != (workers is not None):
        raise ConfigError(
            "--launcher spark and --workers N go together",
            received=f"--launcher {launcher.value}, "
            + ("no --workers" if workers is None else f"--workers {workers}"),
        )
    if workers is not None and not dry_run:
        from jobs.train_spark import Launch, launch

        start = Launch(json.dumps(resolved.resolved()), workers, resume, log_format.value)
        return launch(start, spark_master)
    if dry_run:
        print(json.dumps(plan(resolved), indent=1))
        return 0
    run = train(resolved, resume=resume, log_format=log_format)
    print(json.dumps({"run": str(run)}) if log_format is LogFormat.JSON else f"run: {run}")
    return 0


def plan(config: TrainConfig) -> dict[str, Any]:
    """Returns what a run would do: rows, steps, parameters, devices. Nothing is written.

    Raises:
        SluiceError: The config, the dataset or the devices do not fit.
    """
    with quiet_tensorflow():
        from training.fit import plan_run

    return plan_run(config)


def train(
    config: TrainConfig, *, resume: bool = False, log_format: LogFormat | str = LogFormat.TEXT
) -> Path:
    """Trains a model and returns the directory of the run.

    Args:
        config: The resolved config.
        resume: Whether to go on with the newest run of the same config, if it is unfinished.
        log_format: `text` or `json`.

    Raises:
        SluiceError: Training was refused or failed; earlier runs are untouched.
    """
    with quiet_tensorflow():
        from training.fit import fit_run
    from training.progress import build_progress

    json_lines = LogFormat(log_format) is LogFormat.JSON
    progress = build_progress("json" if json_lines else "text", config.fit.log_every_seconds)
    try:
        return fit_run(config, progress, resume=resume)
    finally:
        progress.close()


if __name__ == "__main__":
    from jobs.cli import run_app

    raise SystemExit(run_app(app))
