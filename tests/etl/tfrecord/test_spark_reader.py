"""Reading TFRecord files in Spark: schemas, casts, and damage that is named."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import tensorflow as tf
from pyspark.errors import PySparkException
from pyspark.sql import types as T

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.read_options import parse_read_options
from etl.tfrecord.spark_reader import TFRecordReader, infer_schema
from etl.tfrecord.writer import ShardWriter


def write_shard(path: Path, columns: dict) -> Path:
    batch = pa.record_batch(columns)
    with ShardWriter(path, batch.schema) as writer:
        writer.write(batch)
    return path


def read_directly(path: Path, schema: str, **options: str) -> list[dict]:
    reader = TFRecordReader(
        parse_read_options({"path": str(path), **options}), T._parse_datatype_string(schema)
    )
    return [
        row for part in reader.partitions() for batch in reader.read(part)
        for row in batch.to_pylist()
    ]  # fmt: skip


def test_infers_and_reads_files_that_tensorflow_wrote(spark, tmp_path: Path) -> None:
    with tf.io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as writer:
        for k in range(3):
            message = tf.train.Example()
            message.features.feature["x"].int64_list.value.append(k)
            message.features.feature["l"].float_list.value.extend([0.5] * k)
            message.features.feature["s"].bytes_list.value.append(b"v%d" % k)
            writer.write(message.SerializeToString())
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".hidden").write_bytes(b"junk")
    frame = spark.read.format("sluice").load(str(tmp_path))
    assert {f.name: f.dataType.simpleString() for f in frame.schema} == {
        "x": "bigint", "l": "array<float>", "s": "string"
    }  # fmt: skip
    rows = sorted((row.x, row.l, row.s) for row in frame.collect())
    assert rows == [(0, [], "v0"), (1, [0.5], "v1"), (2, [0.5, 0.5], "v2")]


def test_corrupt_file_fails_the_job_with_file_and_offset(spark, tmp_path: Path) -> None:
    path = write_shard(tmp_path / "part-0.tfrecord", {"x": list(range(100))})
    data = bytearray(path.read_bytes())
    record = len(data) // 100
    data[40 * record + 20] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(PySparkException, match=rf"(?s)part-0\.tfrecord.*{40 * record} "):
        spark.read.format("sluice").schema("x long").load(str(tmp_path)).count()


@pytest.fixture
def reader_schema(spark) -> None:
    """Spark's type parser needs a session."""


@pytest.mark.usefixtures("reader_schema")
def test_narrow_types_refuse_what_does_not_fit(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a", {"x": [1, 2**40]})
    with pytest.raises(InputDataError, match=r"(?s)'x' does not fit"):
        read_directly(path, "x int")
    assert read_directly(path, "x long") == [{"x": 1}, {"x": 2**40}]


@pytest.mark.usefixtures("reader_schema")
def test_invalid_utf8_is_refused_as_string_and_kept_as_binary(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a", {"s": pa.array([b"\xff"], pa.binary())})
    with pytest.raises(InputDataError, match="'s'"):
        read_directly(path, "s string")
    assert read_directly(path, "s binary") == [{"s": b"\xff"}]


@pytest.mark.usefixtures("reader_schema")
def test_missing_feature_needs_a_nullable_column(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a", {"x": pa.array([1, None])})
    assert read_directly(path, "x long, y array<string>") == [
        {"x": 1, "y": None}, {"x": None, "y": None}
    ]  # fmt: skip
    with pytest.raises(InputDataError, match="not nullable"):
        read_directly(path, "x long not null")


@pytest.mark.usefixtures("reader_schema")
def test_unreadable_types_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)t \(timestamp\).*m \(map"):
        read_directly(tmp_path, "ok long, t timestamp, m map<string,int>")
    with pytest.raises(ConfigError, match="one binary column"):
        read_directly(tmp_path, "x long", recordType="ByteArray")


def test_inference_without_any_feature_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(InputDataError, match="no schema"):
        infer_schema(parse_read_options({"path": str(tmp_path)}))


def test_empty_directory_with_a_schema_has_no_rows(spark, tmp_path: Path) -> None:
    assert spark.read.format("sluice").schema("x long").load(str(tmp_path)).collect() == []
