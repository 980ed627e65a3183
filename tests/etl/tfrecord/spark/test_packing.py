"""Packing in Spark's plan gives the bytes that packing in Python gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pyspark.sql import functions as F

from conf.errors import InputDataError
from etl.tfrecord.policies import ColumnPolicy
from etl.tfrecord.spark.packing import pack_columns
from etl.tfrecord.spark.writer import write_tfrecords
from etl.tfrecord.write_config import WriteConfig

CONFIG = WriteConfig(layout="packed", deterministic_names=True)


@pytest.fixture
def frame(spark):
    ids = spark.range(0, 1000, 1, 2)
    return ids.select(
        "id",
        (F.col("id") % 2 == 0).alias("flag"),
        F.col("id").cast("int").alias("small col"),
        (F.col("id") / 7).cast("float").alias("f"),
        F.col("id").cast("string").alias("name"),
        (F.col("id") / 3).cast("float").alias("g"),
        F.array("id", F.lit(-1)).alias("list"),
    )


def shard_bytes(root):
    return [path.read_bytes() for path in sorted(root.glob("part-*"))]


def test_the_same_bytes_and_the_same_manifest(spark, frame, tmp_path):
    config = replace(CONFIG, statistics=True)
    packed = write_tfrecords(frame, tmp_path / "spark", config=config)
    options = config.to_options(str(tmp_path / "python"), "overwrite", "0" * 32)
    frame.write.format("sluice").mode("overwrite").options(**options).save()
    assert shard_bytes(tmp_path / "spark") == shard_bytes(tmp_path / "python")
    from etl.tfrecord.committed import read_committed

    plain = read_committed(tmp_path / "python")
    assert packed.lowering == plain.lowering
    assert packed.features == plain.features
    rows = spark.read.format("sluice").load(str(tmp_path / "spark"))
    assert rows.agg(F.sum("small col")).first()[0] == sum(range(1000))


def test_numbers_are_packed_beforehand_only_where_all_of_them_can_be(frame):
    rows, given = pack_columns(frame, CONFIG)
    assert given.packed == {"packed.int64": ("id", "flag", "small col"), "packed.float": ("f", "g")}
    assert rows.columns == ["name", "list", "packed.int64", "packed.float"]
    with_double = frame.withColumn("d", F.lit(0.5))
    assert pack_columns(with_double, CONFIG)[0] is with_double
    assert pack_columns(frame, replace(CONFIG, layout="columns"))[0] is frame


def test_a_null_is_refused_by_name_or_becomes_the_default(frame, tmp_path):
    holes = frame.withColumn("f", F.when(F.col("id") != 700, F.col("f")))
    with pytest.raises(InputDataError, match="'f'"):
        write_tfrecords(holes, tmp_path / "a", config=CONFIG)
    policy = ColumnPolicy(nulls="default", default=-1)
    config = replace(CONFIG, policy=policy, columns={"f": replace(policy, default=2)})
    write_tfrecords(holes.drop("name", "flag"), tmp_path / "b", config=config)
    options = config.to_options(str(tmp_path / "c"), "overwrite", "0" * 32)
    holes.drop("name", "flag").write.format("sluice").mode("overwrite").options(**options).save()
    assert shard_bytes(tmp_path / "b") == shard_bytes(tmp_path / "c")


def test_partition_columns_stay_out(frame, tmp_path):
    days = frame.withColumn("day", (F.col("id") % 2).cast("int"))
    written = write_tfrecords(days, tmp_path / "out", config=CONFIG, partition_by=("day",))
    assert {shard.path.partition("/")[0] for shard in written.shards} == {"day=0", "day=1"}
    slots = written.lowering["slots"]["packed.int64"]
    assert [slot[0] if isinstance(slot, list) else slot["name"] for slot in slots] == [
        "id", "flag", "small col",
    ]  # fmt: skip
