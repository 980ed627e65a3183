"""What a read decodes, and how decoded batches become batches of Spark's schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql import types as spark_types
from pyspark.sql.pandas.types import to_arrow_schema as to_spark_arrow_schema

from conf.errors import ConfigError
from etl.tfrecord.features import WireFeature
from etl.tfrecord.input_files import Listing
from etl.tfrecord.lowering.description import read_description
from etl.tfrecord.policies import parse_lowering_options
from etl.tfrecord.raising import Raising, plan_raising
from etl.tfrecord.raising.names import find_name, read_names
from etl.tfrecord.read_options import ReadOptions
from etl.tfrecord.spark.partitions import parse_partition_value
from etl.tfrecord.spark.read_schema import BYTE_ARRAY_COLUMN, parse_simple_type, resolve_record_type
from etl.tfrecord.spark.schema import to_arrow_schema


@dataclass(frozen=True)
class ReadPlan:
    """Plan of a read; picklable.

    Attributes:
        record_type: Record type of the files.
        target: Arrow schema that Spark expects.
        features: What to decode.
        raising: From features to data columns; None for raw payloads.
        partitions: For each partition column of the files, in their order, the column of `target`
            that it fills, or None.
        suspects: Features to look for in another case where a file lacks them: no manifest told
            their names.
    """

    record_type: str
    target: pa.Schema
    features: tuple[WireFeature, ...]
    raising: Raising | None
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
        columns = (self.raising.apply(batch, name) if self.raising else batch).columns
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


def plan_read(options: ReadOptions, listing: Listing, schema: spark_types.StructType) -> ReadPlan:
    """Plans a read.

    Args:
        options: Options of the read.
        listing: Its files.
        schema: Columns wanted: features, and partition columns by their names.

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
    lowering, slots = read_description(committed.lowering if committed else {})
    if options.lowering:
        lowering = parse_lowering_options(options.lowering)
    raising = plan_raising(data, record_type, lowering, slots, read_names(committed))
    suspects = frozenset() if committed else frozenset(f.name for f in raising.features)
    return ReadPlan(record_type, target, raising.features, raising, partitions, suspects)


def _match_partitions(listing: Listing, columns: Sequence[str]) -> tuple[str | None, ...]:
    """Column that each partition column fills; upper and lower case do not matter, as in Spark."""
    found = [find_name(name, columns) for name, _ in listing.partition_columns]
    return tuple(names[0] if names else None for names in found)


def partition_types(listing: Listing) -> Mapping[str, pa.DataType]:
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
