"""Processes that are killed in the middle of a write: rows come out once, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest

from etl.tfrecord.commit.output_directory import read_output_manifest
from tests.etl.tfrecord.faults.conftest import (
    Driver,
    check_output,
    parent_jvm,
    pause,
    wait_for_writers,
)

ROWS = 60_000
# Until the publication and past it; more of them, at random, by the variable.
MOMENTS_S = [0.0, *(pytest.param(s, marks=pytest.mark.exhaustive) for s in (1.0, 1.6))] + [
    random.uniform(0, 2.5) for _ in range(int(os.environ.get("SLUICE_FAULT_MOMENTS", "0")))
]
JOB = {"rows": ROWS, "sleep_ms": 25}  # some 0.8 s per task


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_workers(driver: Driver, out: Path, times: int) -> None:
    driver.send(path=str(out), mode="overwrite", **JOB)
    for _ in range(times):
        writers = wait_for_writers(out)
        pause(0.4)
        kill(writers[0])
    assert driver.receive() == {}
    check_output(out, ROWS)


def test_a_killed_worker_is_replaced(local_driver: Driver, tmp_path: Path) -> None:
    kill_workers(local_driver, tmp_path / "out", 1)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("times", [3])
def test_workers_killed_again_and_again(local_driver: Driver, tmp_path: Path, times: int) -> None:
    kill_workers(local_driver, tmp_path / "out", times)


@pytest.mark.slow
def test_a_task_that_is_always_killed_fails_the_job_alone(
    local_driver: Driver, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert local_driver.run(path=str(out), mode="overwrite", rows=100) == {}
    before = read_output_manifest(out)
    local_driver.send(path=str(out), mode="overwrite", **JOB, partitions=1)
    killed: list[int] = []
    for _ in range(4):  # each in a process of its own, however long the last one took to die
        killed.append(wait_for_writers(out, without=killed)[0])
        kill(killed[-1])
    assert "error" in local_driver.receive()
    assert read_output_manifest(out) == before
    check_output(out, 100)


def kill_driver(driver: Driver, out: Path, after_s: float) -> None:
    driver.send(path=str(out), mode="overwrite", **JOB, settings={"max_records_per_file": 500})
    wait_for_writers(out)
    time.sleep(after_s)
    driver.kill()


@pytest.mark.exhaustive
def test_after_a_killed_driver_the_old_data_stands_and_the_next_write_cleans_up(
    start_driver, local_driver: Driver, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    doomed = start_driver("local[2]")
    assert local_driver.run(path=str(out), mode="overwrite", rows=100) == {}
    kill_driver(doomed.wait_ready(), out, 0.3)
    doomed.wait_for_orphans()
    assert read_output_manifest(out).shards[0].rows == 50
    assert list(out.glob("_temporary-*"))
    assert local_driver.run(path=str(out), mode="append", start=100, rows=300) == {}
    check_output(out, 300)


@pytest.mark.slow
@pytest.mark.parametrize("after_s", MOMENTS_S)
@pytest.mark.exhaustive
def test_driver_killed_at_some_moment(
    start_driver, local_driver: Driver, tmp_path: Path, after_s: float
) -> None:
    """Late moments fall into the commit: then either set may stand, but no mixture of them."""
    out = tmp_path / "out"
    doomed = start_driver("local[2]")
    assert local_driver.run(path=str(out), mode="overwrite", rows=100) == {}
    kill_driver(doomed.wait_ready(), out, after_s)
    doomed.wait_for_orphans()
    assert local_driver.run(path=str(out), mode="append", start=ROWS, rows=ROWS + 50) == {}
    committed = read_output_manifest(out)
    rows = sum(shard.rows for shard in committed.shards)
    assert rows in (150, ROWS + 50)
    check_output(out, rows)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_killed_executor_is_replaced(start_driver, tmp_path: Path) -> None:
    cluster = start_driver("local-cluster[2,1,1024]").wait_ready()
    for k in range(2):
        out = tmp_path / str(k)
        cluster.send(path=str(out), mode="overwrite", **JOB)
        (writer, *_) = wait_for_writers(out)
        pause(0.5)
        kill(parent_jvm(writer))
        assert cluster.receive() == {}
        check_output(out, ROWS)
    cluster.kill()


@pytest.mark.slow
def test_a_full_disk_ends_the_job_and_the_next_one_succeeds(
    local_driver: Driver, small_disk: Path
) -> None:
    root = small_disk / "out"
    assert local_driver.run(path=str(root), mode="overwrite", rows=1000) == {}
    before = read_output_manifest(root)
    reply = local_driver.run(path=str(root), mode="overwrite", rows=100_000)
    assert "the disk is full" in reply["error"]
    assert read_output_manifest(root) == before
    check_output(root, 1000)
    assert local_driver.run(path=str(root), mode="overwrite", rows=2000) == {}
    check_output(root, 2000)
