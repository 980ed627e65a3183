"""Two real processes on the loopback device train as one would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.artefacts.run import read_json, resolve_run
from tests.training.tiny_dataset import write_tiny_dataset
from tests.training.worker_cluster import Ended, expect_end, find_run, losses, run, run_alone
from training.checkpoint.checkpoint_files import list_checkpoints
from training.checkpoint.restore import load_run

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

KILLED_STEP, STOPPED_STEP = 13, 18  # of two epochs of twelve steps


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def two(tiny_version: Path, runs: Path) -> list[Ended]:
    ended = run(tiny_version, runs / "two")
    assert [worker.code for worker in ended] == [0, 0], ended
    return ended


@pytest.fixture(scope="module")
def one(tiny_version: Path, runs: Path) -> list[np.ndarray]:
    return run_alone(tiny_version, runs / "one")


def test_two_workers_train_what_one_process_does(
    runs: Path, one: list[np.ndarray], two: list[Ended]
) -> None:
    assert len(losses(runs / "two")) == 24
    np.testing.assert_allclose(losses(runs / "two"), losses(runs / "one"), rtol=1e-5)
    for mine, theirs in zip(one, two[0].weights, strict=True):
        np.testing.assert_allclose(theirs, mine, rtol=1e-4, atol=1e-6)


def test_keys_get_and_lose_rows_as_in_one_process(
    runs: Path, one: list[np.ndarray], two: list[Ended]
) -> None:
    alone, together = (
        load_run(find_run(runs / name), "last").model.tables["user_id"] for name in ("one", "two")
    )
    states = [table.keys.state_tensors() for table in (alone, together)]
    for name, mine in states[0].items():
        np.testing.assert_array_equal(mine, states[1][name], err_msg=name)
    assert {"counts", "steps", "waiting", "moment"} <= set(states[0])
    np.testing.assert_allclose(together.rows.numpy(), alone.rows.numpy(), rtol=1e-4, atol=1e-6)
    history = json.loads((find_run(runs / "two") / "history.json").read_text())
    for count in ("admitted", "evicted", "rejected"):
        assert history[0]["tables"]["user_id"][count] > 0, count


def test_the_chief_alone_writes(runs: Path, two: list[Ended]) -> None:
    assert not (runs / "two" / "1").exists()
    found = resolve_run(str(runs / "two" / "0" / "t"))
    card = read_json(found / "run_card.json")
    assert card["status"] == "trained"
    devices = card["devices"]
    assert (devices["strategy"], devices["workers"], devices["replicas"]) == ("multi_worker", 2, 2)
    assert (devices["batch_size"], devices["rows_per_replica"]) == (64, 32)


def test_a_run_that_a_worker_ends_goes_on(tiny_version: Path, runs: Path, two: list[Ended]) -> None:
    where = runs / "ended"
    killed = run(tiny_version, where, stop=(KILLED_STEP, "SIGKILL"))
    expect_end(killed, [1, -9], "another of its processes ended")
    saved = list_checkpoints(find_run(where) / "checkpoints" / "last")
    assert saved
    stopped = run(tiny_version, where, resume=True, stop=(STOPPED_STEP, "SIGTERM"))
    expect_end(stopped, [143, 143], "its state is saved")
    assert list_checkpoints(find_run(where) / "checkpoints" / "last")[-1].path != saved[-1].path
    resumed = run(tiny_version, where, resume=True)
    assert [worker.code for worker in resumed] == [0, 0], resumed
    assert not (where / "1").exists()
    np.testing.assert_allclose(losses(where), losses(runs / "two"), rtol=1e-5)
    for whole, *parts in zip(two[0].weights, *(worker.weights for worker in resumed), strict=True):
        np.testing.assert_array_equal(parts[0], parts[1])
        np.testing.assert_allclose(parts[0], whole, rtol=1e-4, atol=1e-6)


def test_all_that_a_step_can_be_asked_for_trains_on_two_workers_as_in_one_process(
    tiny_version: Path, runs: Path, one: list[np.ndarray], tmp_path: Path
) -> None:
    """bfloat16, a batch in parts, mixed datasets and a warm start at once.

    A loss per row: a softmax over the items of a part would depend on how parts are cut.
    """
    other = write_tiny_dataset(tmp_path, "other")
    changes: dict[str, Any] = {
        "model": {"objective": {"kind": "binary"}},
        "compute": {"mixed_precision": True},
        "optimizer": {"accumulate_steps": 2, "epsilon": 1e-3},
        "input": {"mix": [{"dataset": str(other), "weight": 0.25}]},
        "fit": {
            "epochs": 1,
            "warm_start": {"path": str(find_run(runs / "one")), "moments": "transfer"},
        },
    }
    alone = run_alone(tiny_version, tmp_path / "alone", changes)
    ended = run(tiny_version, tmp_path / "two", changes=changes)
    assert [worker.code for worker in ended] == [0, 0], ended
    assert len(losses(tmp_path / "two")) == 16  # of twelve steps of one dataset alone
    # Products are of bfloat16: about two figures.
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "alone"), rtol=2e-2)
    for mine, theirs, other_worker in zip(alone, ended[0].weights, ended[1].weights, strict=True):
        np.testing.assert_array_equal(theirs, other_worker)
        np.testing.assert_allclose(theirs, mine, atol=2e-3)
