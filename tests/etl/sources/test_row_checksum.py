"""The checksum of rows: the same for the same rows in any order, another for any other rows."""

from __future__ import annotations

from pyspark.sql import functions as F

from etl.sources.row_checksum import checksum_rows

SCHEMA = "a int, b int, s string, l array<int>, m map<string,int>, t struct<x:int,y:string>"


def test_order_and_partitions_do_not_count_repeated_rows_do(spark):
    frame = spark.range(50).select("id", F.col("id").cast("string").alias("text"))
    made = checksum_rows(frame)
    assert checksum_rows(frame.repartition(7).orderBy(F.desc("id"))) == made
    assert checksum_rows(frame.unionAll(frame)) != made
    # Two equal rows do not cancel out.
    assert checksum_rows(frame.limit(0)) != checksum_rows(
        frame.unionAll(frame)
        .limit(0)
        .union(spark.createDataFrame([(1, "x"), (1, "x")], frame.schema))
    )


def test_rows_that_differ_in_one_place_have_another_checksum(spark):
    rows = [
        (None, 1, "x", [1, 2], {"k": 1}, (1, "y")),
        (1, None, "x", [1, 2], {"k": 1}, (1, "y")),
        (1, 1, None, [1, 2], {"k": 1}, (1, "y")),
        (1, 1, "", [1, 2], {"k": 1}, (1, "y")),
        (1, 1, "x", None, {"k": 1}, (1, "y")),
        (1, 1, "x", [], {"k": 1}, (1, "y")),
        (1, 1, "x", [None, 1], {"k": 1}, (1, "y")),
        (1, 1, "x", [1, None], {"k": 1}, (1, "y")),
        (1, 1, "x", [1], {"k": 1}, (1, "y")),
        (1, 1, "x", [1, 2], None, (1, "y")),
        (1, 1, "x", [1, 2], {"k": 2}, (1, "y")),
        (1, 1, "x", [1, 2], {"k": 1}, None),
        (1, 1, "x", [1, 2], {"k": 1}, (None, "y")),
        (1, 1, "x", [1, 2], {"k": 1}, (1, "z")),
    ]
    made = {checksum_rows(spark.createDataFrame([row], SCHEMA)) for row in rows}
    assert len(made) == len(rows)


def test_sums_of_many_hashes_do_not_overflow(spark):
    same = spark.range(1000).select(F.lit(1).alias("a"))
    one = int(checksum_rows(same.limit(1)).split(":")[1], 16)
    assert checksum_rows(same) == f"1000:{one * 1000 % 2**64:016x}"
