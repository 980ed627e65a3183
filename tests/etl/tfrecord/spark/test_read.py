"""Reading in a real Spark session: partitions, pruning, splits, damage, schemas from manifests."""

from __future__ import annotations

import datetime
from pathlib import Path

import pyarrow as pa
import pytest
import tensorflow as tf
from pyspark.errors import PySparkException
from pyspark.sql import Row

from conf.errors import ConfigError
from etl.tfrecord.quarantine import read_quarantine
from etl.tfrecord.spark.read import read_tfrecords
from etl.tfrecord.writer import ShardWriter

FORMAT = "sluice"


def write_shard(path: Path, columns: dict) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    batch = pa.record_batch(columns)
    with ShardWriter(path, batch.schema) as writer:
        writer.write(batch)
    return path


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
    flat = spark.read.format(FORMAT).option("recursiveFileLookup", "true").load(str(partitioned))
    assert (flat.columns, flat.count()) == (["x"], 8)


def test_given_schema_decides_types_and_order(spark, partitioned: Path) -> None:
    frame = spark.read.format(FORMAT).schema("date string, x int").load(str(partitioned))
    assert set(frame.collect()) == {
        Row(date=f"2026-01-0{d}", x=v) for d in (1, 2) for v in (d, 10 * d)
    }


@pytest.mark.parametrize("pushdown", [False, True])
def test_filters_on_partitions_open_only_what_they_leave(spark, partitioned, pushdown) -> None:
    damaged = partitioned / "date=2026-01-02" / "country=SE" / "part-0.tfrecord"
    key = "spark.sql.python.filterPushdown.enabled"
    frame = spark.read.format(FORMAT).schema("x long, date date, country string")
    damaged.write_bytes(damaged.read_bytes()[:-3])
    spark.conf.set(key, str(pushdown).lower())
    try:
        wanted = frame.load(str(partitioned)).where("date < '2026-01-02' and x > 1")
        if pushdown:
            assert [row.x for row in wanted.collect()] == [10, 10]
        else:
            with pytest.raises(PySparkException, match="truncated"):
                wanted.collect()
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
    with pytest.raises(PySparkException, match="no partition column"):
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


def test_manifest_gives_the_schema_without_a_scan(spark, tmp_path: Path) -> None:
    rows = [(1, [5], "2026-01-01"), (2, [], "2026-01-01")]  # lists that look like scalars
    frame = spark.createDataFrame(rows, "x long, l array<long>, day string").coalesce(1)
    frame.write.format(FORMAT).mode("overwrite").save(str(tmp_path))
    read = spark.read.format(FORMAT).load(str(tmp_path))
    assert read.schema.simpleString() == "struct<x:bigint,l:array<bigint>,day:string>"
    assert sorted(tuple(row) for row in read.collect()) == rows
    (shard,) = tmp_path.glob("part-*")
    shard.write_bytes(shard.read_bytes()[:-30])
    with pytest.raises(PySparkException, match="another size"):
        spark.read.format(FORMAT).load(str(tmp_path))


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
