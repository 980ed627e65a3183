"""Errors over rows name what the user can look up."""

from __future__ import annotations

import datetime as dt
import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import tensorflow as tf
from pyspark.errors import PySparkException

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.files.writer import ShardOptions
from etl.tfrecord.table import read_frame, read_table, write_frame, write_table
from etl.tfrecord.types.features import TypeOptions
from etl.tfrecord.types.refusals import locate_rows
from tests.machine import some_of

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
    assert write_table(TABLE.slice(0, 0), path).rows == 0
    assert read_table(path, schema=TABLE.schema).num_rows == 0
    write_table(TABLE, path)
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


@pytest.mark.parametrize(
    ("record_type", "columns"),
    [
        ("SequenceExample", {"user": [1, 2], "steps": [[[1, 2], []], [[3]]]}),
        ("ByteArray", {"byteArray": [b"", b"\x00\xff"]}),
    ],
)
def test_other_records_come_back(tmp_path, record_type, columns):
    table, path = pa.table(columns), tmp_path / "a.tfrecord"
    write_table(table, path, options=ShardOptions(record_type=record_type))
    assert read_table(path, record_type=record_type).equals(table)


def test_policies_on_both_ways(tmp_path):
    table = pa.table({"day": [dt.date(2026, 1, 2), None]})
    path = tmp_path / "a.tfrecord"
    with pytest.raises(ConfigError, match="day"):
        write_table(table, path)
    type_options = TypeOptions(dates="days")
    write_table(table, path, type_options=type_options)
    assert read_table(path).column("day").to_pylist() == [20455, None]
    assert read_table(path, schema=table.schema, type_options=type_options).equals(table)


def test_frames_come_back_and_ids_with_nulls_do_not_pass_through_a_float(tmp_path):
    frame = pd.DataFrame(
        {
            "user": [1, 2**53 + 1],
            "score": np.array([0.5, -1.5], np.float32),
            "name": ["a", "ü"],
            "history": [np.array([3, 1]), np.array([], np.int64)],
            "id": pd.array([2**60 + 1, None], "Int64"),
        },
        index=[7, 9],
    )
    path = tmp_path / "a.tfrecord"
    write_frame(frame, path)
    found = read_frame(path)
    assert list(found.columns) == list(frame.columns)
    assert found["user"].tolist() == frame["user"].tolist()
    assert found["score"].dtype == np.float32
    assert [list(h) for h in found["history"]] == [[3, 1], []]
    assert (found["id"].dtype, found["id"][0]) == ("Int64", 2**60 + 1)
    assert found["id"].isna().tolist() == [False, True]
    unsigned = read_frame(path, schema=pa.schema([("id", pa.uint64())]))["id"]
    assert (unsigned.dtype, unsigned[0]) == ("UInt64", 2**60 + 1)
    write_table(pa.table({"s": [{"x": 2**60 + 1}, {"x": None}]}), path)
    parts = read_frame(path, schema=pa.schema([("s", pa.struct([("x", pa.int64())]))]))["s"]
    assert parts[0] == {"x": 2**60 + 1}


BATCH = pa.record_batch({"user": [7, 8], "tags": [["a"], []], "text": ["x" * 99, None]})


def raised(batch: pa.RecordBatch, first_row: int | None, received: str) -> str:
    with pytest.raises(InputDataError) as caught, locate_rows(batch, first_row, "the table"):
        raise InputDataError("bad", received=received, allowed="a", fix="b")
    return str(caught.value)


def test_numbers_go_on_from_batch_to_batch_and_values_are_shown_in_short() -> None:
    text = raised(BATCH, 100, "1e9 in row 0 of the batch")
    assert f"1e9 in row 100 (from 0) of the table: user=7, text='{'x' * 39}…" in text
    assert "allowed:  a\n  fix:      b" in text
    assert "null in a row of the table: user=8" in raised(BATCH, None, "null in row 1 of the batch")
    assert "received: something else" in raised(BATCH, 0, "something else")


def test_values_that_python_cannot_show_are_left_out() -> None:
    far = pa.record_batch({"t": pa.array([2**62], pa.timestamp("s")), "n": [1]})
    assert "of the table: n=1" in raised(far, 0, "row 0 of the batch")


def test_tables_name_their_own_row(tmp_path: Path) -> None:
    batches = [pa.record_batch({"id": [k], "x": [float(k)]}) for k in range(3)]
    batches.append(pa.record_batch({"id": [3], "x": [1e300]}))
    table = pa.Table.from_batches(batches)
    with pytest.raises(InputDataError, match=r"1e\+300 in row 3 \(from 0\) of the table: id=3"):
        write_table(table, tmp_path / "f")
    write_table(pa.table({"m.keys": [["a"], ["b"]], "m.values": [[1], []]}), tmp_path / "f")
    schema = pa.schema({"m": pa.map_(pa.string(), pa.int64())})
    type_options = TypeOptions(maps="entries")
    with pytest.raises(InputDataError, match=r"row 1 \(from 0\) of the file"):
        read_table(tmp_path / "f", schema=schema, type_options=type_options)


@pytest.mark.parametrize(
    ("column", "partitioned"),
    some_of(itertools.product("xdl", [False, True]), [("x", False), ("d", True), ("l", False)]),
)
def test_spark_rows_are_named(spark, tmp_path: Path, column: str, partitioned: bool) -> None:
    bad = {
        "x": "if(id = 77, 1e300D, 0D) x",
        "d": "if(id = 77, date'9999-12-31' + 9, date'2026-01-01') d",
        "l": "if(id = 77, array(1, null), array(1)) l",
    }[column]
    frame = spark.range(0, 100, 1, 2).selectExpr("id", "id % 2 part", bad)
    writer = frame.write.format("sluice").mode("append").option("dates", "iso")
    if partitioned:
        writer = writer.option("partitionBy", "part")
    with pytest.raises(PySparkException) as caught:
        writer.save(str(tmp_path / "out"))
    text = str(caught.value)
    assert "of Spark partition 1" in text
    assert "id=77" in text
    assert "row 27 (from 0)" in text
    if column != "d" and partitioned:
        assert "of part=1: id=77" in text
