"""Reads that decode only what is wanted: chosen columns of chosen partitions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pyspark.sql import types as spark_types

from etl.tfrecord.raising.names import find_name
from etl.tfrecord.read_options import parse_read_options
from etl.tfrecord.spark.reader import infer_schema
from etl.tfrecord.unknown_columns import refuse_unknown

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_tfrecords(
    spark: SparkSession,
    path: str | Path | Sequence[str | Path],
    *,
    columns: Sequence[str] | None = None,
    schema: spark_types.StructType | str | None = None,
    where: Mapping[str, Sequence[Any]] | None = None,
    **options: object,
) -> DataFrame:
    """Reads TFRecord files, decoding only some columns and opening only some partitions.

    Spark tells a Python data source neither which columns a query needs nor, unless
    `spark.sql.python.filterPushdown.enabled` is set, which rows; here both are said up front.

    Args:
        spark: Session with the format registered.
        path: Files, directories or glob patterns.
        columns: Columns to read, partition columns among them, in this order, upper or lower case
            as in Spark; None for all.
        schema: Schema to read by; None to take it from the manifest, or to infer it.
        where: Allowed values by partition column, such as `{"date": ["2026-01-01"]}`.
        **options: Read options of `format("tfrecord")`.

    Returns:
        The rows.

    Raises:
        ConfigError: No such column, partition column or path, or a bad option.
        InputDataError: The schema cannot be inferred.
    """
    given = {name: _as_option(value) for name, value in options.items()}
    if where is not None:
        given["where"] = json.dumps({name: list(v) for name, v in where.items()}, default=str)
    paths = [path] if isinstance(path, str | Path) else list(path)
    if len(paths) == 1:
        given["path"] = str(paths[0])
    else:
        given["paths"] = json.dumps([str(p) for p in paths])
    whole = _resolve_schema(schema, given)
    wanted = whole if columns is None else _select(whole, columns)
    return spark.read.format("sluice").schema(wanted).options(**given).load()


def _resolve_schema(
    schema: spark_types.StructType | str | None, given: Mapping[str, str]
) -> spark_types.StructType:
    if schema is None:
        return infer_schema(parse_read_options(given))
    if isinstance(schema, str):
        return cast(spark_types.StructType, spark_types.StructType.fromDDL(schema))
    return schema


def _as_option(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _select(schema: spark_types.StructType, columns: Sequence[str]) -> spark_types.StructType:
    found = [find_name(name, schema.names) for name in columns]
    unknown = [name for name, names in zip(columns, found, strict=True) if len(names) != 1]
    refuse_unknown("no such column(s)", unknown, schema.names)
    return spark_types.StructType([schema[name] for (name,) in found])
