"""Tables whose rows the workers share train as whole ones do."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.tiny_dataset import write_tiny_dataset
from tests.training.worker_cluster import (
    KEYED,
    Ended,
    expect_end,
    find_run,
    losses,
    run,
    run_alone,
)
from training.checkpoint.checkpoint_files import list_checkpoints, read_checkpoint
from training.checkpoint.restore import load_run
from training.checkpoint.saved_tensors import MODEL, collect_state, copy_state

pytestmark = pytest.mark.slow

SHARDED: dict[str, Any] = {
    "model": {
        "embeddings": {
            "user_id": {**KEYED, "shard": "workers"},
            "items": {"features": ["movie_id", "history"], "capacity": 4, "shard": "workers"},
        },
        "objective": {"kind": "binary"},
    },
}
KILLED_STEP, STOPPED_STEP = 13, 18  # of two epochs of twelve steps


def change(settings: dict[str, Any], *, shard: str | None = "workers", **table: Any) -> Any:
    """A copy with other settings of the items' table, and all tables whole where asked for."""
    changed = copy.deepcopy(settings)
    tables = changed["model"]["embeddings"]
    tables["items"] |= table
    for each in tables.values():
        each["shard"] = shard
    return changed


def run_sharded(version: Path, where: Path, **options: Any) -> list[Ended]:
    return run(version, where, is_shared=True, **{"changes": SHARDED, **options})


def read_model(where: Path) -> dict[str, np.ndarray]:
    """The tables of a run with their keys, whole, and all other weights."""
    model = load_run(find_run(where), "last").model
    return {n: t.numpy() for n, t in copy_state(collect_state(**{MODEL: model})).items()}


def assert_same(where: Path, reference: Path) -> None:
    np.testing.assert_allclose(losses(where), losses(reference), rtol=0, atol=1e-6)
    mine, theirs = read_model(where), read_model(reference)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_allclose(mine[name], value, rtol=1e-4, atol=2e-6, err_msg=name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def one(tiny_version: Path, runs: Path) -> Path:
    run_alone(tiny_version, runs / "one", change(SHARDED, shard=None))
    return runs / "one"


@pytest.fixture(scope="module")
def two(tiny_version: Path, runs: Path, one: Path) -> Path:
    ended = run_sharded(tiny_version, runs / "two")
    assert [worker.code for worker in ended] == [0, 0], ended
    return runs / "two"


def test_two_workers_train_what_one_process_does(one: Path, two: Path) -> None:
    assert len(losses(two)) == 24
    assert_same(two, one)
    tables = [json.loads((find_run(where) / "history.json").read_text()) for where in (one, two)]
    for mine, alone in zip(tables[1], tables[0], strict=True):
        for metric, value in alone["validation"].items():
            assert mine["validation"][metric] == pytest.approx(value, abs=1e-6), metric
        for count in ("keys", "waiting", "admitted", "evicted", "rejected"):
            assert mine["tables"]["user_id"][count] == alone["tables"]["user_id"][count], count
        assert mine["tables"]["items"]["exchanged"] > 0
    newest = list_checkpoints(find_run(two) / "checkpoints" / "last")[-1].path
    assert {file.name.partition(".")[0] for file in newest.iterdir()} == {
        "checkpoint", "state", "rows-00000-of-00002", "rows-00001-of-00002",
    }  # fmt: skip


@pytest.mark.exhaustive
def test_a_run_that_a_worker_ends_goes_on(tiny_version: Path, runs: Path, one: Path) -> None:
    where = runs / "ended"
    killed = run_sharded(tiny_version, where, stop=(KILLED_STEP, "SIGKILL"))
    expect_end(killed, [1, -9], "another of its processes ended")
    last = find_run(where) / "checkpoints" / "last"
    newest = list_checkpoints(last)[-1].path
    next(newest.glob("rows-00001-of-00002.data*")).unlink()  # The one before takes its place.
    stopped = run_sharded(tiny_version, where, resume=True, stop=(STOPPED_STEP, "SIGTERM"))
    expect_end(stopped, [143, 143], "its state is saved")
    resumed = run_sharded(tiny_version, where, resume=True)
    assert [worker.code for worker in resumed] == [0, 0], resumed
    assert_same(where, one)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("victim", "collective"), [(1, "sum_at_owner"), (0, "gather")])
