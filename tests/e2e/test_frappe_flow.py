"""The whole way of preset `frappe`: libfm logs to a probability that a server gives of one row."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from conf.artefacts.run import read_json, resolve_run
from conf.etl.build import BuildConfig
from conf.load import load_config
from etl.build import build_dataset
from jobs.cli import main
from tests.e2e.preset_samples import draw_libfm

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "serving.md"
TRAIN = {
    "fit.epochs": 3, "input.batch_size": 256, "devices.strategy": "mirrored",
    "devices.cpu_replicas": 2,
}  # fmt: skip


def write_logs(folder: Path) -> None:
    """A made log in the form of the split: train as two logs, which the build merges."""
    rows = {"train.1": 4000, "train.2": 4000, "validation": 1000, "test": 700}
    folder.mkdir()
    for seed, (name, count) in enumerate(rows.items(), 1):
        lines = draw_libfm(count, fields=10, size=5382, negative="-1", seed=seed)
        (folder / f"frappe.{name}.libfm").write_text("\n".join(lines) + "\n")


@contextmanager
def serve(models: Path, log: Path) -> Iterator[str]:
    """A server as a process of its own; yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jobs.cli", "serve", "--export", str(models)]
    with log.open("w") as out:
        process = subprocess.Popen([*command, "--port", str(port)], stdout=out, stderr=out)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 600
        while not is_ready(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def post(url: str, body: bytes) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
        return json.load(answer)


def read_guide_row() -> tuple[str, bytes]:
    """The libfm row of the guide, and the request that its command makes of it."""
    text = GUIDE.read_text(encoding="utf-8")
    [row] = re.findall(r"^row='(.*)'$", text, re.MULTILINE)
    [code] = re.findall(r"python -c '(.*?)'", text, re.DOTALL)
    made = subprocess.run([sys.executable, "-c", code], input=row, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return row, made.stdout.encode()


def list_numbers(value: Any, path: str = "") -> dict[str, float]:
    """Every number of a JSON document by its path."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        found = [list_numbers(item, f"{path}/{name}") for name, item in pairs]
        return {name: number for part in found for name, number in part.items()}
    return {path: float(value)} if isinstance(value, int | float) else {}


def test_libfm_logs_become_the_probability_of_a_row(spark, tmp_path) -> None:
    write_logs(tmp_path / "logs")
    settings = [f"data_dir={tmp_path / 'logs'}", f"output.root={tmp_path / 'datasets'}"]
    built = build_dataset(spark, load_config(BuildConfig, "etl", "frappe", settings))
    assert dict(built.manifest.counts.kept) == {"train": 8000, "validation": 1000, "test": 700}
    shards = [str(built.version / shard.path) for shard in built.manifest.split("train").shards]
    assert sum(1 for _ in tf.data.TFRecordDataset(shards)) == 8000

    options = [f"{name}={value}" for name, value in TRAIN.items()] + [f"root={tmp_path / 'runs'}"]
    command = ["train", "frappe", "--dataset", str(tmp_path / "datasets/frappe"), "--no-report"]
    command += [part for option in options for part in ("--set", option)]
    done = subprocess.run(
        [sys.executable, "-m", "jobs.cli", *command], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    run = resolve_run(str(tmp_path / "runs/frappe"))
    assert main(["evaluate", "--run", str(run)]) == 0
    assert main(["export", "--run", str(run), "--to", str(tmp_path / "models")]) == 0

    row, request = read_guide_row()
    with serve(tmp_path / "models", tmp_path / "server.log") as url:
        model = f"{url}/v1/models/frappe"
        assert main(["evaluate", "--run", str(run), "--endpoint", model]) == 0
        [answer] = post(f"{model}:predict", request)["predictions"]
    own, served = (read_json(run / name) for name in ("metrics.json", "metrics-served.json"))
    before = own["tasks"]["used"].pop("uncalibrated")  # A server knows the calibrated ones alone.
    assert before["log_loss"] != own["tasks"]["used"]["log_loss"]
    expected = list_numbers(own["tasks"])
    assert expected["/used/rows"] == 700
    assert list_numbers(served["tasks"]) == pytest.approx(expected, abs=1e-6)
    assert own["tasks"]["used"]["auc"] > 0.6  # It has learned something.

    rows = tmp_path / "row.jsonl"
    rows.write_text(json.dumps(json.loads(request)["instances"][0]) + "\n")
    predict = ["predict", "--run", str(run), "--input", str(rows)]
    assert main([*predict, "--to", str(tmp_path / "row.parquet")]) == 0
    [score] = pq.read_table(tmp_path / "row.parquet")["used"].to_pylist()
    assert answer == pytest.approx(score, abs=1e-6)
    assert len(row.split()) == 11
    assert 0 < answer < 1
    shutil.rmtree(tmp_path / "datasets")  # A server needs the models alone.
