"""Reading TFRecord files in Spark: schemas, casts, and damage that is named."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
import tensorflow as tf
from pyspark.errors import PySparkException
from pyspark.sql import types as T

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.framing import CorruptRecordError
from etl.tfrecord.read_options import parse_read_options
from etl.tfrecord.spark.reader import TFRecordReader, infer_schema
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


def write_messages(path: Path, messages: list) -> Path:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for message in messages:
            writer.write(message if isinstance(message, bytes) else message.SerializeToString())
    return path


def example(**lists: list) -> tf.train.Example:
    message = tf.train.Example()
    for name, values in lists.items():
        message.features.feature[name].int64_list.SetInParent()
        message.features.feature[name].int64_list.value.extend(values)
    return message


@pytest.mark.usefixtures("reader_schema")
def test_empty_list_read_as_scalar_is_null(tmp_path: Path) -> None:
    path = write_messages(tmp_path / "a", [example(x=[]), example(x=[7])])
    assert read_directly(path, "x long") == [{"x": None}, {"x": 7}]


def test_absent_and_empty_features_do_not_break_inference(tmp_path: Path) -> None:
    bare = example()
    bare.features.feature["unset"].SetInParent()
    write_messages(tmp_path / "a", [bare, example(x=[]), example(l=[1, 2])])
    (tmp_path / "b").touch()  # a file without a byte
    schema = infer_schema(parse_read_options({"path": str(tmp_path)}))
    assert set(schema.simpleString()[7:-1].split(",")) == {"l:array<bigint>", "x:bigint"}


@pytest.mark.usefixtures("reader_schema")
def test_files_without_a_byte_have_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert read_directly(tmp_path, "x long") == []
    write_shard(tmp_path / "b", {"x": [1]})
    assert read_directly(tmp_path, "x long") == [{"x": 1}]


@pytest.mark.usefixtures("reader_schema")
def test_truncation_inside_the_last_length_is_an_error(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "a", {"x": [1, 2]})
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2 + 5])
    with pytest.raises(CorruptRecordError, match="truncated header"):
        read_directly(path, "x long")
    assert read_directly(path, "x long", onCorrupt="skip") == [{"x": 1}]


@pytest.mark.usefixtures("reader_schema")
def test_record_that_is_no_example_is_left_out_alone(tmp_path: Path, caplog) -> None:
    path = write_messages(tmp_path / "a", [example(x=[1]), b"\x0a\xff", example(x=[3])])
    with pytest.raises(CorruptRecordError, match=r"record 1"):
        read_directly(path, "x long")
    assert read_directly(path, "x long", onCorrupt="skip") == [{"x": 1}, {"x": 3}]
    assert "1 bad range(s) of 18 bytes" in caplog.text
    inferred = infer_schema(parse_read_options({"path": str(path), "onCorrupt": "skip"}))
    assert inferred.simpleString() == "struct<x:bigint>"


def test_sequence_examples(spark, tmp_path: Path) -> None:
    message = tf.train.SequenceExample()
    message.context.feature["user"].int64_list.value.append(5)
    for values in ([1, 2], []):
        step = message.feature_lists.feature_list["items"].feature.add()
        step.int64_list.value.extend(values)
    write_messages(tmp_path / "a", [message])
    frame = spark.read.format("sluice").option("recordType", "SequenceExample").load(str(tmp_path))
    assert frame.schema.simpleString() == "struct<user:bigint,items:array<array<bigint>>>"
    assert [(row.user, row["items"]) for row in frame.collect()] == [(5, [[1, 2], []])]


def test_raw_records(spark, tmp_path: Path) -> None:
    folder = tmp_path / "day=1"
    folder.mkdir()
    write_messages(folder / "a", [b"one", b"", b"\x00\xff"])
    frame = spark.read.format("sluice").option("recordType", "ByteArray").load(str(tmp_path))
    assert frame.columns == ["byteArray", "day"]
    rows = [(bytes(row.byteArray), row.day) for row in frame.collect()]
    assert rows == [(b"one", 1), (b"", 1), (b"\x00\xff", 1)]


def test_timestamps_and_structs_come_back(spark, tmp_path: Path) -> None:
    frame = spark.sql("select timestamp'2026-01-02 03:04:05' t, date'2026-01-02' d, "
                      "named_struct('a', 1L, 'b', 'x') s")  # fmt: skip
    options = {"timestamps": "ms", "dates": "iso"}
    frame.write.format("sluice").options(**options).mode("overwrite").save(str(tmp_path))
    given = spark.read.format("sluice").schema(frame.schema).load(str(tmp_path))
    assert given.collect() == frame.collect()
    assert spark.read.format("sluice").load(str(tmp_path)).collect() == frame.collect()
    raw = spark.read.format("sluice").option("readAs", "features").load(str(tmp_path))
    assert raw.collect() == [T.Row("t", "d", "s.a", "s.b")(1767323045000, "2026-01-02", 1, "x")]


def test_packed_features_come_back_as_columns(spark, tmp_path: Path) -> None:
    frame = spark.range(3).selectExpr("id", "id * 2 as twice", "cast(id as float) as f")
    frame.write.format("sluice").option("layout", "packed").mode("overwrite").save(str(tmp_path))
    read = spark.read.format("sluice").load(str(tmp_path))
    assert sorted(read.select("id", "twice", "f").collect()) == sorted(frame.collect())
    narrow = spark.read.format("sluice").schema("twice int").load(str(tmp_path))
    assert sorted(row.twice for row in narrow.collect()) == [0, 2, 4]
