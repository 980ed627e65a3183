"""TFRecord, Parquet and CSV files into each other, in batches and without Spark.

A list is one field of CSV, its values joined by a separator of their own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv

from conf.artefacts.dataset import find_manifest, find_version
from conf.errors import ConfigError, InputDataError, did_you_mean
from conf.storage.atomic_output import atomic_file
from conf.storage.table_files import (
    CsvForm,
    CsvRows,
    open_csv,
    open_parquet,
    plain_columns,
    plain_schema,
    read_csv_names,
)
from etl.tfrecord.commit.output_directory import list_complete
from etl.tfrecord.files.data_files import (
    infer_partition_types,
    parse_partition_path,
    parse_partition_value,
    refuse_missing,
)
from etl.tfrecord.files.writer import ShardOptions
from etl.tfrecord.table import TableWriter, infer_table_schema, read_table_batches
from etl.tfrecord.types.features import TypeOptions, innermost, is_list
from etl.tfrecord.types.refusals import refuse_unknown

Format = Literal["tfrecord", "parquet", "csv"]
FORMATS: tuple[Format, ...] = get_args(Format)

_NAMES: Mapping[Format, str] = {
    "tfrecord": r".+\.tfrecords?(\.gz|\.deflate|\.zlib)?",
    "parquet": r".+\.parquet",
    "csv": r".+\.[ct]sv(\.gz)?",
}
_VALUE_TYPES = ("int64", "float32", "float64", "string", "binary")
_FOLDER_TYPES = {"int": "int64", "bigint": "int64", "date": "date32", "timestamp": "timestamp[us]"}
_BATCH_ROWS = 10_000
_CSV_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class TextOptions:
    """How CSV is read and written; without a separator by the file's name, tab or comma."""

    separator: str | None = None
    list_separator: str = "|"
    nulls: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuses separators that a file could not be read by."""
        separator = "," if self.separator is None else self.separator
        if len(separator.encode()) != 1 or separator in '"\r\n':
            received = repr(self.separator)
            raise ConfigError("bad separator", received=received, allowed="one ASCII character")
        if not self.list_separator:
            raise ConfigError("the list separator is empty", allowed="one or more characters")

    def choose_separator(self, path: Path) -> str:
        """The separator that was given, or the one that goes with the file's name."""
        if path.suffix.lower() in (".deflate", ".zlib"):
            allowed = "no compression, or .gz"
            raise ConfigError("text is not compressed so", received=path.name, allowed=allowed)
        return self.separator or ("\t" if ".tsv" in path.name.lower() else ",")


@dataclass(frozen=True)
class ConvertOptions:
    """How files are converted.

    `types` are of columns that have none; the `<column>=<value>` folders of `folder` add theirs.
    """

    shard: ShardOptions = field(default_factory=ShardOptions)
    policies: TypeOptions = field(default_factory=TypeOptions)
    text: TextOptions = TextOptions()
    types: Mapping[str, pa.DataType] = field(default_factory=dict)
    folder: Path | None = None


def detect_format(path: Path) -> Format:
    """Tells a file's format by the ending of its name, that of a compression left aside."""
    for name in FORMATS:
        if re.fullmatch(_NAMES[name], path.name, re.IGNORECASE):
            return name
    raise ConfigError(
        f"cannot tell the format of {path} by its name",
        allowed=".tfrecord, .parquet; .csv and .tsv, also with .gz",
        fix="name it: --from or --to with " + ", ".join(FORMATS),
    )


def parse_type(text: str) -> pa.DataType:
    """Parses the name of a column type, such as `int64` or `list<string>`."""
    match = re.fullmatch(r"list<(\w+)>", text.strip())
    name = match[1] if match else text.strip()
    if name not in _VALUE_TYPES:
        raise ConfigError(
            "unknown column type",
            received=text,
            allowed=f"{', '.join(_VALUE_TYPES)}, list<…> of these",
            fix=did_you_mean(name, _VALUE_TYPES),
        )
    kind = pa.type_for_alias(name)
    return pa.list_(kind) if match else kind


