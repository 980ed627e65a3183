"""Schemas of Spark and of Arrow, columns in the manifest, and the plan of a read.

A read's schema comes from the manifest where there is one, else from a sample of the records.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_type
from pyspark.sql.pandas.types import to_arrow_schema as to_spark_arrow_schema

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.commit.output_directory import OutputManifest
from etl.tfrecord.files.data_files import DataFile, parse_partition_value
from etl.tfrecord.spark.input_files import InputListing, list_input_files
from etl.tfrecord.spark.options import ReadOptions, read_type_options
from etl.tfrecord.types.features import BYTE_ARRAY_COLUMN, WireFeature
from etl.tfrecord.types.from_example import FromExample, find_name, plan_from_example
from etl.tfrecord.types.parts import VECTOR_METADATA, VECTOR_STORAGE
from etl.tfrecord.types.refusals import SPARK_TYPE_KEY, refuse_unknown
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


def to_spark_schema(features: Sequence[WireFeature], binary: Collection[str] = ()) -> T.StructType:
    """Spark schema of features, as the JVM connectors infer it: Long, Float, String, arrays.

    Bytes of the features in `binary` are Binary.
    """
    known = frozenset(binary)
    fields = [(f.name, f.arrow_type if f.name in known else f.text_type) for f in features]
    return from_arrow_schema(pa.schema(fields))


# Every decimal of so many digits is told apart by float32.
_FLOAT32_DIGITS = 6


def restore_columns(wire: T.StructType, committed: OutputManifest) -> T.StructType:
    """Schema of the columns as they were written, as far as the wire allows.

    Each has its own type wherever that holds every value of the wire: a decimal of more than six
    digits comes back as a float. All may be null, as in Spark's own file formats. Features that
    are no part of a column come last, as they are on the wire.
    """
    if committed.columns is None:
        return wire
    options = read_type_options(committed.type_options)
    names = [feature.name for feature in committed.features]
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


def _partition_schema(listing: InputListing) -> T.StructType:
    columns = listing.partition_columns
    return T.StructType([T.StructField(name, parse_simple_type(kind)) for name, kind in columns])


def select_files(
    listing: InputListing, where: Mapping[str, Sequence[str | None]]
) -> list[DataFile]:
    """Leaves the files whose partition has one of the allowed values in each column of `where`."""
    types = {field.name: field.type for field in _arrow_schema(_partition_schema(listing))}
    unknown = [name for name in where if name not in types]
    refuse_unknown("there are no such partition columns to select files by", unknown, types)

    def read(name: str, text: str | None) -> Any:
        return parse_partition_value(name, text, types[name]).as_py()

    allowed = {name: {read(name, text) for text in texts} for name, texts in where.items()}
    rows = [dict(zip(types, file.partition, strict=True)) for file in listing.files]
    return [
        file
        for file, row in zip(listing.files, rows, strict=True)
        if all(read(name, row[name]) in values for name, values in allowed.items())
    ]


# Where a type's name in SQL differs from that in a schema's JSON form.
_JSON_NAMES = {"int": "integer", "bigint": "long", "smallint": "short", "tinyint": "byte"}


def parse_simple_type(name: str) -> T.DataType:
    """Reads the simple name of an atomic Spark type; unlike Spark's parser, without a session."""
    return T._parse_datatype_json_string(json.dumps(_JSON_NAMES.get(name, name)))


def resolve_record_type(options: ReadOptions, listing: InputListing) -> str:
    """Record type as given, else the manifest's, else `Example`."""
    known = None if listing.committed is None else listing.committed.record_type
    return options.record_type or known or "Example"


def infer_schema(options: ReadOptions) -> T.StructType:
    """Schema of all that the files hold: from the manifest, else inferred from a sample.

    Inference follows the JVM connectors: Long, Float, String, and arrays of them. Partition
    columns come last.
    """
    listing = list_input_files(options)
    partitions = _partition_schema(listing)
    fields = [f for f in _data_schema(options, listing).fields if f.name not in partitions.names]
    return T.StructType([*fields, *partitions.fields])


