"""CSV and TSV to Arrow and back; list columns are one field with a separator of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from conf.errors import ConfigError, InputDataError
from etl.conversion.formats import TextOptions, check_types
from etl.conversion.text_files import open_text_input, refuse_damage
from etl.tfrecord.lowering.lists import is_list
from etl.tfrecord.lowering.types import is_binary

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
                    read_options=csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
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


def flatten_lists(batch: pa.RecordBatch, list_separator: str) -> pa.RecordBatch:
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
