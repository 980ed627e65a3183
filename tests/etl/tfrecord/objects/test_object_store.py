"""The store itself: what is stored is what was written."""

from __future__ import annotations

import logging
import os
import pickle
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from conf.errors import ConfigError, InputDataError
from conf.storage.locations import FileOpener, StoredPath
from conf.storage.object_store import Storage
from etl.tfrecord.codec.framing import read_record_blocks
from etl.tfrecord.commit.commit_plan import JOB_FILE, TaskResult
from etl.tfrecord.commit.object_commit import ObjectCommitter
from etl.tfrecord.commit.output_directory import COMMIT_FILE
from etl.tfrecord.spark.input_files import InputListing, list_input_files, plan_splits
from etl.tfrecord.spark.options import parse_read_options, parse_write_options
from etl.tfrecord.spark.write_job import plan_write
from etl.tfrecord.spark.write_task import WriteTask
from tests.fake_store import FakeStore


@pytest.mark.parametrize("name", ["a.tfrecord.gz", "d=1/c%20ü.lz4"])
def test_bytes_are_stored_as_they_are(any_root: Storage, name: str) -> None:
    data = os.urandom(100_000)
    any_root.put(name, data)
    assert any_root.read(name) == data
    found = any_root.find(name)
    assert found is not None
    assert found.bytes == len(data)
    assert any_root.list_objects() == {name: found}
    assert abs(found.mtime_ns / 1e9 - time.time()) < 60
    with any_root.open_input(name) as file:
        file.seek(50_000)
        assert file.read(10) == data[50_000:50_010]


def test_an_object_is_there_when_its_upload_is_closed(any_root: Storage) -> None:
    assert any_root.list_objects() == {}
    assert any_root.find("x") is None
    any_root.delete("x")
    any_root.delete_tree()
    with pytest.raises(FileNotFoundError):
        any_root.open_input("x")
    any_root.put("x", b"old")
    upload, buffer = any_root.open_output("x"), np.zeros(3 << 20, np.uint8)
    for value in range(5):
        buffer[:] = value  # It may be used again after a write.
        upload.write(buffer)
    assert any_root.read("x") == b"old"
    upload.close()
    with any_root.open_input("x") as file:
        assert file.read() == b"".join(bytes([value]) * buffer.size for value in range(5))


def test_marks_of_folders_are_no_data(any_root: Storage) -> None:
    if any_root.scheme == "hdfs":
        pytest.skip("HDFS has folders, and no file of the same name")
    for key, data in {"d=1": b"", "d=1/e": b"", "d=1/e/x": b"1", "d=2": b"", "empty": b""}.items():
        any_root.put(key, data)
    assert sorted(any_root.list_objects()) == ["d=1/e/x", "empty"]


def test_objects_and_places(any_root: Storage) -> None:
    any_root.child("d").put("x", b"1")
    any_root.move_all({"d/x": "e/y"})
    assert any_root.read("e/y") == b"1"
    assert "e" in any_root.list_folders()
    any_root.delete_all(["d/x", "none"])
    assert sorted(any_root.list_objects()) == ["e/y"]
    copy = pickle.loads(pickle.dumps(any_root.child("d=1")))
    assert copy == Storage(any_root.scheme, f"{any_root.root}/d=1")
    assert (copy.parent, Storage("s3", "bucket").parent) == (any_root, None)


def test_an_object_is_replaced_only_as_it_was_seen(any_root: Storage) -> None:
    assert any_root.read_version("x") == (None, None)
    assert any_root.replace("x", b"1", None)
    assert not any_root.replace("x", b"2", None)
    data, version = any_root.read_version("x")
    assert data == b"1"
    assert any_root.replace("x", b"3", version)
    assert not any_root.replace("x", b"4", version)
    assert any_root.read("x") == b"3"
    any_root.delete("x")
    assert not any_root.replace("x", b"5", version)
    assert any_root.read("x") is None


def test_it_answers_as_a_path_does(tmp_path: Path, any_root: Storage) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a.txt").write_text("text: ä", encoding="utf-8")
    any_root.put("folder/a.txt", "text: ä".encode())
    for place in (tmp_path, StoredPath(any_root)):
        file = place / "folder/a.txt"
        assert file.is_file()
        assert not (place / "folder").is_file()
        assert file.read_text(encoding="utf-8") == "text: ä"
        assert file.read_text("ascii", "replace").startswith("text: ")
        assert (str(file), file.name) == (f"{place}/folder/a.txt", "a.txt")
        assert file.absolute() == file
        assert (place / "folder/../b").resolve() == (place / "b").resolve()
        assert file.is_relative_to(place)
        assert place.is_relative_to(place)
        assert not (place / "../x").resolve().is_relative_to(place)
        assert not (place / "ab").is_relative_to(place / "a")
        with pytest.raises(FileNotFoundError):
            (place / "none").read_text()


