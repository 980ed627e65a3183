"""`sluice evaluate`: measures a run's model on a split, beside baselines.

Retrieval models rank the catalogue, beside popularity and chance; ranking models score the rows,
beside the constant.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from conf.artefacts.run import METRICS_FILE, RUN_CARD_FILE, read_json, update_run_card, write_json
from conf.errors import ConfigError
from conf.local_paths import local_path
from conf.metrics import OWN_PREFIX, find_family, list_families
from conf.paths import ReadablePath
from conf.splits import TEST
from jobs.reporting.quality import describe_baselines, view_slices
from jobs.support.formatting import (
    describe_calibration,
    describe_filter,
    describe_gauc,
    describe_not_relevant,
    describe_weights,
    format_count,
    format_metric,
    metric_title,
    read_task_metrics,
)
from jobs.support.serving import read_token
from jobs.support.terminal import LogFormat, LogFormatOption, setup_logging
from jobs.support.trained_run import (
    CheckpointChoice,
    CheckpointOption,
    OnDataset,
    RunOption,
    restore_for_evaluation,
    timed,
)

if TYPE_CHECKING:
    from rich.console import Console

    from training.apply.export import Exported

app = typer.Typer(add_completion=False)


@app.command()
def main(
    run: RunOption,
    split: Annotated[str, typer.Option(help="Split to measure on.")] = TEST,
    dataset: OnDataset = None,
    predictions: Annotated[
        Path | None,
        typer.Option(
            parser=local_path,
            help="Measure the ranked lists of this file in place of the run's model.",
        ),
    ] = None,
    export: Annotated[
        str | None,
        typer.Option(help="Ask this exported version, or model (its newest one), for each row."),
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="Ask this server: http://host:port/v1/models/MODEL, or MODEL/versions/N."
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(parser=local_path, help="File of the token that --endpoint asks for."),
    ] = None,
    checkpoint: CheckpointOption = CheckpointChoice.BEST,
    baselines: Annotated[
        bool,
        typer.Option("--baselines", help="Fit EASE on the rows that train, and measure it too."),
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key of `evaluation`."),
    ] = None,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> int:
    """Rank the catalogue, or score the rows, and compare with the baselines."""
    from training.export.stored_models import resolve_export

    setup_logging(log_format)
    named = {"--predictions": predictions, "--export": export, "--endpoint": endpoint}
    _refuse_mixed(named, dataset, token_file, baselines=baselines)
    how: dict[str, Any] = {"split": split, "checkpoint": checkpoint, "overrides": overrides or ()}
    served = endpoint if export is None else resolve_export(export)
    if served is not None:
        token = None if token_file is None else read_token(token_file)
        metrics = evaluate_served(run, served, **how, dataset=dataset, token=token)
    elif predictions is not None:
        metrics = evaluate_lists(run, predictions, **how)
    else:
        metrics = evaluate(run, **how, dataset=dataset, baselines=baselines)
    if log_format is LogFormat.JSON:
        print(json.dumps(metrics, sort_keys=True))
    elif predictions is not None:
        print_list_metrics(metrics)
    else:
        print_metrics(metrics)
        if "replay" in metrics:
            print_replay(metrics["replay"])
    return 0


def _refuse_mixed(
    named: Mapping[str, Path | str | None],
    dataset: str | None,
    token_file: Path | None,
    *,
    baselines: bool,
) -> None:
    """Refuses options that do not go together; `named` each name what is measured."""
    given = [value for value in named.values() if value is not None]
    if len(given) > 1:
        raise ConfigError(
            "--predictions, --export and --endpoint each name what is measured",
            received=", ".join(map(str, given)),
            fix="leave one of them",
        )
    if given and baselines:
        raise ConfigError(
            "--baselines stand beside the run's own model",
            received=f"--baselines with {given[0]}",
            fix="leave one of them",
        )
    if named["--predictions"] is not None and dataset is not None:
        raise ConfigError(
            "--predictions are lists for the run's own dataset version",
            received=f"--dataset {dataset}",
            fix="leave --dataset out",
        )
    if token_file is not None and named["--endpoint"] is None:
        raise ConfigError(
            "--token-file goes with --endpoint", received=f"--token-file {token_file}"
        )


def evaluate(
    run_dir: str | Path,
    *,
    split: str = TEST,
    dataset: str | None = None,
    checkpoint: str = CheckpointChoice.BEST,
    overrides: Sequence[str] = (),
    baselines: bool = False,
) -> dict[str, Any]:
    """Evaluates a run, or a series' last finished one, and returns the metrics that it writes.

    The test split's go to `metrics.json` and into the run card, another split's to
    `metrics-<split>.json` alone; those on a later version, `dataset`, have its id in their file's
    name. `overrides` are `evaluation.key=value` each.
    """
    trained = restore_for_evaluation(run_dir, checkpoint, overrides, dataset, split)
    run_dir = trained.run_dir
    from training.evaluation.evaluate import evaluate_split

    with timed(run_dir, "evaluate"):
        metrics = {
            **evaluate_split(trained, split, baselines=baselines),
            "checkpoint": str(checkpoint),
            "evaluation": trained.config.evaluation.model_dump(mode="json"),
        }
        name = METRICS_FILE if split == TEST else f"metrics-{split}.json"
        if dataset is not None:
            name = f"metrics-{split}-{trained.manifest.dataset_version}.json"
        write_json(run_dir / name, metrics)
        if name == METRICS_FILE:
            update_run_card(run_dir, metrics=headline_metrics(metrics))
    return metrics


def evaluate_served(
    run_dir: str | Path,
    served: ReadablePath | str,
    *,
    split: str = TEST,
    dataset: str | None = None,
    checkpoint: str = CheckpointChoice.BEST,
    overrides: Sequence[str] = (),
    token: str | None = None,
) -> dict[str, Any]:
    """Evaluates a run through what serves it, and writes `metrics-served.json`.

    `served` is the place of an exported version, or the URL of a model, which may ask for `token`.
    """
    from training.checkpoint.stored_runs import bring_back
    from training.export.stored_models import bring

    trained = restore_for_evaluation(run_dir, checkpoint, overrides, dataset, split)
    from training.apply import endpoint
    from training.apply.export import Export

    client: Exported
    if isinstance(served, str):
        post = partial(endpoint.post_json, token=token)
        client = endpoint.Endpoint(served, endpoint.describe_tasks(trained.model), post)
    else:
        client = Export(bring(served))
    found, difference = endpoint.evaluate_served(trained, split, client)
    metrics = {**found, "checkpoint": str(checkpoint), "served": str(served)}
    write_json(trained.run_dir / "metrics-served.json", metrics)
    bring_back(trained.run_dir)
    difference.refuse()
    return metrics


def evaluate_lists(
    run_dir: str | Path,
    file: Path,
    *,
    split: str = TEST,
    checkpoint: str = CheckpointChoice.BEST,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Measures the ranked lists of a file and writes `metrics-<split>-lists.json` into the run."""
    from training.checkpoint.stored_runs import bring_back

    trained = restore_for_evaluation(run_dir, checkpoint, overrides)
    from training.evaluation.own_metrics import build_measures
    from training.evaluation.prediction_files import measure_lists, refuse_later_lists

    refuse_later_lists(read_json(trained.run_dir / RUN_CARD_FILE), file, split)
    metrics = {
        "kind": "lists",
        "dataset": trained.manifest.dataset_name,
        "dataset_version": trained.manifest.dataset_version,
        "split": split,
        "predictions": str(file),
        **measure_lists(trained, file, split, build_measures(trained.config)),
    }
    write_json(trained.run_dir / f"metrics-{split}-lists.json", metrics)
    bring_back(trained.run_dir)
    return metrics