def _data_schema(options: ReadOptions, listing: InputListing) -> T.StructType:
    record_type, committed = resolve_record_type(options, listing), listing.committed
    if record_type == "ByteArray":
        return T.StructType().add(BYTE_ARRAY_COLUMN, T.BinaryType())
    binary: Sequence[str] = ()
    if committed is not None and committed.record_type == record_type:
        features: Sequence[WireFeature] = committed.features
        binary = committed.type_options.get("binary", ())
    else:
        from etl.tfrecord.spark.read_task import infer_sample  # compiled, and seldom needed

        committed, features = None, infer_sample(listing.files, options, record_type)
    if not features:
        raise InputDataError(
            "no schema can be inferred: the files hold no feature",
            received=", ".join(options.paths),
            fix="give a schema: spark.read.schema(...)",
        )
    wire = to_spark_schema(features, binary)
    return wire if committed is None or options.reads_features else restore_columns(wire, committed)


@dataclass(frozen=True)
class ReadPlan:
    """Plan of a read: `target` is what Spark expects, `from_example` makes its data columns.

    `partitions` are, for each partition column of the files, the column of `target` that it fills,
    or None; `suspects` features to look for in another case where a file lacks them: no manifest
    told their names. Picklable.
    """

    record_type: str
    target: pa.Schema
    from_example: FromExample
    partitions: tuple[str | None, ...]
    suspects: frozenset[str] = frozenset()

    def complete(
        self, batch: pa.RecordBatch, partition: Sequence[str | None], name: str
    ) -> pa.RecordBatch:
        """Decoded features of a file, and its partition values, as one of Spark's batches."""
        columns = self.from_example.apply(batch, name).columns
        if not self.target.names:
            return batch
        values, data = dict(zip(self.partitions, partition, strict=True)), iter(columns)
        filled = [
            pa.repeat(parse_partition_value(f.name, values[f.name], f.type), batch.num_rows)
            if f.name in values
            else next(data)
            for f in self.target
        ]
        return pa.RecordBatch.from_arrays(filled, schema=self.target)


def plan_read(options: ReadOptions, listing: InputListing, schema: T.StructType) -> ReadPlan:
    """Plans a read of the columns of a schema: features, and partition columns by their names."""
    record_type = resolve_record_type(options, listing)
    # Upper and lower case do not matter, as in Spark.
    matches = [find_name(name, schema.names) for name, _ in listing.partition_columns]
    partitions = tuple(names[0] if names else None for names in matches)
    wanted = _arrow_schema(schema)
    data = pa.schema([field for field in wanted if field.name not in partitions])
    target = pa.schema([field.remove_metadata() for field in wanted])
    if record_type == "ByteArray" and data.types not in ([pa.binary()], []):
        raise ConfigError(
            "record type ByteArray is read as one binary column",
            received=str(data.remove_metadata()),
            allowed=f"struct<{BYTE_ARRAY_COLUMN}:binary>",
        )
    committed, types = listing.committed, options.type_options
    names = [f.name for f in committed.features] if committed else []
    written = read_type_options(committed.type_options if committed else {})
    from_example = plan_from_example(data, record_type, types or written, names)
    suspects = frozenset() if committed else frozenset(f.name for f in from_example.features)
    return ReadPlan(record_type, target, from_example, partitions, suspects)


def _arrow_schema(schema: T.StructType) -> pa.Schema:
    """Arrow schema with the types that Spark checks batches against, and our metadata.

    What Spark has no Arrow type for keeps the type that is refused by name.
    """
    return pa.schema(map(_expect, schema.fields, to_arrow_schema(schema)))


def _expect(field: T.StructField, marked: pa.Field) -> pa.Field:
    try:
        expected = to_spark_arrow_schema(T.StructType([field]), timezone="UTC").field(0).type
    except Exception:  # PySpark raises various types for intervals and the like
        return marked
    return marked if expected.equals(marked.type) else marked.with_type(expected)
