"""Builds whose executors or driver are killed: each row once, and the last version stays."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import jobs.support.spark_session
from conf.artefacts.dataset import read_manifest, resolve_version
from conf.etl.build import BuildConfig
from etl.build import build_dataset
from etl.versions.run_fingerprint import RunRequest
from jobs.cli import main
from tests.etl.logs import build_config, write_logs
from tests.etl.tfrecord.faults.conftest import Driver

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]
ROWS = 10_000


def make_config(folder: Path, root: Path, rows: int = ROWS) -> BuildConfig:
    lines = [f"{1 + n % 3}::{10 + n * 7 % 5}::{1 + n % 5}::{n}" for n in range(rows)]
    return build_config(write_logs(folder, lines), root)


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
    config = make_config(tmp_path / "logs", tmp_path / "quiet")
    wanted = checksums(build_dataset(spark, config).version)
    output = config.output.model_copy(update={"root": str(tmp_path / "killed")})
    doomed = config.model_copy(update={"output": output})
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


def start_build(config: BuildConfig, folder: Path) -> subprocess.Popen[bytes]:
    file = folder / "build.yaml"
    file.write_text(json.dumps(config.resolved()))
    command = [sys.executable, "-m", "jobs.build_dataset", str(file), "--force"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def wait_for(process: subprocess.Popen[bytes], folder: Path, pattern: str) -> None:
    while not list(folder.glob(pattern)):
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.005)


@pytest.fixture(scope="module")
def published(spark, tmp_path_factory) -> BuildConfig:
    """A dataset that has a version; every test leaves it with one of the same content."""
    folder = tmp_path_factory.mktemp("published")
    config = make_config(folder / "logs", folder / "datasets", 1000)
    build_dataset(spark, config)
    return config


def find_versions(config: BuildConfig) -> Path:
    return Path(config.output.root) / config.name / "versions"


@pytest.mark.parametrize("moment", ["", "/encoders", "/train", "/_temporary-*"])
def test_a_driver_that_is_killed_leaves_the_last_version_and_the_next_run_sweeps(
    spark, published, tmp_path, moment
):
    versions = find_versions(published)
    first = resolve_version(versions.parent)
    before = checksums(first)
    process = start_build(published, tmp_path)
    wait_for(process, versions, f".staging-*{moment}")
    process.kill()
    process.wait()
    assert checksums(first) == before
    # The old one, or the new one whole.
    assert checksums(resolve_version(versions.parent)) == before
    again = build_dataset(spark, published, request=RunRequest(force=True))
    assert checksums(again.version) == before
    assert not list(versions.glob(".*"))


def test_the_second_of_two_builds_at_once_ends_with_its_exit_code(
    spark, published, tmp_path, monkeypatch, capsys
):
    versions = find_versions(published)
    first = start_build(published, tmp_path)
    wait_for(first, versions, ".staging-*")
    first.send_signal(signal.SIGSTOP)  # so that it cannot end before the other begins
    # The other one is this process, in the suite's session.
    monkeypatch.setattr(jobs.support.spark_session, "build_session", lambda *_, **__: spark)
    monkeypatch.setattr(spark, "stop", lambda: None)
    code = main(["build", str(tmp_path / "build.yaml"), "--force"])
    first.send_signal(signal.SIGCONT)
    assert code == 4
    assert "another build" in capsys.readouterr().err
    assert first.wait() == 0
    read_manifest(resolve_version(versions.parent))
