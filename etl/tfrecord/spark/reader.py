"""Reads TFRecord files into Spark: ranges of files in, Arrow batches out."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import types as spark_types
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from etl.tfrecord.input_files import list_input_files
from etl.tfrecord.read_options import ReadOptions
from etl.tfrecord.spark.loaded_code import freeze_loaded_code, freeze_planner
from etl.tfrecord.spark.partitions import prune_files, select_files
from etl.tfrecord.spark.read_plan import partition_types, plan_read
from etl.tfrecord.spark.read_schema import build_schema
from etl.tfrecord.splits import FileSplit, plan_splits

# Spark's planner runs this module where filters may be pushed down, and only there.
_PUSHDOWN_MODULE = "pyspark.sql.worker.data_source_pushdown_filters"


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
    """Reads files into the columns of a schema."""

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
        types = partition_types(listing)
        self._files = select_files(listing.files, types, options.where)
        if _is_pushdown_planned():
            # Spark refuses a reader that has this method where push-down is switched off.
            self.pushFilters = functools.partial(self._prune, types)  # type: ignore[method-assign]

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what tasks do not need."""
        state = dict(self.__dict__)
        state.pop("_files", None)
        state.pop("pushFilters", None)
        return state

    def _prune(self, types: Mapping[str, pa.DataType], filters: list[Filter]) -> Iterable[Filter]:
        """Drops files by Spark's filters; Spark goes on to check every row by all of them."""
        self._files = prune_files(self._files, types, filters)
        return filters

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


def _is_pushdown_planned() -> bool:
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _PUSHDOWN_MODULE in sys.modules or getattr(main, "name", None) == _PUSHDOWN_MODULE
