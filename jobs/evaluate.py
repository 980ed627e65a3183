"""`sluice evaluate`: ranks a split with a run's model, beside popularity and chance."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from conf.run import METRICS_FILE, update_run_card, write_json
from jobs.support.terminal import LogFormat, LogFormatOption, setup_logging
from jobs.support.trained_run import CheckpointChoice, override_section, restore_run, timed

app = typer.Typer(add_completion=False)

TEST_SPLIT = "test"


@app.command()
def main(
    run: Annotated[str, typer.Option(help="A run, or a series: its last finished run.")],
    split: Annotated[str, typer.Option(help="Split to rank.")] = TEST_SPLIT,
    checkpoint: Annotated[
        CheckpointChoice, typer.Option(help="The best epoch's weights, or the last one's.")
    ] = CheckpointChoice.BEST,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of `evaluation`."),
    ] = None,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Rank the catalogue and compare with the baselines."""
    setup_logging(log_format)
    metrics = evaluate(Path(run), split=split, checkpoint=checkpoint, overrides=overrides or ())
    if log_format is LogFormat.JSON:
        print(json.dumps(metrics, sort_keys=True))
    else:
        print_metrics(metrics)
    return 0


def evaluate(
    run_dir: Path,
    *,
    split: str = TEST_SPLIT,
    checkpoint: str = CheckpointChoice.BEST,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Evaluates a run and writes its metrics.

    The test split's go to `metrics.json` and into the run card, another split's to
    `metrics-<split>.json` alone.

    Args:
        run_dir: A run's directory, or a series' (its last finished run).
        split: Split to rank.
        checkpoint: `best` or `last`.
        overrides: `evaluation.key=value` each.

    Returns:
        The content of the file.

    Raises:
        ConfigError: An override does not fit.
        UpstreamNotReadyError: There is no such run or checkpoint.
        InputDataError: The split is empty, or the run's data or checkpoint is damaged.
    """
    trained = restore_run(run_dir, checkpoint)
    run_dir = trained.run_dir
    from training.evaluation.evaluate import evaluate_split

    section = override_section("evaluation", trained.config.evaluation, overrides)
    trained = replace(trained, config=trained.config.model_copy(update={"evaluation": section}))
    with timed(run_dir, "evaluate"):
        metrics = {
            **evaluate_split(trained, split),
            "checkpoint": str(checkpoint),
            "evaluation": section.model_dump(mode="json"),
        }
        if split == TEST_SPLIT:
            write_json(run_dir / METRICS_FILE, metrics)
            update_run_card(run_dir, metrics=headline_metrics(metrics))
        else:
            write_json(run_dir / f"metrics-{split}.json", metrics)
    return metrics


def headline_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the headline protocol's metrics of every system, for the run card."""
    protocol = next(p for p in metrics["protocols"] if p["name"] == metrics["headline"])
    return {
        "split": metrics["split"],
        "protocol": metrics["headline"],
        "candidates": protocol["candidates"],
        "systems": protocol["systems"],
    }


def print_metrics(metrics: Mapping[str, Any]) -> None:
    """Prints one short table per protocol."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    for protocol in metrics["protocols"]:
        mark = " (headline)" if protocol["name"] == metrics["headline"] else ""
        console.print(
            f"{metrics['split']} split, {protocol['name']}{mark}: "
            f"{protocol['candidates']:,} candidates, {metrics['rows']:,} rows"
        )
        table = Table()
        shown = shown_metrics(protocol["systems"]["model"])
        table.add_column("")
        for name in shown:
            table.add_column(name, justify="right")
        for system, values in protocol["systems"].items():
            table.add_row(system, *[f"{values[name]:.4f}" for name in shown])
        console.print(table)
    if metrics["oov_targets"]:
        console.print(f"{metrics['oov_targets']:,} targets are not in the catalogue: misses")
    if metrics["labels"] is not None:
        console.print(describe_labels(metrics["labels"]))


def shown_metrics(values: Mapping[str, float]) -> list[str]:
    """Picks the columns of the table: at cut-off 10, or at the smallest one evaluated."""
    cuts = sorted({int(name.partition("@")[2]) for name in values if "@" in name})
    k = 10 if 10 in cuts else cuts[0]
    return [f"hit_rate@{k}", f"ndcg@{k}", "mrr"]


def describe_labels(labels: Mapping[str, Any]) -> str:
    """Returns the label's metrics beside those of the constant prediction, as one line."""

    def number(value: float | None) -> str:
        return "not defined" if value is None else f"{value:.4f}"

    line = f"label, {labels['rows']:,} rows: AUC {number(labels['auc'])} (constant 0.5)"
    if labels.get("gauc"):
        line += f", GAUC {number(labels['gauc']['value'])}"
    if labels["log_loss"] is None:
        return line
    constant = number(labels["constant"]["log_loss"])
    line += f", log loss {number(labels['log_loss'])} (constant {constant})"
    if labels.get("calibration"):
        line += f", mean prediction over label rate {number(labels['calibration']['ratio'])}"
    return line


if __name__ == "__main__":
    from jobs.cli import run_app

    raise SystemExit(run_app(app))
