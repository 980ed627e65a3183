from __future__ import annotations

import datetime as dt

import pyarrow as pa
import pytest
import tensorflow as tf

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.policies import ColumnPolicy, LoweringOptions
from etl.tfrecord.table import TableWriter, read_table, write_table
from etl.tfrecord.writer import ShardOptions

TABLE = pa.table(
    {
        "user": [1, 2],
        "score": pa.array([0.5, None], pa.float32()),
        "tags": [["a", "b"], []],
    }
)


def test_round_trip_and_what_tensorflow_reads(tmp_path):
    path = tmp_path / "a.tfrecord"
    info = write_table(TABLE, path)
    assert (info.rows, info.bytes) == (2, path.stat().st_size)
    assert read_table(path).equals(TABLE)
    examples = [tf.train.Example.FromString(r.numpy()) for r in tf.data.TFRecordDataset(str(path))]
    assert list(examples[0].features.feature["tags"].bytes_list.value) == [b"a", b"b"]
    assert "score" not in examples[1].features.feature


@pytest.mark.parametrize("compression", [None, "GZIP", "ZLIB"])
def test_several_files_and_wanted_columns_only(tmp_path, compression):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        write_table(TABLE, path, options=ShardOptions(compression=compression))
    wanted = pa.schema([("user", pa.int32())])
    assert read_table(paths, schema=wanted).to_pydict() == {"user": [1, 2, 1, 2]}


def test_sequence_examples(tmp_path):
    table = pa.table({"user": [1, 2], "steps": [[[1, 2], []], [[3]]]})
    path = tmp_path / "a.tfrecord"
    write_table(table, path, options=ShardOptions(record_type="SequenceExample"))
    assert read_table(path, record_type="SequenceExample").equals(table)


def test_byte_arrays(tmp_path):
    table = pa.table({"byteArray": [b"", b"\x00\xff"]})
    path = tmp_path / "a.tfrecord"
    write_table(table, path, options=ShardOptions(record_type="ByteArray"))
    assert read_table(path, record_type="ByteArray").equals(table)


def test_policies_on_both_ways(tmp_path):
    table = pa.table({"day": [dt.date(2026, 1, 2), None]})
    path = tmp_path / "a.tfrecord"
    with pytest.raises(ConfigError, match="day"):
        write_table(table, path)
    lowering = LoweringOptions(ColumnPolicy(dates="days"))
    write_table(table, path, lowering=lowering)
    assert read_table(path).column("day").to_pylist() == [20455, None]
    assert read_table(path, schema=table.schema, lowering=lowering).equals(table)


def test_an_error_leaves_no_file(tmp_path):
    path = tmp_path / "a.tfrecord"
    batch = pa.record_batch({"x": [[1, None]]})
    with pytest.raises(InputDataError, match="'x'"), TableWriter(path, batch.schema) as writer:
        writer.write(batch)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_table(tmp_path):
    path = tmp_path / "a.tfrecord"
    assert write_table(TABLE.slice(0, 0), path).rows == 0
    assert read_table(path, schema=TABLE.schema).num_rows == 0
