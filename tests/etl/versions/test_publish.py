"""Publishing: whole or not at all, one at a time, leftovers swept, disks that fill up."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from conf.artefacts.dataset import DatasetPaths, read_manifest, resolve_version
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.publication.entries import stage_entry
from etl.versions.history import list_versions, roll_back
from etl.versions.publish import (
    hold_lock,
    new_version_id,
    publish_version,
    read_current,
    sweep_leftovers,
)
from jobs.support.run_app import run_app
from tests.datasets import build_manifest
from tests.etl.built_versions import publish
from tests.machine import PAGE_BYTES, fill


def test_lock_is_exclusive_and_dies_with_its_process(tmp_path):
    paths = DatasetPaths(tmp_path, "d")
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from conf.artefacts.dataset import DatasetPaths\n"
        "from etl.versions.publish import hold_lock\n"
        f"with hold_lock(DatasetPaths(Path({str(tmp_path)!r}), 'd')):\n"
        "    if os.fork(): time.sleep(600)\n"
        "    print('held', flush=True); time.sleep(60); os._exit(0)"  # The child lives on.
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


def test_a_file_system_without_locks_is_warned_of_and_built_on(tmp_path, monkeypatch, caplog):
    def fail(descriptor: int, flags: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", fail)
    with hold_lock(DatasetPaths(tmp_path, "d")):
        assert "has no locks" in caplog.text


def test_sweep_goes_on_where_a_process_of_the_dead_build_removes_too(tmp_path, monkeypatch):
    paths = DatasetPaths(tmp_path, "d")
    (paths.versions / ".staging-v0/train").mkdir(parents=True)
    whole, calls = shutil.rmtree, []

    def race(path: Path) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise FileNotFoundError(2, "No such file or directory", "part-0")
        whole(path)

    monkeypatch.setattr(shutil, "rmtree", race)
    sweep_leftovers(paths)
    assert os.listdir(paths.versions) == []


def test_version_ids_sort_by_time():
    ids = [new_version_id("abcdef0123") for _ in range(2)]
    assert ids == sorted(ids)
    assert ids[0].endswith("abcdef01")


def listing(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_the_disk_fills_up_at_every_moment_of_a_publication(small_disk, capsys):
    paths = DatasetPaths(small_disk, "d")
    first = publish(paths, "v1")
    before = listing(paths.base)
    app = typer.Typer(add_completion=False)
    app.command()(lambda: publish(paths, "v2") and None)
    messages, pages = [], 0
    while True:
        filler = fill(small_disk, leave_bytes=pages * PAGE_BYTES)
        code = run_app(app, [])
        filler.unlink()
        if code == 0:
            break
        assert code == 1
        messages.append(capsys.readouterr().err)
        # Nothing is left of it, no claim that would hold up the next publisher either.
        assert listing(paths.base) == before
        assert resolve_version(paths.base) == first
        assert os.listdir(paths.versions) == ["v1"]
        read_manifest(first)
        pages += 1
    assert len(messages) >= 3
    for message in messages:
        assert "No space left on device" in message
        assert "what was published before is untouched" in message
    assert resolve_version(paths.base).name == "v2"


def test_a_damaged_or_unknown_version_is_refused_and_the_current_one_stays(tmp_path):
    paths = DatasetPaths(tmp_path, "d")
    first, second = publish(paths, "v1"), publish(paths, "v2")
    (first / "train" / "part-0").write_bytes(b"x")
    with pytest.raises(InputDataError, match="not as long as"):
        roll_back(paths, "v1")
    with pytest.raises(ConfigError, match="did you mean 'v2'"):
        roll_back(paths, "v22")
    assert resolve_version(paths.base) == second
    assert [v.damage is None for v in list_versions(paths)] == [False, True]
    (first / "train" / "part-0").write_bytes(b"x" * 16)
    (second / "manifest.json").write_text("{")
    assert roll_back(paths) == ("v2", "v1")  # a damaged one can be left


def test_what_late_tasks_left_is_not_published(tmp_path):
    paths = DatasetPaths(tmp_path, "d")
    with stage_entry(paths.versions, "v1") as staging:
        (staging / "_temporary-j.discarded" / "attempt-9").mkdir(parents=True)
        (staging / "train").mkdir()
        (staging / "train" / "part-0").write_bytes(b"x" * 16)
        (staging / "train" / ".part-0.parquet.0f.tmp").write_bytes(b"half")
        version = publish_version(paths, staging, build_manifest("v1"))
    assert sorted(os.listdir(version)) == ["manifest.json", "train"]
    assert os.listdir(version / "train") == ["part-0"]


def test_a_version_that_was_overtaken_is_not_published(tmp_path):
    """As on a file system whose locks do not reach the other machine."""
    paths = DatasetPaths(tmp_path, "d")
    publish(paths, "v1")
    overtaken = replace(build_manifest("v2"), parent="another")
    with (
        pytest.raises(UpstreamNotReadyError, match="has become current meanwhile"),
        stage_entry(paths.versions, "v2") as staging,
    ):
        publish_version(paths, staging, overtaken)
    assert (read_current(paths), os.listdir(paths.versions)) == ("v1", ["v1"])


def test_an_empty_pointer_is_damage_and_no_dataset_without_versions(tmp_path):
    """Taken for none, it would let a build begin anew: vocabularies would be numbered afresh."""
    paths = DatasetPaths(tmp_path, "d")
    publish(paths, "v1")
    paths.current.write_text("\n")
    for act in (read_current, list_versions, lambda at: publish(at, "v2")):
        with pytest.raises(InputDataError, match=r"of the dataset is empty(.|\n)*v1"):
            act(paths)
    assert roll_back(paths, "v1") == (None, "v1")
    assert read_current(paths) == "v1"
