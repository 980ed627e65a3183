"""`sluice train --sweep FILE`: many runs over a space of configs, and the best of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import ConfigError
from conf.load import load_config
from conf.run import REPORT_FILE
from conf.training.sweep import SweepConfig
from conf.training.train import TrainConfig
from jobs.support.terminal import LogFormat, quiet_tensorflow

if TYPE_CHECKING:
    from rich.table import Table

    from training.sweep import SweepResult


def read_sweep(file: Path) -> SweepConfig:
    """Reads a sweep's file.

    Raises:
        ConfigError: There is no such file, or it does not hold a sweep.
    """
    if not file.is_file():
        raise ConfigError("no such sweep", received=file, allowed="a YAML file")
    return load_config(SweepConfig, "training", str(file.resolve()))


def plan_sweep(config: TrainConfig, sweep: SweepConfig) -> dict[str, Any]:
    """Returns what a sweep would do; nothing is written.

    Raises:
        ConfigError: The space or the metric does not fit.
    """
    with quiet_tensorflow():
        from training.sweep import check_space, find_metric

    metric = find_metric(config, sweep)
    check_space(config, sweep)
    resolved = sweep.model_dump(mode="json")
    return {"sweep": resolved, "trials": sweep.trial_count, "metric": metric}


def sweep_configs(
    config: TrainConfig,
    sweep: SweepConfig,
    *,
    resume: bool,
    report: bool = True,
    log_format: LogFormat = LogFormat.TEXT,
) -> SweepResult:
    """Runs a sweep, prints the table of its trials and returns them.

    Args:
        config: What trials start from.
        sweep: What they try.
        resume: Whether to go on with the newest sweep of the same space and config.
        report: Whether to write a report of each trial, and a page about all of them.
        log_format: `text` or `json`.

    Raises:
        SluiceError: The sweep was refused or stopped; finished trials are kept.
    """
    with quiet_tensorflow():
        from training.sweep import run_sweep
    from training.monitoring.progress import build_progress

    progress = build_progress(log_format.value, config.fit.log_every_seconds)
    try:
        after = report_trials if report else None
        result = run_sweep(config, sweep, progress, resume=resume, after=after)
    finally:
        progress.close()
    _print_sweep(result, log_format)
    return result


def report_trials(result: SweepResult) -> None:
    """Writes the reports that trials lack, and the page that leads to them."""
    from jobs.report import try_report
    from jobs.reporting.page import write_sweep_page

    for trial in result.trials:
        if trial.run is not None and not (trial.run / REPORT_FILE).exists():
            try_report(trial.run)
    write_sweep_page(result)


def _print_sweep(result: SweepResult, log_format: LogFormat) -> None:
    page = result.directory / REPORT_FILE
    if log_format is LogFormat.JSON:
        best = None if result.best is None else result.best.detail
        print(
            json.dumps(
                {
                    "sweep": str(result.directory),
                    **({"report": str(page)} if page.exists() else {}),
                    "best": best,
                    "best_config": None if best is None else str(result.best_config),
                }
            )
        )
        return
    from rich.console import Console

    console = Console()
    console.print(build_trials_table(result))
    print(f"sweep: {result.directory}")
    if page.exists():
        print(f"page:  {page}")
    print("no trial has finished" if result.best is None else f"best:  {result.best_config}")


def build_trials_table(result: SweepResult) -> Table:
    """Returns the trials as a table, the best one in bold."""
    from rich.table import Table
    from rich.text import Text

    from jobs.reporting.formatting import format_value

    keys = list(dict.fromkeys(key for trial in result.trials for key in trial.values))
    table = Table(title="Trials", title_justify="left")
    for name in ("trial", *keys, result.metric, "time", "state"):
        table.add_column(name)
    for trial in result.trials:
        is_best = result.best is not None and trial.number == result.best.number
        cells = (
            str(trial.number),
            *(format_value(trial.values.get(key)) for key in keys),
            "" if trial.value is None else f"{trial.value:.4f}",
            "" if trial.seconds is None else f"{trial.seconds:.0f} s",
            trial.state,
        )
        # As text: a value may look like markup.
        table.add_row(*map(Text, cells), style="bold" if is_best else None)
    return table
