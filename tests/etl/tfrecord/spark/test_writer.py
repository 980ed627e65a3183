"""`write_tfrecords` in a real Spark session."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyspark.sql.functions as F
import pytest
import tensorflow as tf

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.commit.output_directory import OutputManifest, read_output_manifest
from etl.tfrecord.files.data_files import index_path
from etl.tfrecord.spark import write_task
from etl.tfrecord.spark.options import WriteOptions
from etl.tfrecord.spark.write_task import WriteTask
from tests.tfrecord_files import read_index, read_records


@pytest.fixture(scope="module")
def write_tfrecords(spark):
    from etl.tfrecord.spark.frames import write_tfrecords

    return write_tfrecords


def flatten(shards: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(shards))


def read_column(root: Path, committed: OutputManifest, name: str = "id") -> list[list[int]]:
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
    assert read_output_manifest(out) == first
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
    with pytest.raises(ConfigError, match="unknown TFRecord option 'shard'"):
        write_tfrecords(spark.range(1), tmp_path / "out", shard=3)
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
    even = write_tfrecords(spark.range(4000).selectExpr("id % 3 id"), tmp_path / "equal", shards=4,
                           shuffle_seed=0)  # fmt: skip
    assert max(shard.rows for shard in even.shards) < 1100
    assert orders["a"] == orders["b"]
    assert orders["a"] != orders["c"]
    flat = flatten(orders["a"])
    assert sorted(flat) == list(range(500))
    assert sum(1 for x, y in itertools.pairwise(flat) if y == x + 1) < 10


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
    plain = write_tfrecords(frame, tmp_path / "a", max_records_per_file=300, index=True)
    assert [shard.rows for shard in plain.shards] == [300, 200, 300, 200]
    for shard in plain.shards:
        places = list(read_index(tmp_path / "a" / index_path(shard.path)))
        assert len(places) == shard.rows
        assert sum(size for _, size in places) == shard.bytes
    packed = write_tfrecords(
        frame, tmp_path / "b", max_bytes_per_file=2000, compression="gzip", compression_level=1
    )
    assert all(shard.bytes <= 2000 for shard in packed.shards)
    assert sum(shard.rows for shard in packed.shards) == 1000
    assert all(shard.path.endswith(".tfrecord.gz") for shard in packed.shards)
    assert sorted(flatten(read_column(tmp_path / "b", packed))) == list(range(1000))


def run(root: Path, batches: Iterable[pa.RecordBatch], **options) -> list:
    sink = WriteTask(root, "part-0", WriteOptions(str(root), **options))
    return list(sink.write_all(iter(batches)))


def test_few_open_files_lose_no_row(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(write_task, "MAX_OPEN_FILES", 2)
    most = 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal most
        for k in range(3):
            yield pa.record_batch({"a": [k] * 6, "p": [0, 1, 2, 3, 0, 1]})
            most = max(most, len(list(tmp_path.rglob("*.tmp"))))

    shards = run(tmp_path, batches(), partition_by=("p",))
    assert (most, list(tmp_path.rglob("*.tmp"))) == (2, [])
    assert sum(item.info.rows for item in shards) == 18
    by_value: dict[str, list[str]] = {}
    for item in shards:
        by_value.setdefault(item.partition_values["p"], []).append(item.info.path)
        assert len(list(read_records(tmp_path / item.info.path))) == item.info.rows > 0
    assert by_value["2"] == [f"p=2/part-0-c00{k}.tfrecord" for k in range(3)]
    assert set(by_value) == {"0", "1", "2", "3"}
