"""Publishing: whole or not at all, one at a time, leftovers swept."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime

import pytest

from conf.dataset import DatasetPaths, resolve_version
from conf.errors import UpstreamNotReadyError
from etl.publish import (
    hold_lock,
    new_version_id,
    stage_version,
    sweep_leftovers,
)
from tests.etl.versions.versions import publish


def test_published_version_is_current_and_staging_is_gone(tmp_path):
    paths = DatasetPaths(tmp_path, "d")
    assert publish(paths, "v1") == resolve_version(paths.base)
    assert publish(paths, "v2") == resolve_version(paths.base)
    assert sorted(os.listdir(paths.versions)) == ["v1", "v2"]


def test_failed_build_removes_its_staging_and_moves_nothing(tmp_path):
    paths = DatasetPaths(tmp_path, "d")
    first = publish(paths, "v1")

    def build() -> None:
        with stage_version(paths, "v2") as staging:
            (staging / "x").write_bytes(b"1")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        build()
    assert os.listdir(paths.versions) == ["v1"]
    assert resolve_version(paths.base) == first


@pytest.mark.parametrize("step", ["write_text_atomic", "sync_directory"])
def test_failure_inside_publish_keeps_the_last_version_current(tmp_path, monkeypatch, step):
    paths = DatasetPaths(tmp_path, "d")
    first = publish(paths, "v1")

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"etl.publish.{step}", fail)
    with pytest.raises(OSError, match="No space"):
        publish(paths, "v2")
    assert resolve_version(paths.base) == first


def test_lock_is_exclusive_and_dies_with_its_process(tmp_path):
    paths = DatasetPaths(tmp_path, "d")
    code = (
        "import sys, time; from pathlib import Path; from conf.dataset import DatasetPaths;"
        "from etl.publish import hold_lock\n"
        f"with hold_lock(DatasetPaths(Path({str(tmp_path)!r}), 'd')):\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UpstreamNotReadyError), hold_lock(paths):
        pass
    holder.kill()
    holder.wait()
    with hold_lock(paths):
        pass


def test_sweep_takes_leftovers_only(tmp_path):
    paths = DatasetPaths(tmp_path, "d")
    publish(paths, "v1")
    dead = paths.staging("v0")
    (dead / "train").mkdir(parents=True)
    assert sweep_leftovers(paths) == [dead.name]
    assert os.listdir(paths.versions) == ["v1"]


def test_version_ids_sort_by_time():
    ids = [new_version_id("abcdef0123", datetime(2026, 1, 1, 0, 0, s, tzinfo=UTC)) for s in (1, 2)]
    assert ids == sorted(ids)
    assert ids[0].endswith("abcdef01")