def print_list_metrics(metrics: Mapping[str, Any]) -> None:
    """Prints the metrics of written lists, a row per cut-off."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    rows = "users" if metrics["per"] == "user" else "rows"
    _print_filter(console, metrics)
    console.print(
        f"{metrics['split']} split, lists of {metrics['predictions']}: {metrics['rows']:,} {rows}, "
        f"{metrics['without_list']:,} without a list: misses",
        soft_wrap=True,
    )
    own = dict.fromkeys(find_family(m) for m in metrics["metrics"] if m.startswith(OWN_PREFIX))
    families = (*list_families("ranking"), *own)
    table = Table()
    for title in ("k", *map(metric_title, families)):
        table.add_column(title, justify="right")
    for k in metrics["ks"]:
        values = [metrics["metrics"][f"{family}@{k}"] for family in families]
        table.add_row(str(k), *map(format_metric, values))
    console.print(table)
    if metrics["met_before"]:
        console.print(
            f"{metrics['met_before']:,} of {metrics['relevant']:,} held-out items were met by "
            "their users before: misses of a list that leaves out what was met, as `predict` does",
            soft_wrap=True,
        )
    if metrics["lists_of_others"]:
        console.print(
            f"{metrics['lists_of_others']:,} lists are of no {rows[:-1]} that is measured"
        )
    if (note := describe_not_relevant(metrics)) is not None:
        console.print(note)


def print_replay(replay: Mapping[str, Any]) -> None:
    """Prints how what was served compares with the run."""
    rows = ", ".join(f"{count:,} of {side}" for side, count in replay["rows"].items())
    print(f"served: {replay['sent']}; rows compared: {rows}; "
          f"largest difference {replay['largest_difference']:.2g}")  # fmt: skip


def headline_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the run card says: each task, or every system under the headline protocol."""
    # A filter of None takes away that of an earlier evaluation.
    measured = {key: metrics.get(key) for key in ("split", "filter")}
    if "tasks" in metrics:
        tasks = {task: _describe_task(values) for task, values in metrics["tasks"].items()}
        return {**measured, "rows": metrics["rows"], "tasks": tasks}
    protocol = next(p for p in metrics["protocols"] if p["name"] == metrics["headline"])
    return {
        **measured,
        "protocol": metrics["headline"],
        "candidates": protocol["candidates"],
        "systems": protocol["systems"],
    }


