"""Two real processes on the loopback device train as one would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from conf.run import read_json, resolve_run
from conf.training import (
    CheckpointConfig,
    DevicesConfig,
    DSSMConfig,
    FitConfig,
    InputConfig,
    OptimizerConfig,
    SampledSoftmaxConfig,
    TrainConfig,
)
from tests.training.loopback import find_addresses
from training.checkpoint.shelf import list_entries
from training.step_log import read_steps

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300
SIGNAL_STEP = 18  # in the second epoch of twelve steps


@dataclass(frozen=True)
class Ended:
    code: int
    errors: str
    weights: list[np.ndarray]


def build_config(version: Path, root: Path, devices: DevicesConfig) -> TrainConfig:
    return TrainConfig(
        dataset=str(version),
        name="t",
        root=str(root),
        model=DSSMConfig(
            embedding_dim=4,
            user_hidden_units=(8,),
            objective=SampledSoftmaxConfig(uniform_negatives=4),
        ),
        input=InputConfig(batch_size=64, shuffle_buffer=300),
        optimizer=OptimizerConfig(learning_rate=0.01, clip_norm=0.5),
        fit=FitConfig(
            epochs=2,
            early_stopping=None,
            steps_per_loop=1,
            checkpoint=CheckpointConfig(every_steps=5),
        ),
        devices=devices,
    )


def run(
    version: Path,
    where: Path,
    workers: int,
    resume: str = "new",
    stop: tuple[int, int, str] = (0, 0, "SIGTERM"),
) -> list[Ended]:
    """Runs all workers to their end; each has a root of its own.

    Args:
        stop: Worker, step and signal that it sends itself; step 0: none does.
    """
    kind = "multi_worker" if workers > 1 else "none"
    addresses = find_addresses(workers)
    processes = []
    for index in range(workers):
        root = where / str(index)
        devices = DevicesConfig(strategy=kind, worker_timeout_s=30)
        config = where / f"{index}.json"
        where.mkdir(exist_ok=True)
        config.write_text(build_config(version, root, devices).model_dump_json())
        task = {"type": "worker", "index": index}
        tf_config = json.dumps({"cluster": {"worker": addresses}, "task": task})
        step = stop[1] if stop[0] == index else 0
        command = [sys.executable, "-m", "tests.training.worker_run", str(config)]
        processes.append(
            subprocess.Popen(
                [*command, str(where / f"{index}.npz"), resume, str(step), stop[2]],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "TF_CONFIG": tf_config},
                stderr=(where / f"{index}.err").open("w"),
            )
        )
    try:
        codes = [process.wait(TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        Ended(code, (where / f"{index}.err").read_text(), read_weights(where / f"{index}.npz"))
        for index, code in enumerate(codes)
    ]


def read_weights(file: Path) -> list[np.ndarray]:
    if not file.exists():
        return []
    with np.load(file) as arrays:
        return [arrays[name] for name in arrays.files]


def losses(where: Path) -> list[float]:
    return [record.loss for record in read_steps(find_run(where))]


def find_run(where: Path) -> Path:
    return next((where / "0" / "t" / "runs").iterdir())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def two(tiny_version: Path, runs: Path) -> list[Ended]:
    ended = run(tiny_version, runs / "two", 2)
    assert [worker.code for worker in ended] == [0, 0], ended
    return ended


def test_two_workers_train_what_one_process_does(
    tiny_version: Path, runs: Path, two: list[Ended]
) -> None:
    (one,) = run(tiny_version, runs / "one", 1)
    assert one.code == 0, one.errors
    assert len(losses(runs / "two")) == 24
    np.testing.assert_allclose(losses(runs / "two"), losses(runs / "one"), rtol=1e-5)
    for mine, theirs in zip(one.weights, two[0].weights, strict=True):
        np.testing.assert_allclose(theirs, mine, rtol=1e-4, atol=1e-6)


def test_the_workers_hold_the_same_weights(two: list[Ended]) -> None:
    assert two[0].weights
    for chief, other in zip(two[0].weights, two[1].weights, strict=True):
        np.testing.assert_array_equal(chief, other)


def test_the_chief_alone_writes(runs: Path, two: list[Ended]) -> None:
    assert not (runs / "two" / "1").exists()
    found = resolve_run(str(runs / "two" / "0" / "t"))
    card = read_json(found / "run_card.json")
    assert card["status"] == "trained"
    devices = card["devices"]
    assert (devices["strategy"], devices["workers"], devices["replicas"]) == ("multi_worker", 2, 2)
    assert (devices["batch_size"], devices["rows_per_replica"]) == (64, 32)


@pytest.mark.parametrize(
    ("stop", "codes", "message"),
    [
        ((1, SIGNAL_STEP, "SIGKILL"), [1, -9], "another of its processes ended"),
        ((1, SIGNAL_STEP, "SIGTERM"), [143, 143], "its state is saved"),
    ],
)
def test_a_run_that_a_worker_ends_goes_on(
    stop: tuple[int, int, str],
    codes: list[int],
    message: str,
    tiny_version: Path,
    runs: Path,
    two: list[Ended],
) -> None:
    where = runs / stop[2]
    ended = run(tiny_version, where, 2, stop=stop)
    assert [worker.code for worker in ended] == codes, ended
    assert message in ended[0].errors
    assert "--resume" in ended[0].errors
    assert list_entries(find_run(where) / "checkpoints" / "last")
    resumed = run(tiny_version, where, 2, "resume")
    assert [worker.code for worker in resumed] == [0, 0], resumed
    assert not (where / "1").exists()
    np.testing.assert_allclose(losses(where), losses(runs / "two"), rtol=1e-5)
    for whole, *parts in zip(two[0].weights, *(worker.weights for worker in resumed), strict=True):
        np.testing.assert_array_equal(parts[0], parts[1])
        np.testing.assert_allclose(parts[0], whole, rtol=1e-4, atol=1e-6)
