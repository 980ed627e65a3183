"""Plans a read: its schema, the partitions that are asked for, and what is decoded.

The schema comes from the manifest where there is one, else from a sample of the records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema as to_spark_arrow_schema

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.files.data_files import DataFile
from etl.tfrecord.files.partitions import parse_partition_value
from etl.tfrecord.spark.input_files import InputListing, list_input_files
from etl.tfrecord.spark.options import ReadOptions, read_type_options
from etl.tfrecord.spark.schema import restore_columns, to_arrow_schema, to_spark_schema
from etl.tfrecord.types.features import BYTE_ARRAY_COLUMN, WireFeature
from etl.tfrecord.types.from_example import FeatureNames, FromExample, find_name, plan_from_example
from etl.tfrecord.types.refusals import refuse_unknown


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
    features: tuple[WireFeature, ...]
    from_example: FromExample | None
    partitions: tuple[str | None, ...]
    suspects: frozenset[str] = frozenset()

    def complete(
        self, batch: pa.RecordBatch, partition: Sequence[str | None], name: str
    ) -> pa.RecordBatch:
        """Decoded features of a file, and its partition values, as one of Spark's batches."""
        columns = (self.from_example.apply(batch, name) if self.from_example else batch).columns
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
    if record_type == "ByteArray":
        return ReadPlan(record_type, target, _plan_payload(data), None, partitions)
    committed, types = listing.committed, options.type_options
    names = FeatureNames(tuple(f.name for f in committed.features) if committed else ())
    written = read_type_options(committed.type_options if committed else {})
    from_example = plan_from_example(data, record_type, types or written, names)
    suspects = frozenset() if committed else frozenset(f.name for f in from_example.features)
    return ReadPlan(record_type, target, from_example.features, from_example, partitions, suspects)


def _plan_payload(data: pa.Schema) -> tuple[WireFeature, ...]:
    if data.types not in ([pa.binary()], []):
        raise ConfigError(
            "record type ByteArray is read as one binary column",
            received=str(data.remove_metadata()),
            allowed=f"struct<{BYTE_ARRAY_COLUMN}:binary>",
        )
    return tuple(WireFeature(name, "bytes") for name in data.names)


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
