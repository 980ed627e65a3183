from __future__ import annotations

import pyarrow as pa
import pytest

from etl.tfrecord.table import write_table
from etl.tfrecord.writer import ShardOptions
from jobs.inspection.files import list_record_files, summarize_files
from jobs.inspection.head import read_files_head

TABLE = pa.table({"user": [1, 2, 3], "tags": [["a"], ["b", "c"], []]})


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "date=1").mkdir()
    write_table(TABLE, tmp_path / "part-0.tfrecord")
    gzip = ShardOptions(compression="GZIP")
    write_table(TABLE, tmp_path / "date=1" / "part-1.tfrecord.gz", options=gzip)
    (tmp_path / "_SUCCESS").touch()
    return tmp_path


def test_counts_schema_and_sizes(directory):
    read = []
    summary, verification = summarize_files(directory, read.append)
    assert verification.problems == ()
    assert (summary["files"], summary["rows"]) == (2, 6)
    size = sum(path.stat().st_size for path in list_record_files(directory))
    assert summary["bytes"] == sum(read) == size
    assert summary["record_type"] == "Example"
    assert summary["compressions"] == ["GZIP", "none"]
    assert [(f["name"], f["dtype"], f["shape"]) for f in summary["features"]] == [
        ("user", "int64", []),
        ("tags", "bytes", [None]),
    ]
    assert sum(bin_["records"] for bin_ in summary["record_sizes"]["bins"]) == 6


def test_damage_names_file_and_offset_and_the_rest_is_read(directory):
    path = directory / "part-0.tfrecord"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    summary, verification = summarize_files(directory)
    assert [problem.file for problem in verification.problems] == ["part-0.tfrecord"]
    assert "byte offset" in verification.problems[0].what
    assert summary["files"] == 2
    assert verification.rows >= 3


def test_sequence_examples_and_raw_payloads_are_told_apart(tmp_path):
    sequence, raw = tmp_path / "sequence", tmp_path / "raw"
    sequence.mkdir()
    raw.mkdir()
    write_table(
        pa.table({"user": [1], "steps": [[[1], [2, 3]]]}),
        sequence / "a.tfrecord",
        options=ShardOptions(record_type="SequenceExample"),
    )
    write_table(
        pa.table({"byteArray": [b"\xff\xff", b""]}),
        raw / "a.tfrecord",
        options=ShardOptions(record_type="ByteArray"),
    )
    found = summarize_files(sequence)[0]
    assert found["record_type"] == "SequenceExample"
    assert [f["shape"] for f in found["features"]] == [[], [None, None]]
    found, verification = summarize_files(raw)
    assert (found["record_type"], found["features"]) == ("ByteArray", [])
    assert verification.problems == ()


def test_the_head_of_raw_payloads(tmp_path):
    path = tmp_path / "a.tfrecord"
    table = pa.table({"byteArray": [b"one", b"\xfftwo"]})
    write_table(table, path, options=ShardOptions(record_type="ByteArray"))
    assert read_files_head([path], 1, "ByteArray") == [{"byteArray": "one"}]
