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
from etl.tfrecord.files.data_files import DataFile
from etl.tfrecord.files.partitions import parse_partition_value
from etl.tfrecord.spark.input_files import InputListing
from etl.tfrecord.spark.options import ReadOptions
from etl.tfrecord.spark.schema import restore_columns, to_arrow_schema, to_spark_schema
from etl.tfrecord.types.column_policies import parse_type_options
from etl.tfrecord.types.features import BYTE_ARRAY_COLUMN, WireFeature
from etl.tfrecord.types.from_example import (
    FeatureNames,
    FromExample,
    find_name,
    plan_from_example,
    read_names,
)
from etl.tfrecord.types.to_example import read_description


def select_files(
    files: Sequence[DataFile],
    types: Mapping[str, pa.DataType],
    where: Mapping[str, Sequence[str | None]],
) -> list[DataFile]:
    """Leaves the files whose partition has one of the allowed values in each column.

    Args:
        files: With their partition values, in the order of `types`.
        types: Type by partition column.
        where: Allowed values, as text, by partition column.

    Raises:
        ConfigError: No such partition column.
        InputDataError: A value does not fit its column's type.
    """
    allowed: dict[int, set[Any]] = {}
    for name, texts in where.items():
        if name not in types:
            raise ConfigError(
                f"there is no partition column {name!r} to select files by",
                received=", ".join(where),
                allowed=", ".join(types) or "none: the files are not partitioned",
                fix=did_you_mean(name, types) if types else "filter the rows with .where(...)",
            )
        allowed[list(types).index(name)] = {
            parse_partition_value(name, text, types[name]).as_py() for text in texts
        }
    names = list(types)
    return [
        file
        for file in files
        if all(
            parse_partition_value(names[k], file.partition[k], types[names[k]]).as_py() in values
            for k, values in allowed.items()
        )
    ]


# Where a type's name in SQL differs from that in a schema's JSON form.
_JSON_NAMES = {"int": "integer", "bigint": "long", "smallint": "short", "tinyint": "byte"}


def parse_simple_type(name: str) -> spark_types.DataType:
    """Reads the simple name of an atomic Spark type; unlike Spark's parser, without a session."""
    return spark_types._parse_datatype_json_string(json.dumps(_JSON_NAMES.get(name, name)))


def resolve_record_type(options: ReadOptions, listing: InputListing) -> str:
    """Record type as given, else the manifest's, else `Example`."""
    known = None if listing.committed is None else listing.committed.record_type
    return options.record_type or known or "Example"


def build_schema(options: ReadOptions, listing: InputListing) -> spark_types.StructType:
    """Builds the schema of all that the files hold, partition columns last.

    Args:
        options: Options of the read.
        listing: Its files.

    Raises:
        InputDataError: A file is damaged, a feature is not of one kind, or nothing is there.
    """
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
        read_description(committed.type_options)  # refuses one that is damaged
        features: Sequence[WireFeature] = committed.features
        binary = committed.type_options.get("binary", ())
    else:
        from etl.tfrecord.spark.schema_sample import infer_sample  # compiled, and seldom needed

        binary = ()
        features = infer_sample(listing.files, options, record_type)
    if not features:
        raise InputDataError(
            "no schema can be inferred: the files hold no feature",
            received=", ".join(options.paths),
            fix="give a schema: spark.read.schema(...)",
        )
    schema = to_spark_schema(features, binary=binary)
    if options.reads_features or committed is None or committed.record_type != record_type:
        return schema
    return restore_columns(schema, committed)


@dataclass(frozen=True)
class ReadPlan:
    """Plan of a read; picklable.

    Attributes:
        record_type: Record type of the files.
        target: Arrow schema that Spark expects.
        features: What to decode.
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
        """Turns a decoded batch into one of Spark's.

        Args:
            batch: Decoded features.
            partition: Partition values of the file.
            name: What to call the file in an error.

        Raises:
            InputDataError: A value does not fit its column.
        """
        columns = (self.from_example.apply(batch, name) if self.from_example else batch).columns
        if not self.target.names:
            return batch
        if not self.partitions:
            return pa.RecordBatch.from_arrays(columns, schema=self.target)
        values = dict(zip(self.partitions, partition, strict=True))
        data = iter(columns)
        return pa.RecordBatch.from_arrays(
            [
                pa.repeat(parse_partition_value(f.name, values[f.name], f.type), batch.num_rows)
                if f.name in values
                else next(data)
                for f in self.target
            ],
            schema=self.target,
        )


def plan_read(
    options: ReadOptions, listing: InputListing, schema: spark_types.StructType
) -> ReadPlan:
    """Plans a read.

    Args:
        options: Options of the read.
        listing: Its files.
        schema: Columns to read: features, and partition columns by their names.

    Raises:
        ConfigError: Columns that cannot be read, all of them in one message.
    """
    record_type = resolve_record_type(options, listing)
    partitions = _match_partitions(listing, schema.names)
    wanted = _arrow_schema(schema)
    data = pa.schema([field for field in wanted if field.name not in partitions])
    target = pa.schema([field.remove_metadata() for field in wanted])
    if record_type == "ByteArray":
        if data.types not in ([pa.binary()], []):
            raise ConfigError(
                "record type ByteArray is read as one binary column",
                received=schema.simpleString(),
                allowed=f"struct<{BYTE_ARRAY_COLUMN}:binary>",
            )
        features = tuple(WireFeature(name, "bytes") for name in data.names)
        return ReadPlan(record_type, target, features, None, partitions)
    committed = listing.committed
    type_options = read_description(committed.type_options if committed else {})
    if options.type_options:
        type_options = parse_type_options(options.type_options)
    names = FeatureNames()
    if committed is not None:
        names = read_names(committed.type_options, committed.features)
    from_example = plan_from_example(data, record_type, type_options, names)
    suspects = frozenset() if committed else frozenset(f.name for f in from_example.features)
    return ReadPlan(record_type, target, from_example.features, from_example, partitions, suspects)


def _match_partitions(listing: InputListing, columns: Sequence[str]) -> tuple[str | None, ...]:
    """Column that each partition column fills; upper and lower case do not matter, as in Spark."""
    matches = [find_name(name, columns) for name, _ in listing.partition_columns]
    return tuple(names[0] if names else None for names in matches)


def partition_types(listing: InputListing) -> Mapping[str, pa.DataType]:
    """Arrow type of each partition column, in their order."""
    fields = [
        spark_types.StructField(name, parse_simple_type(kind))
        for name, kind in listing.partition_columns
    ]
    schema = _arrow_schema(spark_types.StructType(fields))
    return {field.name: field.type for field in schema}


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
