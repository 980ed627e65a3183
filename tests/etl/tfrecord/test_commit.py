"""The commit protocol: all or nothing, also when interrupted anywhere."""

import fcntl
import json
import os
import time
from pathlib import Path

import pyarrow as pa
import pytest

from conf.errors import InternalError
from etl.tfrecord import commit
from etl.tfrecord.commit import (
    PartitionResult,
    create_temporary,
    discard,
    hold_temporary,
    publish,
    read_commit,
    sweep_stale,
    temporary_directory,
)
from etl.tfrecord.writer import ShardWriter

BATCH = pa.record_batch({"a": [1, 2, 3]})


def write_attempt(root: Path, job: str, partition: int, name: str) -> PartitionResult:
    if not temporary_directory(root, job).exists():
        create_temporary(root, job)
    with (
        hold_temporary(root, job) as temporary,
        ShardWriter(temporary / f"attempt-{partition}", BATCH.schema) as writer,
    ):
        writer.write(BATCH)
    return PartitionResult(partition, writer.info, name)


def visible(root: Path) -> set[str]:
    return {p.name for p in root.iterdir() if p.name[0] not in "._"}


def test_publish_lists_shards_by_partition_and_marks_success(tmp_path: Path) -> None:
    results = [write_attempt(tmp_path, "j", p, f"part-{p}.tfrecord") for p in (2, 0)]
    publish(tmp_path, "j", [results[0], PartitionResult(1, None, "part-1"), results[1]], True)
    assert {p.name for p in tmp_path.iterdir()} == {
        "part-0.tfrecord", "part-2.tfrecord", "_sluice_commit.json", "_SUCCESS"
    }  # fmt: skip
    shards = read_commit(tmp_path)
    assert [shard["partition"] for shard in shards] == [0, 2]
    assert [shard["path"] for shard in shards] == ["part-0.tfrecord", "part-2.tfrecord"]
    assert all(s["bytes"] == (tmp_path / s["path"]).stat().st_size for s in shards)
    assert all(s["rows"] == 3 for s in shards)


def test_overwrite_replaces_and_append_adds(tmp_path: Path) -> None:
    publish(tmp_path, "a", [write_attempt(tmp_path, "a", 0, "part-a.tfrecord")], True)
    (tmp_path / "notes.txt").write_text("mine")
    publish(tmp_path, "b", [write_attempt(tmp_path, "b", 0, "part-b.tfrecord")], False)
    assert [s["path"] for s in read_commit(tmp_path)] == ["part-a.tfrecord", "part-b.tfrecord"]
    publish(tmp_path, "c", [write_attempt(tmp_path, "c", 0, "part-c.tfrecord")], True)
    assert visible(tmp_path) == {"part-c.tfrecord", "notes.txt"}
    assert [s["path"] for s in read_commit(tmp_path)] == ["part-c.tfrecord"]


def test_a_missing_attempt_publishes_nothing_and_keeps_the_old(tmp_path: Path) -> None:
    publish(tmp_path, "a", [write_attempt(tmp_path, "a", 0, "part-a.tfrecord")], True)
    results = [write_attempt(tmp_path, "b", p, f"part-b{p}.tfrecord") for p in (0, 1)]
    (temporary_directory(tmp_path, "b") / "attempt-1").write_bytes(b"cut")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    with pytest.raises(InternalError, match="partition 1"):
        publish(tmp_path, "b", results, True)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before


