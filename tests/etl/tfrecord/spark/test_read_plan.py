"""Batches come out in the types that Spark checks them against."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pytest
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from conf.errors import ConfigError
from etl.tfrecord.input_files import Listing
from etl.tfrecord.read_options import parse_read_options
from etl.tfrecord.spark.read_plan import plan_read

DAY = datetime.date(2026, 1, 1)


def plan(schema: T.StructType, *partition_columns: tuple[str, str], **options: str):
    listing = Listing((), tuple(partition_columns), None)
    return plan_read(parse_read_options({"path": "/x", **options}), listing, schema)


def test_types_are_those_of_spark() -> None:
    schema = T.StructType([
        T.StructField("t", T.TimestampType()), T.StructField("n", T.TimestampNTZType()),
        T.StructField("l", T.ArrayType(T.IntegerType())), T.StructField("m", T.DecimalType(9, 2)),
        T.StructField("s", T.StructType([T.StructField("u", T.TimestampType())])),
    ])  # fmt: skip
    found = plan(schema, timestamps="ms")
    expected = to_arrow_schema(schema, timezone="UTC")
    assert found.target.equals(expected)
    columns = {f.name: pa.array([None], f.arrow_type) for f in found.features}
    assert found.complete(pa.record_batch(columns), (), "f").schema.equals(expected)


def test_partition_values_stand_where_the_schema_wants_them() -> None:
    schema = T.StructType().add("d", T.DateType()).add("x", T.IntegerType()).add("c", "string")
    found = plan(schema, ("c", "string"), ("d", "date"), ("e", "int"))
    batch = pa.record_batch({"x": [1, None]})
    completed = found.complete(batch, (None, "2026-01-01", "3"), "f")
    assert completed.to_pylist() == [
        {"d": DAY, "x": 1, "c": None},
        {"d": DAY, "x": None, "c": None},
    ]
    assert [f.name for f in found.features] == ["x"]


def test_what_cannot_be_read_is_named() -> None:
    schema = T.StructType().add("ok", "long").add("i", T.DayTimeIntervalType())
    schema.add("t", T.TimestampType())
    with pytest.raises(ConfigError, match=r"(?s)i \(.*t \(timestamp\).*option timestamps"):
        plan(schema)
    with pytest.raises(ConfigError, match="one binary column"):
        plan(schema, recordType="ByteArray")
