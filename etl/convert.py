"""TFRecord, Parquet and CSV files into each other on one machine, without Spark.

Rows go from the files to the output in batches, so that memory does not grow with them. A list is
one field of CSV, its values joined by a separator of their own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv

from conf.artefacts.dataset import find_manifest, find_version
from conf.errors import ConfigError, InputDataError, did_you_mean
from conf.schema import PackedSlot
from conf.storage.atomic_output import atomic_file
from conf.storage.table_files import (
    CsvForm,
    open_csv,
    open_parquet,
    plain_columns,
    plain_schema,
    read_csv_names,
)
from etl.tfrecord.commit.directory_view import list_complete
from etl.tfrecord.files.data_files import refuse_missing
from etl.tfrecord.files.partitions import (
    infer_partition_types,
    parse_partition_path,
    parse_partition_value,
)
from etl.tfrecord.files.writer import ShardOptions
from etl.tfrecord.table import TableWriter, infer_table_schema, read_table_batches
from etl.tfrecord.types.column_policies import TypeOptions
from etl.tfrecord.types.conversions import is_list
from etl.tfrecord.types.row_errors import refuse_unknown

Format = Literal["tfrecord", "parquet", "csv"]
FORMATS: tuple[Format, ...] = get_args(Format)

_SUFFIXES: Mapping[str, Format] = {
    ".tfrecord": "tfrecord",
    ".tfrecords": "tfrecord",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
}
_COMPRESSED = (".gz", ".deflate", ".zlib")
_VALUE_TYPES: Mapping[str, pa.DataType] = {
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
}
_BATCH_ROWS = 10_000
_CSV_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class TextOptions:
    """How CSV is read and written.

    Attributes:
        separator: Between columns; None for a tab in `.tsv` files and a comma in others.
        list_separator: Between the values of a list column.
        nulls: Unquoted fields that are nulls, for example `NA`; an empty one always is.
    """

    separator: str | None = None
    list_separator: str = "|"
    nulls: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Checks the separators.

        Raises:
            ConfigError: One that a file could not be read by.
        """
        separator = self.separator
        if separator is not None and (len(separator.encode()) != 1 or separator in '"\r\n'):
            raise ConfigError(
                "no such separator", received=repr(separator), allowed="one ASCII character"
            )
        if not self.list_separator:
            raise ConfigError("the list separator is empty", allowed="one or more characters")

    def choose_separator(self, path: Path) -> str:
        """The separator that was given, or the one that goes with the file's name."""
        return self.separator or ("\t" if ".tsv" in path.name.lower() else ",")


@dataclass(frozen=True)
class ConvertOptions:
    """How files are converted.

    Attributes:
        shard: Record type of TFRecord files, read or written; compression of written ones.
        policies: How columns become features.
        text: How CSV is read and written.
        types: Type by column name, over what a CSV or TFRecord input is inferred to hold, or the
            values of folders.
        folder: Folder of the input: its `<column>=<value>` folders give what its files lack.
    """

    shard: ShardOptions = field(default_factory=ShardOptions)
    policies: TypeOptions = field(default_factory=TypeOptions)
    text: TextOptions = TextOptions()
    types: Mapping[str, pa.DataType] = field(default_factory=dict)
    folder: Path | None = None


class Stream(NamedTuple):
    """Rows to come: the schema of all batches, and the batches in the order of the files."""

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]


class Parts(NamedTuple):
    """Rows to come: the schema of all batches, and those of each file."""

    schema: pa.Schema
    files: Iterator[Iterator[pa.RecordBatch]]


class Converted(NamedTuple):
    """What a conversion wrote: rows, and what became of columns that are not read back alike."""

    rows: int
    notes: tuple[str, ...]


def detect_format(path: Path) -> Format:
    """Tells a file's format by the ending of its name, that of a compression left aside.

    Raises:
        ConfigError: The ending is none of those known.
    """
    name = path.name.lower()
    for ending in _COMPRESSED:
        name = name.removesuffix(ending)
    suffix = Path(name).suffix
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    raise ConfigError(
        f"cannot tell the format of {path} by its name",
        received=suffix or "no ending",
        allowed=", ".join(_SUFFIXES),
        fix="name it: --from or --to with " + ", ".join(FORMATS),
    )