def test_an_error_while_publishing_takes_everything_back(tmp_path, monkeypatch):
    publish(tmp_path, "a", [write_attempt(tmp_path, "a", 0, "part-0.tfrecord")], True)
    before = {p.name: p.stat().st_ino for p in tmp_path.iterdir()}
    results = [write_attempt(tmp_path, "b", p, f"part-{p}.tfrecord") for p in (0, 1)]

    def fail(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(commit, "write_atomically", fail)
    with pytest.raises(OSError, match="No space"):
        publish(tmp_path, "b", results, True)
    discard(tmp_path, "b")
    assert {p.name: p.stat().st_ino for p in tmp_path.iterdir()} == before


def test_a_late_attempt_neither_brings_the_job_back_nor_breaks_it(tmp_path, monkeypatch) -> None:
    result = write_attempt(tmp_path, "a", 0, "part-a.tfrecord")
    with hold_temporary(tmp_path, "a") as temporary:
        late = ShardWriter(temporary / "attempt-9", BATCH.schema)
        with pytest.raises(FileNotFoundError), late as writer:  # noqa: PT012
            publish(tmp_path, "a", [result], True)
            writer.write(BATCH)
    with pytest.raises(InternalError, match="not there"), hold_temporary(tmp_path, "a"):
        pass
    assert {p.name for p in tmp_path.iterdir()} == {
        "part-a.tfrecord", "_sluice_commit.json", "_SUCCESS"
    }  # fmt: skip


def test_statistics_that_are_no_json_change_nothing(tmp_path: Path) -> None:
    publish(tmp_path, "a", [write_attempt(tmp_path, "a", 0, "part-a.tfrecord")], True)
    result = write_attempt(tmp_path, "b", 0, "part-b.tfrecord")
    bad = PartitionResult(0, result.attempt, result.name, {"x": object()})
    with pytest.raises(TypeError):
        publish(tmp_path, "b", [bad], True)
    assert visible(tmp_path) == {"part-a.tfrecord"}
    assert (tmp_path / "_SUCCESS").exists()


def test_leftovers_of_killed_attempts_are_not_published(tmp_path: Path) -> None:
    result = write_attempt(tmp_path, "a", 0, "part-a.tfrecord")
    temporary = temporary_directory(tmp_path, "a")
    (temporary / ".attempt-7.tmp").write_bytes(b"cut off")
    (temporary / "attempt-8").write_bytes(b"a speculative twin that lost")
    publish(tmp_path, "a", [result], True)
    assert visible(tmp_path) == {"part-a.tfrecord"}
    assert not temporary.exists()


def test_discard_leaves_published_files(tmp_path: Path) -> None:
    publish(tmp_path, "a", [write_attempt(tmp_path, "a", 0, "part-a.tfrecord")], True)
    write_attempt(tmp_path, "b", 0, "part-b.tfrecord")
    discard(tmp_path, "b")
    assert {p.name for p in tmp_path.iterdir()} == {
        "part-a.tfrecord", "_sluice_commit.json", "_SUCCESS"
    }  # fmt: skip


def age(path: Path, hours: float) -> None:
    then = time.time() - hours * 3600
    for item in (*path.iterdir(), path):
        os.utime(item, (then, then))


def test_only_dead_jobs_are_swept(tmp_path: Path) -> None:
    for job in ("old", "recent", "held", "growing"):
        write_attempt(tmp_path, job, 0, "x")
    for job, hours in (("old", 25), ("recent", 23), ("held", 48), ("growing", 48)):
        age(temporary_directory(tmp_path, job), hours)
    (temporary_directory(tmp_path, "growing") / "attempt-0").touch()
    descriptor = os.open(temporary_directory(tmp_path, "held") / ".lock", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        assert sweep_stale(tmp_path) == [temporary_directory(tmp_path, "old")]
    finally:
        os.close(descriptor)
    assert len(list(tmp_path.iterdir())) == 3


def test_commit_file_is_json_with_one_key(tmp_path: Path) -> None:
    result = write_attempt(tmp_path, "a", 0, "part-a.tfrecord")
    statistics = {"a": {"count": 3}}
    publish(tmp_path, "a", [PartitionResult(0, result.attempt, result.name, statistics)], True)
    data = json.loads((tmp_path / "_sluice_commit.json").read_text())
    assert set(data) == {"shards"}
    assert set(data["shards"][0]) == {
        "path", "rows", "bytes", "crc32c", "partition", "statistics"
    }  # fmt: skip
    assert data["shards"][0]["statistics"] == statistics
