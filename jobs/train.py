"""`sluice train`: a dataset version to a trained model in a run directory."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from conf.artefacts.run import RUN_CARD_FILE, read_json
from conf.errors import ConfigError, ExitCode
from conf.load import load_config
from conf.local_paths import local_path
from conf.training.train import StepRange, TrainConfig, parse_step_range
from jobs.support.lineage import LineageDataset, LineageRun, emit_lineage
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
    """Who starts the workers of a run."""

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
    settings = list_overrides(overrides, {"dataset": dataset})
    resolved = load_config(TrainConfig, "training", config, settings)
    one_process = {"--sweep": sweep, "--profile": steps, "--once": once or None}
    _check_launcher(launcher, workers, one_process)
    if resolved.fit.refit is not None:
        _check_refit({**one_process, "--launcher spark": workers})
    if sweep is not None:
        switches = Switches(dry_run=dry_run, resume=resume, once=once, report=report, profile=steps)
        return _sweep(resolved, sweep, switches, log_format)
    if workers is not None and not dry_run:
        start = (json.dumps(resolved.resolved()), workers, resume, report, log_format.value)
        return _launch(start, spark_master)
    if dry_run:
        print(json.dumps(plan(resolved), indent=1))
        return 0
    run = train(resolved, resume=resume, once=once, log_format=log_format, profile=steps)
    _tell(run, _write_page(resolved, run) if report and _writes_run(resolved) else None, log_format)
    return 0


def _launch(start: tuple[str, int, bool, bool, str], spark_master: str) -> int:
    from jobs.support.spark_launcher import SparkLaunch, launch_on_spark

    return launch_on_spark(SparkLaunch(*start), spark_master)


def _write_page(config: TrainConfig, run: Path) -> Path | None:
    from jobs.reporting.report import try_report

    page = try_report(run)
    if page is not None:
        _send_page(config, run, page)
    return page


def _send_page(config: TrainConfig, run: Path, page: Path) -> None:
    """Adds the report to what MLflow has of the run; that it cannot is a warning."""
    from training.monitoring.mlflow_log import send_artefact

    try:
        send_artefact(config, run, page)
    except Exception as error:  # Stores of MLflow raise what they like.
        logging.getLogger("sluice").warning("MLflow does not have the report: %s", error)


def _check_launcher(
    launcher: Launcher, workers: int | None, of_one_process: Mapping[str, object]
) -> None:
    if (launcher is Launcher.SPARK) != (workers is not None):
        raise ConfigError(
            "--launcher spark and --workers N go together",
            received=f"--launcher {launcher.value}, "
            + ("no --workers" if workers is None else f"--workers {workers}"),
        )
    given = [name for name, value in of_one_process.items() if value is not None]
    if workers is not None and given:
        raise ConfigError(
            "--launcher spark starts one run anew, or with --resume, without a profile",
            received=given[0],
            fix="leave it out, or train without a launcher",
        )


def _check_refit(others: Mapping[str, object]) -> None:
    given = [name for name, value in others.items() if value is not None and name != "--once"]
    if given:
        raise ConfigError(
            f"fit.refit trains several runs, and {given[0]} is of one run or tries others",
            received=given[0],
            fix="leave it out, or set fit.refit=null",
        )


def _tell(run: Path, report: Path | None, log_format: LogFormat) -> None:
    from training.checkpoint.stored_runs import describe_run

    place = describe_run(run)
    page = None if report is None else f"{place}/{report.name}"
    result = {"run": place, **({} if page is None else {"report": page})}
    if log_format is LogFormat.JSON:
        print(json.dumps(result))
    else:
        print("\n".join(f"{name}: {path}" for name, path in result.items()))


@dataclass(frozen=True)
class Switches:
    """What was asked for beside the config."""

    dry_run: bool
    resume: bool
    once: bool
    report: bool
    profile: StepRange | None


def _sweep(config: TrainConfig, file: Path, switches: Switches, log_format: LogFormat) -> int:
    from conf.training.trials import SweepConfig
    from jobs.reporting.sweep import sweep_configs
    from training.checkpoint.stored_runs import is_stored

    if is_stored(config):
        raise ConfigError(
            "a sweep works on a file system, local or mounted",
            received=f"root: {config.root}",
            fix="set root to one, and train the best config with its root in the store",
        )
    if switches.once:
        raise ConfigError("--once is of one run", received="--sweep", fix="give --resume")
    if switches.profile is not None:
        raise ConfigError(
            "--profile is of one run and cannot be used with --sweep",
            fix="profile the best config: sluice train best.yaml --profile FROM:TO",
        )
    if not file.is_file():
        raise ConfigError("no such sweep", received=file, allowed="a YAML file")
    space = load_config(SweepConfig, "training", str(file.resolve()))
    if switches.dry_run:
        with quiet_tensorflow():
            from training.trials import find_sweep_metric
        plan = {"sweep": space.model_dump(mode="json"), "trials": space.trial_count}
        plan["metric"] = find_sweep_metric(config, space)
        print(json.dumps(plan, indent=1))
        return ExitCode.OK
    options = {"resume": switches.resume, "report": switches.report}
    result = sweep_configs(config, space, **options, log_format=log_format)
    return ExitCode.OK if result.best is not None else ExitCode.FAILED


def plan(config: TrainConfig) -> dict[str, Any]:
    """Returns what a run would do: rows, steps, parameters, devices. Nothing is written.

    Raises:
        SluiceError: The config, the dataset or the devices do not fit.
    """
    with quiet_tensorflow():
        from training.fit import plan_run
        from training.refit import describe_plan

    refit = config.fit.refit
    described = {} if refit is None else {"refit": describe_plan(config, refit)}
    return {**plan_run(config), **described}


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
    from training.checkpoint.stored_runs import describe_run
    from training.monitoring.progress import build_progress

    json_lines = LogFormat(log_format) is LogFormat.JSON
    progress = build_progress("json" if json_lines else "text")
    lineage = emit_lineage(f"train.{config.name}")
    with lineage if _writes_run(config) else nullcontext(LineageRun()) as told, closing(progress):
        told.inputs = [LineageDataset.version_at(config.dataset)]
        if config.fit.refit is None:
            run = fit_run(config, progress, resume=resume, once=once, profile=profile)
        else:
            run = fit_chosen(config, progress, resume=resume, once=once)
        told.inputs = [LineageDataset.version_at(read_json(run / RUN_CARD_FILE)["dataset"]["path"])]
        told.outputs = [LineageDataset.version_at(describe_run(run))]
        return run


def _writes_run(config: TrainConfig) -> bool:
    """Whether this process writes the run: of several workers the chief alone does."""
    from training.distribution.cluster import read_cluster

    return config.devices.strategy != "multi_worker" or read_cluster().index == 0


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))