def _refuse_gone(folder: Path) -> None:
    """Refuses a folder of a dataset version of which a listed shard is gone."""
    inside = folder.absolute() / "shard"
    version, manifest = find_version(inside), find_manifest(inside)
    if version is None or manifest is None:
        return
    listed = [version / shard.path for split in manifest.splits for shard in split.shards]
    below = [shard for shard in listed if shard.is_relative_to(inside.parent)]
    names = {str(shard.relative_to(inside.parent)): shard.is_file() for shard in below}
    refuse_missing(folder, names, [name for name, is_there in names.items() if is_there])


def list_inputs(path: Path, file_format: Format | None) -> list[Path]:
    """Lists the files of an input in the order of their names.

    Args:
        path: A file, or a directory with files of one format, in it or in partitions below.
        file_format: Format of the files; None to tell by their names.

    Raises:
        ConfigError: Nothing is there, or a directory holds several formats.
        InputDataError: A file that the directory's or the version's manifest lists is gone.
    """
    if path.is_file():
        return [path]
    _refuse_gone(path)
    files = sorted(path / name for name in list_complete(path))
    if not files:
        raise ConfigError(
            "there is nothing to convert",
            received=path if path.is_dir() else f"{path} (does not exist)",
            allowed="a file, or a directory with files in it or in <column>=<value> folders",
        )
    formats = set() if file_format else {detect_format(file) for file in files}
    if len(formats) > 1:
        raise ConfigError(
            f"{path} holds files of several formats",
            received=", ".join(sorted(formats)),
            fix="give one file, or a directory of one format",
        )
    return files


def parse_type(text: str) -> pa.DataType:
    """Parses the name of a column type, such as `int64` or `list<string>`.

    Raises:
        ConfigError: No such type.
    """
    match = re.fullmatch(r"list<(\w+)>", text.strip())
    name = match[1] if match else text.strip()
    if name not in _VALUE_TYPES:
        raise ConfigError(
            "unknown column type",
            received=text,
            allowed=f"{', '.join(_VALUE_TYPES)}, list<…> of these",
            fix=did_you_mean(name, _VALUE_TYPES),
        )
    return pa.list_(_VALUE_TYPES[name]) if match else _VALUE_TYPES[name]


def convert_files(
    files: Sequence[Path],
    source: Format,
    output: Path,
    target: Format,
    options: ConvertOptions,
    on_rows: Callable[[int], None] = lambda _: None,
) -> Converted:
    """Converts files to one file, which appears whole or not at all.

    Args:
        files: Input files, of one format.
        source: Their format.
        output: File to create or replace; its directory must exist.
        target: Its format.
        options: How to read and write.
        on_rows: Told of each batch's rows.

    Returns:
        Rows written, and what is to be known of columns.

    Raises:
        ConfigError: The columns do not fit the target, or the output is one of the inputs.
        InputDataError: A file is malformed, or a value has no place in the target.
    """
    if any(output.exists() and file.samefile(output) for file in files):
        raise ConfigError("the output is one of the inputs", received=output)
    stream, rows = _open_stream(files, source, options), 0
    seen = _SeenValues(stream.schema)
    with _open_sink(output, target, stream.schema, options) as write:
        for batch in stream.batches:
            write(batch)
            seen.update(batch)
            rows += batch.num_rows
            on_rows(batch.num_rows)
    return Converted(rows, seen.describe(target) if rows else ())


_EMPTY: Mapping[Format, str] = {
    "tfrecord": "no record has such a feature",
    "csv": "whoever reads the file cannot tell its type",
    "parquet": "its type is {kind}",
}
_WHOLE: Mapping[Format, str] = {
    "tfrecord": "a float32 feature, not int64",
    "csv": "written without a point, and read as int64",
}