def test_a_worker_that_dies_in_an_exchange_ends_the_others(
    tiny_version: Path, tmp_path: Path, one: Path, victim: int, collective: str
) -> None:
    where = tmp_path / "run"
    call = 2 * KILLED_STEP  # In the second of two tables: the first has been exchanged.
    ended = run_sharded(tiny_version, where, dies_in=(victim, collective, call))
    assert [worker.code for worker in ended] == ([-9, 1] if victim == 0 else [1, -9]), ended
    told = ended[1 - victim].errors
    assert told.count("another of its processes ended") == 1
    assert "--resume" in told
    assert "Traceback" not in told
    kept = list_checkpoints(find_run(where) / "checkpoints" / "last")
    assert kept[-1].position.step(12) in (10, 12)  # The last ones that were due before.
    for entry in kept:
        read_checkpoint(entry.path)
    resumed = run_sharded(tiny_version, where, resume=True)
    assert [worker.code for worker in resumed] == [0, 0], resumed
    assert_same(where, one)
    assert [entry.name for entry in where.glob("0/t/runs/*/checkpoints/.*")] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("numbers", [(2, 1), (1, 2), (2, 4)], ids=str)
def test_a_run_goes_on_with_another_number_of_workers(
    tiny_version: Path, tmp_path: Path, one: Path, numbers: tuple[int, int]
) -> None:
    before, after = numbers
    where = tmp_path / "run"
    ended = run_sharded(tiny_version, where, workers=before, stop=(KILLED_STEP, "SIGTERM"))
    assert [worker.code for worker in ended] == [143] * before, ended
    resumed = run_sharded(tiny_version, where, workers=after, resume=True)
    assert [worker.code for worker in resumed] == [0] * after, resumed
    assert_same(where, one)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mixed_precision", "tolerance"), [(False, 1e-5), (True, 3e-2)])
def test_a_day_goes_on_from_the_day_before(
    tiny_version: Path,
    tmp_path: Path,
    one: Path,
    two: Path,
    mixed_precision: bool,
    tolerance: float,
) -> None:
    """A warm start with moments, steps in parts, mixed datasets, a full table."""
    other = write_tiny_dataset(tmp_path, "other")

    def plan(earlier: Path, shard: str | None) -> dict[str, Any]:
        rules = {"max_rows": 45, "eviction": {"when_full": "least_recent"}}
        return {
            **change(SHARDED, shard=shard, **rules),
            "compute": {"mixed_precision": mixed_precision},
            "input": {"mix": [{"dataset": str(other), "weight": 0.25}]},
            "optimizer": {"accumulate_steps": 2, "epsilon": 1e-3},
            "fit": {
                "epochs": 1,
                "warm_start": {"path": str(find_run(earlier)), "moments": "transfer"},
            },
        }  # fmt: skip

    run_alone(tiny_version, tmp_path / "alone", plan(one, None))
    ended = run_sharded(tiny_version, tmp_path / "two", changes=plan(two, "workers"))
    assert [worker.code for worker in ended] == [0, 0], ended
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "alone"), rtol=tolerance)
    assert len(losses(tmp_path / "two")) == 16  # of twelve steps of one dataset alone
    mine, theirs = read_model(tmp_path / "two"), read_model(tmp_path / "alone")
    for name, value in theirs.items():
        np.testing.assert_allclose(mine[name], value, atol=tolerance, err_msg=name)


@pytest.mark.exhaustive
def test_a_checkpoint_without_a_workers_rows_is_refused(
    tiny_version: Path, tmp_path: Path, two: Path
) -> None:
    where = tmp_path / "run"
    ended = run_sharded(tiny_version, where, stop=(KILLED_STEP, "SIGTERM"))
    assert [worker.code for worker in ended] == [143, 143], ended
    files = find_run(where).glob("checkpoints/last/*/rows-00001-of-00002.data*")
    kept = {file: tmp_path / file.parent.name for file in files}
    for file, place in kept.items():
        file.rename(place)
    refused = run_sharded(tiny_version, where, resume=True)
    assert [worker.code for worker in refused] == [3, 3], refused
    assert all("rows-00001-of-00002" in worker.errors for worker in refused)
    for file, place in kept.items():
        place.rename(file)
    resumed = run_sharded(tiny_version, where, resume=True)
    assert [worker.code for worker in resumed] == [0, 0], resumed
    assert_same(where, two)
