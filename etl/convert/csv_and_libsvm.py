"""CSV, TSV and libsvm text to Arrow and back, a block at a time.

List columns are one field with a separator of their own. Ranking data in libsvm has a query's
id after the label: `label qid:3 index:value …`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from conf.errors import ConfigError, InputDataError
from etl.convert.formats import (
    LibsvmColumns,
    TextOptions,
    check_types,
    open_text_input,
    refuse_damage,
)
from etl.tfrecord.types.value_rules import is_binary
from etl.tfrecord.types.values import is_list

_CSV_BLOCK_BYTES = 4 << 20


def choose_separator(path: Path, options: TextOptions) -> str:
    """The separator that was given, or the one that goes with the file's name."""
    if options.separator is not None:
        return options.separator
    return "\t" if ".tsv" in path.name.lower() else ","


class CsvReader:
    """Reads a file with a header line, block by block.

    Types that are not given are inferred from the first block of the file.
    """

    def __init__(
        self, path: Path, options: TextOptions, types: Mapping[str, pa.DataType] | None = None
    ) -> None:
        """Opens the file and settles the schema.

        Args:
            path: The file.
            options: How it is written.
            types: Type by column name, over what is inferred.

        Raises:
            ConfigError: A type is given for a column that is not there.
            InputDataError: The file is empty, its first block malformed, or a name no text or
                there twice.
        """
        self._path, self._options = path, options
        types = types or {}
        self._reader = self._open(types, skip_empty_lines=True)
        names = self._read_names()
        if len(names) == 1:  # where an empty line is a row, of a null
            self._reader = self._open(types, skip_empty_lines=False)
        check_types(types, names, path)
        self.schema = pa.schema(
            [(f.name, types.get(f.name, _plain(f.type))) for f in self._reader.schema]
        )

    def _open(self, types: Mapping[str, pa.DataType], skip_empty_lines: bool) -> Any:
        path, options = self._path, self._options
        scalars = {n: pa.string() if pa.types.is_list(t) else t for n, t in types.items()}
        try:
            with refuse_damage(path):
                return csv.open_csv(
                    open_text_input(path),
                    read_options=csv.ReadOptions(use_threads=False, block_size=_CSV_BLOCK_BYTES),
                    parse_options=csv.ParseOptions(
                        delimiter=choose_separator(path, options),
                        newlines_in_values=True,
                        ignore_empty_lines=skip_empty_lines,
                    ),
                    convert_options=csv.ConvertOptions(
                        column_types=scalars,
                        null_values=["", *options.nulls],
                        strings_can_be_null=True,
                        quoted_strings_can_be_null=False,
                    ),
                )
        except pa.ArrowInvalid as error:
            raise _refuse(path, error) from error

    def _read_names(self) -> list[str]:
        try:
            names: list[str] = self._reader.schema.names
        except UnicodeDecodeError as error:
            raise InputDataError(
                f"{self._path} has a column whose name is not UTF-8",
                received=repr(error.object),
                fix="convert the file to UTF-8, as in iconv -f latin1 -t utf-8",
            ) from error
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise InputDataError(
                f"{self._path} has several columns of one name",
                received=", ".join(map(repr, twice)),
                fix="give them names of their own in the file's first line",
            )
        return names

    def read(self) -> Iterator[pa.RecordBatch]:
        """Yields the rows in file order.

        Raises:
            InputDataError: A line is malformed or a value does not fit its column's type.
        """
        while True:
            try:
                with refuse_damage(self._path):
                    batch = self._reader.read_next_batch()
            except StopIteration:
                return
            except pa.ArrowInvalid as error:
                raise _refuse(self._path, error) from error
            columns = [
                self._convert(column, target)
                for column, target in zip(batch.columns, self.schema, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _convert(self, column: pa.Array, target: pa.Field) -> pa.Array:
        if not pa.types.is_list(target.type):
            return column.cast(target.type)
        parts = pc.split_pattern(column, self._options.list_separator)
        # An empty field is an empty list, not a list of one empty string.
        empty = pc.equal(pc.binary_length(column), 0)
        parts = pc.if_else(empty, pa.scalar([], pa.list_(pa.string())), parts)
        try:
            return parts.cast(target.type)
        except pa.ArrowInvalid as error:
            raise _refuse(self._path, error, f"column {target.name!r}: ") from error


def _plain(data_type: pa.DataType) -> pa.DataType:
    """The type of a column that was inferred; one without any value is text."""
    return pa.string() if pa.types.is_null(data_type) else data_type


def _refuse(path: Path, error: pa.ArrowInvalid, where: str = "") -> InputDataError:
    return InputDataError(
        f"{path} does not read as CSV",
        received=f"{where}{error}",
        fix="give the column's type, as in --types price=string, or correct the file",
    )


def check_csv_schema(schema: pa.Schema) -> None:
    """Refuses, before anything is read, columns that CSV has no place for.

    Raises:
        ConfigError: Names all of them.
    """
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


def join_list_columns(batch: pa.RecordBatch, list_separator: str) -> pa.RecordBatch:
    """Turns the list columns of a batch into text.

    Args:
        batch: Rows; columns that `check_csv_schema` has passed.
        list_separator: Between the values.

    Raises:
        InputDataError: A list that would not be read back as it was, or bytes that are not UTF-8.
    """
    columns = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        target = pa.list_(pa.string()) if is_list(field.type) else pa.string()
        is_text = is_list(field.type) or is_binary(field.type)
        try:
            text = column.cast(target) if is_text else column
        except pa.ArrowInvalid as error:
            raise InputDataError(
                f"column {field.name!r} cannot be written as CSV", received=str(error),
                allowed="numbers, UTF-8 text, and lists of these",
            ) from error  # fmt: skip
        if is_list(field.type):
            text = _join(text, field.name, list_separator)
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


_LIBSVM_BLOCK_BYTES, _HEAD_BYTES = 4 << 20, 1 << 16
_QID = "qid:"
_NUMBER = r"^[+-]?((\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[iI][nN][fF]|[nN][aA][nN])$"
# Up to 9219999999999999999, so that every one fits int64.
_INDEX = r"^(\d{1,18}|[0-8]\d{18}|9[01]\d{17}|92[01]\d{16})$"


def libsvm_schema(columns: LibsvmColumns, has_qid: bool = False) -> pa.Schema:
    """Schema of a libsvm file: label, the query's id where there is one, indices, values."""
    qid = [(columns.qid, pa.int64())] if has_qid else []
    return pa.schema(
        [
            (columns.label, pa.float32()),
            *qid,
            (columns.indices, pa.list_(pa.int64())),
            (columns.values, pa.list_(pa.float32())),
        ]
    )


def has_query_ids(path: Path) -> bool:
    """Whether the first line of a file that is no comment has a query's id."""
    with refuse_damage(path), open_text_input(path) as stream:
        rest = b""
        while data := stream.read(_HEAD_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if tokens := line.split(b"#")[0].split():
                    return _is_query_id(tokens)
    return _is_query_id(rest.split(b"#")[0].split())


def _is_query_id(tokens: list[bytes]) -> bool:
    return len(tokens) > 1 and tokens[1].startswith(_QID.encode())


def read_libsvm(
    path: Path,
    columns: LibsvmColumns,
    block_bytes: int = _LIBSVM_BLOCK_BYTES,
    has_qid: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Reads a file block by block; empty lines and `#` comments are passed over.

    Args:
        path: Text file, plain or gzip.
        columns: Names of the columns.
        block_bytes: Bytes read at a time; a longer line is read whole.
        has_qid: Whether every line has a query's id, or none.

    Yields:
        Batches of `libsvm_schema`, indices as they stand in the file.

    Raises:
        InputDataError: A line is malformed; names the file and the line.
    """
    first_line, rest, schema = 1, b"", libsvm_schema(columns, has_qid)
    with refuse_damage(path), open_text_input(path) as stream:
        while data := stream.read(block_bytes):
            whole, newline, rest = (rest + data).rpartition(b"\n")
            if newline:
                yield _parse_block(whole, path, first_line, schema)
                first_line += whole.count(b"\n") + 1
    if rest:
        yield _parse_block(rest, path, first_line, schema)


def _parse_block(data: bytes, path: Path, first_line: int, schema: pa.Schema) -> Any:
    try:
        text = pa.array([data.replace(b"\r", b"").decode("ascii")])
    except UnicodeDecodeError as error:
        line = first_line + data[: error.start].count(b"\n")
        raise _malformed(path, line, "bytes beyond ASCII") from error
    lines = pc.split_pattern(text, "\n").flatten()
    lines = pc.ascii_trim_whitespace(pc.replace_substring_regex(lines, "#.*", ""))
    numbers = np.flatnonzero(np.asarray(pc.greater(pc.binary_length(lines), 0))) + first_line
    tokens = pc.ascii_split_whitespace(lines.filter(pc.greater(pc.binary_length(lines), 0)))
    offsets = np.asarray(tokens.offsets).astype(np.int64)
    flat = tokens.flatten()
    heads = len(schema) - 2  # the label, and the query's id
    _require_heads(lines.filter(pc.greater(pc.binary_length(lines), 0)), heads, path, numbers)
    is_pair = np.ones(len(flat), bool)
    is_pair[offsets[:-1]] = is_pair[offsets[:-1] + heads - 1] = False
    owners, pairs = np.repeat(numbers, np.diff(offsets))[is_pair], flat.filter(pa.array(is_pair))
    labels = flat.take(pa.array(offsets[:-1]))
    _require(labels, _NUMBER, path, numbers, "a label that is no number")
    _require(pairs, "^[^:]*:[^:]*$", path, owners, "a pair that is not index:value")
    parts = pc.split_pattern(pairs, ":").flatten()
    indices, values = parts[::2], parts[1::2]
    _require(indices, _INDEX, path, owners, "an index that is no whole number of 0 or more")
    _require(values, _NUMBER, path, owners, "a value that is no number")
    bounds = pa.array((offsets - heads * np.arange(len(offsets))).astype(np.int32))
    qids = []
    if heads > 1:
        ids = pc.replace_substring(flat.take(pa.array(offsets[:-1] + 1)), _QID, "")
        _require(ids, _INDEX, path, numbers, "a query id that is no whole number of 0 or more")
        qids = [ids.cast(pa.int64())]
    return pa.RecordBatch.from_arrays(
        [
            _parse_floats(labels),
            *qids,
            pa.ListArray.from_arrays(bounds, indices.cast(pa.int64())),
            pa.ListArray.from_arrays(bounds, _parse_floats(values)),
        ],
        schema=schema,
    )


def _require_heads(lines: pa.Array, heads: int, path: Path, numbers: np.ndarray) -> None:
    """Refuses lines with a query's id among lines without, or the other way round."""
    fits = np.asarray(pc.match_substring_regex(lines, rf"^\S+\s+{_QID}")) == (heads > 1)
    if not fits.all():
        what = (
            "no query id, the first line has one"
            if heads > 1
            else "a query id, which the first line lacks"
        )
        bad = int(np.argmin(fits))
        raise _malformed(path, int(numbers[bad]), f"{what}: {lines[bad].as_py()[:80]!r}")


def _parse_floats(texts: pa.Array) -> pa.Array:
    return pc.ascii_ltrim(texts, "+").cast(pa.float32())


def _require(texts: pa.Array, pattern: str, path: Path, lines: np.ndarray, what: str) -> None:
    fits = np.asarray(pc.match_substring_regex(texts, pattern))
    if not fits.all():
        bad = int(np.argmin(fits))
        raise _malformed(path, int(lines[bad]), f"{what}: {texts[bad].as_py()!r}")


def _malformed(path: Path, line: int, received: str) -> InputDataError:
    return InputDataError(
        f"{path}: line {line} is not libsvm",
        received=received,
        allowed="label index:value index:value …, or label qid:3 index:value … in every line",
        fix="correct the line or take it out",
    )


def format_libsvm(batch: pa.RecordBatch, columns: LibsvmColumns) -> bytes:
    """Formats a batch as libsvm lines; a null or missing list is a line with a label alone.

    Args:
        batch: Rows with the columns, that of the queries' ids or not.
        columns: Their names.

    Raises:
        InputDataError: A label or a query's id is null, an index or a query's id negative, a null
            in a list, or the two lists of a row differ in length.
    """
    label, indices, values = (
        batch.column(name) for name in (columns.label, columns.indices, columns.values)
    )
    heads = [columns.label]
    if columns.qid in batch.schema.names:
        heads.append(columns.qid)
    for name in heads:
        if batch.column(name).null_count:
            raise InputDataError(
                f"column {name!r} has a null, which libsvm cannot express",
                fix="filter those rows, or fill them in",
            )
    for name in (columns.indices, columns.values):
        if batch.column(name).flatten().null_count:
            raise InputDataError(
                f"a list of column {name!r} has a null inside, which libsvm cannot express",
                fix="filter those rows, or fill them in",
            )
    whole = [(columns.indices, indices.flatten()), *((n, batch.column(n)) for n in heads[1:])]
    for name, numbers in whole:
        if pc.any(pc.less(numbers, 0)).as_py():
            raise InputDataError(
                f"column {name!r} holds a negative number, which libsvm does not allow",
                received=pc.min(numbers).as_py(),
            )
    lengths = [pc.fill_null(pc.list_value_length(lists), 0) for lists in (indices, values)]
    if not lengths[0].equals(lengths[1]):
        raise InputDataError(
            f"columns {columns.indices!r} and {columns.values!r} differ in length in some row",
            fix="write equally long lists",
        )
    pairs = pc.binary_join_element_wise(
        indices.flatten().cast(pa.string()), values.flatten().cast(pa.string()), ":"
    )
    offsets = np.concatenate([[0], np.cumsum(np.asarray(lengths[0]))]).astype(np.int32)
    joined = pc.binary_join(pa.ListArray.from_arrays(pa.array(offsets), pairs), " ")
    if len(heads) > 1:
        qids = batch.column(columns.qid).cast(pa.string())
        joined = pc.binary_join_element_wise(
            _QID, qids, pc.binary_join_element_wise(" ", joined, ""), ""
        )
    lines = pc.binary_join_element_wise(label.cast(pa.string()), joined, " ")
    text = "\n".join(pc.ascii_rtrim_whitespace(lines).to_pylist())
    return f"{text}\n".encode() if len(lines) else b""


def check_libsvm_schema(schema: pa.Schema, columns: LibsvmColumns) -> None:
    """Refuses, before anything is read, columns that libsvm has no place for.

    Raises:
        ConfigError: One of the columns is missing or of another kind, or there are more.
    """
    wanted = {columns.label, columns.indices, columns.values}
    fits = (
        wanted <= set(schema.names) <= {*wanted, columns.qid}
        and len(schema) == len(set(schema.names))
        and _is_number(schema.field(columns.label).type)
        and _is_list_of(schema.field(columns.indices).type, pa.types.is_integer)
        and _is_list_of(schema.field(columns.values).type, _is_number)
    )
    if fits and columns.qid in schema.names:
        fits = pa.types.is_integer(schema.field(columns.qid).type)
    if not fits:
        raise ConfigError(
            "these columns cannot be written as libsvm",
            received=", ".join(f"{field.name} ({field.type})" for field in schema),
            allowed=f"{columns.label} (a number), {columns.indices} (lists of whole numbers), "
            f"{columns.values} (lists of numbers); {columns.qid} (whole numbers) or not",
            fix="name the columns with --label, --indices, --values and --qid",
        )


def _is_number(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_integer(data_type) or pa.types.is_floating(data_type))


def _is_list_of(data_type: pa.DataType, is_kind: Callable[[pa.DataType], bool]) -> bool:
    return pa.types.is_list(data_type) and is_kind(data_type.value_type)
