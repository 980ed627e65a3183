"""Reads TFRecord files into Spark: the reader of the data source, and `read_tfrecords`.

`read_tfrecords` decodes only what is asked for: chosen columns of chosen partitions. Nothing
compiled is imported here: Spark's planner processes do without.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
from pyspark.sql import types as spark_types
from pyspark.sql.datasource import DataSourceReader, InputPartition

from etl.tfrecord.spark.input_files import FileSplit, list_input_files, plan_splits
from etl.tfrecord.spark.loaded_code import freeze_loaded_code, freeze_planner
from etl.tfrecord.spark.options import ReadOptions, option_text, parse_read_options
from etl.tfrecord.spark.read_plan import (
    build_schema,
    partition_types,
    plan_read,
    select_files,
)
from etl.tfrecord.types.from_example import find_name
from etl.tfrecord.types.row_errors import refuse_unknown

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def infer_schema(options: ReadOptions) -> spark_types.StructType:
    """Schema of all that the files hold: from the manifest, else inferred from a sample.

    Inference follows the JVM connectors: Long, Float, String, and arrays of them. Partition
    columns come last.

    Args:
        options: Options of the read.

    Raises:
        ConfigError: No such path.
        InputDataError: A file is damaged, a feature is not of one kind, or there is no record.
    """
    return build_schema(options, list_input_files(options))


@dataclass
class ReadPartition(InputPartition):
    """What one task reads.

    Attributes:
        splits: Files and ranges of files, in order.
    """

    splits: tuple[FileSplit, ...]


class TFRecordReader(DataSourceReader):
    """Reads files into the columns of a schema.

    It takes no filters (`pushFilters`): Spark plans a Python source once for all queries of a
    frame, so that what one filter leaves would be all that the others see.
    """

    def __init__(self, options: ReadOptions, schema: spark_types.StructType) -> None:
        """Lists the files and checks the schema.

        Args:
            options: Options of the read.
            schema: Columns to read: features, and partition columns by their names.

        Raises:
            ConfigError: A column type that no feature can be read as, or no such path.
            InputDataError: The files are no complete set.
        """
        self._options = options
        listing = list_input_files(options)
        self._plan = plan_read(options, listing, schema)
        self._files = select_files(listing.files, partition_types(listing), options.where)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what tasks do not need."""
        state = dict(self.__dict__)
        state.pop("_files", None)
        return state

    def partitions(self) -> Sequence[InputPartition]:
        """Plans the tasks.

        Raises:
            OSError: A file cannot be read.
        """
        options = self._options
        planned = plan_splits(
            self._files,
            compression=options.compression,
            split_bytes=options.split_bytes,
            min_partitions=options.min_partitions,
            opener=options.opener,
        )
        freeze_planner()
        return [ReadPartition(splits) for splits in planned]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs in a task: reads its files.

        Raises:
            CorruptRecordError: A file is damaged; names the file and the byte offset.
            InputDataError: A feature does not fit its column.
        """
        if not isinstance(partition, ReadPartition):  # Spark's stand-in where there is nothing
            return
        from etl.tfrecord.spark.read_task import ReadTask  # compiled: not for Spark's planner

        task = ReadTask(self._plan, self._options)
        for split in partition.splits:
            yield from task.read(split)
        freeze_loaded_code()


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

    Spark tells a Python data source neither which columns a query needs nor, query by query, which
    rows; here both are said up front.

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
    given = {name: option_text(value) for name, value in options.items()}
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


def _select(schema: spark_types.StructType, columns: Sequence[str]) -> spark_types.StructType:
    matches = [find_name(name, schema.names) for name in columns]
    unknown = [name for name, names in zip(columns, matches, strict=True) if len(names) != 1]
    refuse_unknown("no such column(s)", unknown, schema.names)
    return spark_types.StructType([schema[name] for (name,) in matches])
