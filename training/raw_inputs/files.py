"""Raw rows of a file as the inputs of a model's encoders: CSV, JSON lines or Parquet.

A value is missing where a field of CSV is empty, a value null, or a key of JSON absent.
"""

from __future__ import annotations

import gzip
import json
import logging
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from conf.errors import ConfigError, InputDataError
from conf.key_lists import BYTE_ORDER_MARK, clean_key, refuse_twice
from conf.local_paths import list_visible_files
from conf.storage.table_files import CsvForm, open_csv, open_parquet, plain_columns, read_csv_names
from training.raw_inputs.converter import Columns, RawColumns, RawRows, separate_lists
from training.raw_inputs.inputs import InputColumn

SEPARATORS = {".csv": ",", ".tsv": "\t"}
_FORMATS = (*SEPARATORS, ".jsonl", ".ndjson", ".json", ".parquet")

_log = logging.getLogger("sluice.training.predict")


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise InputDataError(f"{path} cannot be read", received=str(error)) from error


@dataclass(frozen=True)
class RawFile:
    """A file of raw rows: CSV, lines of JSON, or Parquet, which may be a folder."""

    path: Path
    id_column: str | None = None  # names the rows in what is written; None: their numbers do
    list_separator: str | None = None  # of lists in CSV; None: what the build declares, else `|`

    @property
    def format(self) -> str:
        kind = Path(self.path.name.lower().removesuffix(".gz")).suffix
        if kind not in _FORMATS:
            problem = "the format of the input is not known by its name"
            allowed = f"{', '.join(_FORMATS)}; text also with .gz"
            raise ConfigError(problem, received=str(self.path), allowed=allowed)
        return kind

    def find_columns(self) -> list[str]:
        kind = self.format
        with file_errors(self.path):
            if kind in SEPARATORS:
                return read_csv_names(self.path, SEPARATORS[kind], is_line_wise=True)
            if kind == ".parquet":
                parts = _list_parts(self.path)[:1]
                return [name for part in parts for name in open_parquet(part).schema_arrow.names]
            return list(dict.fromkeys(chain.from_iterable(parse_lines(self.path))))

    def read(
        self, inputs: Sequence[InputColumn], batch_size: int, keys: Collection[str] = ()
    ) -> Iterator[RawRows]:
        """Yields the rows in order; a value that the model does not read ends it by its row.

        Text of columns that are `keys` is read as in lists of keys.
        """
        if self.format in SEPARATORS:
            inputs = separate_lists(inputs, self.list_separator)
        reader, found, first = RawColumns(inputs, str(self.path)), self.find_columns(), 1
        names = reader.choose(found, self.id_column)
        log_unread(str(self.path), found, names)
        if twice := [name for name in names if found.count(name) > 1]:
            raise InputDataError(f"{self.path} has two columns of one name", received=twice[0])
        with file_errors(self.path):
            for columns in self._read_columns(found, names, batch_size, keys):
                rows = reader.build(columns, first)
                first += len(rows.ids)
                yield rows
        if first == 1:
            raise InputDataError("the input has no rows", received=str(self.path))

    def _read_columns(
        self, found: list[str], names: list[str], batch_size: int, keys: Collection[str]
    ) -> Iterator[Columns]:
        if (separator := SEPARATORS.get(self.format)) is not None:
            types = dict.fromkeys(found, pa.string())
            form = CsvForm(separator, types, names, is_line_wise=True)
            for batch in regroup(open_csv(self.path, found, form).batches, batch_size):
                cleaned = {name: _clean_keys(batch[name]) for name in keys if name in names}
                yield take_columns(batch, names) | cleaned
        elif self.format == ".parquet":
            for batch in regroup(_read_parts(self.path, names, batch_size), batch_size):
                yield take_columns(batch, names)
        else:
            lines = parse_lines(self.path)
            while rows := list(islice(lines, batch_size)):
                yield {name: [row.get(name) for row in rows] for name in names}


def log_unread(place: str, found: Sequence[str], read: Sequence[str]) -> None:
    """Logs the columns that nothing reads: one may be an input whose name is misspelt."""
    if unread := [name for name in found if name not in read]:
        _log.info("%s: columns that the model does not read: %s", place, ", ".join(unread))


def _clean_keys(texts: pa.Array) -> pa.Array:
    cleaned = (None if text is None else clean_key(text) for text in texts.to_pylist())
    return pa.array([key or None for key in cleaned], pa.string())


def parse_lines(path: Path, *, skip_empty: bool = False) -> Iterator[dict[str, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip() or not skip_empty:
                yield parse_line(str(path), number, line)


def parse_line(place: str, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        problem = f"{place}, row {number}: the line is no JSON object"
        raise InputDataError(problem, received=repr(line.rstrip("\n")[:200]))
    return row


def _list_parts(path: Path) -> list[Path]:
    files = list_visible_files(path) if path.is_dir() else [path]
    return [file for file in files if file == path or file.suffix == ".parquet"]


def _read_parts(path: Path, names: list[str], batch_size: int) -> Iterator[pa.RecordBatch]:
    schema = None
    for part in _list_parts(path):
        with open_parquet(part) as parquet:
            if lacking := set(names).difference(parquet.schema_arrow.names):
                raise pa.ArrowInvalid(f"{part.name} lacks {', '.join(sorted(lacking))}")
            for batch in parquet.iter_batches(batch_size, columns=names):
                chosen = plain_columns(batch.select(names))
                schema = schema or chosen.schema
                if not chosen.schema.equals(schema):
                    raise pa.ArrowInvalid(f"{part.name} has other types than the first part")
                yield chosen


def take_columns(batch: pa.RecordBatch, names: Iterable[str]) -> dict[str, pa.Array]:
    return {name: batch.column(name) for name in names}


def regroup(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Yields the same rows in batches of at most, and mostly, as many as asked for."""
    held: list[pa.RecordBatch] = []
    for batch in chain(batches, [None]):
        held += [] if batch is None else [batch]
        if held and (batch is None or sum(part.num_rows for part in held) >= rows):
            yield from pa.Table.from_batches(held).combine_chunks().to_batches(rows)
            held = []


def find_key_input(inputs: Sequence[InputColumn], key: str) -> InputColumn:
    first, *others = (item for item in inputs if item.feature == key)
    if others:
        problem = "keys of a file stand in one column, and the id is made of several"
        raise ConfigError(problem, received=", ".join(item.name for item in (first, *others)))
    return first


def read_key_rows(
    file: RawFile, inputs: Sequence[InputColumn], key: InputColumn, batch_size: int
) -> Iterator[tuple[list[Any], RawRows]]:
    """Yields the keys of a file's rows, each there and there once, and the rows."""
    read: list[Any] = []
    for rows in file.read(inputs, batch_size, {key.name, key.column}):
        values = rows.inputs[key.name].tolist()
        keys = [v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in values]
        if key.null_token in keys:
            raise InputDataError(
                f"{file.path}, row {rows.first + keys.index(key.null_token)}: there is no key",
                fix=f"fill column {key.name!r}, or leave the row out",
            )
        read += keys
        yield keys, rows
    refuse_twice(file.path, enumerate(read, 1), "row")
