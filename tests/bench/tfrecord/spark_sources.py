"""Spark data sources that only feed or drop Arrow batches: the floor under any Python format."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType


class DropWriter(DataSourceArrowWriter):
    """Takes every batch and keeps none."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Runs in a task."""
        for _ in iterator:
            pass
        return WriterCommitMessage()


class DropDataSource(DataSource):
    """`format("sluice_bench_drop")`."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "sluice_bench_drop"

    def writer(self, schema: StructType, overwrite: bool) -> DropWriter:
        """Builds the writer."""
        return DropWriter()


_BATCH_BYTES = 4 << 20  # of a batch; the reader's are about as large
_SAMPLE_ROWS = 256


@dataclass
class FeedPartition(InputPartition):
    """Rows of one task.

    Attributes:
        rows: How many.
    """

    rows: int


class FeedReader(DataSourceReader):
    """Makes a batch once per task and hands it over as often as it takes."""

    def __init__(self, shape: str, rows: int, tasks: int, schema: pa.Schema) -> None:
        """Takes what the options say.

        Args:
            shape: Name of the shape.
            rows: Rows in all.
            tasks: Tasks that share them.
            schema: As Spark expects it.
        """
        self._shape, self._rows, self._tasks, self._schema = shape, rows, tasks, schema

    def partitions(self) -> Sequence[InputPartition]:
        """Even shares."""
        bounds = [self._rows * k // self._tasks for k in range(self._tasks + 1)]
        return [FeedPartition(b - a) for a, b in itertools.pairwise(bounds)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Runs in a task."""
        from etl.tfrecord.types.from_example import cast_values
        from tests.bench.shapes import SHAPES, build_batch

        if not isinstance(partition, FeedPartition):
            return
        shape = SHAPES[self._shape]
        most = max(1, _BATCH_BYTES * _SAMPLE_ROWS // build_batch(shape, _SAMPLE_ROWS).nbytes)
        built = build_batch(shape, min(most, partition.rows))
        columns = [
            cast_values(column, field.type, "")
            for column, field in zip(built.columns, self._schema, strict=True)
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        for first in range(0, partition.rows, most):
            yield batch.slice(0, partition.rows - first)


class FeedDataSource(DataSource):
    """`format("sluice_bench_feed")`, options `shape`, `rows` and `tasks`."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "sluice_bench_feed"

    def reader(self, schema: StructType) -> FeedReader:
        """Builds the reader."""
        rows, tasks = int(self.options["rows"]), int(self.options["tasks"])
        return FeedReader(self.options["shape"], rows, tasks, to_arrow_schema(schema))
