"""CSV and TSV to Arrow and back; list columns are one field with a separator of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from conf.errors import ConfigError, InputDataError
from etl.conversion.formats import TextOptions

_BLOCK_BYTES = 4 << 20


def choose_separator(path: Path, options: TextOptions) -> str:
    """The separator that was given, or the one that goes with the file's name."""
    if options.separator is not None:
        return options.separator
    return "\t" if ".tsv" in path.name.lower() else ","


class CsvReader:
    """Reads a file with a header line, block by block.

    Types that are not given are inferred from the first block of the file.
    """

    def __init__(self, path: Path, options: TextOptions) -> None:
        """Opens the file and settles the schema.

        Raises:
            ConfigError: A type is given for a column that is not there.
            InputDataError: The file is empty or its first block malformed.
        """
        self._path, self._options = path, options
        scalars = {n: pa.string() if pa.types.is_list(t) else t for n, t in options.types.items()}
        try:
            self._reader = csv.open_csv(
                pa.input_stream(str(path), compression="detect"),
                read_options=csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
                parse_options=csv.ParseOptions(
                    delimiter=choose_separator(path, options), newlines_in_values=True
                ),
                convert_options=csv.ConvertOptions(
                    column_types=scalars, strings_can_be_null=True, quoted_strings_can_be_null=False
                ),
            )
        except pa.ArrowInvalid as error:
            raise _refuse(path, error) from error
        names = self._reader.schema.names
        missing = [name for name in options.types if name not in names]
        if missing:
            raise ConfigError(
                f"{path} has no column {missing[0]!r}", received="--types", allowed=", ".join(names)
            )
        self.schema = pa.schema(
            [(f.name, options.types.get(f.name, _plain(f.type))) for f in self._reader.schema]
        )

    def read(self) -> Iterator[pa.RecordBatch]:
        """Yields the rows in file order.

        Raises:
            InputDataError: A line is malformed or a value does not fit its column's type.
        """
        while True:
            try:
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


def flatten_lists(batch: pa.RecordBatch, list_separator: str) -> pa.RecordBatch:
    """Turns the list columns of a batch into text.

    Args:
        batch: Rows; lists of numbers or text.
        list_separator: Between the values.

    Raises:
        InputDataError: A text value holds the separator, or bytes are not UTF-8.
    """
    columns = []
    for field, column in zip(batch.schema, batch.columns, strict=True):
        target = pa.list_(pa.string()) if pa.types.is_list(field.type) else pa.string()
        is_text = pa.types.is_list(field.type) or pa.types.is_binary(field.type)
        try:
            text = column.cast(target) if is_text else column
        except pa.ArrowInvalid as error:
            raise InputDataError(
                f"column {field.name!r} cannot be written as CSV", received=str(error),
                allowed="numbers, UTF-8 text, and lists of these",
            ) from error  # fmt: skip
        if pa.types.is_list(field.type):
            _check_separator(text, field.name, list_separator)
            text = pc.binary_join(text, list_separator)
        columns.append(text)
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _check_separator(lists: pa.Array, name: str, list_separator: str) -> None:
    if pc.any(pc.match_substring(lists.flatten(), list_separator)).as_py():
        raise InputDataError(
            f"a value of column {name!r} holds the list separator",
            received=repr(list_separator),
            fix="choose another with --list-separator",
        )
