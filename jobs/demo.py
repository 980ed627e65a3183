"""`sluice demo`: the whole chain on generated sample logs, each step a command of its own."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from conf.artefacts.dataset import resolve_version
from conf.artefacts.run import (
    EXPORT_DIR,
    METRICS_FILE,
    RECOMMENDATIONS_FILE,
    REPORT_FILE,
    read_json,
    resolve_run,
)
from conf.errors import ExitCode
from conf.local_paths import local_path

app = typer.Typer(add_completion=False)


@app.command()
def main(
    out: Annotated[
        Path, typer.Option(parser=local_path, help="Folder for logs, dataset and run.")
    ] = Path("work"),
    ratings: Annotated[int, typer.Option(min=1000, help="Ratings to generate.")] = 100_000,
    seed: Annotated[int, typer.Option(help="Seed of the sample and of the training.")] = 7,
) -> int:
    """Generate logs, build a dataset, train, evaluate, export, recommend, report."""
    start = time.monotonic()
    dataset, run = out / "datasets" / "demo", out / "runs" / "demo"
    steps = list_steps(out, ratings, seed)
    for number, (title, arguments) in enumerate(steps, start=1):
        print(f"\n[{number}/{len(steps)}] {title}:  sluice {shlex.join(arguments)}", flush=True)
        code = run_step(arguments)
        if code != ExitCode.OK:
            print(f"error: step {title!r} ended with exit code {code}", file=sys.stderr)
            return code
    print_result(dataset, resolve_run(str(run)), time.monotonic() - start)
    return ExitCode.OK


def list_steps(out: Path, ratings: int, seed: int) -> list[tuple[str, list[str]]]:
    """Returns the title and the arguments of each subcommand, in the order of the chain."""
    data, datasets, runs = out / "demo-logs", out / "datasets", out / "runs"
    of_run = ["--run", str(runs / "demo")]
    generate = f"--ratings {ratings} --seed {seed} --overwrite".split()
    build = ["--data", str(data), "--set", f"output.root={_quote(datasets)}"]
    settings = ["--set", f"root={_quote(runs)}", "--set", f"seed={seed}"]
    return [
        ("generate sample logs", ["data", "generate", "--out", str(data), *generate]),
        ("build the dataset", ["build", "demo", *build]),
        ("train", ["train", "demo", "--dataset", str(datasets / "demo"), *settings]),
        ("evaluate", ["evaluate", *of_run]),
        ("export", ["export", *of_run]),
        ("recommend", ["predict", *of_run]),
        ("report", ["report", *of_run]),
    ]


def _quote(path: Path) -> str:
    """A path as a YAML value, whatever characters it holds."""
    return json.dumps(str(path), ensure_ascii=False)


def run_step(arguments: list[str]) -> int:
    """Runs one subcommand as a process of its own, as a scheduler would; returns its exit code."""
    command = [sys.executable, "-m", "jobs.cli", *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.run(command, check=False, env=environment).returncode  # noqa: S603


def print_result(dataset: Path, run: Path, seconds: float) -> None:
    """Prints the metrics against the baselines, and where everything is."""
    from rich.console import Console
    from rich.table import Table

    metrics = read_json(run / METRICS_FILE)
    headline = next(p for p in metrics["protocols"] if p["name"] == metrics["headline"])
    shown = [m for m in ("hit_rate@10", "ndcg@10", "mrr") if m in headline["systems"]["model"]]
    table = Table(
        title=f"{metrics['split']} split, {headline['candidates']:,} items ranked, "
        f"{metrics['users']:,} users",
        title_justify="left",
    )
    table.add_column("")
    for metric in shown:
        table.add_column(metric, justify="right")
    for system, values in headline["systems"].items():
        table.add_row(system, *[f"{values[metric]:.4f}" for metric in shown])
    console = Console()
    console.print()
    console.print(table)
    for name, path in (
        ("report", run / REPORT_FILE),
        ("dataset", resolve_version(dataset)),
        ("model", run / EXPORT_DIR),
        ("ranked lists", run / RECOMMENDATIONS_FILE),
    ):
        console.print(f"{name + ':':<14}{path}", soft_wrap=True, highlight=False)
    console.print(f"{'time:':<14}{seconds:.0f} s", highlight=False)


if __name__ == "__main__":
    from jobs.support.run_app import run_app

    raise SystemExit(run_app(app))
