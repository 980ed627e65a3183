"""The columns of a DataFrame in the manifest, so that a read without a schema gives them back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import types as spark_types

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.committed import Committed
from etl.tfrecord.lowering.description import read_description
from etl.tfrecord.lowering.tree import Planner
from etl.tfrecord.options import WriteOptions
from etl.tfrecord.raising import plan_raising
from etl.tfrecord.raising.names import read_names
from etl.tfrecord.spark.schema import VECTOR_CLASSES, to_arrow_schema

# Every decimal of so many digits is told apart by float32.
_FLOAT32_DIGITS = 6


def describe_columns(
    schema: spark_types.StructType, options: WriteOptions
) -> dict[str, Any] | None:
    """Describes the columns of a write for its manifest.

    Args:
        schema: Columns as they come from Spark.
        options: Options of the write.

    Returns:
        Their JSON form, partition columns left out; None where the records hold something else:
        what encoders made of them, or a payload.
    """
    if options.encoders is not None or options.record_type == "ByteArray":
        return None
    fields = [field for field in schema.fields if field.name not in options.partition_by]
    return {"type": "struct", "fields": [field.jsonValue() for field in fields]}


def restore_columns(wire: spark_types.StructType, committed: Committed) -> spark_types.StructType:
    """Schema of the columns as they were written, as far as the wire allows.

    Each has its own type wherever that holds every value of the wire: a decimal of more than six
    digits comes back as a float. All may be null, as in Spark's own file formats.

    Args:
        wire: Schema of the features alone.
        committed: The manifest.

    Returns:
        The columns, then features that are no part of one, as they are on the wire.
    """
    if committed.columns is None:
        return wire
    options, slots = read_description(committed.lowering)
    names = read_names(committed)
    left = {field.name: field for field in wire.fields}
    restored = []
    for field in _parse_columns(committed.columns).fields:
        planner = Planner(committed.record_type, options)
        node = planner.plan(field.name, _to_arrow(field).field(0))
        outputs = () if node is None else node.outputs
        features = {names.resolve(field.name, output.name) for output in outputs}
        data_type = _readable(field.dataType)
        column = spark_types.StructField(field.name, data_type, True, field.metadata)
        with contextlib.suppress(ConfigError):  # left as features, then
            if features and all(name in left for name in features):
                plan_raising(_to_arrow(column), committed.record_type, options, slots, names)
                restored.append(column)
                for name in features:
                    del left[name]
    return spark_types.StructType([*restored, *left.values()])


def _to_arrow(field: spark_types.StructField) -> pa.Schema:
    return to_arrow_schema(spark_types.StructType([field]))


def _readable(data_type: spark_types.DataType) -> spark_types.DataType:
    """The type that a column is read as: nullable throughout, and wide enough for its feature."""
    t = spark_types
    if isinstance(data_type, t.DecimalType) and data_type.precision > _FLOAT32_DIGITS:
        return t.FloatType()
    if isinstance(data_type, t.ArrayType):
        return t.ArrayType(_readable(data_type.elementType))
    if isinstance(data_type, t.MapType):
        return t.MapType(_readable(data_type.keyType), _readable(data_type.valueType))
    if isinstance(data_type, t.StructType):
        return t.StructType(
            [t.StructField(f.name, _readable(f.dataType), True, f.metadata) for f in data_type]
        )
    return data_type


def _parse_columns(columns: Mapping[str, Any]) -> spark_types.StructType:
    """Parses the JSON form of a schema.

    Raises:
        InputDataError: It is damaged, or names a class other than Spark's vectors, which parsing
            it would import.
    """
    try:
        for item in _walk(columns):
            if item.get("type") == "udt" and item.get("pyClass") not in VECTOR_CLASSES:
                raise ValueError(f"class {item.get('pyClass')!r}")
        return spark_types.StructType.fromJson(dict(columns))
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
