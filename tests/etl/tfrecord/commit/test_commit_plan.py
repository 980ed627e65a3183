"""Save modes, and what counts as output."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from conf.errors import ConfigError, InputDataError
from conf.local_paths import is_data_path, list_data_files
from conf.manifest import ShardInfo
from conf.storage import processes
from conf.storage.processes import describe_process, find_jvm, is_dead
from etl.tfrecord.commit.commit_plan import JobPlan, TaskResult, begin_job, plan_commit
from etl.tfrecord.commit.output_directory import (
    DirectoryView,
    OutputManifest,
    OutputShard,
    merge_description,
    read_output_manifest,
    view_local,
)
from etl.tfrecord.files.data_files import WrittenShard
from etl.tfrecord.types.features import WireFeature


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)


DATA = [
    "_d=2/part-1", "a.tfrec", "b=1.tfr", "d=1/c=x/part-0", "d=1/x.tfrecord.gz",
    "data_tfrecord-00000-of-00001.gz", "notes.txt", "part-r-00000",
]  # fmt: skip
OTHERS = [
    "_index/part-0.idx", "backup/part-0", "backup/d=1/part-0", "d=1/plain/part-0", ".d=1/part-0",
    "_temporary-j/part-0", ".part-0.tfrecord.tmp", "_e=1", "d=1/_SUCCESS", "x._COPYING_",
]  # fmt: skip


def test_what_is_a_data_file(tmp_path: Path) -> None:
    touch(tmp_path, *DATA, *OTHERS)
    assert list_data_files(tmp_path) == DATA
    assert all(map(is_data_path, DATA))
    assert not any(map(is_data_path, OTHERS))
    assert list_data_files(tmp_path / "absent") == []
    plain = ["backup/d=1/part-0", "backup/part-0", "d=1/plain/part-0"]  # where every folder counts
    assert sorted(list_data_files(tmp_path, is_recursive=True)) == sorted([*DATA, *plain])
    assert all(is_data_path(name, is_recursive=True) for name in plain)
    assert not is_data_path("_index/part-0.idx", is_recursive=True)


@pytest.mark.parametrize("is_recursive", [False, True])
def test_linked_folders_count_and_links_that_never_end_do_not(tmp_path, is_recursive) -> None:
    touch(tmp_path, "t/d=1/f", "far/c=1/g", "far/e=1/h")
    for name, target in (
        ("t/d=2", "far"), ("t/d=1/up=1", "t"), ("t/d=1/self=1", "t/d=1"), ("t/d=3", "none"),
        ("t/d=1/top=1", "."), ("far/c=1/to=1", "far/e=1"), ("far/e=1/back=1", "far/c=1"),
        ("t/round=1", "t/round=1"), ("t/again=1", "t/d=1"),
    ):  # fmt: skip
        (tmp_path / name).symlink_to(tmp_path / target)
    assert list_data_files(tmp_path / "t", is_recursive=is_recursive) == [
        "again=1/f", "d=1/f", "d=2/c=1/g", "d=2/c=1/to=1/h", "d=2/e=1/back=1/g", "d=2/e=1/h",
    ]  # fmt: skip


def view_states(root: Path) -> DirectoryView:
    return view_local(root, has_states=True)


def test_an_empty_directory_holds_no_output_and_a_file_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "_temporary-j/part-0", "_notes.txt", "backup/part-0")
    assert not view_local(tmp_path).holds_output
    touch(tmp_path, "_SUCCESS")
    assert view_local(tmp_path).holds_output
    with pytest.raises(ConfigError, match="is a file"):
        view_local(tmp_path / "_notes.txt")


def test_a_live_process_is_not_dead_and_a_dead_one_is() -> None:
    process = subprocess.Popen(["sleep", "60"])
    owner = describe_process(process.pid)
    assert not is_dead(owner)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_dead(owner)  # a zombie counts as dead
    process.wait()
    assert is_dead(owner)
    gone = replace(describe_process(os.getpid()), start_ticks=-1)
    assert is_dead(gone)  # another process has that id
    # Nothing is known of other hosts and containers.
    assert not is_dead(replace(gone, boot_id="another"))
    assert not is_dead(replace(gone, pid_namespace="pid:[1]"))


def test_without_a_jvm_above_there_is_no_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    # There may be one in earnest: build servers are written in Java.
    monkeypatch.setattr(processes, "_executable", lambda pid: "python3")
    assert find_jvm() is None
    monkeypatch.setattr(processes, "_executable", lambda pid: {os.getppid(): "java"}.get(pid, "sh"))
    assert find_jvm() == describe_process(os.getppid())


SHARD = OutputShard("d=1/part-0", 3, 99, "00000000", "j", 0, {"d": "1"}, (16, 32), {"a": {}})
OLD = OutputManifest("Example", None, (WireFeature("a", "int64"),), {}, (("d", "int"),), (SHARD,))


def test_features_add_up() -> None:
    new = replace(OLD, features=(WireFeature("z", "bytes"), *OLD.features), shards=())
    merged = merge_description(OLD, new, "out")
    assert [f.name for f in merged.features] == ["a", "z"]
    assert merged.shards == (SHARD,)
    assert merge_description(None, new, "out") == new
    assert merge_description(replace(OLD, shards=()), new, "out") == new


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"compression": "GZIP"}, r"(?s)compression gzip.*compression none"),
        ({"record_type": "ByteArray"}, "record type"),
        ({"partition_columns": ()}, "partition columns"),
        ({"type_options": {"timestamps": "ms"}}, "timestamps"),
        ({"features": (WireFeature("a", "int64", True),)}, "'a': list of int64"),
    ],
)
def test_what_no_reader_could_follow_is_refused(change, message) -> None:
    with pytest.raises(ConfigError, match=message):
        merge_description(OLD, replace(OLD, **change), "out")


def test_a_feature_in_another_case_is_refused() -> None:
    both = (WireFeature("a", "int64"), WireFeature("A", "int64"))
    with pytest.raises(ConfigError, match=r"(?s)another case.*received: A.*allowed:  a"):
        merge_description(OLD, replace(OLD, features=both[1:]), "out")
    # Those of a directory that has had both are told apart.
    merged = merge_description(replace(OLD, features=both), replace(OLD, features=both), "out")
    assert merged.features == both


def test_the_manifest_round_trips(tmp_path) -> None:
    assert read_output_manifest(tmp_path) is None
    assert json.loads(OLD.dumps())["lowering"] == OLD.type_options  # the key of the file format
    (tmp_path / "_sluice_commit.json").write_text(OLD.dumps())
    assert read_output_manifest(tmp_path) == OLD
    (tmp_path / "_sluice_commit.json").write_text(OLD.dumps().replace('"rows"', '"lines"'))
    with pytest.raises(InputDataError, match="damaged"):
        read_output_manifest(tmp_path)


def plan_dynamic(root: Path, *paths: str) -> tuple[list[str], list[str]]:
    """Paths that the manifest lists after a dynamic overwrite, and those that made way."""
    job = JobPlan("j", "overwrite", True, replace(OLD, shards=()))
    shards = tuple(WrittenShard(ShardInfo(path, 1, 9, "00000000"), ()) for path in paths)
    result = TaskResult(0, "attempt", shards)
    view = view_states(root)
    commit = plan_commit(root, job, begin_job(root, job, view, None), view, [result])
    return [shard.path for shard in commit.manifest.shards], list(commit.old)


def test_a_partition_is_replaced_however_its_folders_are_spelled(tmp_path: Path) -> None:
    old = ["d=1/f", "d=1/e=2/f", "d=%31/f", "d=1/b"]
    touch(tmp_path, *old, "d=2/f", "e=1/d=1/f", "d=11/f", "f", "d=1/plain/f")
    assert plan_dynamic(tmp_path, "d=1/new") == (["d=1/new"], sorted(old))


def test_a_listed_file_of_a_replaced_partition_may_be_gone(tmp_path: Path) -> None:
    shards = (SHARD, replace(SHARD, path="d=2/part-0"))
    (tmp_path / "_sluice_commit.json").write_text(replace(OLD, shards=shards).dumps())
    touch(tmp_path, "d=2/part-0")
    assert plan_dynamic(tmp_path, "d=1/new") == (["d=2/part-0", "d=1/new"], [])
