"""Reading TFRecord files in Spark: schemas, casts, and damage that is named."""

from __future__ import annotations

import datetime
from pathlib import Path

import pyarrow as pa
import pytest
import tensorflow as tf
from pyspark.errors import PySparkException
from pyspark.sql import Row
from pyspark.sql import types as T

from conf.errors import ConfigError
from etl.tfrecord.codec.framing import CorruptRecordError
from etl.tfrecord.spark.datasource import TFRecordReader
from etl.tfrecord.spark.frames import read_tfrecords
from etl.tfrecord.spark.options import parse_read_options
from etl.tfrecord.spark.schema import infer_schema
from etl.tfrecord.table import TableWriter
from tests.tfrecord_files import read_quarantine


def write_shard(path: Path, columns: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    batch = pa.record_batch(columns)
    with TableWriter(path, batch.schema) as writer:
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


@pytest.fixture
def reader_schema(spark) -> None:
    """Spark's type parser needs a session."""


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
def test_files_without_a_byte_have_no_rows(tmp_path: Path) -> None:
    assert read_directly(tmp_path, "x long") == []
    (tmp_path / "a").touch()
    assert read_directly(tmp_path, "x long") == []
    write_shard(tmp_path / "b", {"x": [1]})
    assert read_directly(tmp_path, "x long") == [{"x": 1}]


@pytest.mark.usefixtures("reader_schema")
def test_other_record_types(spark, tmp_path: Path) -> None:
    message = tf.train.SequenceExample()
    message.context.feature["user"].int64_list.value.append(5)
    for values in ([1, 2], []):
        step = message.feature_lists.feature_list["items"].feature.add()
        step.int64_list.value.extend(values)
    for folder, messages in (("s", [message]), ("raw/day=1", [b"one", b"", b"\x00\xff"])):
        (tmp_path / folder).mkdir(parents=True)
        write_messages(tmp_path / folder / "a", messages)
    read = spark.read.format("sluice")
    frame = read.option("recordType", "SequenceExample").load(str(tmp_path / "s"))
    assert frame.schema.simpleString() == "struct<user:bigint,items:array<array<bigint>>>"
    assert [(row.user, row["items"]) for row in frame.collect()] == [(5, [[1, 2], []])]
    raw = read.option("recordType", "ByteArray").load(str(tmp_path / "raw"))
    assert raw.columns == ["byteArray", "day"]
    rows = [(bytes(row.byteArray), row.day) for row in raw.collect()]
    assert rows == [(b"one", 1), (b"", 1), (b"\x00\xff", 1)]
    raw.coalesce(1).write.format("sluice").mode("overwrite").option(
        "recordType", "ByteArray"
    ).option("partitionBy", "day").save(str(tmp_path / "again"))
    (shard,) = (tmp_path / "again" / "day=1").iterdir()
    assert [r.numpy() for r in tf.data.TFRecordDataset(str(shard))] == [row[0] for row in rows]


def test_record_that_is_no_example_is_left_out_alone(tmp_path: Path, caplog) -> None:
    path = write_messages(tmp_path / "a", [example(x=[1]), b"\x0a\xff", example(x=[3])])
    with pytest.raises(CorruptRecordError, match=r"record 1"):
        read_directly(path, "x long")
    assert read_directly(path, "x long", onCorrupt="skip") == [{"x": 1}, {"x": 3}]
    assert "1 bad range(s) of 18 bytes" in caplog.text
    inferred = infer_schema(parse_read_options({"path": str(path), "onCorrupt": "skip"}))
    assert inferred.simpleString() == "struct<x:bigint>"


FORMAT = "sluice"


@pytest.fixture
def partitioned(tmp_path: Path) -> Path:
    root = tmp_path / "in"
    for day in (1, 2):
        for country in ("NO", "SE"):
            folder = root / f"date=2026-01-0{day}" / f"country={country}"
            write_shard(folder / "part-0.tfrecord", {"x": [day, 10 * day]})
    write_shard(root / "_hidden" / "part-0.tfrecord", {"x": [99]})
    return root


def test_partition_columns_as_spark_reads_them(spark, partitioned: Path, tmp_path: Path) -> None:
    frame = spark.read.format(FORMAT).load(str(partitioned))
    frame.write.partitionBy("date", "country").parquet(str(tmp_path / "parquet"))
    parquet = spark.read.parquet(str(tmp_path / "parquet"))
    assert frame.schema == parquet.schema
    assert sorted(frame.collect()) == sorted(parquet.collect())
    assert frame.count() == 8
    only = spark.read.format(FORMAT).load(str(partitioned / "date=2026-01-01"))
    assert only.columns == ["x", "country"]
    based = spark.read.format(FORMAT).option("basePath", str(partitioned))
    one = based.load(str(partitioned / "date=2026-01-01"))
    assert one.columns == ["x", "date", "country"]


def test_given_schema_decides_types_and_order(spark, partitioned: Path) -> None:
    frame = spark.read.format(FORMAT).schema("date string, x int").load(str(partitioned))
    assert set(frame.collect()) == {
        Row(date=f"2026-01-0{d}", x=v) for d in (1, 2) for v in (d, 10 * d)
    }


@pytest.mark.parametrize("pushdown", [False, True])
def test_a_filter_leaves_other_queries_of_the_frame_their_rows(
    spark, partitioned, pushdown
) -> None:
    key = "spark.sql.python.filterPushdown.enabled"
    spark.conf.set(key, str(pushdown).lower())
    try:
        frame = spark.read.format(FORMAT).load(str(partitioned))
        first, second = (frame.where(f"date = '2026-01-0{day}'") for day in (1, 2))
        assert (first.count(), frame.count(), second.count()) == (4, 8, 4)
        assert first.unionByName(second).count() == 8
        assert frame.join(first.select("x"), "x", "left_anti").count() == 4
    finally:
        spark.conf.unset(key)


def test_chosen_columns_and_partitions(spark, partitioned: Path) -> None:
    frame = read_tfrecords(
        spark, partitioned, columns=["country", "x"],
        where={"date": [datetime.date(2026, 1, 2)], "country": ["NO"]},
    )  # fmt: skip
    assert frame.collect() == [Row(country="NO", x=2), Row(country="NO", x=20)]
    assert read_tfrecords(spark, partitioned, columns=["Country", "X"]).columns == ["country", "x"]
    assert read_tfrecords(spark, [partitioned], columns=["date"], schema="date date").count() == 8
    with pytest.raises(ConfigError, match="did you mean 'country'"):
        read_tfrecords(spark, partitioned, columns=["contry"])
    with pytest.raises(PySparkException, match="no such partition column"):
        read_tfrecords(spark, partitioned, where={"x": [1]}, schema="x long").collect()


def test_several_paths(spark, tmp_path: Path) -> None:
    paths = [str(write_shard(tmp_path / name / "f", {"x": [k]})) for k, name in enumerate("ab")]
    assert sorted(r.x for r in spark.read.format(FORMAT).load(paths).collect()) == [0, 1]
    assert read_tfrecords(spark, paths).count() == 2


def test_split_file_gives_every_row_once_in_order(spark, tmp_path: Path) -> None:
    path = write_shard(tmp_path / "f", {"x": list(range(100_000))})
    size = path.stat().st_size // 10
    frame = spark.read.format(FORMAT).option("splitBytes", str(size)).load(str(path))
    assert frame.rdd.getNumPartitions() >= 10
    assert [row.x for row in frame.collect()] == list(range(100_000))


def test_damage_is_set_aside_or_skipped_but_never_by_default(spark, tmp_path: Path) -> None:
    path = write_shard(tmp_path / "in" / "part-0", {"x": list(range(1000, 2000))})
    record = path.stat().st_size // 1000
    data = bytearray(path.read_bytes())
    for number, byte in ((10, 20), (20, 3)):  # a payload, a length
        data[number * record + byte] ^= 1
    path.write_bytes(bytes(data[:-5]))
    reader = spark.read.format(FORMAT).schema("x long")
    spark.conf.set("spark.sql.files.ignoreCorruptFiles", "true")
    try:
        with pytest.raises(PySparkException, match="checksum"):
            reader.load(str(path)).count()
    finally:
        spark.conf.unset("spark.sql.files.ignoreCorruptFiles")
    with pytest.raises(PySparkException, match="onCorrupt"):
        spark.read.format(FORMAT).option("ignoreCorruptFiles", "true").load(str(path))
    expected = [k for k in range(1000, 1999) if k not in (1010, 1020)]
    skipped = read_tfrecords(spark, path, schema="x long", onCorrupt="skip")
    assert [row.x for row in skipped.collect()] == expected
    aside = tmp_path / "aside"
    for _ in range(2):  # a second run finds the same and doubles nothing
        frame = read_tfrecords(
            spark, path, schema="x long", onCorrupt="quarantine", quarantinePath=aside
        )
        assert [row.x for row in frame.collect()] == expected
    found = read_quarantine(aside)
    assert [(bad.offset, bad.length, bad.record) for bad in found] == [
        (10 * record, record, 10), (20 * record, record, 20), (999 * record, record - 5, None)
    ]  # fmt: skip
    for bad in found:
        saved = (aside / str(bad.saved_in)).read_bytes()[bad.saved_at :][: bad.length]
        assert saved == path.read_bytes()[bad.offset : bad.offset + bad.length]


def test_record_that_contradicts_the_sample_says_what_to_do(spark, tmp_path: Path) -> None:
    with tf.io.TFRecordWriter(str(tmp_path / "f")) as writer:
        for k in range(50):
            message = tf.train.Example()
            message.features.feature["x"].int64_list.value.extend([1] * (1 + k // 49))
            writer.write(message.SerializeToString())
    sampled = spark.read.format(FORMAT).option("inferRecords", "10").load(str(tmp_path))
    assert sampled.schema["x"].dataType.simpleString() == "bigint"
    with pytest.raises(PySparkException, match="inferRecords=all"):
        sampled.collect()
    whole = spark.read.format(FORMAT).option("inferRecords", "all").load(str(tmp_path))
    assert [len(row.x) for row in whole.collect()] == [1] * 49 + [2]
