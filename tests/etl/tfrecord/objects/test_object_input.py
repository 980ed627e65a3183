"""Reads from a store: what the manifest lists, else what is there; shards as tasks write them."""

from __future__ import annotations

import logging

import pyarrow as pa
import pytest

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.committed import COMMIT_FILE
from etl.tfrecord.framing import read_record_blocks, read_records
from etl.tfrecord.input_files import Listing, list_input_files
from etl.tfrecord.locations import FileOpener
from etl.tfrecord.options import WriteOptions, parse_write_options
from etl.tfrecord.publishing.commit import JobPlan, TaskResult
from etl.tfrecord.publishing.committer import ObjectCommitter
from etl.tfrecord.publishing.intents import Intent
from etl.tfrecord.read_options import parse_read_options
from etl.tfrecord.splits import plan_splits
from etl.tfrecord.storage import Storage
from etl.tfrecord.task_sink import TaskSink
from etl.tfrecord.write_plan import plan_write

pytestmark = pytest.mark.usefixtures("owner")

BATCH = pa.record_batch(
    {"payload": pa.array([b"a" * 100, b"b", b"c" * 50]), "d": pa.array(["x", "y", "x"])}
)


@pytest.fixture
def root(any_root: Storage) -> Storage:
    """Reads are the same from the store of the tests and from real servers."""
    return any_root


def write(root: Storage, batch: pa.RecordBatch = BATCH, **options: str) -> JobPlan:
    """What a driver and one task do."""
    given = {"path": root.uri, "recordType": "ByteArray", **options}
    parsed = parse_write_options(given, overwrite=options.get("saveMode") == "overwrite")
    plan = plan_write(batch.schema, parsed, {"d": "string"})
    committer = ObjectCommitter(root)
    committer.begin(plan.job)
    with committer.hold_attempt(plan.job.job_id, "attempt-0") as place:
        sink = TaskSink(place, f"part-00000-{plan.job.job_id}", plan.options, plan.source)
        shards = sink.write_all(iter([batch]))
    committer.publish(plan.job, [TaskResult(0, "attempt-0", shards)])
    return plan.job


def listing(path: str, **options: str) -> Listing:
    return list_input_files(parse_read_options({"path": path, **options}))


def payloads(found: Listing) -> list[bytes]:
    opener = FileOpener()
    blocks = [b for f in found.files for b in read_record_blocks(f.path, opener=opener)]
    return sorted(
        b.data[start : start + length].tobytes() for b in blocks for start, length in b.index
    )


@pytest.mark.parametrize("compression", ["none", "gzip", "zlib"])
def test_what_was_written_is_read(root: Storage, compression: str) -> None:
    one = BATCH.drop_columns(["d"])
    write(root, one, compression=compression)
    write(root, one, compression=compression)
    found = listing(root.uri)
    assert len(found.files) == 2
    assert found.committed is not None
    assert payloads(found) == sorted([*one.column(0).to_pylist()] * 2)
    assert payloads(listing(found.files[0].path)) == sorted(one.column(0).to_pylist())


def test_partitions_side_files_and_single_partitions(root: Storage) -> None:
    write(root, partitionBy="d", index="true", maxRecordsPerFile="1")
    found = listing(root.uri)
    assert found.partition_columns == (("d", "string"),)
    assert sorted(file.partition for file in found.files) == [("x",), ("x",), ("y",)]
    index = [key for key in root.list_objects() if key.startswith("_index/d=")]
    assert len(index) == 3
    below = listing(f"{root.uri}/d=x")
    assert len(below.files) == 2
    assert below.committed is not None
    assert below.partition_columns == ()
    based = listing(f"{root.uri}/d=x", basePath=root.uri)
    assert {file.partition for file in based.files} == {("x",)}
    with pytest.raises(ConfigError, match="basePath"):
        listing(f"{root.uri}/d=x", basePath=f"{root.uri}/d=y")


def test_the_manifest_decides(root: Storage, caplog: pytest.LogCaptureFixture) -> None:
    write(root, BATCH.drop_columns(["d"]))
    root.put("part-r-00000.tfrecord", b"no TFRecord at all")
    with caplog.at_level(logging.WARNING):
        found = listing(root.uri)
    assert len(found.files) == 1
    assert "part-r-00000" in caplog.text
    [file] = found.files
    key = file.path[len(root.uri) + 1 :]
    root.put(key, b"cut")
    with pytest.raises(InputDataError, match="another size"):
        listing(root.uri)
    root.delete(key)
    with pytest.raises(InputDataError, match="not there"):
        listing(root.uri)


def test_without_a_manifest_all_that_is_shown_counts(root: Storage) -> None:
    write(root, BATCH.drop_columns(["d"]))
    root.delete(COMMIT_FILE)
    [name] = [key for key in root.list_objects() if key.startswith("part-")]
    root.copy_all({name: "any.name", "_SUCCESS": "_hidden/x"})
    root.copy_all({name: "sub/x"})
    assert [f.path.rpartition("/")[2] for f in listing(root.uri).files] == ["any.name", name]
    assert len(listing(root.uri, recursiveFileLookup="true").files) == 3
    root.put("_publishing-j", Intent("j", None, "digest", new=("any.name",)).dumps())
    assert len(listing(root.uri).files) == 1  # the other one is not decided yet
    with pytest.raises(ConfigError, match="no such"):
        listing(f"{root.uri}-none")


def test_objects_are_split_at_known_places_only(root: Storage) -> None:
    rows = pa.record_batch({"payload": [bytes([65 + k]) * 1_000_000 for k in range(20)]})
    write(root, rows, index="true")
    root.delete(COMMIT_FILE)

    def split() -> list[tuple[int, int | None]]:
        options = parse_read_options({"path": root.uri})
        files = list_input_files(options).files
        planned = plan_splits(
            files, compression="auto", split_bytes=5 << 20, min_partitions=9, opener=options.opener
        )
        return [(s.start, s.stop) for part in planned for s in part]

    with_index = split()
    assert len(with_index) > 3
    opener = parse_read_options({"path": root.uri}).opener
    [file] = listing(root.uri).files
    read = [
        bytes(b.data[s : s + 1])
        for start, stop in with_index
        for b in read_record_blocks(
            file.path, compression=None, start=start, stop=stop, opener=opener
        )
        for s, _ in b.index
    ]
    assert read == [bytes([65 + k]) for k in range(20)]
    for key in list(root.list_objects()):
        if key.startswith("_index/"):
            root.put(key, b"0 17 damaged")
    assert split() == [(0, None)]


def test_a_failed_task_leaves_nothing(root: Storage) -> None:
    plan = plan_write(BATCH.schema, WriteOptions(root.uri, record_type="ByteArray",
                                                 partition_by=("d",), storage=root),
                      {"d": "string"})  # fmt: skip
    committer = ObjectCommitter(root)
    committer.begin(plan.job)
    with (  # noqa: PT012
        pytest.raises(ZeroDivisionError),
        committer.hold_attempt(plan.job.job_id, "attempt-0") as place,
    ):
        sink = TaskSink(place, "part-0", plan.options, plan.source)
        sink.write_all(BATCH if k == 0 else 1 / 0 for k in range(2))
    assert not [key for key in root.list_objects() if "attempt-0" in key]
    committer.discard(plan.job.job_id)
    assert root.list_objects() == {}


def test_local_files_are_read_as_before(tmp_path, frame) -> None:
    (tmp_path / "x").write_bytes(frame([b"1", b"2"]))
    assert list(read_records(tmp_path / "x")) == [b"1", b"2"]
