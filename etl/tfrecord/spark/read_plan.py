"""Plans a read: its schema, the partitions that are asked for, and what is decoded.

The schema comes from the manifest where there is one, else from a sample of the records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import types as spark_types
from pyspark.sql.pandas.types import to_arrow_schema as to_spark_arrow_schema

from conf.errors import ConfigError, InputDataError, did_you_mean
from etl.tfrecord.commit.output_manifest import OutputManifest
from etl.tfrecord.files.data_files import DataFile
from etl.tfrecord.files.partitions import parse_partition_value
from etl.tfrecord.spark.input_files import InputListing, list_input_files
from etl.tfrecord.spark.options import ReadOptions
from etl.tfrecord.spark.schema import restore_columns, to_arrow_schema, to_spark_schema
from etl.tfrecord.types.features import BYTE_ARRAY_COLUMN, WireFeature
from etl.tfrecord.types.from_example import FeatureNames, FromExample, find_name, plan_from_example
from etl.tfrecord.types.type_options import TypeOptions


def partition_types(listing: InputListing) -> Mapping[str, pa.DataType]:
    """Arrow type of each partition column, in their order."""
    fields = [
        spark_types.StructField(name, parse_simple_type(kind))
        for name, kind in listing.partition_columns
    ]
    schema = _arrow_schema(spark_types.StructType(fields))
    return {field.name: field.type for field in schema}


def _partition_row(file: DataFile, types: Mapping[str, pa.DataType]) -> dict[str, Any]:
    """Partition values of a file by column, as Python's."""
    return {
        name: parse_partition_value(name, text, types[name]).as_py()
        for name, text in zip(types, file.partition, strict=True)
    }


def select_files(
    files: Sequence[DataFile],
    types: Mapping[str, pa.DataType],
    where: Mapping[str, Sequence[str | None]],
) -> list[DataFile]:
    """Leaves the files whose partition has one of the allowed values in each column of `where`."""
    for name in where:
        if name not in types:
            raise ConfigError(
                f"there is no partition column {name!r} to select files by",
                received=", ".join(where),
                allowed=", ".join(types) or "none: the files are not partitioned",
                fix=did_you_mean(name, types) if types else "filter the rows with .where(...)",
            )
    if not where:
        return list(files)
    allowed = {
        name: {parse_partition_value(name, text, types[name]).as_py() for text in texts}
        for name, texts in where.items()
    }
    rows = ((file, _partition_row(file, types)) for file in files)
    return [file for file, row in rows if all(row[n] in values for n, values in allowed.items())]


# Where a type's name in SQL differs from that in a schema's JSON form.
_JSON_NAMES = {"int": "integer", "bigint": "long", "smallint": "short", "tinyint": "byte"}


def parse_simple_type(name: str) -> spark_types.DataType:
    """Reads the simple name of an atomic Spark type; unlike Spark's parser, without a session."""
    return spark_types._parse_datatype_json_string(json.dumps(_JSON_NAMES.get(name, name)))


def resolve_record_type(options: ReadOptions, listing: InputListing) -> str:
    """Record type as given, else the manifest's, else `Example`."""
    known = None if listing.committed is None else listing.committed.record_type
    return options.record_type or known or "Example"


def infer_schema(options: ReadOptions) -> spark_types.StructType:
    """Schema of all that the files hold: from the manifest, else inferred from a sample.

    Inference follows the JVM connectors: Long, Float, String, and arrays of them. Partition
    columns come last.
    """
    return build_schema(options, list_input_files(options))


def build_schema(options: ReadOptions, listing: InputListing) -> spark_types.StructType:
    """Schema of all that listed files hold; see `infer_schema`."""
    schema = _data_schema(options, listing)
    partitions = {name for name, _ in listing.partition_columns}
    fields = [field for field in schema.fields if field.name not in partitions]
    for name, simple_type in listing.partition_columns:
        fields.append(spark_types.StructField(name, parse_simple_type(simple_type)))
    return spark_types.StructType(fields)


def _data_schema(options: ReadOptions, listing: InputListing) -> spark_types.StructType:
    record_type = resolve_record_type(options, listing)
    if record_type == "ByteArray":
        return spark_types.StructType().add(BYTE_ARRAY_COLUMN, spark_types.BinaryType())
    committed = listing.committed
    if committed is not None and committed.record_type == record_type:
        return _committed_schema(options, committed)
    from etl.tfrecord.spark.schema_sample import infer_sample  # compiled, and seldom needed

    return to_spark_schema(_some(infer_sample(listing.files, options, record_type), options))


def _committed_schema(options: ReadOptions, committed: OutputManifest) -> spark_types.StructType:
    TypeOptions.read_manifest(committed.type_options)  # refuses one that is damaged
    features = _some(committed.features, options)
    schema = to_spark_schema(features, binary=committed.type_options.get("binary", ()))
    return schema if options.reads_features else restore_columns(schema, committed)


def _some(features: Sequence[WireFeature], options: ReadOptions) -> Sequence[WireFeature]:
    if not features:
        raise InputDataError(
            "no schema can be inferred: the files hold no feature",
            received=", ".join(options.paths),
            fix="give a schema: spark.read.schema(...)",
        )
    return features


@dataclass(frozen=True)
class ReadPlan:
    """Plan of a read; picklable.

    Attributes:
        target: Arrow schema that Spark expects.
        from_example: From features to data columns; None for raw payloads.
        partitions: For each partition column of the files, in their order, the column of `target`
            that it fills, or None.
        suspects: Features to look for in another case where a file lacks them: no manifest told
            their names.
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


def plan_read(
    options: ReadOptions, listing: InputListing, schema: spark_types.StructType
) -> ReadPlan:
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
    written = TypeOptions.read_manifest(committed.type_options if committed else {})
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


def _arrow_schema(schema: spark_types.StructType) -> pa.Schema:
    """Arrow schema with the types that Spark checks batches against, and our metadata.

    What Spark has no Arrow type for keeps the type that is refused by name.
    """
    fields = []
    for field, marked in zip(schema.fields, to_arrow_schema(schema), strict=True):
        try:
            expected = to_spark_arrow_schema(spark_types.StructType([field]), timezone="UTC")
        except Exception:  # PySpark raises various types for intervals and the like
            fields.append(marked)
            continue
        data_type = expected.field(0).type
        is_same = data_type.equals(marked.type)
        fields.append(marked if is_same else marked.with_type(data_type))
    return pa.schema(fields)
