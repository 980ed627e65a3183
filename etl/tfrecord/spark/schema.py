"""Spark schemas to Arrow schemas and back, and the columns of a DataFrame in the manifest."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_type

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.commit.output_manifest import OutputManifest
from etl.tfrecord.spark.options import WriteOptions, read_type_options
from etl.tfrecord.types.features import Kind, WireFeature
from etl.tfrecord.types.from_example import FeatureNames, plan_from_example
from etl.tfrecord.types.parts import VECTOR_METADATA, VECTOR_STORAGE
from etl.tfrecord.types.refusals import SPARK_TYPE_KEY
from etl.tfrecord.types.to_example import plan_to_example

# Told by name, so that the ML libraries need not be imported.
VECTOR_CLASSES = ("pyspark.ml.linalg.VectorUDT", "pyspark.mllib.linalg.VectorUDT")


def quote_name(name: str) -> str:
    """The name of a column as Spark's SQL takes it, whatever characters it has."""
    return "`" + name.replace("`", "``") + "`"


def to_arrow_schema(schema: T.StructType) -> pa.Schema:
    """Arrow form of a Spark schema: a field per column, which names its Spark type.

    ML vectors are structs in Spark's storage, marked by `VECTOR_METADATA`; a type without an Arrow
    form is null, which nothing carries. Batches may differ in the zone of timestamps, which is the
    session's.
    """
    return pa.schema([_to_field(field.name, field.dataType, field.nullable) for field in schema])


def _to_field(name: str, data_type: T.DataType, nullable: bool) -> pa.Field:
    metadata = {SPARK_TYPE_KEY: data_type.simpleString().encode()}
    kind = type(data_type)
    if f"{kind.__module__}.{kind.__name__}" in VECTOR_CLASSES:
        return pa.field(name, VECTOR_STORAGE, nullable, {**metadata, **VECTOR_METADATA})
    arrow_type = _to_type(data_type)
    # Arrow takes no field of nulls alone that is not nullable.
    return pa.field(name, arrow_type, nullable or pa.types.is_null(arrow_type), metadata)


def _to_type(data_type: T.DataType) -> pa.DataType:
    if isinstance(data_type, T.StructType):
        return pa.struct([_to_field(f.name, f.dataType, f.nullable) for f in data_type])
    if isinstance(data_type, T.ArrayType):
        element = _to_type(data_type.elementType)
        return pa.list_(pa.field("element", element, data_type.containsNull))
    if isinstance(data_type, T.MapType):
        values = _to_field("value", data_type.valueType, data_type.valueContainsNull)
        keys = pa.field("key", _to_type(data_type.keyType), nullable=False)
        return pa.map_(keys, values)
    if isinstance(data_type, T.UserDefinedType | T.VariantType):
        return pa.null()  # a variant's Arrow form, two binaries, could not be read back as one
    if isinstance(data_type, T.TimestampType):
        return pa.timestamp("us", "UTC")
    if isinstance(data_type, T.CharType | T.VarcharType):
        return pa.string()
    try:
        return to_arrow_type(data_type)
    except Exception:  # PySpark raises various types for intervals and the like
        return pa.null()


_SPARK_TYPES: Mapping[Kind, T.DataType] = {
    "int64": T.LongType(),
    "float32": T.FloatType(),
    "bytes": T.StringType(),
}


def to_spark_schema(features: Sequence[WireFeature], binary: Collection[str] = ()) -> T.StructType:
    """Spark schema of features, as the JVM connectors infer it: Long, Float, String, arrays.

    Bytes of the features in `binary` are Binary.
    """
    known = frozenset(binary)
    fields = []
    for feature in features:
        data_type = T.BinaryType() if feature.name in known else _SPARK_TYPES[feature.kind]
        for _ in range(2 if feature.is_sequence else int(feature.is_list)):
            data_type = T.ArrayType(data_type)
        fields.append(T.StructField(feature.name, data_type))
    return T.StructType(fields)  # its `add` would go through all fields every time


# Every decimal of so many digits is told apart by float32.
_FLOAT32_DIGITS = 6


def describe_columns(schema: T.StructType, options: WriteOptions) -> dict[str, Any] | None:
    """JSON form of the columns of a write, for its manifest, partition columns left out.

    None where the records hold something else: what encoders made of them, or a payload.
    """
    if options.encoders is not None or options.record_type == "ByteArray":
        return None
    fields = [field for field in schema.fields if field.name not in options.partition_by]
    return {"type": "struct", "fields": [field.jsonValue() for field in fields]}


def restore_columns(wire: T.StructType, committed: OutputManifest) -> T.StructType:
    """Schema of the columns as they were written, as far as the wire allows.

    Each has its own type wherever that holds every value of the wire: a decimal of more than six
    digits comes back as a float. All may be null, as in Spark's own file formats. Features that
    are no part of a column come last, as they are on the wire.
    """
    if committed.columns is None:
        return wire
    options = read_type_options(committed.type_options)
    names = FeatureNames(tuple(feature.name for feature in committed.features))
    left = {field.name: field for field in wire.fields}
    restored = []
    for field in _parse_columns(committed.columns).fields:
        column = T.StructField(field.name, _readable(field.dataType), True, field.metadata)
        with contextlib.suppress(ConfigError):  # left as features, then
            plan = plan_to_example(_to_arrow(field), committed.record_type, options)
            if plan.schema.names and left.keys() >= set(plan.schema.names):
                plan_from_example(_to_arrow(column), committed.record_type, options, names)
                restored.append(column)
                for name in plan.schema.names:
                    del left[name]
    return T.StructType([*restored, *left.values()])


def _to_arrow(field: T.StructField) -> pa.Schema:
    return to_arrow_schema(T.StructType([field]))


def _readable(data_type: T.DataType) -> T.DataType:
    """The type that a column is read as: nullable throughout, and wide enough for its feature."""
    if isinstance(data_type, T.DecimalType) and data_type.precision > _FLOAT32_DIGITS:
        return T.FloatType()
    if isinstance(data_type, T.ArrayType):
        return T.ArrayType(_readable(data_type.elementType))
    if isinstance(data_type, T.MapType):
        return T.MapType(_readable(data_type.keyType), _readable(data_type.valueType))
    if isinstance(data_type, T.StructType):
        return T.StructType(
            [T.StructField(f.name, _readable(f.dataType), True, f.metadata) for f in data_type]
        )
    return data_type


def _parse_columns(columns: Mapping[str, Any]) -> T.StructType:
    """Parses the JSON form of a schema; imports no class but those of Spark's vectors."""
    try:
        for item in _walk(columns):
            if item.get("type") == "udt" and item.get("pyClass") not in VECTOR_CLASSES:
                raise ValueError(f"class {item.get('pyClass')!r}")
        return T.StructType.fromJson(dict(columns))
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputDataError(
            "the manifest's account of the columns is damaged",
            received=repr(error),
            fix="read with option readAs=features, or give a schema",
        ) from error


def _walk(item: Any) -> Iterator[Mapping[str, Any]]:
    """All types and fields; what users note in a field's metadata is none."""
    if isinstance(item, Mapping):
        yield item
        item = [part for name, part in item.items() if name != "metadata"]
    if isinstance(item, list):
        for part in item:
            yield from _walk(part)
