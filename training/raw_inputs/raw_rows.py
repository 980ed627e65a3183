"""Raw rows of a file as the inputs of a model's encoders: CSV, JSON lines or Parquet.

Columns are named as the raw inputs in `export.json`; inputs of one raw column may
share theirs. Of further columns only the id is read; the log names the others. A value is missing
where a field of CSV is empty, a value null, or a key of JSON absent. A list is a list, or text as
the build reads it; in CSV, its values stand between separators.
"""

from __future__ import annotations

import gzip
import logging
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError, InputDataError
from conf.key_lists import clean_key
from conf.local_paths import list_visible_files
from conf.storage.table_files import CsvForm, open_csv, open_parquet, read_csv_names, without_views
from training.raw_inputs.input_columns import InputColumn
from training.raw_inputs.raw_columns import Columns, RawColumns, decode_columns, parse_line, regroup

_log = logging.getLogger("sluice.training.predict")


def log_unread(place: str, found: Sequence[str], read: Sequence[str]) -> None:
    """Logs the columns that nothing reads: one may be an input whose name is misspelt."""
    unread = [name for name in found if name not in read]
    if unread:
        _log.info("%s: columns that the model does not read: %s", place, ", ".join(unread))


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
        self.file, self.inputs = file, tuple(inputs)
        self._key_names = () if key is None else (key.name, key.column)
        self._done = 0
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
        is_csv = self._kind in (".csv", ".tsv")
        separator = file.list_separator if is_csv else None
        place = str(file.path)
        self._columns = RawColumns(self.inputs, place, separator, is_delimited=is_csv)

    def find_columns(self) -> list[str]:
        """Returns the names of the file's columns.

        Raises:
            InputDataError: The file is missing, damaged or empty.
        """
        with self._file_errors():
            if not (columns := self._find()):
                raise self._build_empty_error()
            return columns

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
                rows = self._build_rows(columns, self._done + 1, id_type)
                self._done, id_type = self._done + len(rows.ids), rows.ids.type
                yield rows
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
        inputs, name = self._columns.build(columns, first), self.file.id_column
        rows = len(next(iter(columns.values())))
        if name is None:
            return RawRows(first, pa.array(np.arange(first, first + rows)), inputs)
        return RawRows(first, self._columns.build_ids(name, columns[name], first, id_type), inputs)

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

    @property
    def _separator(self) -> str:
        return "\t" if self._kind == ".tsv" else ","

    def _find_csv(self) -> list[str]:
        return read_csv_names(self.file.path, self._separator, is_line_wise=True)

    def _read_csv(self, batch_size: int) -> Iterator[Columns]:
        found = self._find_csv()
        names = self._choose(found)
        types = dict.fromkeys(found, pa.string())
        form = CsvForm(self._separator, types, names, is_line_wise=True)
        for batch in regroup(open_csv(self.file.path, found, form).batches, batch_size):
            columns = decode_columns(batch, names)
            keys = {name: _clean_keys(columns[name]) for name in self._key_names if name in names}
            yield columns | keys

    def _list_parquet(self) -> list[Path]:
        """The file, or those of a folder in the order of their names."""
        path = self.file.path
        if not path.is_dir():
            return [path]
        return [part for part in list_visible_files(path) if part.suffix == ".parquet"]

    def _find_parquet(self) -> list[str]:
        return [
            name
            for part in self._list_parquet()[:1]
            for name in open_parquet(part).schema_arrow.names
        ]

    def _read_parquet(self, batch_size: int) -> Iterator[Columns]:
        if not (columns := self._find_parquet()):
            return
        names = self._choose(columns)
        for batch in regroup(self._read_parts(batch_size, names), batch_size):
            yield decode_columns(batch, names)

    def _read_parts(self, batch_size: int, names: list[str]) -> Iterator[pa.RecordBatch]:
        schema = None
        for part in self._list_parquet():
            with open_parquet(part) as parquet:
                self._refuse_lacking(part, names, parquet.schema_arrow.names)
                for batch in parquet.iter_batches(batch_size, columns=names):
                    chosen = without_views(batch.select(names))
                    schema = schema or chosen.schema
                    if not chosen.schema.equals(schema):
                        raise pa.ArrowInvalid(f"{part} has columns of other types than the first")
                    yield chosen

    def _refuse_lacking(self, part: Path, names: Sequence[str], found: Sequence[str]) -> None:
        if lacking := [name for name in names if name not in found]:
            raise InputDataError(
                f"a part of {self.file.path} lacks columns that its first part has",
                received=f"{part.name}: no {', '.join(lacking)}",
                allowed="the same columns in each part",
                fix="write the part again, or take it out",
            )

    def _find_keys(self) -> list[str]:
        return list(dict.fromkeys(name for row in self._parse_lines() for name in row))

    def _read_json_lines(self, batch_size: int) -> Iterator[Columns]:
        if not (keys := self._find_keys()):
            return
        names, lines = self._choose(keys), self._parse_lines()
        while rows := list(islice(lines, batch_size)):
            yield {name: [row.get(name) for row in rows] for name in names}

    def _parse_lines(self) -> Iterator[dict[str, Any]]:
        opener = gzip.open if self.file.path.suffix == ".gz" else open
        with opener(self.file.path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                yield parse_line(str(self.file.path), number, line)


def _clean_keys(texts: pa.Array) -> pa.Array:
    """Returns the keys that fields of CSV hold; a field that holds none is missing."""
    cleaned = (None if text is None else clean_key(text) for text in texts.to_pylist())
    return pa.array([key or None for key in cleaned], pa.string())
