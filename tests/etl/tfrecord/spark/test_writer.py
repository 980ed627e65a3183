"""`write_tfrecords` in a real Spark session."""

from __future__ import annotations

import itertools
from pathlib import Path

import pyspark.sql.functions as F
import pytest
import tensorflow as tf

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.committed import Committed, read_committed
from etl.tfrecord.side_index import index_path, read_index


@pytest.fixture(scope="module")
def write_tfrecords(spark):
    from etl.tfrecord.spark.writer import write_tfrecords

    return write_tfrecords


def flatten(shards: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(shards))


def read_column(root: Path, committed: Committed, name: str = "id") -> list[list[int]]:
    """Values per shard, in file order, as TensorFlow reads them."""
    return [
        [
            tf.train.Example.FromString(r.numpy()).features.feature[name].int64_list.value[0]
            for r in tf.data.TFRecordDataset(
                str(root / shard.path), compression_type=committed.compression or ""
            )
        ]
        for shard in committed.shards
    ]


def test_modes(spark, tmp_path: Path, write_tfrecords) -> None:
    out = tmp_path / "out"
    first = write_tfrecords(spark.range(0, 6, 1, 2), out)
    assert read_committed(out) == first
    assert sorted(flatten(read_column(out, first))) == list(range(6))
    with pytest.raises(ConfigError, match="holds data already"):
        write_tfrecords(spark.range(1), out)
    assert write_tfrecords(spark.range(1), out, mode="ignore") == first
    both = write_tfrecords(spark.range(10, 12), out, mode="append")
    assert sorted(flatten(read_column(out, both))) == [*range(6), 10, 11]
    only = write_tfrecords(spark.range(1), out, mode="Overwrite")
    assert read_column(out, only) == [[0]]
    with pytest.raises(ConfigError, match="did you mean 'overwrite'"):
        write_tfrecords(spark.range(1), out, mode="overwrit")


def test_faults_are_the_products_own_errors(spark, tmp_path: Path, write_tfrecords) -> None:
    bad = spark.range(1).select("id", F.expr("interval 1 day").alias("i"), F.lit(None).alias("n"))
    with pytest.raises(ConfigError, match=r"(?s)i \(.*n \(|n.*i"):
        write_tfrecords(bad, tmp_path / "out")
    with pytest.raises(ConfigError, match="did you mean 'shards'"):
        write_tfrecords(spark.range(1), tmp_path / "out", shard=3)
    with pytest.raises(ConfigError, match="number of shards"):
        write_tfrecords(spark.range(1), tmp_path / "out", shards=3, shard_rows=3)
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputDataError, match="x"):
        write_tfrecords(spark.range(2).selectExpr("double('1e300') x"), tmp_path / "out")


def test_exactly_so_many_files(spark, tmp_path: Path, write_tfrecords) -> None:
    frame = spark.range(0, 1003, 1, 3)
    committed = write_tfrecords(frame, tmp_path / "a", shards=4, deterministic_names=True)
    rows = [shard.rows for shard in committed.shards]
    assert len(rows) == 4
    assert sum(rows) == 1003
    assert max(rows) - min(rows) <= 3
    assert sorted(flatten(read_column(tmp_path / "a", committed))) == list(range(1003))


def test_seeded_shuffle_depends_on_content_and_seed_alone(spark, tmp_path, write_tfrecords):
    orders = {}
    for name, partitions, seed in (("a", 1, 1), ("b", 7, 1), ("c", 1, 2)):
        frame = spark.range(0, 500, 1, partitions).withColumn("m", F.create_map("id", "id"))
        out = tmp_path / name
        committed = write_tfrecords(
            frame.drop("m"), out, shards=3, shuffle_seed=seed, deterministic_names=True
        )
        rows = [shard.rows for shard in committed.shards]
        assert max(rows) - min(rows) <= 1
        orders[name] = read_column(out, committed)
    assert orders["a"] == orders["b"]
    assert orders["a"] != orders["c"]
    flat = flatten(orders["a"])
    assert sorted(flat) == list(range(500))
    assert sum(1 for x, y in itertools.pairwise(flat) if y == x + 1) < 10


