"""Schemas of Parquet files, as far as Spark reads them.

Spark refuses a file for one column of a type that it does not know; here such columns are left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import types as T

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameReader, SparkSession

Unread = dict[tuple[str, ...], str]
"""Parquet types that Spark does not read, by the names that lead to them."""


def load_parquet(spark: SparkSession, reader: DataFrameReader, paths: Sequence[str]) -> DataFrame:
    """Opens files of one schema without the columns that Spark does not read.

    Args:
        spark: The session.
        reader: Its reader of Parquet, with options.
        paths: Files, folders or globs.
    """
    try:
        schema = reader.load(list(paths)).schema
    except (PySparkException, Py4JJavaError) as error:
        files = spark.read.format("text").load(list(paths)).inputFiles()
        try:
            schema, _ = read_footer(spark, min(files))
        except Py4JJavaError:  # no Parquet file: what Spark says of it is known to callers
            raise error from None
    return reader.schema(widen_decimals(schema)).load(list(paths))


_LONG_DIGITS = 18


def widen_decimals(kind: Any) -> Any:
    """The type with decimals that are longer than an int64.

    Of shorter ones Spark does not read those that a Parquet file holds as byte arrays.
    """
    if isinstance(kind, T.DecimalType) and kind.precision <= _LONG_DIGITS:
        return T.DecimalType(_LONG_DIGITS + 1, kind.scale)
    if isinstance(kind, T.ArrayType):
        return T.ArrayType(widen_decimals(kind.elementType), kind.containsNull)
    if isinstance(kind, T.StructType):
        return T.StructType(
            [T.StructField(f.name, widen_decimals(f.dataType), True, f.metadata) for f in kind]
        )
    return kind


_SPARK_SCHEMA = "org.apache.spark.sql.parquet.row.metadata"


def read_footer(spark: SparkSession, uri: str) -> tuple[T.StructType, Unread]:
    """The schema of a file as far as Spark reads it, and what it does not read."""
    jvm: Any = spark._jvm
    place = jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(uri))
    hadoop = jvm.org.apache.parquet.hadoop
    file = hadoop.util.HadoopInputFile.fromPath(place, spark._jsc.hadoopConfiguration())
    reader = hadoop.ParquetFileReader.open(file)
    try:
        footer = reader.getFileMetaData()
    finally:
        reader.close()
    if (written := footer.getKeyValueMetaData().get(_SPARK_SCHEMA)) is not None:
        return T.StructType.fromJson(json.loads(written)), {}
    unread: Unread = {}
    fields = _list_readable(spark, footer.getSchema().getFields(), unread, ())
    return _to_spark(spark, fields), unread


def _list_readable(spark: SparkSession, fields: Any, unread: Unread, above: tuple[str, ...]) -> Any:
    """Those of some Parquet fields that Spark reads; notes the others."""
    kept = spark._jvm.java.util.ArrayList()  # type: ignore[union-attr]
    for field in fields:
        path = (*above, field.getName())
        if _is_readable(spark, field):
            kept.add(field)
        elif field.isPrimitive() or field.getLogicalTypeAnnotation() is not None:
            unread[path] = field.toString()
        elif inner := _list_readable(spark, field.getFields(), unread, path):
            kept.add(field.withNewFields(inner))
    return kept


def _is_readable(spark: SparkSession, field: Any) -> bool:
    one = spark._jvm.java.util.ArrayList()  # type: ignore[union-attr]
    one.add(field)
    try:
        schema = _to_spark(spark, one)
    except (PySparkException, Py4JJavaError):
        return False
    return not _holds_time(schema)


def _to_spark(spark: SparkSession, fields: Any) -> T.StructType:
    """Spark's schema of Parquet fields."""
    jvm: Any = spark._jvm
    settings = spark._jsparkSession.sessionState().conf()
    parquet = jvm.org.apache.spark.sql.execution.datasources.parquet
    converter = parquet.ParquetToSparkSchemaConverter(settings)
    found = converter.convert(jvm.org.apache.parquet.schema.MessageType("read", fields))
    return T.StructType.fromJson(json.loads(found.asNullable().json()))


def _holds_time(kind: T.DataType) -> bool:
    """Whether a type is or holds a time of day, which Spark reads by an option alone."""
    if isinstance(kind, T.StructType):
        return any(_holds_time(field.dataType) for field in kind)
    if isinstance(kind, T.MapType):
        return _holds_time(kind.keyType) or _holds_time(kind.valueType)
    if isinstance(kind, T.ArrayType):
        return _holds_time(kind.elementType)
    return isinstance(kind, T.TimeType)