@pytest.mark.parametrize("call", ["is_file", "read_text", "list_bytes"])
def test_a_store_that_refuses_ends_in_a_message(store: FakeStore, root: Storage, call: str) -> None:
    def refuse(name: str) -> None:
        raise OSError("ACCESS_DENIED")

    store.hook = refuse
    with pytest.raises(ConfigError, match="cannot be reached") as refused:
        getattr(StoredPath(root) / "x", call)()
    assert "ACCESS_DENIED" in str(refused.value)
    assert StoredPath(root).has_bucket()  # the store does not tell


BATCH = pa.record_batch({"payload": [b"a" * 100, b"b", b"c" * 50], "d": ["x", "y", "x"]})


def write(root: Storage, batch: pa.RecordBatch = BATCH, **options: str) -> None:
    """What a driver and one task do."""
    given = {"path": root.uri, "recordType": "ByteArray", **options}
    parsed = parse_write_options(given, overwrite=False)
    plan = plan_write(from_arrow_schema(batch.schema), parsed)
    committer = ObjectCommitter(root)
    committer.begin(plan.job, None)
    with committer.hold_attempt(plan.job.job_id, "attempt-0") as place:
        sink = WriteTask(place, f"part-00000-{plan.job.job_id}", plan.options, plan.source)
        shards = sink.write_all(iter([batch]))
    committer.publish(plan.job, [TaskResult(0, "attempt-0", shards)])


def listing(path: str, **options: str) -> InputListing:
    return list_input_files(parse_read_options({"path": path, **options}))


def payloads(found: InputListing) -> list[bytes]:
    blocks = (b for f in found.files for b in read_record_blocks(f.path, opener=FileOpener()))
    return sorted(b.data[start : start + n].tobytes() for b in blocks for start, n in b.index)


def test_partitions_side_files_and_single_partitions(any_root: Storage) -> None:
    write(any_root, partitionBy="d", index="true", maxRecordsPerFile="1")
    found = listing(any_root.uri)
    assert found.partition_columns == (("d", "string"),)
    assert sorted(file.partition for file in found.files) == [("x",), ("x",), ("y",)]
    assert sum(key.startswith("_index/d=") for key in any_root.list_objects()) == 3
    below = listing(f"{any_root.uri}/d=x")
    assert (len(below.files), below.partition_columns) == (2, ())
    assert below.committed is not None
    based = listing(f"{any_root.uri}/d=x", basePath=any_root.uri)
    assert {file.partition for file in based.files} == {("x",)}
    with pytest.raises(ConfigError, match="basePath"):
        listing(f"{any_root.uri}/d=x", basePath=f"{any_root.uri}/d=y")


def test_the_manifest_decides(any_root: Storage, caplog: pytest.LogCaptureFixture) -> None:
    one = BATCH.drop_columns(["d"])
    for _ in range(2):
        write(any_root, one, compression="gzip")
    any_root.put("part-r-00000.tfrecord", b"no TFRecord at all")
    with caplog.at_level(logging.WARNING):
        found = listing(any_root.uri)
    assert payloads(found) == sorted([*one.column(0).to_pylist()] * 2)
    assert payloads(listing(found.files[0].path)) == sorted(one.column(0).to_pylist())
    assert "part-r-00000" in caplog.text
    key = found.files[0].path[len(any_root.uri) + 1 :]
    any_root.put(key, b"cut")
    with pytest.raises(InputDataError, match="another size"):
        listing(any_root.uri)
    any_root.delete(key)
    with pytest.raises(InputDataError, match="not there"):
        listing(any_root.uri)


def test_without_a_manifest_all_that_is_shown_counts(any_root: Storage) -> None:
    write(any_root, BATCH.drop_columns(["d"]))
    any_root.delete(COMMIT_FILE)
    [name] = [key for key in any_root.list_objects() if key.startswith("part-")]
    data = any_root.read(name) or b""
    for key in ("any.name", "_hidden/x", "sub/x"):
        any_root.put(key, data)
    assert len(listing(any_root.uri).files) == 2
    ObjectCommitter(any_root).find_temporary(name.split("-")[2]).put(JOB_FILE, b"{}")
    assert len(listing(any_root.uri).files) == 1  # the other one is not decided yet
    with pytest.raises(ConfigError, match="no such"):
        listing(f"{any_root.uri}-none")


def test_objects_are_split_at_known_places_only(any_root: Storage) -> None:
    rows = pa.record_batch({"payload": [bytes([65 + k]) * 1_000_000 for k in range(20)]})
    write(any_root, rows)

    def split() -> list[tuple[int, int | None]]:
        given = {"path": any_root.uri, "splitBytes": str(5 << 20), "minPartitions": "9"}
        options = parse_read_options(given)
        planned = plan_splits(list_input_files(options).files, options)
        return [(s.start, s.stop) for part in planned for s in part]

    (start, middle), (again, end) = split()  # The manifest knows a place every 16 MiB.
    assert (start, middle, end) == (0, again, None)
    any_root.delete(COMMIT_FILE)
    assert split() == [(0, None)]
