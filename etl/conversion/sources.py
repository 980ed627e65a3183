"""Reads files of any format as a stream of Arrow batches of one schema."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from conf.dataset import find_manifest
from conf.errors import ConfigError, InputDataError
from conf.layout import PackedSlot
from etl.conversion.csv import CsvReader
from etl.conversion.formats import ConvertOptions, Format, check_types
from etl.conversion.libsvm import has_query_ids, libsvm_schema, read_libsvm
from etl.tfrecord.table import infer_table_schema, read_table_batches

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