def test_seeded_shuffle_of_equal_rows_is_even(spark, tmp_path: Path, write_tfrecords) -> None:
    frame = spark.range(0, 4000, 1, 2).selectExpr("id % 3 as id")
    committed = write_tfrecords(frame, tmp_path / "a", shards=4, shuffle_seed=0)
    rows = [shard.rows for shard in committed.shards]
    assert len(rows) == 4
    assert sum(rows) == 4000
    assert max(rows) < 1100


def test_partitions_from_the_sessions_overwrite_mode(spark, tmp_path, write_tfrecords) -> None:
    frame = spark.range(0, 30).selectExpr("id", "id % 3 p")
    write_tfrecords(frame, tmp_path, partition_by=("p",), mode="overwrite")
    spark.conf.set("spark.sql.sources.partitionOverwriteMode", "dynamic")
    try:
        committed = write_tfrecords(
            frame.where("p = 1").limit(1), tmp_path, partition_by=("p",), mode="overwrite"
        )
    finally:
        spark.conf.unset("spark.sql.sources.partitionOverwriteMode")
    rows: dict[str, int] = {}
    for shard in committed.shards:
        rows[shard.partition_values["p"]] = rows.get(shard.partition_values["p"], 0) + shard.rows
    assert rows == {"0": 10, "1": 1, "2": 10}


def test_index_limits_and_compression(spark, tmp_path: Path, write_tfrecords) -> None:
    frame = spark.range(0, 1000, 1, 2)
    plain = write_tfrecords(frame, tmp_path / "a", shard_rows=300, index=True, statistics=True)
    assert [shard.rows for shard in plain.shards] == [300, 200, 300, 200]
    for shard in plain.shards:
        places = list(read_index(tmp_path / "a" / index_path(shard.path)))
        assert len(places) == shard.rows
        assert sum(size for _, size in places) == shard.bytes
        assert shard.statistics["id"]["rows"] == shard.rows
    packed = write_tfrecords(
        frame, tmp_path / "b", shard_bytes=2000, compression="gzip", compression_level=1
    )
    assert all(shard.bytes <= 2000 for shard in packed.shards)
    assert sum(shard.rows for shard in packed.shards) == 1000
    assert all(shard.path.endswith(".tfrecord.gz") for shard in packed.shards)
    assert sorted(flatten(read_column(tmp_path / "b", packed))) == list(range(1000))


def test_sequence_examples_and_policies(spark, tmp_path: Path, write_tfrecords) -> None:
    from etl.tfrecord.policies import ColumnPolicy

    frame = spark.range(2, numPartitions=1).selectExpr(
        "id", "array(array(id, 7L), array()) as nested", "date'1970-01-03' as day"
    )
    committed = write_tfrecords(
        frame,
        tmp_path / "a",
        record_type="SequenceExample",
        columns={"day": ColumnPolicy(dates="days")},
    )
    assert [(f.name, f.is_sequence) for f in committed.features] == [
        ("id", False), ("nested", True), ("day", False)
    ]  # fmt: skip
    (shard,) = committed.shards
    raw = [r.numpy() for r in tf.data.TFRecordDataset(str(tmp_path / "a" / shard.path))]
    examples = [tf.train.SequenceExample.FromString(r) for r in raw]
    assert [e.context.feature["day"].int64_list.value[0] for e in examples] == [2, 2]
    lists = [e.feature_lists.feature_list["nested"].feature for e in examples]
    assert [[list(f.int64_list.value) for f in item] for item in lists] == [
        [[0, 7], []], [[1, 7], []]
    ]  # fmt: skip


def test_packed_layout_is_described(spark, tmp_path: Path, write_tfrecords) -> None:
    frame = spark.range(0, 4, 1, 1).selectExpr("id", "id * 2 as b", "float(id) x", "array(id) l")
    committed = write_tfrecords(frame, tmp_path / "a", layout="packed")
    assert {f.name for f in committed.features} == {"packed.int64", "packed.float", "l"}
    slots = committed.lowering["slots"]["packed.int64"]
    assert [slot["name"] for slot in slots] == ["id", "b"]
    raw = tf.data.TFRecordDataset(str(tmp_path / "a" / committed.shards[0].path))
    values = [
        list(
            tf.train.Example.FromString(r.numpy()).features.feature["packed.int64"].int64_list.value
        )
        for r in raw
    ]
    assert values == [[k, 2 * k] for k in range(4)]
