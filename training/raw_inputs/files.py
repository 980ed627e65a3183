"""Raw rows of a file as the inputs of a model's encoders: CSV, JSON lines or Parquet.

Columns are named as the raw inputs in `export.json`, or as the columns of the source; of further
ones only the id is read. A value is missing where a field of CSV is empty, a value null, or a key
of JSON absent. A list is a list, or text as the build reads it; in CSV, its values stand between
separators.
"""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError, InputDataError
from conf.key_lists import BYTE_ORDER_MARK, clean_key, refuse_twice
from conf.local_paths import list_visible_files
from conf.storage.table_files import CsvForm, open_csv, open_parquet, read_csv_names, without_views
from training.raw_inputs.converter import Columns, RawColumns
from training.raw_inputs.inputs import InputColumn

_log = logging.getLogger("sluice.training.predict")


@dataclass(frozen=True)
class RawFile:
    """A file of raw rows.

    Attributes:
        path: `.csv`, `.tsv`, `.jsonl`, `.ndjson`, `.json` (lines too), each also with `.gz`, or
            `.parquet`, which may be a folder of such files.
        id_column: Column that names the rows in what is written; None: their numbers do.
        list_separator: What separates the values of a list in CSV; None: what the build declares
            of its column, else `|`.
    """

    path: Path
    id_column: str | None = None
    list_separator: str | None = None


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
    """Reads the raw inputs of a model from a file.

    Args:
        file: The file.
        inputs: The inputs.
        key: Input whose values are keys of a list: text of them is read as such; None: none is.

    Raises:
        ConfigError: The file's format is not known by its name.
    """

    def __init__(
        self, file: RawFile, inputs: Sequence[InputColumn], key: InputColumn | None = None
    ) -> None:
        self.file, self.inputs, self._done = file, tuple(inputs), 0
        self._table = _open_table(file.path, () if key is None else (key.name, key.column))
        is_csv = isinstance(self._table, _CsvFile)
        separator = file.list_separator if is_csv else None
        self._columns = RawColumns(self.inputs, str(file.path), separator, is_delimited=is_csv)

    def find_columns(self) -> list[str]:
        """Returns the names of the file's columns.

        Raises:
            InputDataError: The file is missing, damaged or empty.
        """
        with self._file_errors():
            if not (columns := self._table.find_names()):
                raise InputDataError("the input has no rows", received=str(self.file.path))
            return columns

    def read(self, batch_size: int) -> Iterator[RawRows]:
        """Yields the rows in order.

        Args:
            batch_size: Rows at a time, at most.

        Raises:
            InputDataError: The file is missing or damaged, a column is missing, or a value is not
                what the model reads; names the file, the row and the column.
        """
        names, id_type, self._done = self._choose(self.find_columns()), None, 0
        with self._file_errors():
            for columns in self._table.read(names, batch_size):
                rows = self._build_rows(columns, id_type)
                self._done, id_type = self._done + len(rows.ids), rows.ids.type
                yield rows
            if not self._done:
                raise InputDataError("the input has no rows", received=str(self.file.path))

    def _choose(self, found: Sequence[str]) -> list[str]:
        names = self._columns.choose(found, self.file.id_column)
        if twice := [name for name in names if found.count(name) > 1]:
            raise InputDataError(
                f"{self.file.path} has two columns of one name",
                received=twice[0],
                fix="rename one of them, or leave it out",
            )
        log_unread(str(self.file.path), found, names)
        return names

    def _build_rows(self, columns: Columns, id_type: pa.DataType | None) -> RawRows:
        first, name = self._done + 1, self.file.id_column
        inputs = self._columns.build(columns, first)
        if name is None:
            rows = len(next(iter(columns.values())))
            return RawRows(first, pa.array(np.arange(first, first + rows)), inputs)
        return RawRows(first, self._columns.build_ids(name, columns[name], first, id_type), inputs)

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


def log_unread(place: str, found: Sequence[str], read: Sequence[str]) -> None:
    """Logs the columns that nothing reads: one may be an input whose name is misspelt."""
    if unread := [name for name in found if name not in read]:
        _log.info("%s: columns that the model does not read: %s", place, ", ".join(unread))


@dataclass(frozen=True)
class _CsvFile:
    path: Path
    separator: str
    keys: Sequence[str]

    def find_names(self) -> list[str]:
        return read_csv_names(self.path, self.separator, is_line_wise=True)

    def read(self, names: Sequence[str], batch_size: int) -> Iterator[Columns]:
        found = self.find_names()
        form = CsvForm(self.separator, dict.fromkeys(found, pa.string()), names, is_line_wise=True)
        for batch in regroup(open_csv(self.path, found, form).batches, batch_size):
            columns = decode_columns(batch, names)
            yield columns | {n: _clean_keys(columns[n]) for n in self.keys if n in columns}


def _clean_keys(texts: pa.Array) -> pa.Array:
    """Returns the keys that fields of CSV hold; a field that holds none is missing."""
    cleaned = (None if text is None else clean_key(text) for text in texts.to_pylist())
    return pa.array([key or None for key in cleaned], pa.string())


