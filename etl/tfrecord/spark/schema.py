"""Spark schemas to Arrow schemas, and features to Spark schemas."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
from pyspark.sql import types as spark_types
from pyspark.sql.pandas.types import to_arrow_type

from etl.tfrecord.features import Kind, WireFeature
from etl.tfrecord.lowering.packing import Slot
from etl.tfrecord.lowering.vectors import VECTOR_METADATA, VECTOR_STORAGE

# Told by name, so that the ML libraries need not be imported.
VECTOR_CLASSES = ("pyspark.ml.linalg.VectorUDT", "pyspark.mllib.linalg.VectorUDT")
SPARK_TYPE_KEY = b"sluice.spark_type"


def to_arrow_schema(schema: spark_types.StructType) -> pa.Schema:
    """Arrow form of a Spark schema.

    Args:
        schema: Spark's schema of the rows to come.

    Returns:
        A field per column, which names the Spark type in its metadata under `sluice.spark_type`.
        ML vectors are structs in Spark's storage, marked by `VECTOR_METADATA`; a type without an
        Arrow form is null, which nothing carries. Batches may differ in the zone of timestamps,
        which is the session's.
    """
    return pa.schema([_to_field(field.name, field.dataType, field.nullable) for field in schema])


def _to_field(name: str, data_type: spark_types.DataType, nullable: bool) -> pa.Field:
    metadata = {SPARK_TYPE_KEY: data_type.simpleString().encode()}
    if _is_vector(data_type):
        return pa.field(name, VECTOR_STORAGE, nullable, {**metadata, **VECTOR_METADATA})
    arrow_type = _to_type(data_type)
    # Arrow takes no field of nulls alone that is not nullable.
    return pa.field(name, arrow_type, nullable or pa.types.is_null(arrow_type), metadata)


def _to_type(data_type: spark_types.DataType) -> pa.DataType:
    if isinstance(data_type, spark_types.StructType):
        return pa.struct([_to_field(f.name, f.dataType, f.nullable) for f in data_type])
    if isinstance(data_type, spark_types.ArrayType):
        element = _to_type(data_type.elementType)
        return pa.list_(pa.field("element", element, data_type.containsNull))
    if isinstance(data_type, spark_types.MapType):
        values = _to_field("value", data_type.valueType, data_type.valueContainsNull)
        keys = pa.field("key", _to_type(data_type.keyType), nullable=False)
        return pa.map_(keys, values)
    if isinstance(data_type, spark_types.UserDefinedType | spark_types.VariantType):
        return pa.null()  # a variant's Arrow form, two binaries, could not be read back as one
    if isinstance(data_type, spark_types.TimestampType):
        return pa.timestamp("us", "UTC")
    if isinstance(data_type, spark_types.CharType | spark_types.VarcharType):
        return pa.string()
    try:
        return to_arrow_type(data_type)
    except Exception:  # PySpark raises various types for intervals and the like
        return pa.null()


def _is_vector(data_type: spark_types.DataType) -> bool:
    """Whether a type is a vector of either ML library."""
    kind = type(data_type)
    return f"{kind.__module__}.{kind.__name__}" in VECTOR_CLASSES


def to_spark_schema(
    features: Sequence[WireFeature],
    slots: Mapping[str, Sequence[Slot]] | None = None,
    string_type: spark_types.DataType | None = None,
    binary: Collection[str] = (),
) -> spark_types.StructType:
    """Spark schema of features, as the JVM connectors infer it: Long, Float, String, arrays.

    Args:
        features: In column order.
        slots: What lies where in packed features, each of which becomes the columns of its slots.
        string_type: Type of bytes features; None for String.
        binary: Names of features that are Binary, whatever the others are.
    """
    text, known = string_type or spark_types.StringType(), frozenset(binary)
    fields = []
    for feature in features:
        for part in _split(feature, (slots or {}).get(feature.name, ())):
            values = spark_types.BinaryType() if part.name in known else text
            fields.append(spark_types.StructField(part.name, _spark_type(part, values)))
    return spark_types.StructType(fields)  # its `add` would go through all fields every time


def _split(feature: WireFeature, slots: Sequence[Slot]) -> list[WireFeature]:
    """A packed feature's slots as features of their own; any other feature itself."""
    if not slots:
        return [feature]
    return [replace(feature, name=slot.name, is_list=slot.width > 1) for slot in slots]


def _spark_type(feature: WireFeature, string_type: spark_types.DataType) -> spark_types.DataType:
    types: Mapping[Kind, spark_types.DataType] = {
        "int64": spark_types.LongType(),
        "float32": spark_types.FloatType(),
        "bytes": string_type,
    }
    values = types[feature.kind]
    if feature.is_sequence:
        return spark_types.ArrayType(spark_types.ArrayType(values))
    return spark_types.ArrayType(values) if feature.is_list else values
