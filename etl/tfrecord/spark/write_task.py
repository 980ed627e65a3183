"""One task of a write: partition values, type mapping and bytes in one pass over Arrow batches."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from conf.storage.object_store import Storage
from etl.tfrecord.codec.encode import build_encoder
from etl.tfrecord.files.data_files import (
    PartitionValues,
    ShardLimits,
    WrittenShard,
    partition_path,
    split_partitions,
)
from etl.tfrecord.files.writer import RollingPlan, RollingWriter, ShardOptions
from etl.tfrecord.spark.options import WriteOptions
from etl.tfrecord.types.refusals import locate_rows
from etl.tfrecord.types.to_example import ToExample, plan_to_example

if TYPE_CHECKING:
    from etl.tfrecord.spark.write_job import WriteHooks

# Each costs a file descriptor and up to half a megabyte of buffers.
MAX_OPEN_FILES = 64
# Each upload holds some parts of ten megabytes.
MAX_OPEN_UPLOADS = 8


class WriteTask:
    """Writes the rows of a task below a directory of its own.

    Files lie where they are to be published, relative to that directory. One file per partition
    value is open at a time, and no more than a fixed number in all: rows that are sorted by the
    partition columns give the fewest files.
    """

    def __init__(
        self,
        root: Path | Storage,
        stem: str,
        options: WriteOptions,
        source: pa.Schema | None = None,
        hooks: WriteHooks | None = None,
    ) -> None:
        """Plans the files; touches none yet.

        `stem` is their name without number and ending, for example `part-00000-<job>`; the metadata
        of `source`, the columns as planned, says what a column stands for.
        """
        # Not looked up in the schema: it would be searched from its start for every column.
        self._marks = {} if source is None else {field.name: field.metadata for field in source}
        self._options, self._stem = options, stem
        self._max_open_files = MAX_OPEN_UPLOADS if isinstance(root, Storage) else MAX_OPEN_FILES
        self._plan = RollingPlan(
            root,
            ShardOptions(options.record_type, options.compression, options.compression_level),
            options.limits,
            options.index,
            hooks.build_statistics if hooks else None,
        )
        self._hooks = hooks
        self._to_example: ToExample | None = None
        self._encoder: Any = None
        self._writers: OrderedDict[PartitionValues, RollingWriter] = OrderedDict()
        self._counters: dict[PartitionValues, Iterator[int]] = {}
        self._shards: list[WrittenShard] = []

    def write_all(
        self, batches: Iterator[pa.RecordBatch], origin: str = "the rows"
    ) -> tuple[WrittenShard, ...]:
        """Writes batches of one schema; the files, by partition value and number.

        Without a row there is none. Errors call the rows `origin`.
        """
        first_row = 0
        try:
            for batch in batches:
                if batch.num_rows:
                    self._write(batch, first_row, origin)
                first_row += batch.num_rows
            while self._writers:
                self._retire()
        except BaseException:
            for writer in self._writers.values():
                writer.discard()
            raise
        return tuple(sorted(self._shards, key=lambda shard: shard.info.path))

    def _write(self, batch: pa.RecordBatch, first_row: int, origin: str) -> None:
        names = self._options.partition_by
        keys = [batch.column(name) for name in names]
        source: pa.RecordBatch | None = None
        if self._hooks is not None:
            source, batch = batch, self._hooks.apply(batch)
        batch = batch.drop_columns([name for name in names if name in batch.schema.names])
        to_example = self._to_example or self._plan_records(batch.schema)
        with locate_rows(batch, first_row, origin):
            batch = to_example.apply(batch)
        if not names:
            with locate_rows(batch, first_row, origin):
                self._find_writer(()).write(batch, source)
            return
        for values, rows, numbers in split_partitions(batch, keys):
            directory = partition_path(names, values)
            with locate_rows(rows, first_row + numbers, f"{origin}, of {directory}"):
                own = None if source is None else source.take(pa.array(numbers))
                self._find_writer(values).write(rows, own)

    def _plan_records(self, schema: pa.Schema) -> ToExample:
        """Plans by the batches' own types, which settings of the session may vary."""
        fields = [field.with_metadata(self._marks.get(field.name)) for field in schema]
        options = self._options
        plan = plan_to_example(pa.schema(fields), options.record_type, options.type_options)
        self._to_example, self._encoder = plan, build_encoder(plan.schema, options.record_type)
        return plan

    def _find_writer(self, values: PartitionValues) -> RollingWriter:
        writer = self._writers.get(values)
        if writer is None:
            if len(self._writers) >= self._max_open_files:
                self._retire()
            writer = RollingWriter(self._plan, self._encoder, lambda: self._name(values))
            self._writers[values] = writer
        self._writers.move_to_end(values)
        return writer

    def _retire(self) -> None:
        """Closes the file that has been idle longest."""
        values, writer = self._writers.popitem(last=False)
        try:
            writer.finish_file()
        finally:
            writer.discard()
        names = dict(zip(self._options.partition_by, values, strict=True))
        self._shards.extend(replace(s, partition_values=names) for s in writer.shards)

    def _name(self, values: PartitionValues) -> str:
        options = self._options
        number = next(self._counters.setdefault(values, itertools.count()))
        # Without limits and partitions there is one file, which needs no number of its own.
        is_plain = options.deterministic_names and options.limits == ShardLimits() and not values
        name = self._stem if is_plain else f"{self._stem}-c{number:03d}"
        directory = partition_path(options.partition_by, values)
        return f"{directory}/{name}{options.suffix}" if directory else f"{name}{options.suffix}"
