"""Packed columns are shown by their own names: which list, which place, which values."""

from __future__ import annotations

from pyspark.sql import functions as F

from etl.tfrecord.spark.writer import write_tfrecords
from etl.tfrecord.write_config import WriteConfig
from jobs.inspect_dataset import inspect
from jobs.inspection.listing import list_summary, render_plain
from jobs.inspection.slots import PackedColumn, list_packed_columns, unpack_record
from jobs.inspection.target import find_target


def test_a_packed_data_set_shows_its_columns(spark, tmp_path):
    frame = spark.range(0, 20, 1, 1).select(
        "id",
        F.lit("x").alias("name"),
        (F.col("id") + 100).cast("int").alias("age"),
        (F.col("id") / 4).cast("float").alias("price"),
        F.array("id", F.lit(-1)).alias("list"),
        (F.col("id") / 2).cast("float").alias("weight"),
    )
    config = WriteConfig(layout="packed", compression="none")
    write_tfrecords(frame, tmp_path / "out", config=config)
    summary = inspect(find_target(str(tmp_path / "out")), head=2)
    found = [(c["name"], c["type"], c["feature"], c["places"]) for c in summary["packed_columns"]]
    assert [column for column in found if column[0] != "name"] == [
        ("id", "long", "packed.int64", [0, 0]),
        ("age", "integer", "packed.int64", [1, 1]),
        ("price", "float", "packed.float", [0, 0]),
        ("weight", "float", "packed.float", [1, 1]),
    ]
    second = summary["head"][1]
    assert {k: second[k] for k in ("id", "age", "price", "weight")} == {
        "id": 1,
        "age": 101,
        "price": 0.25,
        "weight": 0.5,
    }
    assert not [name for name in second if name.startswith("packed.") and "bytes" not in name]
    text = "".join(map(render_plain, list_summary(summary)))
    assert "packed columns" in text
    assert "weight" in text


def test_a_wide_column_has_several_places_and_another_length_stays_as_it_is():
    columns = (
        PackedColumn("a", "packed.float", 0, 2, None),
        PackedColumn("b", "packed.float", 2, 1, None),
    )
    assert unpack_record({"packed.float": [1.0, 2.0, 3.0], "x": 7}, columns) == {
        "x": 7,
        "a": [1.0, 2.0],
        "b": 3.0,
    }
    short = {"packed.float": [1.0, 2.0], "x": 7}
    assert unpack_record(short, columns) == short
    assert columns[0].to_json()["places"] == [0, 1]
    assert list_packed_columns(None) == ()