def list_inputs(path: Path, file_format: Format | None) -> list[Path]:
    """Lists a file, or those of a directory and its partitions by name; refuses other formats."""
    if path.is_file():
        return [path]
    _refuse_gone(path)
    files = sorted(path / name for name in list_complete(path))
    if not files:
        raise ConfigError("there is nothing to convert", received=path)
    formats = {file_format or detect_format(file) for file in files}
    if len(formats) > 1:
        received = ", ".join(sorted(formats))
        raise ConfigError(f"{path} holds files of several formats", received=received)
    return files


def _refuse_gone(folder: Path) -> None:
    """Refuses a folder of a dataset version of which a listed shard is gone."""
    root = folder.absolute()
    version, manifest = find_version(root / "shard"), find_manifest(root / "shard")
    if version is None or manifest is None:
        return
    listed = [version / shard.path for split in manifest.splits for shard in split.shards]
    names = [str(path.relative_to(root)) for path in listed if path.is_relative_to(root)]
    refuse_missing(folder, names, [name for name in names if (root / name).is_file()])


def convert_files(
    files: Sequence[Path],
    source: Format,
    output: Path,
    target: Format,
    options: ConvertOptions,
    on_rows: Callable[[int], None] = lambda _: None,
) -> int:
    """Converts files of one format to one file, which appears whole or not at all.

    Returns the number of rows.

    Raises:
        ConfigError: The columns do not fit the target, or the output is one of the inputs.
        InputDataError: A file is malformed, or a value has no place in the target.
    """
    if any(output.exists() and file.samefile(output) for file in files):
        raise ConfigError("the output is one of the inputs", received=output)
    schema, batches = _open_input(files, source, options)
    rows = 0
    with _open_output(output, target, schema, options) as write:
        for batch in batches:
            write(batch)
            rows += batch.num_rows
            on_rows(batch.num_rows)
    return rows


def _open_input(files: Sequence[Path], source: Format, options: ConvertOptions) -> CsvRows:
    """Opens files of the columns of the first, to which their folders add what they lack."""
    root, types = options.folder, options.types
    folders = [
        {} if root is None else parse_partition_path(file.parent.relative_to(root).as_posix())
        for file in files
    ]
    inferred = dict(infer_partition_types(folders))
    opened = _open_files(files, source, options, list(inferred))
    first = next(opened)
    names = [name for name in inferred if name not in first.schema.names]
    kinds = {name: types.get(name) or _folder_type(inferred[name]) for name in names}
    schema = pa.schema([*first.schema, *map(pa.field, kinds, kinds.values())])

    def read() -> Iterator[pa.RecordBatch]:
        for path, folder, rows in zip(files, folders, chain([first], opened), strict=True):
            _require_schema(path, rows.schema, first.schema)
            values = [parse_partition_value(n, folder[n], kind) for n, kind in kinds.items()]
            with _reading(path, source):
                for batch in rows.batches:
                    columns = [pa.repeat(value, batch.num_rows) for value in values]
                    yield pa.RecordBatch.from_arrays([*batch.columns, *columns], schema=schema)

    return CsvRows(schema, read())


def _folder_type(kind: str) -> pa.DataType:
    """Type of a partition column by its name in Spark."""
    if kind.startswith("decimal"):
        return pa.decimal128(int(kind[8:-3]), 0)
    return pa.type_for_alias(_FOLDER_TYPES.get(kind, kind))


def _require_schema(path: Path, found: pa.Schema, expected: pa.Schema) -> None:
    if not found.equals(expected):
        raise InputDataError(
            f"{path} has other columns than the files before it",
            received=", ".join(f"{field.name} {field.type}" for field in found),
            allowed=", ".join(f"{field.name} {field.type}" for field in expected),
            fix="convert it alone, or give the types with --types",
        )


