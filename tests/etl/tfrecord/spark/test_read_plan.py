"""Batches come out in the types that Spark checks them against."""

from __future__ import annotations

import datetime
import decimal
from pathlib import Path

import pyarrow as pa
import pytest
import tensorflow as tf
from pyspark.sql import types as T

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.codec.framing import CorruptRecordError
from etl.tfrecord.commit.output_directory import COMMIT_FILE, OutputManifest
from etl.tfrecord.files.data_files import DataFile, parse_partition_value
from etl.tfrecord.spark.input_files import InputListing, list_input_files
from etl.tfrecord.spark.options import parse_read_options
from etl.tfrecord.spark.read_task import infer_sample
from etl.tfrecord.spark.schema import infer_schema, plan_read, select_files
from etl.tfrecord.types.features import WireFeature

ROWS = [
    ("2026-01-01", "0", "a"), ("2026-01-01", "1", "b"), ("2026-01-02", "0", None),
    (None, None, "c"),
]  # fmt: skip
FILES = tuple(DataFile(str(k), 1, row) for k, row in enumerate(ROWS))
LISTING = InputListing(FILES, (("date", "date"), ("hour", "int"), ("name", "string")), None)


@pytest.mark.parametrize(
    ("text", "target", "value"),
    [
        ("7", pa.int32(), 7), ("+07", pa.int64(), 7), (" 1.5", pa.float64(), 1.5),
        ("2026-01-02", pa.date32(), datetime.date(2026, 1, 2)), ("true", pa.bool_(), True),
        (" x", pa.string(), " x"), (None, pa.int32(), None),
        ("12345678901234567890", pa.decimal128(20, 0), decimal.Decimal(12345678901234567890)),
        ("1e3", pa.decimal128(4, 0), decimal.Decimal(1000)),
        ("2026-01-02 03:04:05", pa.timestamp("us", "UTC"),
         datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)),
    ],
)  # fmt: skip
def test_values_become_typed(text, target, value) -> None:
    scalar = parse_partition_value("p", text, target)
    assert scalar.type == target
    assert scalar.as_py() == value


def test_selection_by_values_as_text() -> None:
    def selected(**where) -> list[int]:
        return [int(file.path) for file in select_files(LISTING, where)]

    assert selected(date=["2026-01-01"], hour=["00", "5"]) == [0]
    assert selected(date=[None]) == [3]
    assert selected() == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="did you mean 'date'"):
        selected(dates=["2026-01-01"])
    with pytest.raises(InputDataError, match="'hour'"):
        selected(hour=["x"])


def write(path: Path, *rows: dict[str, list[int]]) -> Path:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in rows:
            message = tf.train.Example()
            for name, values in row.items():
                message.features.feature[name].int64_list.value.extend(values)
            writer.write(message.SerializeToString())
    return path


def schema_of(path: Path, **options: str) -> str:
    parsed = parse_read_options({"path": str(path), **options})
    return infer_schema(parsed).simpleString()


def test_sample_takes_its_records_from_many_files(tmp_path: Path) -> None:
    for k in range(40):
        write(tmp_path / f"f{k:02}", {"x": [1]}, {f"only{k}": [1]})
    options = parse_read_options({"path": str(tmp_path), "inferRecords": "16"})
    files = list_input_files(options).files
    assert [f.name for f in infer_sample(files, options, "Example")] == ["x"]
    options = parse_read_options({"path": str(tmp_path), "inferRecords": "32"})
    found = {f.name for f in infer_sample(files, options, "Example")}
    assert {"x", "only0", "only39"} <= found
    assert len(found) == 17
    whole = parse_read_options({"path": str(tmp_path), "inferRecords": "all"})
    assert len(infer_sample(files, whole, "Example")) == 41


def test_a_sample_does_not_read_on(tmp_path: Path) -> None:
    path = write(tmp_path / "f", *[{"x": [k] * 50} for k in range(60_000)])
    data = bytearray(path.read_bytes())
    assert len(data) > 4 << 20
    data[-1] ^= 1
    path.write_bytes(data)
    assert schema_of(tmp_path, inferRecords="5") == "struct<x:array<bigint>>"
    with pytest.raises(CorruptRecordError):
        schema_of(tmp_path, inferRecords="all")


def test_partition_column_stands_once_and_last(tmp_path: Path) -> None:
    (tmp_path / "x=7").mkdir()
    write(tmp_path / "x=7" / "f", {"x": [1], "y": [2]})
    assert schema_of(tmp_path) == "struct<y:bigint,x:int>"


def test_manifest_without_a_shard_still_has_a_schema(tmp_path: Path) -> None:
    features = (WireFeature("a", "float32"), WireFeature("l", "bytes", is_list=True))
    manifest = OutputManifest("Example", None, features, {}, (("d", "date"),), ())
    (tmp_path / COMMIT_FILE).write_text(manifest.dumps())
    assert schema_of(tmp_path) == "struct<a:float,l:array<string>,d:date>"


def test_record_type_of_the_manifest_unless_told(tmp_path: Path) -> None:
    features = (WireFeature("byteArray", "bytes"),)
    (tmp_path / COMMIT_FILE).write_text(
        OutputManifest("ByteArray", None, features, {}, (), ()).dumps()
    )
    assert schema_of(tmp_path) == "struct<byteArray:binary>"
    with pytest.raises(InputDataError, match="no schema"):
        schema_of(tmp_path, recordType="Example")


def plan(schema: T.StructType, *partition_columns: tuple[str, str], **options: str):
    listing = InputListing((), tuple(partition_columns), None)
    return plan_read(parse_read_options({"path": "/x", **options}), listing, schema)


def test_what_cannot_be_read_is_named() -> None:
    schema = T.StructType().add("ok", "long").add("i", T.DayTimeIntervalType())
    schema.add("t", T.TimestampType())
    with pytest.raises(ConfigError, match=r"(?s)i \(.*t \(timestamp\).*option timestamps"):
        plan(schema)
    with pytest.raises(ConfigError, match="one binary column"):
        plan(schema, recordType="ByteArray")
