"""Parquet and CSV files as Arrow reads them, each opened in one way for all that read rows."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import csv

Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)


def open_parquet(file: Path | pa.BufferReader) -> pq.ParquetFile:
    """Opens a Parquet file; INT96 times are microseconds: in nanoseconds years become others."""
    return pq.ParquetFile(file, coerce_int96_timestamp_unit="us")


def read_parquet(file: Path | pa.BufferReader, columns: Sequence[str] | None = None) -> pa.Table:
    """Reads a Parquet file, or some of its columns."""
    with open_parquet(file) as opened:
        return plain_columns(opened.read(None if columns is None else list(columns)))


def plain_columns(rows: Rows) -> Rows:
    """Returns rows with plain text in place of views, values in place of places in a dictionary."""
    schema = plain_schema(rows.schema)
    return rows if schema.equals(rows.schema) else rows.cast(schema)


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Returns the schema of plain columns."""
    return pa.schema([one.with_type(_plain(one.type)) for one in schema], schema.metadata)


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        make = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(_plain(kind.value_type)))
    if pa.types.is_string_view(kind):
        return pa.string()
    return pa.binary() if pa.types.is_binary_view(kind) else kind


def to_arrow(values: np.ndarray) -> pa.Array:
    """Returns numbers `[rows]`, or `[rows, …]` as lists, of which each axis is a level."""
    found = pa.array(values.ravel())
    for length in reversed(values.shape[1:]):
        offsets = np.arange(0, len(found) + 1, length, dtype=np.int32)
        found = pa.ListArray.from_arrays(offsets, found)
    return found


_END = "\ufdd0"  # no character of any text
# Without the 1 and 0 of Arrow's own: among words they stay what they are.
_TRUE, _FALSE = ("true", "True", "TRUE"), ("false", "False", "FALSE")


@dataclass(frozen=True)
class CsvForm:
    """How a CSV file with a header is read.

    Types that are not given Arrow infers from the first block, but for numbers that would become
    others, such as 64-bit hashes, `007`, `0xff` or `1e400`, and times of a day: these are text.
    Line-wise a row is a line, as builds read it: no field spans lines, and where tabs separate
    there are no quotes. What another reader would take otherwise is refused.
    """

    separator: str = ","
    types: Mapping[str, pa.DataType] = field(default_factory=dict)
    columns: Sequence[str] | None = None
    nulls: Sequence[str] = ()  # beside the empty field
    quoted_nulls: bool = False
    empty_lines: bool = False  # are rows of an only column
    is_line_wise: bool = False
    block_bytes: int = 1 << 20

    @property
    def has_quotes(self) -> bool:
        return not self.is_line_wise or self.separator != "\t"

    def open(self, source: Path | _Ended) -> csv.CSVStreamingReader:
        return csv.open_csv(
            source,
            csv.ReadOptions(use_threads=False, block_size=self.block_bytes),
            csv.ParseOptions(
                delimiter=self.separator,
                quote_char='"' if self.has_quotes else False,
                newlines_in_values=True,
                ignore_empty_lines=not self.empty_lines,
            ),
            csv.ConvertOptions(
                column_types=self.types,
                include_columns=self.columns,
                null_values=["", _END, *self.nulls],
                true_values=_TRUE,
                false_values=_FALSE,
                strings_can_be_null=True,
                quoted_strings_can_be_null=self.quoted_nulls,
            ),
        )


class CsvRows(NamedTuple):
    """The schema of a file, and its rows to come."""

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]


class OtherNumberError(pa.ArrowInvalid):
    """A column of numbers holds text that would become another number."""

    def __init__(self, column: str) -> None:
        super().__init__(
            f"column {column!r}: numbers first, then text that would become other numbers, such as "
            "0xff, 1e400, or beside fractions whole numbers beyond 2^53"
        )
        self.column = column


def read_csv_names(path: Path, separator: str = ",", *, is_line_wise: bool = False) -> list[str]:
    """Reads the names of the columns in the first line of a CSV file."""
    with CsvForm(separator, is_line_wise=is_line_wise).open(path) as reader:
        return list(reader.schema.names)


def open_csv(path: Path, names: Sequence[str], form: CsvForm) -> CsvRows:
    """Opens a CSV file, of which all names are given; what is wrong in it is `pa.ArrowInvalid`."""
    wanted = list(form.columns or names)
    # A quote without an end takes the rest of the file into the last column.
    form = replace(form, columns=list(dict.fromkeys([*wanted, names[-1]])))
    with form.open(path) as reader:
        inferred = {f.name: f.type for f in reader.schema if f.name not in form.types}
    numbers = {n: k for n, k in inferred.items() if pa.types.is_integer(k) or k == pa.float64()}
    texts = {n for n, k in inferred.items() if pa.types.is_null(k) or pa.types.is_time(k)}
    types = {**inferred, **dict.fromkeys(numbers.keys() | texts, pa.string()), **form.types}
    form = replace(form, types=types)
    reader = form.open(_Ended(path, len(names), form))
    batches = _without_end(reader, names[-1])
    first = next(batches)
    numbers = {n: k for n, k in numbers.items() if not _holds_other_number(first.column(n), k)}
    schema = pa.schema([(n, numbers.get(n, reader.schema.field(n).type)) for n in wanted])

    def rows() -> Iterator[pa.RecordBatch]:
        with reader:
            for batch in chain((first,), batches):
                columns = [_read_column(name, batch, numbers.get(name)) for name in wanted]
                yield pa.RecordBatch.from_arrays(columns, schema=schema)

    return CsvRows(schema, rows())


