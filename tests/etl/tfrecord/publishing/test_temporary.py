"""Temporary directories: held by live jobs, swept when the job is dead."""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from conf.errors import InternalError
from etl.tfrecord.publishing.liveness import describe_process
from etl.tfrecord.publishing.modes import Baseline
from etl.tfrecord.publishing.temporary import (
    create_temporary,
    discard,
    hold_attempt,
    read_baseline,
    sweep_stale,
    temporary_directory,
)


def age(path: Path, hours: float) -> None:
    then = time.time() - hours * 3600
    for item in (*path.rglob("*"), path):
        os.utime(item, (then, then))


def start(root: Path, job: str) -> Path:
    create_temporary(root, job)
    with hold_attempt(root, job, "attempt") as attempt:
        (attempt / "shard").write_bytes(b"x")
    return temporary_directory(root, job)


def test_only_dead_jobs_are_swept(tmp_path: Path) -> None:
    places = {job: start(tmp_path, job) for job in ("old", "recent", "held", "growing")}
    for job, hours in (("old", 25), ("recent", 23), ("held", 48), ("growing", 48)):
        age(places[job], hours)
    (places["growing"] / "attempt" / "shard").touch()
    descriptor = os.open(places["held"] / ".lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        assert sweep_stale(tmp_path) == [places["old"]]
    finally:
        os.close(descriptor)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_job_with_a_dead_driver_is_swept_at_once_even_while_a_task_writes(tmp_path) -> None:
    here = describe_process(os.getpid())
    create_temporary(tmp_path, "live", owner=here)
    create_temporary(tmp_path, "elsewhere", owner=replace(here, boot_id="x", start_ticks=-1))
    create_temporary(tmp_path, "dead", owner=replace(here, start_ticks=-1))
    with (  # noqa: PT012
        pytest.raises(FileNotFoundError),
        hold_attempt(tmp_path, "dead", "attempt") as attempt,
    ):
        assert sweep_stale(tmp_path) == [temporary_directory(tmp_path, "dead")]
        (attempt / "shard").write_bytes(b"x")
    assert {p.name for p in tmp_path.iterdir()} == {"_temporary-live", "_temporary-elsewhere"}


def test_a_discard_that_was_killed_is_finished(tmp_path: Path) -> None:
    (tmp_path / "_temporary-x.discarded").mkdir()
    discard(tmp_path, "y")
    assert not list(tmp_path.iterdir())


def test_a_failed_attempt_leaves_nothing(tmp_path: Path) -> None:
    create_temporary(tmp_path, "j")
    with pytest.raises(ValueError), hold_attempt(tmp_path, "j", "attempt") as attempt:  # noqa: PT012
        (attempt / "shard").write_bytes(b"x")
        raise ValueError
    assert not (temporary_directory(tmp_path, "j") / "attempt").exists()


def test_the_baseline_comes_back(tmp_path: Path) -> None:
    create_temporary(tmp_path, "j", Baseline({"": "0", "d=1": "1"}, ("a", "b")))
    assert read_baseline(tmp_path, "j") == Baseline({"": "0", "d=1": "1"}, ("a", "b"))
    with pytest.raises(InternalError, match="not there"):
        read_baseline(tmp_path, "other")
