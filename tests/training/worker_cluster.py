"""Workers of a run on the loopback device, and the same run in one process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conf.training.train import TrainConfig
from tests.training.processes import find_addresses, start_forked
from tests.training.worker_run import Worker, fit_and_keep, run_worker
from training.monitoring.progress import TrainingProgress
from training.monitoring.run_logs import read_steps

WORKERS = 2
TIMEOUT_S = 600
WORKER_TIMEOUT_S = 30
KEYED = {
    "capacity": 4,
    "admission": {"count": 2},
    "eviction": {"min_count": 3, "every": 2},
}


@dataclass(frozen=True)
class Ended:
    code: int | None
    errors: str
    weights: list[np.ndarray]


def build_config(version: Path, root: Path, changes: dict[str, Any]) -> TrainConfig:
    settings = {
        "dataset": str(version),
        "name": "t",
        "root": str(root),
        "model": {
            "name": "dssm",
            "embedding_dim": 4,
            "user_hidden_units": [8],
            "objective": {"kind": "sampled_softmax", "negatives": {"source": "mixed", "count": 4}},
            "embeddings": {"user_id": KEYED},
        },
        "input": {"batch_size": 64, "shuffle_buffer": 300},
        "optimizer": {"learning_rate": 0.01, "clip_norm": 0.5},
        "fit": {
            "epochs": 2,
            "early_stopping": None,
            "steps_per_loop": 1,
            "checkpoint": {"every_steps": 5},
        },
    }
    return TrainConfig.model_validate(merge(settings, changes))


def merge(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    inner = {
        key: merge(settings[key], value)
        for key, value in changes.items()
        if isinstance(value, dict) and key in settings and "kind" not in value
    }
    return {**settings, **changes, **inner}


def run(
    version: Path,
    where: Path,
    resume: bool = False,
    stop: tuple[int, str] = (0, "SIGTERM"),
    changes: dict[str, Any] | None = None,
    workers: int = WORKERS,
    is_shared: bool = False,
    dies_in: tuple[int, str, int] | None = None,
) -> list[Ended]:
    """Runs all workers to their end.

    Args:
        resume: Whether they go on with the run.
        stop: Step and signal that the last worker sends itself; step 0: it does not.
        changes: What differs in the config.
        workers: How many there are.
        is_shared: Whether all have the root of the first, and not each its own.
        dies_in: Worker that is killed in a collective of rows, which one, and in which call of it.
    """
    addresses = find_addresses(workers)
    devices = {"devices": {"strategy": "multi_worker", "worker_timeout_s": WORKER_TIMEOUT_S}}
    where.mkdir(exist_ok=True)
    processes = []
    for index in range(workers):
        config = where / f"{index}.json"
        root = where / ("0" if is_shared else str(index))
        own = build_config(version, root, {**(changes or {}), **devices})
        config.write_text(own.model_dump_json())
        task = {"type": "worker", "index": index}
        worker = Worker(
            config,
            json.dumps({"cluster": {"worker": addresses}, "task": task}),
            where / f"{index}.err",
            resume,
            where / f"{index}.npz",
            stop if index == workers - 1 else (0, "SIGTERM"),
            dies_in[1:] if dies_in is not None and dies_in[0] == index else ("gather", 0),
        )
        processes.append(start_forked(run_worker, worker))
    try:
        for process in processes:
            process.join(TIMEOUT_S)
    finally:
        for process in processes:
            process.kill()
    codes = [process.exitcode for process in processes]
    return [
        Ended(code, (where / f"{index}.err").read_text(), read_weights(where / f"{index}.npz"))
        for index, code in enumerate(codes)
    ]


def run_alone(
    version: Path, where: Path, changes: dict[str, Any] | None = None
) -> list[np.ndarray]:
    """Trains in this process, without a strategy; returns the weights."""
    where.mkdir()
    config = build_config(version, where / "0", changes or {})
    fit_and_keep(config, TrainingProgress(), where / "0.npz")
    return read_weights(where / "0.npz")


def read_weights(file: Path) -> list[np.ndarray]:
    if not file.exists():
        return []
    with np.load(file) as arrays:
        return [arrays[name] for name in arrays.files]


def losses(where: Path) -> list[float]:
    return [record.loss for record in read_steps(find_run(where))]


def find_run(where: Path) -> Path:
    return next((where / "0" / "t" / "runs").iterdir())


def expect_end(ended: list[Ended], codes: list[int], message: str) -> None:
    assert [worker.code for worker in ended] == codes, ended
    assert message in ended[0].errors
    assert "--resume" in ended[0].errors
