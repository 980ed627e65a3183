"""Schemas from manifests and from samples."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensorflow as tf
from pyspark.sql import types as T

from conf.errors import InputDataError
from etl.tfrecord.committed import COMMIT_FILE, Committed
from etl.tfrecord.features import WireFeature
from etl.tfrecord.framing import CorruptRecordError
from etl.tfrecord.input_files import list_input_files
from etl.tfrecord.read_options import parse_read_options
from etl.tfrecord.schema_sample import infer_sample
from etl.tfrecord.spark.read_schema import build_schema, parse_simple_type


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
    return build_schema(parsed, list_input_files(parsed)).simpleString()


@pytest.mark.parametrize(
    "data_type",
    [T.IntegerType(), T.LongType(), T.DoubleType(), T.DecimalType(20, 0), T.DateType(),
     T.TimestampType(), T.StringType(), T.BooleanType(), T.ShortType(), T.ByteType()],
    ids=str,
)  # fmt: skip
def test_simple_types_are_read_without_a_session(data_type: T.DataType) -> None:
    assert parse_simple_type(data_type.simpleString()) == data_type


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


def test_contradicting_kinds_are_an_error(tmp_path: Path) -> None:
    with tf.io.TFRecordWriter(str(tmp_path / "f")) as writer:
        for kind in ("int64_list", "bytes_list"):
            message = tf.train.Example()
            getattr(message.features.feature["x"], kind).value.append(1 if kind[0] == "i" else b"1")
            writer.write(message.SerializeToString())
    with pytest.raises(InputDataError, match="different kinds"):
        schema_of(tmp_path)


def test_partition_column_stands_once_and_last(tmp_path: Path) -> None:
    (tmp_path / "x=7").mkdir()
    write(tmp_path / "x=7" / "f", {"x": [1], "y": [2]})
    assert schema_of(tmp_path) == "struct<y:bigint,x:int>"


def test_manifest_without_a_shard_still_has_a_schema(tmp_path: Path) -> None:
    features = (WireFeature("a", "float32"), WireFeature("l", "bytes", is_list=True))
    manifest = Committed("Example", None, features, {}, (("d", "date"),), ())
    (tmp_path / COMMIT_FILE).write_text(manifest.dumps())
    assert schema_of(tmp_path) == "struct<a:float,l:array<string>,d:date>"


def test_record_type_of_the_manifest_unless_told(tmp_path: Path) -> None:
    features = (WireFeature("byteArray", "bytes"),)
    (tmp_path / COMMIT_FILE).write_text(Committed("ByteArray", None, features, {}, (), ()).dumps())
    assert schema_of(tmp_path) == "struct<byteArray:binary>"
    with pytest.raises(InputDataError, match="no schema"):
        schema_of(tmp_path, recordType="Example")