def _read_column(name: str, batch: pa.RecordBatch, kind: pa.DataType | None) -> pa.Array:
    column = batch.column(name)
    if kind is not None and _holds_other_number(column, kind):
        raise OtherNumberError(name)
    return column if kind is None else pc.ascii_trim_whitespace(column).cast(kind)


def _holds_other_number(texts: pa.Array, kind: pa.DataType) -> bool:
    """Whether text would become another number: `007`, hexadecimal, beyond 2^53, out of range."""

    def matches(pattern: str) -> pa.Array:
        return pc.match_substring_regex(texts, pattern)

    is_other = pc.any(matches(r"^\s*[+-]?0[xX0-9]")).as_py()
    if is_other or pa.types.is_integer(kind):
        return bool(is_other)
    # From 2^53 on a float64 may be another whole number.
    whole = texts.filter(matches(r"^\s*[+-]?[0-9]{16,}\s*$"))
    long = pc.abs(pc.ascii_trim_whitespace(whole).cast(pa.float64()))
    if pc.any(pc.greater_equal(long, float(1 << 53))).as_py():
        return True
    numbers = pc.ascii_trim_whitespace(texts).cast(kind)
    is_far = pc.and_(pc.is_inf(numbers), matches("[0-9]"))
    is_near = pc.and_(pc.equal(numbers, 0.0), matches("^[^eE]*[1-9]"))
    return bool(pc.any(pc.or_(is_far, is_near)).as_py())


class _Ended:
    """The bytes of a CSV file and a row without a value, which a quote without an end takes."""

    def __init__(self, path: Path, columns: int, form: CsvForm) -> None:
        self._file = pa.input_stream(str(path), compression="detect")
        end = _END if columns == 1 and not form.empty_lines else ""
        self._row = f"{end}{form.separator * (columns - 1)}\n".encode()
        self._next: bytes | None = None
        self._lines = _Lines(form) if form.is_line_wise else None
        self.closed = False

    def read(self, size: int) -> bytes:
        """Returns the next bytes of the file, with the last ones the row behind them."""
        most = size - len(self._row) - 1
        before = self._file.read(most) if self._next is None else self._next
        self._next = self._file.read(most) if before else b""
        if self._lines is not None:
            self._lines.check(before, is_last=not self._next)
        end = (b"" if before[-1:] in b"\r\n" else b"\n") + self._row
        return before if self._next or not before else before + end

    def close(self) -> None:
        self._file.close()
        self.closed = True


class _Lines:
    """Looks for lines of a line-wise file that another reader of quotes would take otherwise."""

    def __init__(self, form: CsvForm) -> None:
        mark = re.escape(form.separator)
        quoted = '"(?:[^"]|"")*+"|' if form.has_quotes else ""
        field = f'(?:{quoted}(?!")[^{mark}]*+)'
        self._line = re.compile(f"{field}(?:{mark}{field})*+".encode())
        self._wrong = (
            "a quote does not end in its field; one with a line break is read from Parquet"
            if form.has_quotes
            else "a quote before a field, and .tsv has none; name a file with them and commas .csv"
        )
        self._rest, self._done = b"", 0

    def check(self, read: bytes, *, is_last: bool) -> None:
        """Looks at the next bytes of the file."""
        lines = (self._rest + read).splitlines(keepends=True)
        self._rest = b"" if is_last or not lines else lines.pop()
        for number, line in enumerate(lines, self._done + 1):
            if b'"' in line and not self._line.fullmatch(line.rstrip(b"\r\n")):
                text = line[:100].decode(errors="replace").rstrip()
                raise pa.ArrowInvalid(f"line {number}, {text!r}: {self._wrong}")
        self._done += len(lines)


def _without_end(reader: csv.CSVStreamingReader, last: str) -> Iterator[pa.RecordBatch]:
    """Yields batches without the row that `_Ended` adds."""
    held = None
    for batch in filter(len, reader):
        if held is not None:
            yield held
        held = batch
    if held is None or held.column(last)[-1].is_valid:
        raise pa.ArrowInvalid("the file ends within quotes: a quote in its last row has no end")
    yield held.slice(0, held.num_rows - 1)
