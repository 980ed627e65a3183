"""A read without a schema gives back the columns that were written."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.ml.linalg import DenseVector, VectorUDT
from pyspark.sql import Row
from pyspark.sql import types as T

from conf.errors import InputDataError
from etl.tfrecord.committed import COMMIT_FILE, Committed
from etl.tfrecord.features import WireFeature
from etl.tfrecord.policies import ColumnPolicy
from etl.tfrecord.spark.columns import restore_columns
from etl.tfrecord.spark.writer import write_tfrecords

FORMAT = "sluice"
POLICY = ColumnPolicy(dates="days", timestamps="us", maps="entries")
NESTED = T.StructType().add("c", "string").add("e", T.ArrayType(T.ShortType()))
SCHEMA = (
    T.StructType()
    .add("i", "integer")
    .add("b", "boolean")
    .add("d", "double")
    .add("price", T.DecimalType(6, 2))
    .add("big", T.DecimalType(12, 2))
    .add("raw", "binary")
    .add("day", "date")
    .add("ts", "timestamp")
    .add("s", T.StructType().add("a", "integer").add("b", NESTED))
    .add("m", T.MapType(T.StringType(), T.IntegerType()))
    .add("v", VectorUDT(), True, {"ml": 1})
)
ROW = Row(*SCHEMA.names)(
    1, True, 0.5, decimal.Decimal("1234.56"), decimal.Decimal("1234567.25"), bytearray(b"\xff"),
    datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 3, 4, 5, 678901),
    Row(a=1, b=Row(c="x", e=[1, 2])), {"k": 3}, DenseVector([1.0, 2.0]),
)  # fmt: skip


@pytest.mark.parametrize("layout", ["columns", "packed"])
def test_every_type_comes_back(spark, tmp_path: Path, layout: str) -> None:
    frame = spark.createDataFrame([ROW], SCHEMA)
    write_tfrecords(frame, tmp_path / "out", policy=POLICY, layout=layout)
    back = spark.read.format(FORMAT).load(str(tmp_path / "out"))
    # A float32 holds fewer digits than the larger decimal has.
    expected = [T.FloatType() if f.name == "big" else f.dataType for f in SCHEMA]
    assert [field.dataType for field in back.schema] == expected
    assert back.schema["v"].metadata == {"ml": 1}
    assert back.collect() == [Row(*SCHEMA.names)(*(
        float(value) if name == "big" else value for name, value in ROW.asDict().items()
    ))]  # fmt: skip
    raw = spark.read.format(FORMAT).option("readAs", "features").load(str(tmp_path / "out"))
    assert raw.schema["s.b.e"].dataType == T.ArrayType(T.LongType())
    assert raw.schema["day"].dataType == T.LongType()


def test_packed_in_spark_keeps_the_types_of_its_columns(spark, tmp_path: Path) -> None:
    frame = spark.sql("select 1 a, true b, 2S c, cast(0.5 as float) d, 'x' t")
    write_tfrecords(frame, tmp_path / "out", layout="packed")
    back = spark.read.format(FORMAT).load(str(tmp_path / "out"))
    assert (back.dtypes, back.collect()) == (frame.dtypes, frame.collect())


def test_partition_columns_and_nulls(spark, tmp_path: Path) -> None:
    frame = spark.sql("select named_struct('a', 1, 'b', cast(null as int)) s, 7 x, 'NO' c "
                      "union all select null, null, 'SE'")  # fmt: skip
    write_tfrecords(frame, tmp_path / "out", partition_by=("c",))
    back = spark.read.format(FORMAT).load(str(tmp_path / "out"))
    assert back.dtypes == frame.dtypes
    assert sorted(back.collect(), key=str) == sorted(frame.collect(), key=str)


def test_renamed_features_come_back_under_their_columns(spark, tmp_path: Path) -> None:
    frame = spark.sql("select 1 `a.b`, named_struct('b', 2, 'c', 3) a")
    writer = frame.write.format(FORMAT).option("nameCollisions", "rename")
    writer.mode("append").save(str(tmp_path))
    assert spark.read.format(FORMAT).load(str(tmp_path)).collect() == frame.collect()
    given = spark.read.format(FORMAT).schema("A struct<B:int>").load(str(tmp_path))
    assert given.collect() == [Row(A=Row(B=2))]


def test_appended_columns_of_other_types_are_read_as_their_features(spark, tmp_path) -> None:
    for sql in ("select 1 x, 2 same", "select 3L x, 4 same, true more"):
        spark.sql(sql).write.format(FORMAT).mode("append").save(str(tmp_path))
    back = spark.read.format(FORMAT).load(str(tmp_path))
    assert dict(back.dtypes) == {"x": "bigint", "same": "int", "more": "boolean"}
    assert sorted(back.select("x", "same", "more").collect(), key=str) == [
        Row(x=1, same=2, more=None), Row(x=3, same=4, more=True),
    ]  # fmt: skip


def test_columns_lowered_by_other_rules_are_read_as_their_features(spark, tmp_path) -> None:
    frame = spark.sql("select map('a', 1) m")
    options = {"maps": "keys", "mapKeys": '["a"]'}
    frame.write.format(FORMAT).options(**options).mode("append").save(str(tmp_path))
    frame.write.format(FORMAT).option("maps", "entries").mode("append").save(str(tmp_path))
    back = spark.read.format(FORMAT).load(str(tmp_path))
    assert sorted(back.columns) == ["m.a", "m.keys", "m.values"]


def test_a_manifest_without_columns_is_read_as_before(spark, tmp_path: Path) -> None:
    spark.sql("select 1 x").write.format(FORMAT).mode("append").save(str(tmp_path))
    manifest = json.loads((tmp_path / COMMIT_FILE).read_text())
    assert manifest.pop("columns")["fields"][0]["type"] == "integer"
    (tmp_path / COMMIT_FILE).write_text(json.dumps(manifest))
    assert spark.read.format(FORMAT).load(str(tmp_path)).dtypes == [("x", "bigint")]


@pytest.mark.parametrize("kind", [{"type": "udt", "pyClass": "os.path"}, {"type": "nope"}, 7])
def test_damaged_columns_are_told_and_no_class_of_theirs_is_imported(kind) -> None:
    columns = {"type": "struct", "fields": [
        {"name": "x", "type": kind, "nullable": True, "metadata": {}}]}  # fmt: skip
    committed = Committed("Example", None, (WireFeature("x", "int64"),), {}, (), (), columns)
    wire = T.StructType().add("x", "long")
    with pytest.raises(InputDataError, match="readAs=features"):
        restore_columns(wire, committed)
    with pytest.raises(InputDataError, match="is damaged"):
        Committed.loads(json.dumps({**json.loads(committed.dumps()), "columns": [7]}), "m")


def test_case_does_not_matter_where_the_manifest_tells_the_names(spark, tmp_path: Path) -> None:
    frame = spark.sql("select 1 UserId, named_struct('Age', 30) Profile, 'NO' Country")
    write_tfrecords(frame, tmp_path / "out", partition_by=("Country",))
    schema = "userid int, PROFILE struct<age:int>, COUNTRY string"
    back = spark.read.format(FORMAT).schema(schema).load(str(tmp_path / "out"))
    assert back.collect() == [Row(userid=1, PROFILE=Row(age=30), COUNTRY="NO")]


def test_a_feature_in_another_case_is_never_taken_for_absent(spark, tmp_path: Path) -> None:
    frame = spark.sql("select 1 UserId, 2 x")
    frame.write.format(FORMAT).mode("append").save(str(tmp_path))
    (tmp_path / COMMIT_FILE).unlink()
    read = spark.read.format(FORMAT)
    with pytest.raises(PySparkException, match=r"(?s)no record has a feature 'userid'.*UserId"):
        read.schema("userid int, x int").load(str(tmp_path)).collect()
    for lenient in ("skip", "fail"):
        found = read.option("onCorrupt", lenient).schema("x int, absent int").load(str(tmp_path))
        assert found.collect() == [Row(x=2, absent=None)]
