"""Converts files: one stream of Arrow batches from the sources to the sink."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from conf.errors import ConfigError, InputDataError
from conf.paths import find_manifest, sync_directory
from conf.schema import PackedSlot
from etl.convert.csv_and_libsvm import (
    CsvReader,
    check_csv_schema,
    check_libsvm_schema,
    choose_separator,
    format_libsvm,
    has_query_ids,
    join_list_columns,
    libsvm_schema,
    read_libsvm,
)
from etl.convert.formats import ConvertOptions, Format, check_types, open_text_output
from etl.tfrecord.table import TableWriter, infer_table_schema, read_table_batches

_BATCH_ROWS = 10_000


@dataclass(frozen=True)
class Stream:
    """Rows to come.

    Attributes:
        schema: Schema of all batches.
        batches: The rows, in the order of the files.
    """

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]


def open_stream(files: Sequence[Path], source: Format, options: ConvertOptions) -> Stream:
    """Opens the files of an input.

    Args:
        files: At least one, all of one format.
        source: Their format.
        options: How to read them.

    Raises:
        ConfigError: An option does not fit the files.
        InputDataError: A file is malformed, or has other columns than the first.
    """
    open_files: Mapping[Format, Callable[[Sequence[Path], ConvertOptions], Stream]] = {
        "tfrecord": _open_tfrecord,
        "parquet": _open_parquet,
        "csv": _open_csv,
        "libsvm": _open_libsvm,
    }
    if options.types and source not in ("csv", "tfrecord"):
        raise ConfigError(
            "types are given for columns that have their own",
            received=f"--types {', '.join(options.types)}",
            allowed="--types for CSV and TFRecord inputs",
        )
    return open_files[source](files, options)


def _open_tfrecord(files: Sequence[Path], options: ConvertOptions) -> Stream:
    record_type, slots = options.shard.record_type, _find_slots(files)
    schema = None
    if options.types:
        found = infer_table_schema(files, record_type, slots)
        check_types(options.types, found.names, files[0])
        schema = pa.schema([(f.name, options.types.get(f.name, f.type)) for f in found])
    return Stream(*read_table_batches(files, schema=schema, record_type=record_type, slots=slots))


def _find_slots(files: Sequence[Path]) -> tuple[PackedSlot, ...]:
    """Slots of the dataset version that the files are shards of; none for any other file."""
    manifests = {file.parent: find_manifest(file) for file in files}
    slots = {() if manifest is None else manifest.slots for manifest in manifests.values()}
    if len(slots) > 1:
        raise ConfigError(
            "files of different layouts cannot be converted together",
            received=", ".join(str(folder) for folder in manifests),
            allowed="shards of one dataset of layout packed, or files of layout columns",
            fix="convert the files of each dataset alone",
        )
    return slots.pop()


def _open_parquet(files: Sequence[Path], options: ConvertOptions) -> Stream:
    def read() -> Iterator[pa.RecordBatch]:
        for path in files:
            with _open_parquet_file(path) as file:
                _check_schema(path, file.schema_arrow, schema)
                try:
                    yield from file.iter_batches(batch_size=_BATCH_ROWS)
                except (pa.ArrowInvalid, OSError) as error:
                    raise _damaged(path, error) from error

    with _open_parquet_file(files[0]) as first:
        schema = first.schema_arrow.remove_metadata()
    return Stream(schema, read())


def _open_parquet_file(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> InputDataError:
    return InputDataError(f"{path} does not read as Parquet", received=str(error))


def _open_csv(files: Sequence[Path], options: ConvertOptions) -> Stream:
    first = CsvReader(files[0], options.text, options.types)

    def read() -> Iterator[pa.RecordBatch]:
        yield from first.read()
        for path in files[1:]:
            reader = CsvReader(path, options.text, options.types)
            _check_schema(path, reader.schema, first.schema)
            yield from reader.read()

    return Stream(first.schema, read())


def _open_libsvm(files: Sequence[Path], options: ConvertOptions) -> Stream:
    has_qid = has_query_ids(files[0])
    batches = (
        batch for path in files for batch in read_libsvm(path, options.libsvm, has_qid=has_qid)
    )
    return Stream(libsvm_schema(options.libsvm, has_qid), batches)


def _check_schema(path: Path, found: pa.Schema, wanted: pa.Schema) -> None:
    if found.names != wanted.names or found.types != wanted.types:
        raise InputDataError(
            f"{path} has other columns than the files before it",
            received=", ".join(f"{field.name} {field.type}" for field in found),
            allowed=", ".join(f"{field.name} {field.type}" for field in wanted),
            fix="convert it alone, or give the types with --types",
        )


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
        flat = join_list_columns(pa.RecordBatch.from_pylist([], schema), self._list_separator)
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
        self._writer.write_batch(join_list_columns(batch, self._list_separator))

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


def convert_files(
    files: Sequence[Path],
    source: Format,
    output: Path,
    target: Format,
    options: ConvertOptions,
    on_rows: Callable[[int], None] = lambda _: None,
) -> int:
    """Converts files to one file, which appears whole or not at all.

    Args:
        files: Input files, of one format.
        source: Their format.
        output: File to create or replace; its directory must exist.
        target: Its format.
        options: How to read and write.
        on_rows: Told of each batch's rows.

    Returns:
        Rows written.

    Raises:
        ConfigError: The columns do not fit the target, or the output is one of the inputs.
        InputDataError: A file is malformed, or a value has no place in the target.
    """
    if any(output.exists() and file.samefile(output) for file in files):
        raise ConfigError("the output is one of the inputs", received=output)
    stream = open_stream(files, source, options)
    # Keeps the endings, by which writers choose compression and separator.
    temporary = output.with_name(f".{uuid.uuid4().hex}.{output.name}")
    rows = 0
    try:
        sink = open_sink(temporary, target, stream.schema, options)
        try:
            for batch in stream.batches:
                sink.write(batch)
                rows += batch.num_rows
                on_rows(batch.num_rows)
        except BaseException:
            sink.abort()
            raise
        sink.close()
        temporary.replace(output)
        sync_directory(output.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return rows
