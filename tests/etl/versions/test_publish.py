"""Versions: published whole or not at all, swept, compared, removed; never the current one."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from conf.artefacts.dataset import DatasetPaths, published_versions, read_manifest, resolve_version
from conf.errors import ConfigError, InputDataError, UpstreamNotReadyError
from conf.manifest import RowCounts, ShardInfo, SourceSnapshot, SplitInfo
from conf.publication.entries import set_pointer, stage_entry
from conf.schema import FeatureSchema, FeatureSpec
from etl.versions.history import (
    VersionInfo,
    collect_garbage,
    diff_manifests,
    list_versions,
    roll_back,
    select_garbage,
)
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


def test_rows_schema_vocabularies_config_and_statistics():
    old = build_manifest("a")
    assert diff_manifests(old, build_manifest("b")) == {}
    spec = FeatureSpec("u", "int64", "user", vocabulary_size=7, encoding="u")
    found = {"rows": 4, "values": 4, "mean": 2.0, "missing": 0, "oov": 3}
    raw = {"missing": 2, "nan": 0, "bucketed": 0}
    new = replace(
        old,
        splits=(SplitInfo("train", (ShardInfo("train/part-0", 3, 16, "0"),)),),
        schema=FeatureSchema((spec, FeatureSpec("x", "float32", "context"))),
        source=SourceSnapshot((), None, {"name": "d", "joins": [{"name": "a", "size": 5}]}, "1"),
        counts=RowCounts({"log": 4}, {"log": {}}, 1, {"train": 3}, {"duplicate": 1}),
        statistics={"train": {"u": {**found, "raw": raw}}},
    )
    assert diff_manifests(old, new) == {
        "rows": {"train": [1, 3]},
        "read": {"log": [1, 4]},
        "dropped": {"duplicate": [None, 1]},
        "schema": {
            "u": ["int64 [] user identity", "int64 [] user u"],
            "x": [None, "float32 [] context identity"],
        },
        "vocabularies": {"identity": [5, None], "u": [None, 7]},
        "config": {"joins.a.name": [None, "a"], "joins.a.size": [None, 5]},
        "statistics": {
            # Of three ids 1 two are nulls.
            "train.u": {"mean": [None, 2.0], "missing_rate": [None, 0.5], "oov_rate": [None, 0.5]}
        },
    }


def test_small_moves_of_a_mean_are_no_highlight():
    old, near, far = (
        replace(build_manifest("a"), statistics={"train": {"u": {"rows": 9, "mean": mean}}})
        for mean in (1.0, 1.005, 1.5)
    )
    assert diff_manifests(old, near) == {}
    assert diff_manifests(old, far) == {"statistics": {"train.u": {"mean": [1.0, 1.5]}}}


NOW = datetime(2026, 3, 1, tzinfo=UTC)


def version(age_days: int, *, current: bool = False) -> VersionInfo:
    created = NOW - timedelta(days=age_days)
    return VersionInfo(f"{created:%Y%m%dT%H%M%S%f}Z-x", current, created.isoformat())


@given(
    st.integers(1, 12), st.data(), st.one_of(st.none(), st.integers(1, 14)),
    st.one_of(st.none(), st.integers(0, 14)),
)  # fmt: skip
def test_limits_hold_and_the_current_version_stays(count, data, keep, older_than):
    current = data.draw(st.integers(0, count - 1))
    versions = [version(count - k, current=k == current) for k in range(count)]
    if keep is None and older_than is None:
        return
    chosen = select_garbage(versions, keep, older_than, NOW)
    for place, info in enumerate(versions):
        newest = keep is not None and place >= count - keep
        young = older_than is not None and count - place <= older_than
        assert (info in chosen) == (not info.is_current and not newest and not young)


def test_gc_removes_files_sweeps_and_respects_the_lock(tmp_path):
    paths = DatasetPaths(tmp_path, "d")
    for name in ("v1", "v2", "v3"):
        publish(paths, name)
    set_pointer(paths.base, "v1")
    assert [v.version_id for v in collect_garbage(paths, 1, None, dry_run=True)] == ["v2"]
    assert published_versions(paths.base) == ["v1", "v2", "v3"]
    with hold_lock(paths), pytest.raises(UpstreamNotReadyError):
        collect_garbage(paths, 1, None)
    (paths.versions / ".trash-v0").mkdir()  # a removal that was killed
    assert [v.version_id for v in collect_garbage(paths, 1, None)] == ["v2"]
    assert sorted(entry.name for entry in paths.versions.iterdir()) == ["v1", "v3"]
    assert [v.is_current for v in list_versions(paths)] == [True, False]
    set_pointer(paths.base, "v2")
    gone = list_versions(paths)[-1]
    assert gone.is_current
    assert gone.damage == "CURRENT names it, and it is not there"
    with pytest.raises(UpstreamNotReadyError, match="no published dataset version"):
        collect_garbage(DatasetPaths(tmp_path, "nothing"), 1, None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["d"]
