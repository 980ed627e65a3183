"""Writes Arrow batches as one file of any format."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from etl.conversion.csv import check_csv_schema, choose_separator, flatten_lists
from etl.conversion.formats import ConvertOptions, Format
from etl.conversion.libsvm import check_libsvm_schema, format_libsvm
from etl.conversion.text_files import open_text_output
from etl.tfrecord.table import TableWriter


class Sink(Protocol):
    """Takes batches until it is closed."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends a batch."""

    def close(self) -> None:
        """Finishes the file."""

    def abort(self) -> None:
        """Lets go of the file without finishing it."""


class TFRecordSink:
    """A TFRecord file."""

    def __init__(self, path: Path, schema: pa.Schema, options: ConvertOptions) -> None:
        self._writer = TableWriter(path, schema, options.shard, options.lowering)
        self._writer.__enter__()

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends a batch."""
        self._writer.write(batch)

    def close(self) -> None:
        """Finishes the file."""
        self._writer.__exit__(None)

    def abort(self) -> None:
        """Removes the file."""
        self._writer.__exit__(RuntimeError)


class ParquetSink:
    """A Parquet file."""

    def __init__(self, path: Path, schema: pa.Schema, options: ConvertOptions) -> None:
        self._writer = pq.ParquetWriter(path, schema)

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends a batch as a row group."""
        self._writer.write_batch(batch)

    def close(self) -> None:
        """Finishes the file."""
        self._writer.close()

    abort = close


class CsvSink:
    """A CSV file with a header line; lists are one field each."""

    def __init__(self, path: Path, schema: pa.Schema, options: ConvertOptions) -> None:
        self._list_separator = options.text.list_separator
        check_csv_schema(schema)
        flat = flatten_lists(pa.RecordBatch.from_pylist([], schema), self._list_separator)
        self._file = open_text_output(path)
        self._writer = csv.CSVWriter(
            self._file,
            flat.schema,
            write_options=csv.WriteOptions(
                delimiter=choose_separator(path, options.text), quoting_style="needed"
            ),
        )

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends a batch."""
        self._writer.write_batch(flatten_lists(batch, self._list_separator))

    def close(self) -> None:
        """Finishes the file."""
        self._writer.close()
        self._file.close()

    abort = close


class LibsvmSink:
    """A libsvm file."""

    def __init__(self, path: Path, schema: pa.Schema, options: ConvertOptions) -> None:
        check_libsvm_schema(schema, options.libsvm)
        self._columns = options.libsvm
        self._file = open_text_output(path)

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends a batch."""
        self._file.write(format_libsvm(batch, self._columns))

    def close(self) -> None:
        """Finishes the file."""
        self._file.close()

    abort = close


_SINKS: dict[Format, Any] = {
    "tfrecord": TFRecordSink,
    "parquet": ParquetSink,
    "csv": CsvSink,
    "libsvm": LibsvmSink,
}


def open_sink(path: Path, target: Format, schema: pa.Schema, options: ConvertOptions) -> Sink:
    """Creates a file.

    Args:
        path: File to create.
        target: Its format.
        schema: Schema of the batches to come.
        options: How to write it.

    Raises:
        ConfigError: Columns that the format has no place for, all of them named.
    """
    sink: Sink = _SINKS[target](path, schema, options)
    return sink
