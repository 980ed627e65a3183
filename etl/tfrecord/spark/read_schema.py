"""Schema of a read: from the manifest where there is one, else inferred from a sample."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pyspark.sql import types as spark_types

from conf.errors import InputDataError
from etl.tfrecord.features import WireFeature
from etl.tfrecord.input_files import Listing
from etl.tfrecord.lowering.description import read_description
from etl.tfrecord.read_options import ReadOptions
from etl.tfrecord.spark.columns import restore_columns
from etl.tfrecord.spark.schema import to_spark_schema

BYTE_ARRAY_COLUMN = "byteArray"  # as the JVM connectors name it

# Where a type's name in SQL differs from that in a schema's JSON form.
_JSON_NAMES = {"int": "integer", "bigint": "long", "smallint": "short", "tinyint": "byte"}


def parse_simple_type(name: str) -> spark_types.DataType:
    """Reads the simple name of an atomic Spark type; unlike Spark's parser, without a session."""
    return spark_types._parse_datatype_json_string(json.dumps(_JSON_NAMES.get(name, name)))


def resolve_record_type(options: ReadOptions, listing: Listing) -> str:
    """Record type as given, else the manifest's, else `Example`."""
    known = None if listing.committed is None else listing.committed.record_type
    return options.record_type or known or "Example"


def build_schema(options: ReadOptions, listing: Listing) -> spark_types.StructType:
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


def _data_schema(options: ReadOptions, listing: Listing) -> spark_types.StructType:
    record_type = resolve_record_type(options, listing)
    if record_type == "ByteArray":
        return spark_types.StructType().add(BYTE_ARRAY_COLUMN, spark_types.BinaryType())
    committed = listing.committed
    if committed is not None and committed.record_type == record_type:
        _, slots = read_description(committed.lowering)
        features: Sequence[WireFeature] = committed.features
        binary = committed.lowering.get("binary", ())
    else:
        from etl.tfrecord.schema_sample import infer_sample  # compiled, and seldom needed

        slots, binary = {}, ()
        features = infer_sample(listing.files, options, record_type)
    if not features:
        raise InputDataError(
            "no schema can be inferred: the files hold no feature",
            received=", ".join(options.paths),
            fix="give a schema: spark.read.schema(...)",
        )
    schema = to_spark_schema(features, slots, binary=binary)
    if options.reads_features or committed is None or committed.record_type != record_type:
        return schema
    return restore_columns(schema, committed)
