"""Spark schemas and Arrow schemas, compared with the batches that Spark itself hands over."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import tensorflow as tf
from pyspark.errors import PySparkException
from pyspark.ml.linalg import DenseVector, Vectors, VectorUDT
from pyspark.sql import Row
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema as spark_arrow_schema

from conf.errors import InputDataError
from etl.tfrecord.commit.output_directory import COMMIT_FILE, OutputManifest
from etl.tfrecord.spark.frames import write_tfrecords
from etl.tfrecord.spark.schema import restore_columns, to_arrow_schema
from etl.tfrecord.types.features import TypeOptions, WireFeature
from etl.tfrecord.types.parts import VECTOR_STORAGE


def test_equals_what_spark_hands_over(spark) -> None:
    vectors = spark.createDataFrame([(0, Vectors.dense([1.0]))], ["id", "v"])
    frame = vectors.select(
        "id", "v", F.struct("v").alias("sv"),
        F.current_timestamp().alias("t"), F.current_date().alias("d"),
        F.expr("cast(1.5 as decimal(10,2))").alias("dec"), F.array(F.lit(1)).alias("a"),
        F.expr("array(array(1.0f, null))").alias("aa"), F.lit("x").cast("binary").alias("b"),
        F.create_map(F.lit("k"), F.expr("cast(null as int)")).alias("m"),
        F.struct("id", F.current_timestamp().alias("t"), F.lit("x").alias("s")).alias("s"),
        F.expr("cast(current_timestamp() as timestamp_ntz)").alias("n"),
    )  # fmt: skip

    def schema_of(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.record_batch({"schema": [batch.schema.serialize().to_pybytes()]})

    (row,) = frame.mapInArrow(schema_of, "schema binary").collect()
    given = pa.ipc.read_schema(pa.py_buffer(bytes(row.schema)))
    planned = to_arrow_schema(frame.schema)
    assert given.names == planned.names
    assert given.field("v").type == VECTOR_STORAGE
    for theirs, ours in zip(given, planned, strict=True):
        if ours.name not in ("t", "s"):  # their zone is the session's
            assert theirs.type == ours.type, ours.name
    # What Spark checks the batches of a reader against.
    assert planned.equals(spark_arrow_schema(frame.schema, timezone="UTC"))


FORMAT = "sluice"
TYPES = TypeOptions(dates="days", timestamps="us", maps="entries")
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
    .add("tags", T.ArrayType(T.StringType()))
)
ROW = Row(*SCHEMA.names)(
    1, True, 0.5, decimal.Decimal("1234.56"), decimal.Decimal("1234567.25"), bytearray(b"\xff"),
    datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 3, 4, 5, 678901),
    Row(a=1, b=Row(c="x", e=[1, 2])), {"k": 3}, DenseVector([1.0, 2.0]), ["ü", ""],
)  # fmt: skip
EMPTY = Row(*SCHEMA.names)(
    0, False, -0.5, *[None] * 3, datetime.date(1, 1, 1), None, None, {}, None, []
)
NULLS = Row(*SCHEMA.names)(-1, *[None] * 11)


def test_every_type_comes_back(spark, tmp_path: Path) -> None:
    frame = spark.createDataFrame([ROW, EMPTY, NULLS], SCHEMA).coalesce(1)
    write_tfrecords(frame, tmp_path / "out", types=TYPES)
    back = spark.read.format(FORMAT).load(str(tmp_path / "out"))
    # A float32 holds fewer digits than the larger decimal has.
    expected = [T.FloatType() if f.name == "big" else f.dataType for f in SCHEMA]
    assert [field.dataType for field in back.schema] == expected
    assert back.schema["v"].metadata == {"ml": 1}
    first = ROW.asDict(recursive=False) | {"big": float(ROW.big)}
    assert back.collect() == [Row(*SCHEMA.names)(*first.values()), EMPTY, NULLS]
    raw = spark.read.format(FORMAT).option("readAs", "features").load(str(tmp_path / "out"))
    assert raw.schema["s.b.e"].dataType == T.ArrayType(T.LongType())
    assert raw.schema["day"].dataType == T.LongType()
    assert raw.schema["raw"].dataType == T.BinaryType()


def test_partition_columns_and_nulls(spark, tmp_path: Path) -> None:
    frame = spark.sql("select named_struct('a', 1, 'b', cast(null as int)) s, 7 x, 'NO' c "
                      "union all select null, null, 'SE'")  # fmt: skip
    write_tfrecords(frame, tmp_path / "out", partition_by=("c",))
    back = spark.read.format(FORMAT).load(str(tmp_path / "out"))
    assert back.dtypes == frame.dtypes
    assert sorted(back.collect(), key=str) == sorted(frame.collect(), key=str)


def test_appended_columns_of_other_types_are_read_as_their_features(spark, tmp_path) -> None:
    for sql in ("select 1 x, 2 same", "select 3L x, 4 same, true more, map('a', 1) m"):
        writer = spark.sql(sql).write.format(FORMAT).option("maps", "entries").mode("append")
        writer.save(str(tmp_path))
    back = spark.read.format(FORMAT).load(str(tmp_path))
    kinds = {"x": "bigint", "same": "int", "more": "boolean", "m": "map<string,int>"}
    assert dict(back.dtypes) == kinds
    assert sorted(back.select("x", "same", "more").collect(), key=str) == [
        Row(x=1, same=2, more=None), Row(x=3, same=4, more=True),
    ]  # fmt: skip


@pytest.mark.parametrize("kind", [{"type": "udt", "pyClass": "os.path"}, {"type": "nope"}, 7])
def test_damaged_columns_are_told_and_no_class_of_theirs_is_imported(kind) -> None:
    columns = {"type": "struct", "fields": [
        {"name": "x", "type": kind, "nullable": True, "metadata": {}}]}  # fmt: skip
    committed = OutputManifest("Example", None, (WireFeature("x", "int64"),), {}, (), (), columns)
    wire = T.StructType().add("x", "long")
    with pytest.raises(InputDataError, match="readAs=features"):
        restore_columns(wire, committed)
    with pytest.raises(InputDataError, match="is damaged"):
        OutputManifest.loads(json.dumps({**json.loads(committed.dumps()), "columns": [7]}), "m")


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


def test_other_messages_are_not_read_as_nulls(spark, tmp_path: Path) -> None:
    example = b"\n\t\n\x07\n\x01x\x12\x02\x1a\x00"  # an Example whose `x` has no value
    lists = b"\n" + bytes([len(example)]) + example  # ExampleListWithContext
    sequence = tf.train.SequenceExample()
    sequence.context.feature["y"].int64_list.value.append(1)
    sequence.feature_lists.feature_list["x"].feature.add().int64_list.value.append(2)
    records = {"example": example, "lists": lists, "empty": b""}
    records["sequence"] = sequence.SerializeToString()
    for name, record in records.items():
        with tf.io.TFRecordWriter(str(tmp_path / name)) as writer:
            writer.write(record)
    read = spark.read.format(FORMAT).schema("x int")
    for name in ("example", "empty"):
        assert read.load(str(tmp_path / name)).collect() == [Row(x=None)]
    for name, why in (("lists", "lists hold no feature"), ("sequence", "hold feature lists")):
        with pytest.raises(PySparkException, match=why):
            read.load(str(tmp_path / name)).collect()
    with pytest.raises(PySparkException, match="hold feature lists"):
        spark.read.format(FORMAT).load(str(tmp_path / "sequence"))
