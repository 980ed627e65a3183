"""Frames with columns of their own: Parquet, ORC and Avro files under the declared schema.

Columns are found by declared name and path and cast by checked casts: a value that does not
fit is null, and counted.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.ml.functions import vector_to_array
from pyspark.sql import functions as F
from pyspark.sql import types as T

from conf.errors import ConfigError, InputDataError, SluiceError, did_you_mean
from conf.etl.sources import EPOCH_UNITS, NUMBER_TYPES, SPARK_TYPES, ColumnConfig, SourceConfig
from etl.sources.bad_rows import check_columns
from etl.sources.source import FILE_COLUMN, LINE_COLUMN, ParsedColumn, ParsedRows, Reading
from etl.sources.text_files import escape_path
from etl.sources.text_formats import (
    epoch_millis,
    fraction_millis,
    parse_column,
    parse_pairs,
    parse_scalar,
    split_path,
)
from etl.tfrecord.spark.failures import describe_failure
from etl.tfrecord.spark.schema import quote_name

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession

Field = tuple["Column", T.DataType]
Given = tuple["DataFrame", T.StructType]
"""Rows, and what they have by its types: `NullType` where Spark does not read it."""


def lay_out_frames(
    reading: Reading, given: Sequence[Given], optional: Collection[str]
) -> Iterator[ParsedRows]:
    """Takes frames apart into the declared columns; folders give what a frame lacks."""
    config = reading.config
    asked = {column.field_name.lower() for column in config.columns}
    asked |= {head for name in asked for head, _ in split_path(name)}
    names = {name for _, schema in given for name in schema.fieldNames()}
    new = sorted(name for name in names if name.lower() not in asked)
    check_columns(reading.name, config, new)
    lackable = {  # A frame may lack what is optional, or what another one has.
        column.name
        for column in config.columns
        if column.name in optional or any(find_field(s, column.field_name) for _, s in given)
    }
    for frame, schema in given:
        yield _lay_out_frame(reading, frame, schema, lackable)


def _lay_out_frame(
    reading: Reading, frame: DataFrame, schema: T.StructType, lackable: Collection[str]
) -> ParsedRows:
    columns: dict[str, ParsedColumn] = {}
    days = reading.days
    own = (FILE_COLUMN, "_metadata")
    line = F.to_json(F.struct(*[quote_name(name) for name in frame.columns if name not in own]))
    for column in reading.config.columns:
        field = _find_or_fill(reading, schema, column, lackable)
        if days is not None and days.column == column:
            frame = days.prune(frame, *field)
        columns |= cast_column(reading.name, column, *field)
    return ParsedRows(frame.withColumn(LINE_COLUMN, line), columns)


def _find_or_fill(
    reading: Reading, schema: T.StructType, column: ColumnConfig, lackable: Collection[str]
) -> Field:
    """A column as the input has it, else as folders give it, else of nulls if it may lack."""
    if (field := find_field(schema, column.field_name)) is not None:
        return field
    if (text := reading.folders.get(column.field_name)) is not None:
        return text, T.StringType()
    if column.name in lackable:
        kind = T.ArrayType(T.StringType()) if column.is_list else T.StringType()
        return F.lit(None).cast(kind), kind
    names = schema.fieldNames()
    raise InputDataError(
        f"source {reading.name!r}: there is no column {column.field_name!r}",
        received=", ".join(names),
        fix=f"{did_you_mean(column.field_name, names)}; correct sources.{reading.name}.columns "
        "(name or field), or correct the input",
    )


def find_field(schema: T.StructType, name: str, parent: Column | None = None) -> Field | None:
    """Finds a column by its name, whatever its case, or else by a path into structs."""
    exact = [field for field in schema if field.name == name]
    near = exact or [field for field in schema if field.name.lower() == name.lower()]
    if len(near) == 1:
        return _child(parent, near[0].name), near[0].dataType
    for head, rest in split_path(name):
        for struct in (f.dataType for f in schema if f.name == head):
            if isinstance(struct, T.StructType) and (
                inner := find_field(struct, rest, _child(parent, head))
            ):
                return inner
    return None


def _child(parent: Column | None, name: str) -> Column:
    return F.col(quote_name(name)) if parent is None else parent[name]


_INTEGERS = (T.ByteType, T.ShortType, T.IntegerType, T.LongType)
_FRACTIONS = (T.FloatType, T.DoubleType, T.DecimalType)
_TEXTS = (T.StringType, T.BinaryType)
_TIMES = (T.TimestampType, T.TimestampNTZType, T.DateType)
# What a column may be declared as, by what it is in the input. Floats have no text that every
# engine agrees on, and a time has no number but by a unit.
_ALLOWED: dict[str, tuple[type[T.DataType], ...]] = {
    **dict.fromkeys(NUMBER_TYPES, (*_INTEGERS, *_FRACTIONS, T.BooleanType, *_TEXTS)),
    "string": (*_INTEGERS, T.DecimalType, T.BooleanType, *_TEXTS),
    "bytes": _TEXTS,
    "timestamp": (*_TIMES, *_TEXTS),
}
_INT64_END = 2.0**63


def cast_column(
    name: str, column: ColumnConfig, raw: Column, found: T.DataType
) -> dict[str, ParsedColumn]:
    """Casts a declared column from what it is in the input, of type `found` there."""
    if column.is_list and column.pair is None and _is_vector(found):
        # The function takes no null.
        raw = F.when(raw.isNotNull(), vector_to_array(raw))
        found = T.ArrayType(T.DoubleType())
    _check_type(name, column, found)
    if isinstance(found, T.ArrayType):
        element = found.elementType
        if (second := column.second) is not None:
            texts = F.transform(raw, lambda e: _valid_text(e, element))
            return parse_pairs(column, second, raw, texts)
        value = F.transform(raw, lambda e: _cast(column, e, element))
    elif isinstance(found, _TEXTS) and column.type != "bytes":
        text = _valid_text(raw, found)
        columns = parse_column(column, text)
        first, broken = columns[column.name], raw.isNotNull() & text.isNull()
        faults = ((broken, f"not_utf8:{column.name}"), *first.faults)
        return columns | {column.name: replace(first, faults=faults)}
    elif column.pair is not None:
        # A whole number has no second value.
        return parse_column(column, raw.cast("string"))
    else:
        value = _cast(column, raw, found)
    return {column.name: ParsedColumn(value, raw.isNotNull(), value.cast("string"))}


def _is_vector(found: T.DataType) -> bool:
    """Whether values are vectors of Spark's ML or MLlib."""
    return isinstance(found, T.UserDefinedType) and found.simpleString() == "vector"


