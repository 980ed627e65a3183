"""Whole builds: through spark-submit, on a disk that fills, and ended by SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.artefacts.dataset import read_manifest, resolve_version
from etl.build import build_dataset
from etl.versions.run_fingerprint import RunRequest
from jobs.cli import main
from jobs.support.java_runtime import ensure_java
from tests.etl.logs import build_config, write_logs
from tests.lineage import file_transport, read_events
from tests.machine import fill, mount_small_disk

SUBMIT_MARK = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@SUBMIT_MARK
@pytest.mark.exhaustive
def test_spark_submit_builds_what_python_builds(built, tmp_path):
    ensure_java()
    config = build_config(write_logs(tmp_path / "logs"), tmp_path / "datasets")
    file = tmp_path / "build.yaml"
    file.write_text(json.dumps(config.resolved()))
    done = subprocess.run(
        [
            Path(sys.executable).with_name("spark-submit"),
            "--master",
            "local[2]",
            "--conf",
            "spark.ui.enabled=false",
            "--conf",
            "spark.sql.shuffle.partitions=3",
            ROOT / "jobs" / "build_dataset.py",
            file,
            "--log-format",
            "json",
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={
            **os.environ,
            "PYSPARK_PYTHON": sys.executable,
            "PYSPARK_DRIVER_PYTHON": sys.executable,
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    submitted = read_manifest(resolve_version(tmp_path / "datasets" / "small"))
    checksums = {s.path: s.crc32c for split in submitted.splits for s in split.shards}
    expected = built[0].manifest
    assert checksums == {s.path: s.crc32c for split in expected.splits for s in split.shards}
    assert json.loads(done.stdout.splitlines()[-1])["kept"] == dict(submitted.counts.kept)


FULL_DISK_MARK = pytest.mark.slow
DISK_BYTES = 4_000_000


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    with mount_small_disk(tmp_path, DISK_BYTES) as disk:
        yield disk


def sluice(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jobs.cli", *arguments], capture_output=True, text=True, check=False
    )


@FULL_DISK_MARK
@pytest.mark.exhaustive
def test_full_disk_during_a_build_keeps_the_last_version(spark, small_disk, tmp_path):
    root = small_disk / "datasets"
    rows = [f"{u}::{10 + (u * t) % 5}::{1 + t % 5}::{t}" for u in (1, 2, 3) for t in range(1, 400)]
    config = build_config(write_logs(tmp_path / "logs", rows), root)
    file = tmp_path / "build.yaml"
    file.write_text(json.dumps(config.resolved()))
    version = build_dataset(spark, config).version
    # Enough for the encoders, too little for the records.
    filler = fill(small_disk, leave_bytes=60_000)
    second = sluice("build", str(file), "--force")
    assert second.returncode == 1
    assert "No space left on device" in second.stderr or "disk is full" in second.stderr
    assert "fix:" in second.stderr
    # A worker that Spark drops in mid-sentence may say so itself; this command tells no trace.
    assert "/jobs/" not in second.stderr
    assert "/etl/" not in second.stderr
    assert resolve_version(root / "small") == version
    read_manifest(version)
    filler.unlink()
    assert main(["inspect", str(root / "small"), "--verify"]) == 0
    again = build_dataset(spark, config, request=RunRequest(force=True))
    assert again.version != version


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", ["read sources", "join and split events", "write records"])
def test_sigterm_to_a_build_and_its_java_is_told_in_a_line(tmp_path, stage):
    """Schedulers send it to all processes of a task."""
    config = build_config(write_logs(tmp_path / "logs"), tmp_path / "datasets")
    file, events = tmp_path / "build.yaml", tmp_path / "events.jsonl"
    file.write_text(json.dumps(config.resolved()))
    build = subprocess.Popen(
        [sys.executable, "-m", "jobs.cli", "build", str(file)],
        env={**os.environ, **file_transport(events)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert build.stderr is not None
    lines = iter(build.stderr.readline, "")
    assert any(line.rstrip().endswith(f" {stage} …") for line in lines)
    os.killpg(build.pid, signal.SIGTERM)
    rest = build.stderr.read()
    assert build.wait(300) == 1
    assert "error: interrupted; what was published before is untouched" in rest
    assert "Traceback" not in rest
    assert [event["eventType"] for event in read_events(events)] == ["START", "ABORT"]
    assert main(["versions", "list", str(tmp_path / "datasets" / "small")]) == 4
    again = sluice("build", str(file))
    assert again.returncode == 0, again.stderr[-2000:]
    assert sorted(os.listdir(tmp_path / "datasets" / "small")) == [".lock", "CURRENT", "versions"]
