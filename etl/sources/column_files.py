"""Parquet, ORC and Avro files, whatever their schemas have become from day to day."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F
from pyspark.sql import types as T

from conf.errors import ConfigError, InputDataError, SluiceError
from conf.etl import SourceConfig
from conf.provenance import InputFile
from etl.failures import describe_failure
from etl.sources.headers import escape_path
from etl.sources.source import FILE_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_MERGES_SCHEMAS = ("parquet", "orc")


def read_column_files(
    spark: SparkSession, name: str, config: SourceConfig, files: Sequence[InputFile]
) -> tuple[DataFrame, ...]:
    """Reads files with columns, in as few frames as their schemas allow.

    Files whose schemas merge are one frame, where a column that a file lacks is null; where a
    column has two types, there is one frame per schema.

    Returns:
        Frames with `__file` and Spark's `_metadata`.

    Raises:
        ConfigError: The session cannot read the format.
        InputDataError: A file is damaged, or of another format.
    """
    paths = [escape_path(file.path) for file in files if file.bytes]
    try:
        frames = _merged(spark, config, paths) or _by_schema(spark, config, paths)
    except (PySparkException, Py4JJavaError) as error:
        raise _explain(name, config, error) from error
    # The metadata is named, or a select of columns would lose it.
    return tuple(
        frame.select("*", "_metadata").withColumn(FILE_COLUMN, F.col("_metadata.file_path"))
        for frame in frames
    )


def _merged(
    spark: SparkSession, config: SourceConfig, paths: list[str]
) -> tuple[DataFrame, ...] | None:
    if config.format not in _MERGES_SCHEMAS:
        return None
    reader = spark.read.format(config.format).option("mergeSchema", "true")
    try:
        return (reader.load(paths),)
    except (PySparkException, Py4JJavaError) as error:
        if "merg" not in str(error).lower():
            raise
        return None


def _by_schema(
    spark: SparkSession, config: SourceConfig, paths: list[str]
) -> tuple[DataFrame, ...]:
    groups: dict[str, list[str]] = {}
    for path in paths:
        schema = spark.read.format(config.format).load(path).schema
        groups.setdefault(schema.json(), []).append(path)
    return tuple(
        spark.read.format(config.format)
        .schema(T.StructType.fromJson(json.loads(schema)))
        .load(group)
        for schema, group in groups.items()
    )


def _explain(name: str, config: SourceConfig, error: Exception) -> SluiceError:
    text = str(error)
    if config.format == "avro" and ("AVRO_DATA_SOURCE" in text or "DATA_SOURCE_NOT_FOUND" in text):
        return ConfigError(
            f"source {name!r}: this Spark session cannot read Avro",
            received="format: avro, without Spark's Avro package on the class path",
            fix="add it: spark.conf.spark.jars.packages: "
            "org.apache.spark:spark-avro_2.13:VERSION, VERSION that of Spark or the newest before "
            "it; or spark.conf.spark.jars: the path of its jar",
        )
    return InputDataError(
        f"source {name!r} does not read as {config.format}",
        received=describe_failure(error),
        fix=f"check sources.{name}.path and .format, or take damaged files out",
    )