def _check_type(name: str, column: ColumnConfig, found: T.DataType) -> None:
    inner = found.elementType if isinstance(found, T.ArrayType) and column.is_list else found
    by_text = isinstance(found, _TEXTS) and column.separator is not None
    shape_fits = not column.is_list or isinstance(found, T.ArrayType) or by_text
    allowed = _ALLOWED[column.element_type]
    if column.timestamp_format in EPOCH_UNITS:
        allowed += (*_INTEGERS, *_FRACTIONS)
    if not (shape_fits and isinstance(inner, allowed)):
        unread = "of a type that Spark does not read"
        given = unread if isinstance(found, T.NullType) else found.simpleString()
        raise InputDataError(
            f"source {name!r}: {column.field_name!r} is {given}, and is not read as {column.type}",
            fix=f"correct sources.{name}.columns, or the input; times as numbers need a "
            "timestamp_format such as epoch_ms",
        )


def _valid_text(raw: Column, found: T.DataType) -> Column:
    """The text of a string or of bytes; null where the bytes are no UTF-8."""
    text = raw.cast("string")
    return F.when(F.is_valid_utf8(text), text) if isinstance(found, _TEXTS) else text


def _cast(column: ColumnConfig, raw: Column, found: T.DataType) -> Column:
    kind = SPARK_TYPES[column.element_type]
    if column.type == "bytes":
        return raw.cast(kind)
    if isinstance(found, _TEXTS):
        return parse_scalar(column, _valid_text(raw, found))
    if column.type == "timestamp":
        if isinstance(found, _INTEGERS):
            return epoch_millis(raw.cast("bigint"), column.timestamp_format or "")
        if isinstance(found, _FRACTIONS):
            return fraction_millis(raw, column.timestamp_format or "")
        return F.unix_millis(raw.cast("timestamp"))
    if column.element_type == "int64" and isinstance(found, _FRACTIONS):
        whole = raw % F.lit(1) == F.lit(0)
        if not isinstance(found, T.DecimalType):
            # The cast would let 2**63 pass as the number before it.
            whole = whole & (raw < F.lit(_INT64_END))
        return F.when(whole, raw.try_cast(kind))
    return raw.try_cast(kind)


def read_column_files(spark: SparkSession, reading: Reading) -> list[Given]:
    """Reads files with columns: one frame if their schemas merge, else one for each schema."""
    kind = reading.config.format
    paths = [file.path for file in reading.files if file.bytes]
    groups: dict[str, list[str]] = {}
    try:
        # A column that a file lacks is null there; two types of one, or a type that Spark does not
        # read, keep schemas from merging.
        merged = None
        with contextlib.suppress(PySparkException, Py4JJavaError):
            if kind != "avro":
                reader = spark.read.format(kind).option("mergeSchema", "true")
                merged = reader.load(list(map(escape_path, paths))).schema
        for path in paths:
            schema = merged or _read_schema(spark, kind, path)
            groups.setdefault(schema.json(), []).append(path)
        return [_load(spark, kind, schema, group) for schema, group in groups.items()]
    except (PySparkException, Py4JJavaError) as error:
        raise _explain(reading.name, reading.config, error) from error


