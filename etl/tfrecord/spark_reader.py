"""Reads TFRecord files into Spark: ranges of files in, Arrow batches out."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql import types as spark_types
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema

from conf.errors import InputDataError
from etl.tfrecord.data_files import list_data_files
from etl.tfrecord.framing import BadRange, CorruptRecordError, RecordBlock, read_record_blocks
from etl.tfrecord.interim import build_decoder, plan_raising
from etl.tfrecord.partition_values import parse_partition_value, prune_files, select_files
from etl.tfrecord.policies import parse_lowering_options
from etl.tfrecord.quarantine import DamageLog
from etl.tfrecord.read_options import ReadOptions
from etl.tfrecord.read_schema import build_schema, resolve_record_type
from etl.tfrecord.splits import FileSplit, plan_splits

_LOGGER = logging.getLogger(__name__)

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
    return build_schema(options, list_data_files(options))


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
        self._target = to_arrow_schema(schema, timezone="UTC")
        listing = list_data_files(options)
        self._record_type = resolve_record_type(options, listing)
        self._partition_names = tuple(name for name, _ in listing.partition_columns)
        data = [field for field in self._target if field.name not in self._partition_names]
        self._raising = plan_raising(
            pa.schema(data), self._record_type, parse_lowering_options(options.lowering), {}
        )
        types = {
            field.name: field.type
            for field in to_arrow_schema(
                spark_types.StructType([
                    spark_types.StructField(name, spark_types._parse_datatype_string(kind))
                    for name, kind in listing.partition_columns
                ]),
                timezone="UTC",
            )
        }
        self._files: Any = select_files(listing.files, types, options.where)
        if _PUSHDOWN_MODULE in sys.modules or _runs_as(_PUSHDOWN_MODULE):
            # Spark refuses a reader that has this method where push-down is switched off.
            self.pushFilters = functools.partial(self._prune, types)  # type: ignore[method-assign]

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out what tasks do not need."""
        state = dict(self.__dict__)
        state.pop("_files", None)
        state.pop("pushFilters", None)
        return state

    def _prune(self, types: dict[str, pa.DataType], filters: list[Filter]) -> Iterable[Filter]:
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
        )
        return [ReadPartition(splits) for splits in planned]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs in a task: reads its files.

        Raises:
            CorruptRecordError: A file is damaged; names the file and the byte offset.
            InputDataError: A feature does not fit its column.
        """
        if not isinstance(partition, ReadPartition):  # Spark's stand-in where there is nothing
            return
        decoder = build_decoder(self._raising.features, self._record_type)
        for split in partition.splits:
            for batch in self._read_split(split, decoder):
                yield self._complete(self._raising.apply(batch, split.path), split)

    def _read_split(self, split: FileSplit, decoder: Any) -> Iterator[pa.RecordBatch]:
        name = f"{split.path} (from byte {split.start} on)" if split.start else split.path
        is_range = split.start > 0 or split.stop is not None
        read = functools.partial(
            read_record_blocks,
            split.path,
            compression=None if is_range else self._options.compression,
            start=split.start,
            stop=split.stop,
        )
        if self._options.on_corrupt == "fail":
            for block in read():
                with _explained():
                    batch = decoder.decode_block(block, name)
                yield batch
            return
        with DamageLog(split.path, split.start, self._options.quarantine) as log:
            for block in read(on_corrupt=log.add):
                with _explained():
                    batch, malformed = decoder.decode_sound(block, name)
                for bad in malformed:
                    log.add(_as_range(block, bad))
                yield batch
            if log.ranges:
                _LOGGER.warning("%s", log.describe())
