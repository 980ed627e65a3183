"""A chief, workers and parameter servers on the loopback device."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from conf.artefacts.dataset import read_manifest
from conf.artefacts.run import read_json, resolve_run
from conf.training.input import InputConfig
from conf.training.models import DSSMConfig
from conf.training.objectives import SampledSoftmaxConfig
from conf.training.optimizer import OptimizerConfig
from conf.training.train import CheckpointConfig, DevicesConfig, FitConfig, StepRange, TrainConfig
from tests.training.killed_run import KEYS, row_keys
from tests.training.processes import find_addresses, start_forked
from tests.training.server_run import Task, run_task
from training.checkpoint.checkpoint_files import list_checkpoints
from training.checkpoint.restore import load_run
from training.fit import fit_run
from training.input.batches import build_train_dataset
from training.loop.validation import build_validate
from training.monitoring.epoch_records import read_history
from training.monitoring.progress import NoProgress
from training.reader.split_source import TrainingData

pytestmark = pytest.mark.slow

TIMEOUT_S = 120
WORKERS, SERVERS = 2, 2
EPOCHS, STEPS, STEPS_PER_LOOP = 3, 24, 6


def build_config(version: Path, root: Path, strategy: str) -> TrainConfig:
    return TrainConfig(
        dataset=str(version),
        name="t",
        root=str(root),
        model=DSSMConfig(
            embedding_dim=4,
            user_hidden_units=(8,),
            batch_normalization=True,
            objective=SampledSoftmaxConfig(uniform_negatives=4),
        ),
        input=InputConfig(batch_size=32, shuffle_buffer=300),
        optimizer=OptimizerConfig(learning_rate=0.01, clip_norm=0.5),
        fit=FitConfig(
            epochs=EPOCHS,
            steps_per_loop=STEPS_PER_LOOP,
            checkpoint=CheckpointConfig(every_steps=STEPS_PER_LOOP),
        ),
        devices=DevicesConfig(strategy=strategy, worker_timeout_s=5),
    )


@dataclass(frozen=True)
class Ended:
    """How the processes of a run ended: chief, workers, parameter servers."""

    codes: list[int | None]
    errors: str


def run(
    version: Path, where: Path, *, resume: bool = False, kills: Mapping[int, str] | None = None,
    profile: StepRange | None = None,
) -> Ended:  # fmt: skip
    """Runs all processes to their end.

    Args:
        version: The dataset version.
        where: Root of the run; what the processes say lies there too.
        resume: Whether to go on with the run.
        kills: Names of processes to kill once so many batches of the run are given out.
        profile: Steps to profile, or None.
    """
    where.mkdir(exist_ok=True)
    config = where / "config.json"
    config.write_text(build_config(version, where, "parameter_server").model_dump_json())
    addresses = find_addresses(1 + WORKERS + SERVERS)
    cluster = {
        "ps": addresses[1 + WORKERS :],
        "worker": addresses[1 : 1 + WORKERS],
        "chief": addresses[:1],
    }
    processes: dict[str, Any] = {}
    try:
        for job, index in [(job, i) for job, found in cluster.items() for i in range(len(found))]:
            name = f"{job}{index}"
            tf_config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            pids = {"chief0": 0} | {name: process.pid for name, process in processes.items()}
            killed = {batch: pids[name] for batch, name in (kills or {}).items() if job == "chief"}
            task = Task(config, tf_config, where / f"{name}.err", resume, killed, profile)
            processes[name] = start_forked(run_task, task)
        for process in processes.values():
            process.join(TIMEOUT_S)
    finally:
        for process in processes.values():
            process.kill()
    names = ["chief0", "worker0", "worker1", "ps0", "ps1"]
    return Ended(
        [processes[name].exitcode for name in names],
        "\n".join((where / f"{name}.err").read_text() for name in names),
    )


def expected_rows(version: Path, config: TrainConfig, epoch: int) -> Counter[tuple[int, ...]]:
    """The rows of an epoch's batches, read in this process."""
    dataset = build_train_dataset(
        version, read_manifest(version), config.input, epoch=epoch, seed=config.seed, features=KEYS
    )
    return Counter(row for batch in dataset for row in row_keys(batch))


