"""Builds whose executors are killed: each row once."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.artefacts.dataset import read_manifest
from etl.build import build_dataset
from tests.etl.logs import build_config, change_keys, write_logs
from tests.etl.tfrecord.faults.conftest import Driver

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]


def checksums(version: Path) -> dict[str, tuple[int, str]]:
    splits = read_manifest(version).splits
    return {shard.path: (shard.rows, shard.crc32c) for split in splits for shard in split.shards}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Driver]:
    """A driver with two executors, which is starting still."""
    script = Path(__file__).with_name("driver.py")
    driver = Driver("local-cluster[2,1,1024]", tmp_path / "spark", script)
    yield driver
    driver.kill()


def find_executors(driver: Driver) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            session = (process / "stat").read_text().rpartition(")")[2].split()[3]
            command = (process / "cmdline").read_bytes()
            if int(session) == driver.process.pid and b"CoarseGrainedExecutorBackend" in command:
                found.append(int(process.name))
    return found


def test_killed_executors_and_speculation_never_duplicate_a_row(spark, cluster, tmp_path):
    lines = [f"{1 + n % 3}::{10 + n * 7 % 5}::{1 + n % 5}::{n}" for n in range(10_000)]
    config = build_config(write_logs(tmp_path / "logs", lines), tmp_path / "quiet")
    wanted = checksums(build_dataset(spark, config).version)
    doomed = change_keys(config, {"output.root": str(tmp_path / "killed")})
    cluster.wait_ready().send(config=doomed.resolved())
    versions = tmp_path / "killed" / "small" / "versions"
    # Once while events are joined, once while records are written.
    for moment in (".staging-*", ".staging-*/_temporary-*"):
        while not list(versions.glob(moment)):
            assert not select.select([cluster.process.stdout], [], [], 0.02)[0], cluster.receive()
        time.sleep(0.3)
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(find_executors(cluster)[0], signal.SIGKILL)
    reply = cluster.receive()
    assert "error" not in reply
    assert checksums(Path(reply["version"])) == wanted
