"""Reads TFRecord files into Spark: one partition per file, Arrow batches out."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql import types as spark_types
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_type

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.decode import Kind, WireFeature, infer_features, read_batches
from etl.tfrecord.framing import read_record_blocks
from etl.tfrecord.read_options import ReadOptions
from etl.tfrecord.replacement import is_publishing

BYTE_ARRAY_COLUMN = "byteArray"  # as the JVM connectors name it

_SPARK_TYPES: dict[Kind, type[spark_types.DataType]] = {
    "int64": spark_types.LongType,
    "float32": spark_types.FloatType,
    "bytes": spark_types.StringType,
}
_KINDS: dict[type[spark_types.DataType], Kind] = {
    spark_types.BooleanType: "int64",
    spark_types.ByteType: "int64",
    spark_types.ShortType: "int64",
    spark_types.IntegerType: "int64",
    spark_types.LongType: "int64",
    spark_types.FloatType: "float32",
    spark_types.DoubleType: "float32",
    spark_types.DecimalType: "float32",
    spark_types.StringType: "bytes",
    spark_types.BinaryType: "bytes",
}


def _expand(pattern: str) -> list[str]:
    return sorted(glob.glob(pattern))  # noqa: PTH207 - Path.glob takes no absolute pattern


def list_files(path: str) -> list[str]:
    """Lists the data files of a path, sorted by name.

    Args:
        path: A file, a directory (its files, hidden ones and those with `_` in front left out), or
            a glob pattern of either.

    Raises:
        ConfigError: Nothing is there.
        InputDataError: A directory is in the middle of a write, or a write was killed there.
    """
    roots = [Path(path)] if Path(path).exists() else [Path(p) for p in _expand(path)]
    if not roots:
        raise ConfigError(
            "no such TFRecord path", received=path, allowed="a file, a directory or a glob pattern"
        )
    files: list[Path] = []
    for root in roots:
        if root.is_dir() and is_publishing(root):
            raise InputDataError(
                "the files are no complete set: a write is publishing there, or was killed",
                received=root,
                fix="wait for it to end; after a kill, the next write restores the earlier files",
            )
        files.extend(sorted(root.iterdir()) if root.is_dir() else [root])
    return [str(file) for file in files if file.is_file() and file.name[0] not in "._"]


def infer_schema(options: ReadOptions) -> spark_types.StructType:
    """Infers a Spark schema, as the JVM connectors do: Long, Float, String, and arrays of them.

    Args:
        options: Which files, and their record type.

    Raises:
        ConfigError: No such path.
        InputDataError: A file is damaged, a feature is not of one kind, or there is no record.
    """
    if options.record_type == "ByteArray":
        return spark_types.StructType().add(BYTE_ARRAY_COLUMN, spark_types.BinaryType())
    features = infer_features(list_files(options.path), options.compression)
    if not features:
        raise InputDataError(
            "no schema can be inferred: the files hold no feature",
            received=options.path,
            fix="give a schema: spark.read.schema(...)",
        )
    schema = spark_types.StructType()
    for feature in features:
        value_type = _SPARK_TYPES[feature.kind]()
        schema.add(
            feature.name, spark_types.ArrayType(value_type) if feature.is_list else value_type
        )
    return schema


def _plan_features(schema: spark_types.StructType) -> list[WireFeature]:
    features, bad = [], []
    for field in schema.fields:
        value_type, is_list = field.dataType, isinstance(field.dataType, spark_types.ArrayType)
        if isinstance(value_type, spark_types.ArrayType):
            value_type = value_type.elementType
        kind = _KINDS.get(type(value_type))
        if kind is None:
            bad.append(f"{field.name} ({field.dataType.simpleString()})")
        else:
            features.append(WireFeature(field.name, kind, is_list))
    if bad:
        raise ConfigError(
            f"{len(bad)} column(s) cannot be read from tf.train.Example",
            received=", ".join(bad),
            allowed="boolean, integers, float, double, decimal, string, binary, arrays of these",
            fix="read the column as one of these and convert it with Spark's functions",
        )
    return features


def _arrow_schema(schema: spark_types.StructType) -> pa.Schema:
    return pa.schema(
        [pa.field(f.name, to_arrow_type(f.dataType), f.nullable) for f in schema.fields]
    )


def _cast_batch(batch: pa.RecordBatch, schema: pa.Schema, path: str) -> pa.RecordBatch:
    """Casts decoded columns to the wanted types; a value that does not fit is an error."""
    columns = []
    for field, column in zip(schema, batch.columns, strict=True):
        try:
            column = _cast_column(column, field.type)
        except pa.ArrowInvalid as error:
            raise InputDataError(
                f"{path}: feature {field.name!r} does not fit the type it is to be read as",
                received=str(error),
                allowed=str(field.type),
                fix="read it as a wider type",
            ) from error
        if column.null_count and not field.nullable:
            raise InputDataError(
                f"{path}: feature {field.name!r} is missing in {column.null_count} record(s), but "
                "its column is not nullable",
                fix="make the column nullable in the schema",
            )
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _cast_column(column: pa.Array, target: pa.DataType) -> pa.Array:
    decimal = target.value_type if pa.types.is_list(target) else target
    if pa.types.is_decimal(decimal):
        # The shortest digits that give back the float32: 12.34, not 12.340000152587891.
        text = pa.list_(pa.string()) if decimal is not target else pa.string()
        column = column.cast(text)
    return column.cast(target)


class TFRecordReader(DataSourceReader):
    """Reads files into the columns of a schema."""

    def __init__(self, options: ReadOptions, schema: spark_types.StructType) -> None:
        """Checks the schema.

        Args:
            options: Which files, and their record type.
            schema: Columns to read.

        Raises:
            ConfigError: A column type that no feature can be read as.
        """
        self._options, self._schema = options, schema
        if options.record_type == "ByteArray":
            types = [type(field.dataType) for field in schema.fields]
            if types != [spark_types.BinaryType]:
                raise ConfigError(
                    "record type ByteArray is read as one binary column",
                    received=schema.simpleString(),
                    allowed=f"struct<{BYTE_ARRAY_COLUMN}:binary>",
                )
        else:
            self._features = _plan_features(schema)

    def partitions(self) -> list[InputPartition]:
        """One partition per file."""
        return [InputPartition(path) for path in list_files(self._options.path)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs in a task: reads a file.

        Raises:
            CorruptRecordError: The file is damaged; names the file and the byte offset.
            InputDataError: A feature does not fit its column.
        """
        if partition.value is None:  # what Spark makes of a source without partitions
            return
        path, compression = str(partition.value), self._options.compression
        target = _arrow_schema(self._schema)
        if self._options.record_type == "ByteArray":
            for block in read_record_blocks(path, compression=compression):
                payloads = [block.data[s : s + n].tobytes() for s, n in block.index.tolist()]
                yield pa.RecordBatch.from_arrays([pa.array(payloads, pa.binary())], schema=target)
            return
        for batch in read_batches(path, self._features, compression=compression):
            yield _cast_batch(batch, target, path)
