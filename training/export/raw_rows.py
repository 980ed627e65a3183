"""Raw rows of a file as the inputs of a model's encoders: CSV, JSON lines or Parquet.

Columns are named as the raw inputs in `export.json`; inputs of one raw column may
share theirs. Of further columns only the id is read. A value is missing where a field of CSV is
empty, a value null, or a key of JSON absent. A list is a list; in CSV, its values stand between
separators.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from conf.errors import ConfigError, InputDataError, did_you_mean

if TYPE_CHECKING:
    from training.export.serving_encoders import RawInput, ServingEncoders

_TYPES = {
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.binary(),
}
_WORDS = {"int64": "whole numbers", "float32": "numbers", "float64": "numbers", "string": "text"}
_BAD_VALUES = (pa.ArrowException, TypeError, ValueError, OverflowError)

Columns = Mapping[str, pa.Array | list[Any]]
"""Values of some rows by column, as the file holds them."""


@dataclass(frozen=True)
class RawFile:
    """A file of raw rows.

    Attributes:
        path: `.csv`, `.tsv`, `.jsonl`, `.ndjson`, `.json` (lines too), each also with `.gz`, or
            `.parquet`.
        id_column: Column that names the rows in what is written; None: their numbers do.
        list_separator: What separates the values of a list in CSV.
    """

    path: Path
    id_column: str | None = None
    list_separator: str = "|"


@dataclass(frozen=True)
class RawRows:
    """Some rows of a file.

    Attributes:
        first: Number of the first one; the file's first row is 1.
        ids: Their ids, as many as there are rows.
        inputs: By name, `[rows]` or `[rows, length]`: what the encoders take; text as bytes.
    """

    first: int
    ids: pa.Array
    inputs: dict[str, np.ndarray]


class RawReader:
    """Reads the inputs of encoders from a file.

    Args:
        file: The file.
        encoders: What the inputs are for.

    Raises:
        ConfigError: The file's format is not known by its name.
    """

    def __init__(self, file: RawFile, encoders: ServingEncoders) -> None:
        self.file, self.encoders, self.inputs = file, encoders, encoders.inputs
        self._done = 0
        self._required = encoders.required
        self._names: dict[str, str] = {}
        suffixes = [suffix.lower() for suffix in file.path.suffixes]
        kind = suffixes[-2] if suffixes[-1:] == [".gz"] and len(suffixes) > 1 else file.path.suffix
        csv, lines = (self._find_csv, self._read_csv), (self._find_keys, self._read_json_lines)
        readers = {
            ".csv": csv,
            ".tsv": csv,
            ".jsonl": lines,
            ".ndjson": lines,
            ".json": lines,
            ".parquet": (self._find_parquet, self._read_parquet),
        }
        if kind.lower() not in readers:
            raise ConfigError(
                "the format of the input is not known by its name",
                received=str(file.path),
                allowed=f"{', '.join(readers)}; text also with .gz",
            )
        self._kind = kind.lower()
        self._find, self._read = readers[self._kind]

    def find_columns(self) -> list[str]:
        """Returns the names of the file's columns.

        Raises:
            InputDataError: The file is missing, damaged or empty.
        """
        with self._file_errors():
            if not (found := self._find()):
                raise self._build_empty_error()
            return found

    def read(self, batch_size: int) -> Iterator[RawRows]:
        """Yields the rows in order.

        Args:
            batch_size: Rows at a time, at most.

        Raises:
            InputDataError: The file is missing or damaged, a column is missing, or a value is not
                what the model reads; names the file, the row and the column.
        """
        id_type, self._done = None, 0
        with self._file_errors():
            for columns in self._read(batch_size):
                found = self._build_rows(columns, self._done + 1, id_type)
                self._done, id_type = self._done + len(found.ids), found.ids.type
                yield found
            if not self._done:
                raise self._build_empty_error()

    @contextmanager
    def _file_errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise InputDataError("there is no such input", received=str(self.file.path)) from error
        except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
            raise InputDataError(
                f"{self.file.path} cannot be read", received=f"after row {self._done}: {error}"
            ) from error

    def _build_empty_error(self) -> InputDataError:
        return InputDataError("the input has no rows", received=str(self.file.path))

    def _build_rows(self, columns: Columns, first: int, id_type: pa.DataType | None) -> RawRows:
        inputs = {item.name: self._build_input(item, columns, first) for item in self.inputs}
        rows = len(next(iter(columns.values())))
        if self.file.id_column is None:
            return RawRows(first, pa.array(np.arange(first, first + rows)), inputs)
        values = columns[self.file.id_column]
        if id_type is None:
            id_type = values.type if isinstance(values, pa.Array) else _infer_type(values)
        try:
            return RawRows(first, _convert(values, id_type), inputs)
        except _BAD_VALUES:
            self._refuse_first(self.file.id_column, values, id_type, first, f"an id of {id_type}")

    def _build_input(self, item: RawInput, columns: Columns, first: int) -> np.ndarray:
        values, dtype = columns[self._names[item.name]], _TYPES[item.dtype]
        is_text = isinstance(values, pa.Array) and pa.types.is_string(values.type)
        if item.is_list and is_text and self._kind in (".csv", ".tsv"):
            values = pc.split_pattern(values, self.file.list_separator)
        target = pa.list_(dtype) if item.is_list else dtype
        try:
            array = _convert(values, target)
        except _BAD_VALUES:
            what = _WORDS[item.dtype]
            allowed = f"a list of {what}" if item.is_list else what
            self._refuse_first(self._names[item.name], values, target, first, allowed)
        return self._pad(item, array, first) if item.is_list else self._fill(item, array, first)

    def _fill(self, item: RawInput, values: pa.Array, first: int) -> np.ndarray:
        """Returns scalars `[rows]` with the null token where one is missing."""
        if values.null_count:
            missing = self._missing_value(item)
            if missing is None:
                row = int(values.is_null().to_numpy(zero_copy_only=False).argmax())
                self._refuse(
                    self._names[item.name],
                    first + row,
                    None,
                    "a value: the feature has no pad_value",
                )
            values = values.fill_null(pa.scalar(missing, values.type))
        return np.asarray(values.to_numpy(zero_copy_only=False))

    def _pad(self, item: RawInput, values: pa.Array, first: int) -> np.ndarray:
        """Returns lists `[rows, length]` with the pad token behind their ends."""
        lengths = pc.list_value_length(values).fill_null(0).to_numpy(zero_copy_only=False)
        if item.length is not None:
            bad = (lengths != item.length) & (lengths != 0)
            if bad.any():
                row = int(bad.argmax())
                allowed = f"a list of {item.length} values, or none"
                self._refuse(self._names[item.name], first + row, values[row].as_py(), allowed)
        flat = values.flatten()
        if flat.null_count:
            missing = self._missing_value(item)
            if missing is None:
                position = int(flat.is_null().to_numpy(zero_copy_only=False).argmax())
                row = int(np.searchsorted(np.cumsum(lengths), position, side="right"))
                name, value = self._names[item.name], values[row].as_py()
                self._refuse(name, first + row, value, "a list without null")
            flat = flat.fill_null(pa.scalar(missing, flat.type))
        width = item.length or max(1, int(lengths.max(initial=0)))
        padding = _encode(item.pad_token)
        if padding is None:
            padding = b"" if item.dtype == "string" else 0
        shape, dtype = (len(values), width), object if item.dtype == "string" else item.dtype
        padded = np.full(shape, padding, dtype)
        padded[np.arange(width) < lengths[:, np.newaxis]] = flat.to_numpy(zero_copy_only=False)
        return padded

    def _missing_value(self, item: RawInput) -> int | float | bytes | None:
        if item.null_token is not None:
            return _encode(item.null_token)
        is_number = item.dtype in ("float32", "float64")
        return float("nan") if is_number and item.name not in self._required else None

    def _find_csv(self) -> list[str]:
        with pa_csv.open_csv(str(self.file.path), *self._csv_options()) as reader:
            return list(reader.schema.names)

    def _csv_options(self) -> tuple[pa_csv.ReadOptions, pa_csv.ParseOptions]:
        separator = "\t" if self._kind == ".tsv" else ","
        parse = pa_csv.ParseOptions(delimiter=separator, newlines_in_values=True)
        return pa_csv.ReadOptions(use_threads=False), parse  # Errors then name the row.

    def _read_csv(self, batch_size: int) -> Iterator[Columns]:
        path = str(self.file.path)
        names = self._choose_columns(self._find_csv())
        convert = pa_csv.ConvertOptions(
            include_columns=names,
            column_types=dict.fromkeys(names, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )
        with pa_csv.open_csv(path, *self._csv_options(), convert) as reader:
            for batch in reader:
                for start in range(0, batch.num_rows, batch_size):
                    part = batch.slice(start, batch_size)
                    yield dict(zip(names, part.columns, strict=True))

    def _find_parquet(self) -> list[str]:
        return list(pq.read_schema(self.file.path).names)

    def _read_parquet(self, batch_size: int) -> Iterator[Columns]:
        names = self._choose_columns(self._find_parquet())
        with pq.ParquetFile(self.file.path) as parquet:
            for batch in parquet.iter_batches(batch_size, columns=names):
                yield {name: _decode(batch.column(name)) for name in names}

    def _find_keys(self) -> list[str]:
        return list(dict.fromkeys(name for row in self._parse_lines() for name in row))

    def _read_json_lines(self, batch_size: int) -> Iterator[Columns]:
        if not (found := self._find_keys()):
            return
        names, lines = self._choose_columns(found), self._parse_lines()
        while rows := list(islice(lines, batch_size)):
            yield {name: [row.get(name) for row in rows] for name in names}

    def _parse_lines(self) -> Iterator[dict[str, Any]]:
        opener = gzip.open if self.file.path.suffix == ".gz" else open
        with opener(self.file.path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                yield self._parse_line(number, line)

    def _parse_line(self, number: int, line: str) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise InputDataError(
                f"{self.file.path}, row {number}: the line is no JSON object",
                received=repr(line.rstrip("\n")[:200]),
                fix="write one object per line",
            )
        return row

    def _choose_columns(self, found: Sequence[str]) -> list[str]:
        """Returns the columns to read.

        Raises:
            InputDataError: One is missing.
        """
        extra = [] if self.file.id_column is None else [self.file.id_column]
        for item in self.inputs:
            alike = [
                other.name
                for other in self.inputs
                if (other.column, other.dtype) == (item.column, item.dtype)
                and other.is_list == item.is_list
            ]
            present = [name for name in (item.name, *alike) if name in found]
            self._names[item.name] = present[0] if present else item.name
        names = list(dict.fromkeys([*self._names.values(), *extra]))
        missing = [name for name in names if name not in found]
        if missing:
            raise InputDataError(
                f"{self.file.path} lacks columns that the model reads",
                received=f"missing: {', '.join(missing)}; found: {', '.join(found)}",
                allowed=", ".join(
                    f"{item.name} ({'list of ' if item.is_list else ''}{_WORDS[item.dtype]})"
                    for item in self.inputs
                ),
                fix=did_you_mean(missing[0], found) or "name the columns as export.json does",
            )
        return names

    def _refuse_first(
        self, name: str, values: Any, target: pa.DataType, first: int, allowed: str
    ) -> NoReturn:
        """Refuses the first value that is not of a type."""
        for row in range(len(values)):
            try:
                # Taken, not sliced: what is cast of a slice of lists are all values.
                is_array = isinstance(values, pa.Array)
                _convert(values.take([row]) if is_array else values[row : row + 1], target)
            except _BAD_VALUES:
                value = values[row].as_py() if isinstance(values, pa.Array) else values[row]
                self._refuse(name, first + row, value, allowed)
        self._refuse(name, first, f"{len(values)} values", allowed)

    def _refuse(self, name: str, row: int, value: Any, allowed: str) -> NoReturn:
        raise InputDataError(
            f"{self.file.path}, row {row}: column {name!r} does not hold what the model reads",
            received="no value" if value is None else repr(value)[:200],
            allowed=allowed,
            fix="correct the row, or leave it out",
        )


def _convert(values: pa.Array | list[Any], target: pa.DataType) -> pa.Array:
    return values.cast(target) if isinstance(values, pa.Array) else pa.array(values, target)


def _decode(values: pa.Array) -> pa.Array:
    is_dictionary = isinstance(values, pa.DictionaryArray)
    return values.dictionary_decode() if is_dictionary else values


def _infer_type(values: list[Any]) -> pa.DataType:
    try:
        return pa.array(values).type
    except _BAD_VALUES:
        return pa.string()


def _encode(token: int | float | str | None) -> int | float | bytes | None:
    return token.encode() if isinstance(token, str) else token
