"""`sluice compare`: two runs on the same rows, with confidence intervals of their differences.

With `--margin` it is a gate: exit code 6 where the first run is not ahead of the second by at least
that much, as far as 95 % confidence goes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conf.artefacts.run import write_json
from conf.errors import ConfigError, ExitCode, LaterLogError, did_you_mean
from conf.metrics import is_minimised
from jobs.support.formatting import (
    describe_filter,
    describe_not_relevant,
    format_metric,
    metric_title,
)
from jobs.support.terminal import LogFormat, LogFormatOption, setup_logging
from jobs.support.trained_run import (
    CheckpointChoice,
    CheckpointOption,
    OnDataset,
    RunOption,
    restore_for_evaluation,
    restore_run,
)

if TYPE_CHECKING:
    from training.checkpoint.restore import TrainedModel

app = typer.Typer(add_completion=False)

COMPARISON_FILE = "comparison.json"


@app.command()
def main(
    run: RunOption,
    against: Annotated[str, typer.Option(help="The run, or series, that it is compared with.")],
    split: Annotated[str, typer.Option(help="Split to measure on.")] = "test",
    dataset: OnDataset = None,
    metric: Annotated[
        str | None, typer.Option(help="What decides; default: ndcg@10, or the first task's auc.")
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(help="Least lead that the run must have; below 0: most that it may lose."),
    ] = None,
    checkpoint: CheckpointOption = CheckpointChoice.BEST,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of `evaluation`."),
    ] = None,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Compare two runs on a split, row by row."""
    setup_logging(log_format)
    result = compare(
        run, against, split=split, dataset=dataset, metric=metric, margin=margin,
        checkpoint=checkpoint, overrides=overrides or (),
    )  # fmt: skip
    if log_format is LogFormat.JSON:
        print(json.dumps(result, sort_keys=True))
    else:
        print_comparison(result)
    return ExitCode.GATE_FAILED if result["passed"] is False else ExitCode.OK


def compare(
    run: str | Path,
    against: str | Path,
    *,
    split: str = "test",
    dataset: str | None = None,
    metric: str | None = None,
    margin: float | None = None,
    checkpoint: str = CheckpointChoice.BEST,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Compares two runs, or series (the last finished run), and writes `comparison.json`.

    The `evaluation` settings of `run`, with `overrides`, hold for both. Without `metric`, `ndcg@10`
    or the first task's `auc` or `mse` decides.

    Returns:
        `metrics` with difference and interval by name; `metric`, `lead` (the end of the interval
        that is worse for the run; None with too few users for one), `margin` and `passed`, None
        without a margin. A margin that cannot be measured is not kept, and `why` says so: there
        is no interval, or the other run was trained on a log that ends later.
    """
    from conf.publication.working_copy import describe_place

    trained = restore_for_evaluation(run, checkpoint, overrides, dataset, split)
    result: dict[str, Any] = {
        "run": describe_place(trained.run_dir),
        "against": str(against),
        "dataset": trained.manifest.dataset_name,
        "dataset_version": trained.manifest.dataset_version,
        "split": split,
        "checkpoint": str(checkpoint),
        "metrics": {},
        "metric": metric,
        "lead": None,
        "margin": margin,
    }
    try:
        other = restore_run(against, checkpoint, dataset, split)
    except LaterLogError as error:
        if margin is None:
            raise
        # Nothing would be fair, and what knows more recent days stays.
        return _write(trained, {**result, "passed": False, "why": error.what})
    from training.evaluation.evaluate import compare_runs
    from training.evaluation.intervals import FEWEST_GROUPS

    comparison = compare_runs(trained, other, split)
    decisive = require_metric(comparison, metric)
    lead = find_lead(decisive, comparison["metrics"][decisive])
    result |= {
        "against": describe_place(other.run_dir),
        **comparison,
        "metric": decisive,
        "lead": lead,
        "passed": None if margin is None else lead is not None and lead >= margin,
    }
    if margin is not None and lead is None:
        few = f"fewer than {FEWEST_GROUPS} {_name_groups(result)}"
        result["why"] = (
            f"{decisive} has no interval: it is of {few}, and a lead on so few says nothing of "
            "others"
        )
    return _write(trained, result)


def require_metric(result: Mapping[str, Any], metric: str | None) -> str:
    """What decides: the metric that is asked for, which has to be there, or the first usual one."""
    known = result["metrics"]
    if metric is None:
        return next((m for m in ("ndcg@10", "auc", "mse") if m in known), next(iter(known)))
    if metric not in known:
        raise ConfigError(
            "the runs were not compared on this metric",
            received=metric,
            allowed=", ".join(known),
            fix=did_you_mean(metric, list(known)),
        )
    return metric


def find_lead(metric: str, difference: Mapping[str, Any]) -> float | None:
    """What the first is ahead at least: the end of the interval that is worse for it, or None."""
    end = difference["high" if is_minimised(metric) else "low"]
    return None if end is None else -float(end) if is_minimised(metric) else float(end)


def _write(trained: TrainedModel, result: dict[str, Any]) -> dict[str, Any]:
    from training.checkpoint.stored_runs import bring_back

    write_json(trained.run_dir / COMPARISON_FILE, result)
    bring_back(trained.run_dir)
    return result


def _name_groups(result: Mapping[str, Any]) -> str:
    """What intervals are drawn from: users, or rows that belong to nobody."""
    return "users" if result["users"] else "rows"


def print_comparison(result: Mapping[str, Any]) -> None:
    """Prints a row per metric, and whether the margin is kept."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    if not result["metrics"]:
        console.print(f"not passed: {result['against']}: {result['why']}", soft_wrap=True)
        return
    users = f" of {result['users']:,} users" if result["users"] else ", of no users"
    console.print(f"{result['split']} split, {result['protocol']}: {result['rows']:,} rows{users}")
    if (line := describe_filter(result)) is not None:
        console.print(f"{line}, for both runs", soft_wrap=True, markup=False)
    if (line := describe_not_relevant(result)) is not None:
        console.print(line)
    for name in ("run", "against"):
        console.print(f"{name}: {result[name]}", soft_wrap=True)
    table = Table()
    for title in ("", "run", "against", "difference", "95 % interval"):
        table.add_column(title, justify="left" if title == "" else "right")
    for name, found in result["metrics"].items():
        values = [format_metric(found[part]) for part in ("run", "other")]
        low, high = found["low"], found["high"]
        few = f"too few {_name_groups(result)}"
        interval = few if low is None else f"{low:+.4f} to {high:+.4f}"
        table.add_row(metric_title(name), *values, f"{found['difference']:+.4f}", interval)
    console.print(table)
    if "why" in result:
        console.print(f"not passed: {result['why']}", soft_wrap=True)
    elif result["margin"] is not None:
        word, lead = "passed" if result["passed"] else "not passed", result["lead"]
        ahead = f"ahead by at least {lead:.4f}" if lead >= 0 else f"behind by at most {-lead:.4f}"
        console.print(
            f"{word}: {result['metric']} is {ahead} with 95 % confidence; the margin is "
            f"{result['margin']}",
            soft_wrap=True,
        )


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))
