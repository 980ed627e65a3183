"""Two real processes on the loopback device train as one would."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from conf.artefacts.run import read_json, resolve_run
from tests.training.worker_cluster import Ended, find_run, losses, run, run_alone
from training.checkpoint.restore import load_run

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


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
