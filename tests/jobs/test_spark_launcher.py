from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conf.artefacts.run import read_json, resolve_run
from jobs.cli import main
from jobs.support.spark_launcher import SparkLaunch, build_command, choose_exit_code
from tests.java import START_LINES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([1, 1], 1),
        ([1, 3], 3),  # the others ended because that one did
        ([143, 143], 143),
        ([1, -9], 137),
        ([0, 1], 1),
    ],
)
def test_the_exit_code_is_that_of_the_cause(codes: list[int], code: int) -> None:
    assert choose_exit_code(codes) == code


def test_a_worker_is_the_same_command() -> None:
    start = SparkLaunch("{}", 2, True, False, "json")
    command = build_command(start, Path("c.yaml"))
    assert command[:5] == [sys.executable, "-m", "jobs.cli", "train", "c.yaml"]
    assert "devices.strategy=multi_worker" in command
    assert {"--resume", "--no-report"} <= set(command)
    plain = build_command(SparkLaunch("{}", 2, False, True, "json"), Path("c.yaml"))
    assert not {"--resume", "--no-report"} & set(plain)


@pytest.mark.parametrize("arguments", [["--launcher", "spark"], ["--workers", "2"]])
def test_launcher_and_workers_go_together(arguments: list[str], capsys) -> None:
    assert main(["train", "--dataset", "d", "--set", "name=t", *arguments]) == 2
    assert "go together" in capsys.readouterr().err


def sluice_train(*arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the suite's Spark session has one of another size."""
    return subprocess.run(
        [sys.executable, "-m", "jobs.cli", "train", "--launcher", "spark", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.mark.slow
@pytest.mark.exhaustive
def test_more_workers_than_slots_are_refused() -> None:
    ended = sluice_train(
        "--workers", "3", "--spark-master", "local[2]", "--dataset", "d", "--set", "name=t"
    )
    assert ended.returncode == 2
    assert "--workers 3, slots for tasks: 2" in ended.stderr
    assert not [line for line in START_LINES if line in ended.stderr], ended.stderr


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_workers_as_tasks_of_a_barrier_job(tmp_path: Path) -> None:
    from tests.training.tiny_dataset import write_tiny_dataset

    version = write_tiny_dataset(tmp_path)
    settings = {"root": tmp_path / "runs", "name": "t", "model.name": "mf", "fit.epochs": 1}
    settings |= {"model.embedding_dim": 4, "input.batch_size": 64}
    ended = sluice_train(
        *("--workers", "2", "--spark-master", "local[2]", "--dataset", str(version)),
        *(word for key, value in settings.items() for word in ("--set", f"{key}={value}")),
    )
    assert ended.returncode == 0, ended.stderr
    assert "[worker 0] " in ended.stderr  # streamed while it ran
    assert "worker 1 on " in ended.stderr
    devices = read_json(resolve_run(str(tmp_path / "runs" / "t")) / "run_card.json")["devices"]
    assert (devices["strategy"], devices["workers"]) == ("multi_worker", 2)
    # What a worker refuses comes back as its exit code.
    missing = sluice_train(
        *("--workers", "2", "--spark-master", "local[2]", "--dataset", str(tmp_path / "none")),
        *("--set", "name=t", "--set", f"root={tmp_path / 'runs'}"),
    )
    assert missing.returncode == 4, json.dumps(missing.stderr)