class _SeenValues:
    """Which columns had no value yet, and of which real numbers all have been whole."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._empty = set(schema.names)
        self._whole = {field.name for field in schema if pa.types.is_floating(field.type)}

    def update(self, batch: pa.RecordBatch) -> None:
        self._empty -= {n for n in self._empty if batch[n].null_count < batch.num_rows}
        self._whole -= {n for n in self._whole if not _are_whole(batch[n])}

    def describe(self, target: Format) -> tuple[str, ...]:
        notes = [
            f"{field.name}: no value in any row; {_EMPTY[target].format(kind=field.type)}"
            for field in self._schema
            if field.name in self._empty
        ]
        if target in _WHOLE:
            whole = [f.name for f in self._schema if f.name in self._whole - self._empty]
            notes += [f"{name}: real numbers, all whole; {_WHOLE[target]}" for name in whole]
        return tuple(notes)


def _are_whole(values: pa.Array) -> bool:
    numbers = values.cast(pa.float64())
    return pc.all(pc.equal(pc.floor(numbers), numbers)).as_py() is not False


_FOLDER_TYPES: Mapping[str, pa.DataType] = {
    "int": pa.int64(),
    "bigint": pa.int64(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "string": pa.string(),
}


def _open_stream(files: Sequence[Path], source: Format, options: ConvertOptions) -> Stream:
    folders = [_read_folders(file, options.folder) for file in files]
    inferred, types = dict(infer_partition_types(folders)), options.types
    open_parts = _open_tfrecord if source == "tfrecord" else partial(_open_each, source)
    parts = open_parts(files, options, list(inferred))
    added = {
        name: types.get(name) or _folder_type(kind)
        for name, kind in inferred.items()
        if name not in parts.schema.names
    }
    schema = pa.schema([*parts.schema, *map(pa.field, added, added.values())])

    def read() -> Iterator[pa.RecordBatch]:
        for folder, batches in zip(folders, parts.files, strict=True):
            values = [parse_partition_value(n, folder[n], kind) for n, kind in added.items()]
            for batch in batches:
                columns = [pa.repeat(value, batch.num_rows) for value in values]
                yield pa.RecordBatch.from_arrays([*batch.columns, *columns], schema=schema)

    return Stream(schema, read())


def _folder_type(kind: str) -> pa.DataType:
    if kind in _FOLDER_TYPES:
        return _FOLDER_TYPES[kind]
    return pa.decimal128(int(kind.removeprefix("decimal(").removesuffix(",0)")), 0)


def _read_folders(file: Path, root: Path | None) -> Mapping[str, str | None]:
    return {} if root is None else parse_partition_path(file.parent.relative_to(root).as_posix())


def _open_each(
    source: Format, files: Sequence[Path], options: ConvertOptions, folders: Sequence[str]
) -> Parts:
    """Opens Parquet or CSV files, of the columns of the first."""
    open_file = _open_csv if source == "csv" else _open_parquet
    first = open_file(files[0], options, folders)

    def read() -> Iterator[Iterator[pa.RecordBatch]]:
        yield first.batches
        for path in files[1:]:
            other = open_file(path, options, folders)
            _require_schema(path, other.schema, first.schema)
            yield other.batches

    return Parts(first.schema, read())


def _require_schema(path: Path, found: pa.Schema, expected: pa.Schema) -> None:
    if not found.equals(expected):
        raise InputDataError(
            f"{path} has other columns than the files before it",
            received=", ".join(f"{field.name} {field.type}" for field in found),
            allowed=", ".join(f"{field.name} {field.type}" for field in expected),
            fix="convert it alone, or give the types with --types",
        )


@contextmanager
def _reading(path: Path, kind: str) -> Iterator[None]:
    """Makes Arrow's errors of a damaged or malformed file name the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise InputDataError(
            f"{path} is not UTF-8",
            received=repr(error.object),
            fix="convert the file to UTF-8, as in iconv -f latin1 -t utf-8",
        ) from error
    except (pa.ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's: no such file, no permission
        raise InputDataError(
            f"{path} does not read as {kind}",
            received=str(error),
            fix="correct or copy the file again, or give a column's type: --types price=string",
        ) from error


def _open_tfrecord(files: Sequence[Path], options: ConvertOptions, folders: Sequence[str]) -> Parts:
    record_type, slots, types = options.shard.record_type, _find_slots(files), options.types
    schema = infer_table_schema(files, record_type, slots)
    _require_columns(types, [*schema.names, *folders], files[0])
    schema = pa.schema([(f.name, types.get(f.name, f.type)) for f in schema])
    read = partial(read_table_batches, schema=schema, record_type=record_type, slots=slots)
    return Parts(schema, (read([file])[1] for file in files))


def _require_columns(types: Mapping[str, pa.DataType], names: Sequence[str], path: Path) -> None:
    missing = [name for name in types if name not in names]
    refuse_unknown(f"--types names columns that {path} does not have", missing, names)


def _find_slots(files: Sequence[Path]) -> tuple[PackedSlot, ...]:
    """Slots of the dataset version that the files are shards of; none for any other file."""
    manifests = {file.parent: find_manifest(file) for file in files}
    slots = {() if manifest is None else manifest.slots for manifest in manifests.values()}
    if len(slots) > 1:
        raise ConfigError(
            "files whose scalars share lists in different ways cannot be converted together",
            received=", ".join(str(folder) for folder in manifests),
            allowed="shards of one imported dataset, or files without such lists",
            fix="convert the files of each dataset alone",
        )
    return slots.pop()


def _open_parquet(path: Path, options: ConvertOptions, folders: Sequence[str]) -> Stream:
    with _reading(path, "Parquet"):
        file = open_parquet(path)
    typed = [n for n in options.types if n not in folders or n in file.schema_arrow.names]
    if typed:
        raise ConfigError(
            "types are given for columns that have their own",
            received=f"--types {', '.join(typed)}",
            allowed="--types for CSV and TFRecord inputs, and for columns of folders",
        )

    def read() -> Iterator[pa.RecordBatch]:
        with file, _reading(path, "Parquet"):
            yield from map(plain_columns, file.iter_batches(batch_size=_BATCH_ROWS))

    return Stream(plain_schema(file.schema_arrow.remove_metadata()), read())


def _open_csv(path: Path, options: ConvertOptions, folders: Sequence[str]) -> Stream:
    """Opens a file with a header; types not given are inferred from its first block."""
    types, text = options.types, options.text
    _require_text_compression(path)
    separator = text.choose_separator(path)
    with _reading(path, "CSV"):
        names = read_csv_names(path, separator)
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputDataError(
            f"{path} has several columns of one name",
            received=", ".join(map(repr, twice)),
            fix="give them names of their own in the file's first line",
        )
    _require_columns(types, [*names, *folders], path)
    given = {name: pa.string() if is_list(kind) else kind for name, kind in types.items()}
    form = CsvForm(
        separator,
        given,
        nulls=text.nulls,
        empty_lines=len(names) == 1,
        block_bytes=_CSV_BLOCK_BYTES,
    )
    with _reading(path, "CSV"):
        rows = open_csv(path, names, form)
    schema = pa.schema([(f.name, types.get(f.name, f.type)) for f in rows.schema])

    def read() -> Iterator[pa.RecordBatch]:
        with _reading(path, "CSV"):
            for batch in rows.batches:
                columns = [
                    _split_lists(column, target, text.list_separator)
                    for column, target in zip(batch.columns, schema, strict=True)
                ]
                yield pa.RecordBatch.from_arrays(columns, schema=schema)

    return Stream(schema, read())


def _require_text_compression(path: Path) -> None:
    if path.suffix.lower() in (".deflate", ".zlib"):
        raise ConfigError(
            "text files are not compressed that way",
            received=path.name,
            allowed="no compression, or .gz",
        )


def _split_lists(column: pa.Array, target: pa.Field, list_separator: str) -> pa.Array:
    if not is_list(target.type):
        return column.cast(target.type)
    parts = pc.split_pattern(column, list_separator)
    # An empty field is an empty list, not a list of one empty string.
    empty = pc.equal(pc.binary_length(column), 0)
    try:
        return pc.if_else(empty, pa.scalar([], parts.type), parts).cast(target.type)
    except pa.ArrowInvalid as error:
        raise pa.ArrowInvalid(f"column {target.name!r}: {error}") from error


@contextmanager
def _open_sink(
    path: Path, target: Format, schema: pa.Schema, options: ConvertOptions
) -> Iterator[Callable[[pa.RecordBatch], None]]:
    """Gives what appends a batch to a file, which appears when the block ends well.

    Raises:
        ConfigError: Columns that the format has no place for, all of them named.
    """
    if target == "tfrecord":
        with TableWriter(path, schema, options.shard, options.policies) as records:
            yield records.write
        return
    if target == "csv":
        _require_text_compression(path)
        _require_text_columns(schema)
    with atomic_file(path) as unfinished:
        if target == "parquet":
            with pq.ParquetWriter(unfinished, schema) as table:
                yield table.write_batch
            return
        join = partial(_join_lists, list_separator=options.text.list_separator)
        flat = join(pa.RecordBatch.from_pylist([], schema)).schema
        settings = csv.WriteOptions(
            delimiter=options.text.choose_separator(path), quoting_style="needed"
        )
        compression = "gzip" if path.suffix.lower() == ".gz" else None
        with (
            pa.output_stream(unfinished, compression=compression) as file,
            csv.CSVWriter(file, flat, write_options=settings) as lines,
        ):
            yield lambda batch: lines.write_batch(join(batch))


def _require_text_columns(schema: pa.Schema) -> None:
    bad = [field for field in schema if not _has_text(field.type)]
    if bad:
        raise ConfigError(
            f"{len(bad)} column(s) cannot be written as CSV",
            received=", ".join(f"{field.name} ({field.type})" for field in bad),
            allowed="numbers, booleans, dates, timestamps, text, and lists of these",
            fix="leave them out of the input, or convert to Parquet",
        )


def _has_text(data_type: pa.DataType) -> bool:
    value_type = data_type.value_type if is_list(data_type) else data_type
    if pa.types.is_nested(value_type):
        return False
    try:
        pa.array([], value_type).cast(pa.string())
    except pa.ArrowNotImplementedError:
        return False
    return True


def _is_written_as_it_is(kind: pa.DataType) -> bool:
    tests = (pa.types.is_primitive, pa.types.is_decimal, pa.types.is_string, pa.types.is_null)
    return any(test(kind) for test in tests)


def _join_lists(batch: pa.RecordBatch, list_separator: str) -> pa.RecordBatch:
    """Turns the list columns of a batch into text.

    Raises:
        InputDataError: A list that would not be read back as it was, or bytes that are not UTF-8.
    """
    columns = []
    for column, target in zip(batch.columns, batch.schema, strict=True):
        try:
            if is_list(target.type):
                text = _join(column.cast(pa.list_(pa.string())), target.name, list_separator)
            else:
                text = column if _is_written_as_it_is(target.type) else column.cast(pa.string())
        except pa.ArrowInvalid as error:
            raise InputDataError(
                f"column {target.name!r} cannot be written as CSV",
                received=str(error),
                allowed="numbers, UTF-8 text, and lists of these",
            ) from error
        columns.append(text)
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _join(lists: pa.Array, name: str, list_separator: str) -> pa.Array:
    values = lists.flatten()
    if pc.any(pc.match_substring(values, list_separator)).as_py():
        raise InputDataError(
            f"a value of column {name!r} holds the list separator",
            received=repr(list_separator),
            fix="choose another with --list-separator",
        )
    joined = pc.binary_join(lists, list_separator)
    is_blank = pc.and_(pc.equal(joined, ""), pc.greater(pc.list_value_length(lists), 0))
    if values.null_count or pc.any(is_blank).as_py():
        what = "a null inside a list" if values.null_count else "a list of one empty text"
        raise InputDataError(
            f"column {name!r} holds {what}, which CSV cannot express",
            fix="take it out of the lists, or convert to Parquet",
        )
    return joined
