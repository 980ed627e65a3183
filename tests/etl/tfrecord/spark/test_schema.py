"""Spark schemas and Arrow schemas, compared with the batches that Spark itself hands over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.ml.linalg import MatrixUDT, Vectors, VectorUDT
from pyspark.sql import functions as F
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema as spark_arrow_schema

from conf.errors import ConfigError
from etl.tfrecord.features import WireFeature
from etl.tfrecord.lowering import Slot, plan_lowering
from etl.tfrecord.lowering.values import holds_same
from etl.tfrecord.lowering.vectors import VECTOR_STORAGE, is_vector
from etl.tfrecord.spark.schema import SPARK_TYPE_KEY, to_arrow_schema, to_spark_schema
from tests.growth import growth


def test_vectors_are_marked_at_any_depth_of_structs_and_maps() -> None:
    inner = T.StructType().add("v", VectorUDT()).add("x", T.LongType(), False)
    schema = to_arrow_schema(
        T.StructType().add("v", VectorUDT()).add("s", inner)
        .add("m", T.MapType(T.StringType(), VectorUDT()))
    )  # fmt: skip
    assert is_vector(schema.field("v"))
    assert is_vector(schema.field("s").type.field("v"))
    assert not schema.field("s").type.field("x").nullable
    assert is_vector(schema.field("m").type.item_field)


def test_types_without_an_arrow_form_are_null_and_keep_their_name() -> None:
    schema = T.StructType().add("i", T.CalendarIntervalType()).add("m", MatrixUDT())
    schema = schema.add("y", T.YearMonthIntervalType()).add("n", T.NullType())
    arrow = to_arrow_schema(schema)
    assert arrow.types == [pa.null()] * 4
    assert arrow.field("y").metadata[SPARK_TYPE_KEY] == b"interval year to month"


def test_variants_are_refused_rather_than_written_as_their_internals() -> None:
    schema = T.StructType().add("v", T.VariantType()).add("a", T.ArrayType(T.VariantType()))
    with pytest.raises(ConfigError) as caught:
        plan_lowering(to_arrow_schema(schema), "Example")
    assert "2 column(s)" in str(caught.value)


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
        assert holds_same(theirs.type, ours.type), ours.name
        if ours.name not in ("t", "s"):  # their zone is the session's
            assert theirs.type == ours.type, ours.name
    # What Spark checks the batches of a reader against.
    assert planned.equals(spark_arrow_schema(frame.schema, timezone="UTC"))


def test_features_as_the_connectors_infer_them() -> None:
    features = [
        WireFeature("x", "int64"), WireFeature("f", "float32", True), WireFeature("s", "bytes"),
        WireFeature("g", "bytes", is_sequence=True), WireFeature("packed.int64", "int64", True),
    ]  # fmt: skip
    slots = {"packed.int64": (Slot("a", 1), Slot("b", 3))}
    assert to_spark_schema(features, slots).simpleString() == (
        "struct<x:bigint,f:array<float>,s:string,g:array<array<string>>,a:bigint,b:array<bigint>>"
    )
    binary = to_spark_schema(features[2:4], string_type=T.BinaryType())
    assert binary.simpleString() == "struct<s:binary,g:array<array<binary>>>"
    assert to_spark_schema(features[4:]).simpleString() == "struct<packed.int64:array<bigint>>"


def test_nulls_alone_are_nullable_whatever_spark_says() -> None:
    schema = T.StructType().add("y", T.YearMonthIntervalType(), False)
    assert to_arrow_schema(schema).field("y").nullable


def test_strings_of_limited_length_are_strings() -> None:
    schema = T.StructType().add("c", T.CharType(3)).add("v", T.VarcharType(3))
    assert to_arrow_schema(schema).types == [pa.string(), pa.string()]


def test_many_columns_take_time_by_their_number_not_by_its_square() -> None:
    def prepare(columns: int) -> Callable[[], Any]:
        features = [WireFeature(f"c{k}", "int64") for k in range(columns)]
        return lambda: to_spark_schema(features, binary=[f.name for f in features])

    assert growth(prepare, 1000, 16_000) < 80  # 16 where it is linear, 256 where it is quadratic