def read_rows(where: Path) -> dict[int, list[list[tuple[int, ...]]]]:
    """What workers trained on, by the first batch of the call: of one that was done twice, as
    its checkpoint was not written yet, the second time."""
    found: dict[int, list[list[tuple[int, ...]]]] = {}
    last: tuple[int, int] | None = None
    for line in (where / "rows.jsonl").read_text().splitlines():
        chief, first, rows = json.loads(line)
        if (chief, first) != last:
            found[first] = []
        found[first].append([tuple(row) for row in rows])
        last = chief, first
    return found


def check_rows(version: Path, where: Path, killed_workers: int = 0) -> None:
    """Every row of each epoch was trained on once, and no other.

    The batch that a worker was at when it died is done by another one, from its start.
    """
    config = build_config(version, where, "none")
    found = read_rows(where)
    calls = {first: dict.fromkeys(map(tuple, steps)) for first, steps in found.items()}
    repeated = sum(map(len, found.values())) - sum(map(len, calls.values()))
    assert repeated <= killed_workers
    assert sorted(calls) == list(range(0, EPOCHS * STEPS, STEPS_PER_LOOP))
    for epoch in range(EPOCHS):
        trained = Counter(
            row
            for first, steps in calls.items()
            if first // STEPS == epoch
            for rows in steps
            for row in rows
        )
        assert trained == expected_rows(version, config, epoch)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.mark.exhaustive
def test_workers_train_what_one_process_does(tiny_version: Path, runs: Path) -> None:
    where = runs / "servers"
    ended = run(tiny_version, where, profile=StepRange(STEPS_PER_LOOP, 2 * STEPS_PER_LOOP))
    assert ended.codes == [0, 0, 0, 0, 0], ended
    check_rows(tiny_version, where)
    [profile] = resolve_run(str(where / "t")).rglob("*.xplane.pb")
    # What the chief does in a step: it takes a batch, and sends it.
    assert b"IteratorGetNext" in profile.read_bytes()
    one = fit_run(build_config(tiny_version, runs / "one", "none"), NoProgress())
    found = resolve_run(str(where / "t"))
    (*_, mine), (*_, theirs) = read_history(found), read_history(one)
    # Asynchronous steps find another way to about the same place.
    assert mine.loss == pytest.approx(theirs.loss, rel=0.1)
    assert mine.validation["ndcg@10"] == pytest.approx(theirs.validation["ndcg@10"], abs=0.1)
    newest = (list_checkpoints(path / "checkpoints" / "last")[-1].path for path in (found, one))
    tensors, reference = (tf.train.load_checkpoint(str(path / "state")) for path in newest)
    # The files of one process: `evaluate`, `export` and `predict` know of no servers.
    assert tensors.get_variable_to_shape_map() == reference.get_variable_to_shape_map()
    for name, shape in reference.get_variable_to_shape_map().items():
        if not shape and "iteration" in name:
            assert tensors.get_tensor(name) == EPOCHS * STEPS
    # The best epoch's weights, as a process without servers reads them, rank as they did there.
    best = load_run(found, "best")
    model, config, manifest = best.model, best.config, best.manifest
    version = best.version_dir
    again = build_validate(config, TrainingData(version, manifest))(model)
    best = max(record.validation["ndcg@10"] for record in read_history(found))
    assert again["ndcg@10"] == pytest.approx(best, abs=1e-6)
    devices = read_json(found / "run_card.json")["devices"]
    assert (devices["strategy"], devices["workers"]) == ("parameter_server", WORKERS)
    assert (devices["parameter_servers"], devices["rows_per_replica"]) == (SERVERS, 32)


@pytest.mark.exhaustive
def test_a_run_goes_on_whatever_dies(tiny_version: Path, runs: Path) -> None:
    where = runs / "killed"
    ended = run(tiny_version, where, kills={9: "worker1", 40: "chief0"})
    assert ended.codes == [-9, 1, -9, 1, 1], ended
    assert "the chief has died" in ended.errors
    assert max(read_rows(where)) >= 30  # It went on without the worker.
    ended = run(tiny_version, where, resume=True, kills={50: "ps0"})
    assert ended.codes == [1, 1, 1, -9, 1], ended
    assert "another of its processes ended" in ended.errors
    assert "ps 0 (127.0.0.1" in ended.errors
    assert "with --resume" in ended.errors
    ended = run(tiny_version, where, resume=True, kills={60: "worker0"})
    assert ended.codes == [0, -9, 0, 0, 0], ended
    check_rows(tiny_version, where, killed_workers=2)
    assert read_json(resolve_run(str(where / "t")) / "run_card.json")["status"] == "trained"