def _read_schema(spark: SparkSession, kind: str, path: str) -> T.StructType:
    if kind == "parquet":
        return _read_footer(spark, Path(path).as_uri())
    return spark.read.format(kind).load(escape_path(path)).schema


def _load(spark: SparkSession, kind: str, schema: str, paths: list[str]) -> Given:
    found = T.StructType.fromJson(json.loads(schema))
    read = _readable(found) if kind == "parquet" else found
    frame = spark.read.format(kind).schema(read).load(list(map(escape_path, paths)))
    # The metadata is named, or a select of columns would lose it.
    frame = frame.select("*", "_metadata").withColumn(FILE_COLUMN, F.col("_metadata.file_path"))
    return frame, found


def load_parquet(spark: SparkSession, reader: DataFrameReader, paths: Sequence[str]) -> DataFrame:
    """Opens Parquet files of one schema without the columns that Spark does not read."""
    try:
        schema = reader.load(list(paths)).schema
    except (PySparkException, Py4JJavaError) as error:
        files = spark.read.format("text").load(list(paths)).inputFiles()
        try:
            schema = _read_footer(spark, min(files))
        except Py4JJavaError:  # no Parquet file: what Spark says of it is known to callers
            raise error from None
    return reader.schema(_readable(schema)).load(list(paths))


_LONG_DIGITS = 18


def _readable(kind: Any) -> Any:
    """The type without fields that Spark does not read, and decimals longer than an int64."""
    # Of shorter ones Spark does not read those that a Parquet file holds as byte arrays.
    if isinstance(kind, T.DecimalType) and kind.precision <= _LONG_DIGITS:
        return T.DecimalType(_LONG_DIGITS + 1, kind.scale)
    if isinstance(kind, T.ArrayType):
        return T.ArrayType(_readable(kind.elementType), kind.containsNull)
    if isinstance(kind, T.StructType):
        fields = [T.StructField(f.name, _readable(f.dataType), True, f.metadata) for f in kind]
        return T.StructType([f for f in fields if f.dataType not in (T.NullType(), T.StructType())])
    return kind


_SPARK_SCHEMA = "org.apache.spark.sql.parquet.row.metadata"


def _read_footer(spark: SparkSession, uri: str) -> T.StructType:
    """The schema of a Parquet file; fields that Spark does not read are of no type."""
    jvm: Any = spark._jvm
    hadoop = jvm.org.apache.parquet.hadoop
    place = jvm.org.apache.hadoop.fs.Path(jvm.java.net.URI(uri))
    file = hadoop.util.HadoopInputFile.fromPath(place, spark._jsc.hadoopConfiguration())
    reader = hadoop.ParquetFileReader.open(file)
    try:
        footer = reader.getFileMetaData()
    finally:
        reader.close()
    if (written := footer.getKeyValueMetaData().get(_SPARK_SCHEMA)) is not None:
        return T.StructType.fromJson(json.loads(written))
    return _to_spark(spark, footer.getSchema().getFields())


def _to_spark(spark: SparkSession, fields: Any) -> T.StructType:
    found = T.StructType()
    for field in fields:
        if (one := _convert(spark, field)) is not None:
            found.add(one)
        elif field.isPrimitive() or field.getLogicalTypeAnnotation() is not None:
            found.add(field.getName(), T.NullType())
        else:
            found.add(field.getName(), _to_spark(spark, field.getFields()))
    return found


def _convert(spark: SparkSession, field: Any) -> T.StructField | None:
    """Spark's form of a Parquet field; None: it is read not at all, or by an option alone."""
    jvm: Any = spark._jvm
    message = jvm.org.apache.parquet.schema.MessageType(
        "read", jvm.java.util.Collections.singletonList(field)
    )
    parquet = jvm.org.apache.spark.sql.execution.datasources.parquet
    settings = spark._jsparkSession.sessionState().conf()
    try:
        found = parquet.ParquetToSparkSchemaConverter(settings).convert(message).asNullable().json()
    except (PySparkException, Py4JJavaError):
        return None
    return None if '"time(' in found else T.StructType.fromJson(json.loads(found))[0]


def _explain(name: str, config: SourceConfig, error: Exception) -> SluiceError:
    text = str(error)
    if config.format == "avro" and ("AVRO_DATA_SOURCE" in text or "DATA_SOURCE_NOT_FOUND" in text):
        return ConfigError(
            f"source {name!r}: this Spark session cannot read Avro",
            fix="add its module by spark.jars.packages: org.apache.spark:spark-avro_2.13:VERSION, "
            "VERSION that of Spark or the newest before it; or its jar by spark.jars",
        )
    return InputDataError(
        f"source {name!r} does not read as {config.format}",
        received=describe_failure(error),
        fix=f"check sources.{name}.path and .format, or take damaged files out",
    )