@contextmanager
def _reading(path: Path, source: Format) -> Iterator[None]:
    """Makes Arrow's errors of a damaged or malformed file name the file."""
    try:
        yield
    except (pa.ArrowInvalid, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's: no such file, no permission
        raise InputDataError(
            f"{path} does not read as {source.upper()}",
            received=str(error),
            fix="correct it, make it UTF-8, or give a column's type: --types price=string",
        ) from error


def _open_files(
    files: Sequence[Path], source: Format, options: ConvertOptions, folders: Sequence[str]
) -> Iterator[CsvRows]:
    """Opens files one after the other; `folders` names the columns that their folders have."""
    open_file = _open_csv if source == "csv" else _open_parquet
    if source == "tfrecord":
        open_file = _plan_tfrecords(files, options, folders)
    for path in files:
        with _reading(path, source):
            rows = open_file(path, options, folders)
        yield rows


def _plan_tfrecords(
    files: Sequence[Path], options: ConvertOptions, folders: Sequence[str]
) -> Callable[..., CsvRows]:
    """Plans to open files of all the columns that any of them has."""
    record_type, types = options.shard.record_type, options.types
    schema = infer_table_schema(files, record_type)
    _require_columns(types, [*schema.names, *folders], files[0])
    schema = pa.schema([(f.name, types.get(f.name, f.type)) for f in schema])
    read = partial(read_table_batches, schema=schema, record_type=record_type)
    return lambda path, *_: CsvRows(*read([path]))


def _require_columns(types: Iterable[str], names: Sequence[str], path: Path) -> None:
    missing = [name for name in types if name not in names]
    refuse_unknown(f"--types names columns that {path} does not have", missing, names)


def _open_parquet(path: Path, options: ConvertOptions, folders: Sequence[str]) -> CsvRows:
    file = open_parquet(path)
    schema = file.schema_arrow.remove_metadata()
    typed = [n for n in options.types if n not in folders or n in schema.names]
    if typed:
        raise ConfigError(
            "types are given for columns that have their own",
            received=f"--types {', '.join(typed)}",
            allowed="--types for CSV and TFRecord inputs, and for columns of folders",
        )
    batches = file.iter_batches(batch_size=_BATCH_ROWS)
    return CsvRows(plain_schema(schema), map(plain_columns, batches))


def _open_csv(path: Path, options: ConvertOptions, folders: Sequence[str]) -> CsvRows:
    """Opens a file with a header; types not given are inferred from its first block."""
    types, text = options.types, options.text
    separator = text.choose_separator(path)
    names = read_csv_names(path, separator)
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise InputDataError(f"{path} has several columns of one name", received=twice)
    _require_columns(types, [*names, *folders], path)
    form = CsvForm(
        separator,
        {name: pa.string() if _is_parsed(kind) else kind for name, kind in types.items()},
        nulls=text.nulls,
        empty_lines=len(names) == 1,
        block_bytes=_CSV_BLOCK_BYTES,
    )
    rows = open_csv(path, names, form)
    schema = pa.schema([(f.name, types.get(f.name, f.type)) for f in rows.schema])
    parse = partial(_parse_columns, schema=schema, list_separator=text.list_separator)
    return CsvRows(schema, map(parse, rows.batches))


def _is_parsed(kind: pa.DataType) -> bool:
    return is_list(kind) or pa.types.is_floating(kind)


def _parse_columns(batch: pa.RecordBatch, schema: pa.Schema, list_separator: str) -> pa.RecordBatch:
    """Makes lists and fractions of text."""
    columns = [
        column if column.type == target.type else _parse(column, target, list_separator)
        for column, target in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _parse(texts: pa.Array, target: pa.Field, list_separator: str) -> pa.Array:
    parts = pc.ascii_trim_whitespace(texts)
    if is_list(target.type):
        parts = pc.split_pattern(texts, list_separator)
        # An empty field is an empty list, not a list of one empty string.
        empty = pc.equal(pc.binary_length(texts), 0)
        parts = pc.if_else(empty, pa.scalar([], parts.type), parts)
    try:
        found = parts.cast(target.type)
        if pa.types.is_floating(innermost(target.type)):
            _refuse_infinite(*(a.flatten() if is_list(a.type) else a for a in (parts, found)))
    except pa.ArrowInvalid as error:
        raise pa.ArrowInvalid(f"column {target.name!r}: {error}") from error
    return found


def _refuse_infinite(texts: pa.Array, numbers: pa.Array) -> None:
    """Refuses numbers beyond the range of their type, such as 1e39 of float32."""
    is_far = pc.and_(pc.is_inf(numbers), pc.match_substring_regex(texts, "[0-9]"))
    if len(far := texts.filter(is_far)):
        raise pa.ArrowInvalid(f"{far[0]} is beyond {numbers.type}")


@contextmanager
def _open_output(
    path: Path, target: Format, schema: pa.Schema, options: ConvertOptions
) -> Iterator[Callable[[pa.RecordBatch], None]]:
    """Gives what appends a batch to a file, which appears when the block ends well."""
    if target == "tfrecord":
        with TableWriter(path, schema, options.shard, options.policies) as records:
            yield records.write
    elif target == "parquet":
        with atomic_file(path) as unfinished, pq.ParquetWriter(unfinished, schema) as table:
            yield table.write_batch
    else:
        text, compression = options.text, "gzip" if path.suffix.lower() == ".gz" else None
        form = csv.WriteOptions(delimiter=text.choose_separator(path), quoting_style="needed")
        flat = _text_schema(schema, text.list_separator)
        with (
            atomic_file(path) as unfinished,
            pa.output_stream(unfinished, compression=compression) as file,
            csv.CSVWriter(file, flat, write_options=form) as lines,
        ):
            yield lambda batch: lines.write_batch(_join_lists(batch, text.list_separator))


def _text_schema(schema: pa.Schema, list_separator: str) -> pa.Schema:
    """Columns as CSV holds them; refuses all that it has no form for."""
    flat, bad = [], []
    for column in schema:
        kind = column.type.value_type if is_list(column.type) else column.type
        try:
            pa.array([], kind).cast(pa.string())
            text = _to_text(pa.array([], column.type), column.name, list_separator)
        except pa.ArrowNotImplementedError:
            text = None
        if text is None or pa.types.is_duration(kind):  # a number without its unit
            bad.append(f"{column.name} ({column.type})")
        else:
            flat.append((column.name, text.type))
    if bad:
        allowed = "numbers, booleans, dates, timestamps, text, and lists of these"
        what = f"{len(bad)} column(s) cannot be written as CSV"
        raise ConfigError(what, received=", ".join(bad), allowed=allowed)
    return pa.schema(flat)


def _join_lists(batch: pa.RecordBatch, list_separator: str) -> pa.RecordBatch:
    """Makes text of lists and of all that CSV has no form for; refuses bytes that are no UTF-8."""
    names = batch.schema.names
    columns = [_to_text(c, n, list_separator) for c, n in zip(batch.columns, names, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=names)


def _to_text(column: pa.Array, name: str, list_separator: str) -> pa.Array:
    kind = column.type
    # Numbers, times and nulls stand without quotes.
    if pa.types.is_primitive(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind):
        return column
    try:
        if is_list(kind):
            return _join(column.cast(pa.list_(pa.string())), name, list_separator)
        return column.cast(pa.string())
    except pa.ArrowInvalid as error:
        what = f"column {name!r} cannot be written as CSV"
        raise InputDataError(what, received=str(error)) from error


def _join(lists: pa.Array, name: str, list_separator: str) -> pa.Array:
    """Joins lists of text; refuses those that would not be read back as they were."""
    values = lists.flatten()
    if pc.any(pc.match_substring(values, list_separator)).as_py():
        what = f"a value of column {name!r} holds the list separator"
        raise InputDataError(what, received=repr(list_separator), fix="name another")
    joined = pc.binary_join(lists, list_separator)
    is_blank = pc.and_(pc.equal(joined, ""), pc.greater(pc.list_value_length(lists), 0))
    if values.null_count or pc.any(is_blank).as_py():
        what = "a null inside a list" if values.null_count else "a list of one empty text"
        raise InputDataError(f"column {name!r} holds {what}, which CSV cannot express")
    return joined
