"""`sluice train --sweep FILE`: many runs over a space of configs, and the best of them."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING

from conf.artefacts.run import REPORT_FILE
from conf.training.train import TrainConfig
from conf.training.trials import SweepConfig
from jobs.support.terminal import LogFormat, quiet_tensorflow

if TYPE_CHECKING:
    from rich.table import Table

    from training.trials import Study


def sweep_configs(
    config: TrainConfig, sweep: SweepConfig, *, resume: bool, report: bool, log_format: LogFormat
) -> Study:
    """Runs a sweep and prints its trials; with `report` each has one, and a page leads to them."""
    with quiet_tensorflow():
        from training.trials import run_sweep
    from training.monitoring.progress import build_progress

    after = report_trials if report else None
    with closing(build_progress(log_format.value)) as progress:
        result = run_sweep(config, sweep, progress, resume=resume, after=after)
    _print_sweep(result, log_format)
    return result


def report_trials(result: Study) -> None:
    """Writes the reports that trials lack, and the page that leads to them."""
    from jobs.reporting.page import write_sweep_page
    from jobs.reporting.report import try_report

    for trial in result.trials:
        if trial.run is not None and not (trial.run / REPORT_FILE).exists():
            try_report(trial.run)
    write_sweep_page(result)


def _print_sweep(result: Study, log_format: LogFormat) -> None:
    page, best = result.directory / REPORT_FILE, result.best
    if log_format is LogFormat.JSON:
        report = {"report": page} if page.exists() else {}
        answer = {"best": best and best.detail, "best_config": result.best_config}
        print(json.dumps({"sweep": result.directory, **report, **answer}, default=str))
        return
    from rich.console import Console

    Console().print(build_trials_table(result))
    print(f"sweep: {result.directory}")
    if page.exists():
        print(f"page:  {page}")
    print("no trial has finished" if best is None else f"best:  {result.best_config}")


def build_trials_table(result: Study) -> Table:
    """Returns the trials as a table, the best one in bold."""
    from rich.table import Table
    from rich.text import Text

    from jobs.support.formatting import format_value

    table = Table("trial", *result.keys, result.metric, "time", "state", title="Trials")
    for trial in result.trials:
        values = [format_value(trial.values.get(key)) for key in result.keys]
        value = "" if trial.value is None else f"{trial.value:.4f}"
        seconds = f"{trial.seconds:.0f} s"
        # As text: a value may look like markup.
        cells = map(Text, (str(trial.number), *values, value, seconds, trial.state))
        table.add_row(*cells, style="bold" if trial == result.best else None)
    return table
