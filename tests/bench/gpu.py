"""`sluice train` on a GPU, with XLA and without, beside the CPUs of the same machine.

A machine without a GPU takes two logical CPU devices in its place: figures of those say nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset

BATCHES = (256, 8_192, 65_536)
WAYS = ("CPU", "GPU", "GPU and XLA")
EVENTS_PER_USER = 100
STEPS_PER_CALL = 5
MODEL = {"kind": "ranking", "network": "deepfm", "embedding_dim": 16}


def write_rows(folder: Path, rows: int) -> Path:
    """Writes a dataset version of about so many rows of train."""
    users = rows // EVENTS_PER_USER + 1
    return write_tiny_dataset(
        folder, config=TinyConfig(users=users, items=1_000, events_per_user=EVENTS_PER_USER)
    )


def describe_way(way: str, *, has_gpu: bool) -> tuple[dict[str, str], dict[str, object]]:
    """Returns variables of the process, and the devices that the config names."""
    if way == "CPU":
        return {"CUDA_VISIBLE_DEVICES": "-1"}, {}
    xla = {"TF_XLA_FLAGS": "--tf_xla_auto_jit=2"} if way.endswith("XLA") else {}
    return xla, {} if has_gpu else {"strategy": "mirrored", "cpu_replicas": 2}


def train(version: Path, folder: Path, batch_size: int, way: str, *, has_gpu: bool) -> list[float]:
    """Trains in a process of its own; returns the rows per second of each compiled call."""
    variables, devices = describe_way(way, has_gpu=has_gpu)
    config, root = folder / "bench.yaml", folder / f"{way} {batch_size}"
    settings = {
        "dataset": str(version),
        "name": "bench",
        "root": str(root),
        "model": MODEL,
        "input": {"batch_size": batch_size},
        "devices": devices,
        "fit": {"epochs": 2, "steps_per_loop": STEPS_PER_CALL, "early_stopping": None},
    }
    config.write_text(json.dumps(settings))  # JSON is YAML.
    command = [sys.executable, "-m", "jobs.cli", "train", str(config), "--no-report"]
    subprocess.run(command, check=True, env={**os.environ, **variables}, stdout=subprocess.DEVNULL)
    [records] = root.rglob("metrics.jsonl")
    speeds = [json.loads(line)["examples_per_s"] for line in records.read_text().splitlines()]
    return speeds[len(speeds) // 2 :]  # The first calls compile.


def measure(rows: int, batches: list[int], console: Console) -> dict[str, dict[str, float]]:
    """Trains at each batch size in each way; returns rows per second, by way and batch size."""
    import tensorflow as tf

    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    found: dict[str, dict[str, float]] = {way: {} for way in WAYS}
    table = Table(title="rows per second of `sluice train`", title_justify="left")
    for column in ("batch", *WAYS):
        table.add_column(column, justify="right")
    with tempfile.TemporaryDirectory() as name:
        version = write_rows(Path(name) / "datasets", rows)
        for batch_size in batches:
            for way in WAYS:
                speeds = train(version, Path(name), batch_size, way, has_gpu=has_gpu)
                found[way][str(batch_size)] = statistics.median(speeds)
            figures = [found[way][str(batch_size)] for way in WAYS]
            shown = [f"{figure:,.0f} ({figure / figures[0]:.2f}x)" for figure in figures]
            table.add_row(f"{batch_size:,}", *shown)
    console.print(table)
    if not has_gpu:
        console.print("there is no GPU: two logical CPU devices stood in its place")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Reads the options and measures."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__)
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    found = measure(asked.rows, asked.batches, Console())
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
