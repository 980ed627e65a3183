"""A Spark sink that takes the rows as Arrow and drops them: the floor under any Python writer."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, WriterCommitMessage
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
