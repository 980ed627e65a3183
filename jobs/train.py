"""`sluice train`: a dataset version to a trained model in a run directory."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import closing, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from conf.artefacts.run import RUN_CARD_FILE, read_json
from conf.errors import ConfigError, ExitCode
from conf.load import load_config
from conf.local_paths import local_path
from conf.training.train import StepRange, TrainConfig, parse_step_range
from jobs.support.lineage import LineageRun
from jobs.support.terminal import (
    CONFIG_HELP,
    DryRun,
    LogFormat,
    LogFormatOption,
    Overrides,
    list_overrides,
    quiet_tensorflow,
    setup_logging,
)

app = typer.Typer(add_completion=False)


class Launcher(StrEnum):
    NONE = "none"
    SPARK = "spark"


@app.command()
def main(
    config: Annotated[str | None, typer.Argument(help=CONFIG_HELP)] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="Dataset directory or URI (its current version), or a version's."),
    ] = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with this config's newest run, if unfinished.")
    ] = False,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="The same, and train nothing where it has finished on this version."
        ),
    ] = False,
    profile: Annotated[
        str | None,
        typer.Option(metavar="FROM:TO", help="Profile the steps between these, for TensorBoard."),
    ] = None,
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Write the run's report.html at the end.")
    ] = True,
    sweep: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=local_path,
            help="Train many runs over the space of configs in FILE.",
        ),
    ] = None,
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
    steps = None if profile is None else parse_step_range(profile)
    resolved = load_config(
        TrainConfig, "training", config, list_overrides(overrides, {"dataset": dataset})
    )
    if (launcher is Launcher.SPARK) != (workers is not None):
        raise ConfigError("--launcher spark and --workers N go together")
    alone: dict[str, object] = {"--sweep": sweep, "--profile": steps, "--once": once or None}
    _refuse_beside("--launcher spark", workers, alone)
    alone = {"--sweep": sweep, "--profile": steps, "--launcher spark": workers}
    _refuse_beside("fit.refit", resolved.fit.refit, alone)
    _refuse_beside("--sweep", sweep, {"--profile": steps, "--once": once or None})
    if sweep is not None:
        return _sweep(resolved, sweep, dry_run, {"resume": resume, "report": report}, log_format)
    if dry_run:
        print(json.dumps(plan(resolved), indent=1))
        return ExitCode.OK
    if workers is not None:
        from jobs.support.spark_launcher import SparkLaunch, launch_on_spark

        asked = json.dumps(resolved.resolved())
        launch = SparkLaunch(asked, workers, resume, report, log_format.value)
        return launch_on_spark(launch, spark_master)
    run = train(resolved, resume=resume, once=once, log_format=log_format, profile=steps)
    _tell(run, _write_page(resolved, run) if report and _writes_run(resolved) else None, log_format)
    return ExitCode.OK


def _refuse_beside(name: str, asked: object, others: Mapping[str, object]) -> None:
    """Refuses options that would be left out beside another one."""
    given = [other for other, value in others.items() if value is not None]
    if asked is not None and given:
        raise ConfigError(f"{name} cannot be used with {given[0]}", fix="leave one of them out")


def _write_page(config: TrainConfig, run: Path) -> Path | None:
    from jobs.reporting.report import try_report
    from training.monitoring.mlflow_log import send_run

    page = try_report(run)
    if config.mlflow is not None and page is not None:
        send_run(config, run, logging.getLogger("sluice").warning)
    return page


def _tell(run: Path, report: Path | None, log_format: LogFormat) -> None:
    from conf.publication.working_copy import describe_place

    result = {"run": describe_place(run)}
    if report is not None:
        result["report"] = f"{result['run']}/{report.name}"
    if log_format is LogFormat.JSON:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name}: {path}" for name, path in result.items()))


def _sweep(
    config: TrainConfig,
    file: Path,
    dry_run: bool,
    options: Mapping[str, bool],
    log_format: LogFormat,
) -> int:
    from conf.storage.locations import is_remote
    from conf.training.trials import SweepConfig
    from jobs.reporting.sweep import sweep_configs

    if is_remote(config.root):
        raise ConfigError(
            "a sweep works on a file system, local or mounted",
            received=f"root: {config.root}",
            fix="set root to one, and train the best config with its root in the store",
        )
    if not file.is_file():
        raise ConfigError("no such sweep", received=file, allowed="a YAML file")
    space = load_config(SweepConfig, "training", str(file.resolve()))
    if dry_run:
        with quiet_tensorflow():
            from training.trials import find_sweep_metric
        described = {"sweep": space.model_dump(mode="json"), "trials": space.trial_count}
        described["metric"] = find_sweep_metric(config, space)
        print(json.dumps(described, indent=1))
        return ExitCode.OK
    result = sweep_configs(config, space, **options, log_format=log_format)
    return ExitCode.OK if result.best is not None else ExitCode.FAILED


def plan(config: TrainConfig) -> dict[str, Any]:
    """Returns what a run would do: rows, steps, features, tables. Nothing is written.

    Raises:
        SluiceError: The config does not fit its dataset.
    """
    from training.loop.plan import read_plan

    planned = read_plan(config).to_json()
    if config.fit.refit is not None:
        with quiet_tensorflow():
            from training.refit import describe_plan
        planned["refit"] = describe_plan(config, config.fit.refit)
    return planned


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    once: bool = False,
    log_format: LogFormat | str = LogFormat.TEXT,
    profile: StepRange | None = None,
) -> Path:
    """Trains a model and returns the directory of the run.

    Args:
        config: The resolved config.
        resume: Whether to go on with the newest run of the same config, if it is unfinished.
        once: The same; where that run has finished on the same version it is returned.
        log_format: `text` or `json`.
        profile: Steps to profile, or None.

    Raises:
        SluiceError: Training was refused or failed; earlier runs are untouched.
    """
    with quiet_tensorflow():
        from training.fit import fit_run
        from training.refit import fit_chosen
    from conf.publication.working_copy import describe_place
    from training.monitoring.progress import build_progress

    json_lines = LogFormat(log_format) is LogFormat.JSON
    progress = build_progress("json" if json_lines else "text")
    lineage = LineageRun(f"train.{config.name}")
    with lineage if _writes_run(config) else nullcontext(lineage) as told, closing(progress):
        told.inputs = {config.dataset: {}}
        if config.fit.refit is None:
            run = fit_run(config, progress, resume=resume, once=once, profile=profile)
        else:
            run = fit_chosen(config, progress, resume=resume, once=once)
        told.inputs = {read_json(run / RUN_CARD_FILE)["dataset"]["path"]: {}}
        told.outputs = {describe_place(run): {}}
        return run


def _writes_run(config: TrainConfig) -> bool:
    """Whether this process writes the run: of several workers the chief alone does."""
    from training.distribution.strategy import read_cluster

    return config.devices.strategy != "multi_worker" or read_cluster().index == 0


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))