@dataclass(frozen=True)
class _JsonLines:
    path: Path

    def find_names(self) -> list[str]:
        return list(dict.fromkeys(name for row in self._parse() for name in row))

    def read(self, names: Sequence[str], batch_size: int) -> Iterator[Columns]:
        lines = self._parse()
        while rows := list(islice(lines, batch_size)):
            yield {name: [row.get(name) for row in rows] for name in names}

    def _parse(self) -> Iterator[dict[str, Any]]:
        opener = gzip.open if self.path.suffix == ".gz" else open
        with opener(self.path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                yield parse_line(str(self.path), number, line)


def parse_line(place: str, number: int, line: str) -> dict[str, Any]:
    """Reads a line of JSON.

    Raises:
        InputDataError: It is no object; names the row.
    """
    try:
        row = json.loads(line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise InputDataError(
            f"{place}, row {number}: the line is no JSON object",
            received=repr(line.rstrip("\n")[:200]),
            fix="write one object per line",
        )
    return row


@dataclass(frozen=True)
class _ParquetFiles:
    path: Path

    def _list_parts(self) -> list[Path]:
        """The file, or those of a folder in the order of their names."""
        if not self.path.is_dir():
            return [self.path]
        return [part for part in list_visible_files(self.path) if part.suffix == ".parquet"]

    def find_names(self) -> list[str]:
        parts = self._list_parts()[:1]
        return [name for part in parts for name in open_parquet(part).schema_arrow.names]

    def read(self, names: Sequence[str], batch_size: int) -> Iterator[Columns]:
        for batch in regroup(self._read_parts(names, batch_size), batch_size):
            yield decode_columns(batch, names)

    def _read_parts(self, names: Sequence[str], batch_size: int) -> Iterator[pa.RecordBatch]:
        schema = None
        for part in self._list_parts():
            with open_parquet(part) as parquet:
                self._refuse_lacking(part, names, parquet.schema_arrow.names)
                for batch in parquet.iter_batches(batch_size, columns=list(names)):
                    chosen = without_views(batch.select(list(names)))
                    schema = schema or chosen.schema
                    if not chosen.schema.equals(schema):
                        raise pa.ArrowInvalid(f"{part} has columns of other types than the first")
                    yield chosen

    def _refuse_lacking(self, part: Path, names: Sequence[str], found: Sequence[str]) -> None:
        if lacking := [name for name in names if name not in found]:
            raise InputDataError(
                f"a part of {self.path} lacks columns that its first part has",
                received=f"{part.name}: no {', '.join(lacking)}",
                allowed="the same columns in each part",
                fix="write the part again, or take it out",
            )


def _open_table(path: Path, keys: Sequence[str]) -> _CsvFile | _JsonLines | _ParquetFiles:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    kind = suffixes[-2] if suffixes[-1:] == [".gz"] and len(suffixes) > 1 else path.suffix.lower()
    if kind in (".csv", ".tsv"):
        return _CsvFile(path, "\t" if kind == ".tsv" else ",", keys)
    if kind in (".jsonl", ".ndjson", ".json"):
        return _JsonLines(path)
    if kind == ".parquet":
        return _ParquetFiles(path)
    raise ConfigError(
        "the format of the input is not known by its name",
        received=str(path),
        allowed=".csv, .tsv, .jsonl, .ndjson, .json, .parquet; text also with .gz",
    )


def decode_columns(batch: pa.RecordBatch, names: Iterable[str]) -> dict[str, pa.Array]:
    """Returns columns of a batch by name: values, not positions in a dictionary."""
    columns = {name: batch.column(name) for name in names}
    return {
        name: values.dictionary_decode() if isinstance(values, pa.DictionaryArray) else values
        for name, values in columns.items()
    }


def regroup(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Yields the same rows in batches that have at most, and mostly, as many rows as asked for."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(part.num_rows for part in held) >= rows:
            yield from pa.Table.from_batches(held).combine_chunks().to_batches(rows)
            held = []
    if held:
        yield from pa.Table.from_batches(held).combine_chunks().to_batches(rows)


def find_key_input(inputs: Sequence[InputColumn], key: str) -> InputColumn:
    """Returns the only input that a key is made of.

    Raises:
        ConfigError: It is made of several.
    """
    found = [item for item in inputs if item.feature == key]
    if len(found) > 1:
        raise ConfigError(
            "keys of a file stand in one column, and the id is made of several",
            received=", ".join(item.name for item in found),
        )
    return found[0]


def read_key_rows(
    file: RawFile, inputs: Sequence[InputColumn], key: InputColumn, batch_size: int
) -> Iterator[tuple[list[Any], RawRows]]:
    """Yields the keys of a file's rows, and the rows.

    Args:
        file: The file.
        inputs: What is read of it, the key among them.
        key: Input of the key.
        batch_size: Rows at a time, at most.

    Raises:
        ConfigError: The file's format is not known by its name.
        InputDataError: The file is missing, damaged or empty, lacks a column or a key, or holds a
            key twice.
    """
    read: list[Any] = []
    for rows in RawReader(file, inputs, key).read(batch_size):
        keys = _read_keys(rows.inputs[key.name], key, rows.first, file)
        read += keys
        yield keys, rows
    refuse_twice(file.path, enumerate(read, 1), "row")


def _read_keys(values: np.ndarray, key: InputColumn, first: int, file: RawFile) -> list[Any]:
    raw = [v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in values.tolist()]
    if key.null_token in raw:
        raise InputDataError(
            f"{file.path}, row {first + raw.index(key.null_token)}: there is no key",
            received="no value",
            fix=f"fill column {key.name!r}, or leave the row out",
        )
    return raw