def _describe_task(values: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    found = read_task_metrics(values)
    return {
        "model": {name: model for name, (model, _) in found.items()},
        "constant": {name: value for name, (_, value) in found.items() if value is not None},
    }


def print_metrics(metrics: Mapping[str, Any]) -> None:
    """Prints one short table per protocol, or one of all tasks."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    _print_filter(console, metrics)
    if "tasks" in metrics:
        _print_tasks(console, metrics)
        return
    for protocol in metrics["protocols"]:
        mark = " (headline)" if protocol["name"] == metrics["headline"] else ""
        console.print(
            f"{metrics['split']} split, {protocol['name']}{mark}: "
            f"{protocol['candidates']:,} candidates, {protocol['rows']:,} "
            + ("users" if protocol["per"] == "user" else "rows")
        )
        table = Table()
        shown = shown_metrics(protocol["systems"]["model"])
        table.add_column("")
        for name in shown:
            table.add_column(name, justify="right")
        for system, values in protocol["systems"].items():
            table.add_row(system, *[f"{values[name]:.4f}" for name in shown])
        console.print(table)
        if lost := protocol.get("users_outside_catalogue"):
            console.print(f"{lost:,} users have no held-out item in the catalogue: misses")
        if left_out := protocol.get("left_out_as_seen"):
            console.print(
                f"{left_out:,} of {protocol['relevant']:,} held-out items are left out of their "
                "user's list as seen before: misses"
            )
        if unnamed := protocol.get("records_without_user"):
            console.print(
                f"{unnamed:,} records are of users outside the vocabulary: not measured per user"
            )
    for line in describe_baselines(metrics):
        console.print(line, soft_wrap=True, markup=False)
    _print_slices(console, metrics["slices"])
    if metrics["oov_targets"]:
        console.print(f"{metrics['oov_targets']:,} targets are not in the catalogue: misses")
    if (note := describe_not_relevant(metrics)) is not None:
        console.print(note)
    if metrics["labels"] is not None:
        console.print(describe_labels(metrics["labels"]))


def _print_filter(console: Console, metrics: Mapping[str, Any]) -> None:
    if (line := describe_filter(metrics)) is not None:
        console.print(line, soft_wrap=True, markup=False)


def _print_tasks(console: Console, metrics: Mapping[str, Any]) -> None:
    from rich.table import Table

    console.print(f"{metrics['split']} split, {metrics['rows']:,} rows")
    table = Table()
    for name in ("task", "metric", "model", "constant"):
        table.add_column(name, justify="right" if name in ("model", "constant") else "left")
    for task, values in metrics["tasks"].items():
        for number, (name, found) in enumerate(read_task_metrics(values).items()):
            model, constant = map(format_metric, found)
            table.add_row("" if number else task, metric_title(name), model, constant)
    console.print(table)
    for line in _list_notes(metrics["tasks"]):
        console.print(line, soft_wrap=True)
    for task, values in metrics["tasks"].items():
        _print_slices(console, values.get("slices", {}), f"{task}, ")


def _list_notes(tasks: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What the table's figures are of: weights, rows of GAUC, calibration; each thing once."""
    weights = dict.fromkeys(note for v in tasks.values() if (note := describe_weights(v)))
    notes = [f"weighted: {note}" for note in weights]
    for task, values in tasks.items():
        for line in (describe_gauc(values), describe_calibration(values)):
            if line is not None:
                notes.append(f"{task}: {line}" if len(tasks) > 1 else line)
    return notes


def _print_slices(console: Console, slices: Mapping[str, Any], prefix: str = "") -> None:
    from rich.table import Table

    for view in view_slices(slices):
        table = Table(title=f"{prefix}by {view['name']}", title_justify="left")
        table.add_column("")
        for title in ("rows", *view["titles"]):
            table.add_column(title, justify="right")
        for value, rows, *found in view["rows"]:
            table.add_row(value, format_count(rows), *map(format_metric, found))
        console.print(table)


def shown_metrics(values: Mapping[str, float]) -> list[str]:
    """Columns of the table: at cut-off 10, or at the smallest one evaluated; all user metrics."""
    cuts = sorted({int(name.partition("@")[2]) for name in values if "@" in name})
    k = 10 if 10 in cuts else cuts[0]
    own = [name for name in values if name.startswith(OWN_PREFIX) and name.endswith(f"@{k}")]
    if "mrr" in values:
        return [f"hit_rate@{k}", f"ndcg@{k}", "mrr", *own]
    return [*(f"{family}@{k}" for family in ("recall", "precision", "map", "ndcg")), *own]


def describe_labels(labels: Mapping[str, Any]) -> str:
    """Returns the label's metrics beside those of the constant prediction, as one line."""
    line = f"label, {labels['rows']:,} rows: AUC {_number(labels['auc'])} (constant 0.5)"
    if labels.get("gauc"):
        line += f", GAUC {_number(labels['gauc']['value'])}"
    notes = [note for note in (describe_weights(labels), describe_gauc(labels)) if note]
    end = "".join(f"; {note}" for note in notes)
    if labels["log_loss"] is None:
        return line + end
    constant = _number(labels["constant"]["log_loss"])
    line += f", log loss {_number(labels['log_loss'])} (constant {constant})"
    if labels.get("calibration"):
        line += f", mean prediction over label rate {_number(labels['calibration']['ratio'])}"
    return line + end


def _number(value: float | None) -> str:
    return "not defined" if value is None else f"{value:.4f}"


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))
