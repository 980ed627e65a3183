"""The first run on a GPU, in this order; two logical CPU devices stand in where there is none.

`pytest -m gpu tests/training/test_gpu.py` runs it. Each run is a process of its own, whose losses
are held against those of one CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.bench import gpu
from tests.training.dynamic_runs import TABLES, TIERED
from tests.training.every_model import RANKING_MODELS, RETRIEVAL_MODELS
from tests.training.tiny_dataset import TinyConfig, write_tiny_dataset

pytestmark = [pytest.mark.gpu, pytest.mark.exhaustive]
HAS_GPU = bool(tf.config.list_physical_devices("GPU"))
DSSM = RETRIEVAL_MODELS["dssm"]
ON_KEYS = {**DSSM, "objective": {"logq_correction": False}}
SASREC = RETRIEVAL_MODELS["sasrec"]
STEPS = 50
RUNS: dict[str, dict[str, Any]] = {
    "two towers": DSSM,
    "deepfm": RANKING_MODELS["deepfm"],
    "sasrec": {**SASREC, "dropout": None},
    "dynamic table": {**ON_KEYS, "embeddings": TABLES},
    "two tiers": {**ON_KEYS, "embeddings": TIERED},
    "gru": {**RETRIEVAL_MODELS["gru"], "dropout": None},
}


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    root = tmp_path_factory.mktemp("datasets")
    plain = write_tiny_dataset(root / "plain")
    keyed = write_tiny_dataset(root / "keyed", config=TinyConfig(keyed=True, timed=True))
    return {False: plain, True: keyed}


def run_command(*arguments: str, on_cpu: bool = False) -> None:
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"} if on_cpu else {}
    command = [sys.executable, "-m", "jobs.cli", *arguments]
    subprocess.run(command, check=True, env={**os.environ, **hidden}, stdout=subprocess.DEVNULL)


def train(version: Path, root: Path, model: dict[str, Any], devices: dict[str, Any]) -> Path:
    """Trains in a process of its own; a config without devices leaves GPUs unseen."""
    root.mkdir()
    settings = {
        "dataset": str(version),
        "name": "first",
        "root": str(root),
        "model": model,
        "input": {"batch_size": 8 if model.get("embeddings") is TIERED else 64},
        "optimizer": {"learning_rate": 0.005, "epsilon": 1e-3},
        "devices": devices,
        "fit": {"max_steps": STEPS, "steps_per_loop": 1, "early_stopping": None},
        "evaluation": {"sampled_negatives": 10},
    }
    (root / "run.yaml").write_text(json.dumps(settings))
    run_command("train", str(root / "run.yaml"), "--no-report", on_cpu=not devices)
    [records] = root.rglob("metrics.jsonl")
    return records.parent


def read_losses(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


ALONE = {"strategy": "none"} if HAS_GPU else {"strategy": "mirrored", "cpu_replicas": 2}


def test_a_matrix_product_is_that_of_float32() -> None:
    tf.config.experimental.enable_tensor_float_32_execution(False)
    left, right = np.random.default_rng(0).normal(size=(2, 512, 512)).astype(np.float32)
    exact = left.astype(np.float64) @ right.astype(np.float64)
    assert np.abs(tf.matmul(left, right).numpy() - exact).max() < 1e-3


@pytest.mark.parametrize("name", RUNS)
def test_losses_are_those_of_one_cpu(name: str, versions: dict[bool, Path], tmp_path: Path) -> None:
    model, version = RUNS[name], versions["embeddings" in RUNS[name]]
    of_cpu = read_losses(train(version, tmp_path / "cpu", model, {}))
    of_device = read_losses(train(version, tmp_path / "device", model, ALONE))
    assert len(of_cpu) == len(of_device) > 1
    np.testing.assert_allclose(of_device, of_cpu, rtol=2e-3)


def test_what_was_exported_there_is_served_by_a_cpu(
    versions: dict[bool, Path], tmp_path: Path
) -> None:
    run = train(versions[False], tmp_path / "device", RUNS["gru"], ALONE)
    run_command("export", "--run", str(run))
    lists = tmp_path / "lists.parquet"
    run_command("predict", "--run", str(run), "--split", "test", "--to", str(lists), on_cpu=True)
    assert lists.exists()


@pytest.mark.skipif(not HAS_GPU, reason="a table of 10 GB is for a GPU")
def test_a_table_beyond_int32_is_made_as_a_whole() -> None:
    code = (
        "import tensorflow as tf\n"
        "from conf.training.tables import NormalConfig\n"
        "from training.embedding.static_table import _draw_first_rows\n"
        "rows = tf.Variable(tf.zeros([40_000_000, 64]))\n"
        "_draw_first_rows(rows, [1, 2], NormalConfig(stddev=1.0))\n"
        "last = rows[-1000:].numpy()\n"
        "assert 0.9 < last.std() < 1.1, last.std()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_several_devices_have_the_losses_of_one(versions: dict[bool, Path], tmp_path: Path) -> None:
    devices = {"strategy": "mirrored"} if HAS_GPU else ALONE
    losses = [
        read_losses(train(versions[False], tmp_path / name, DSSM, where))
        for name, where in (("cpu", {}), ("devices", devices))
    ]
    np.testing.assert_allclose(*losses, rtol=2e-3)


def test_the_bench_prints_each_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--rows", "2000", "--batches", "256"]) == 0
    assert "256" in capsys.readouterr().out
