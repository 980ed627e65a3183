"""Columns of items, for people and for filters, and the files that may bring them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pa_json

from conf.errors import ConfigError, InputDataError
from conf.key_lists import KeyList
from conf.number_text import parse_real, parse_whole
from conf.storage.table_files import (
    CsvForm,
    LongNumberError,
    holds_long_number,
    open_csv,
    read_csv_names,
    read_parquet,
)

COLUMN_PREFIX = "column:"

Token = int | str


class WrongFilterError(ValueError):
    """A filter names a column that items do not have, or values that it can never hold."""


class ItemColumns:
    """Titles and further columns of items, for people and for filters.

    Args:
        table: A row per item, in the order of positions.
    """

    def __init__(self, table: pa.Table) -> None:
        self._table = table.combine_chunks()
        self.names = tuple(table.column_names)
        found = {name: _list_places(self._table[name]) for name in self.names}
        self._places = {name: places for name, places in found.items() if places is not None}
        self._json = {field.name for field in self._table.schema if _is_json(field.type)}
        self._numbers = {field.name for field in self._table.schema if _is_number(field.type)}
        self._texts = {field.name for field in self._table.schema if _is_text(field.type)}

    def get(self, positions: np.ndarray) -> list[dict[str, Any]]:
        """Returns the columns of items; none of an item of which nothing is known."""
        found = self._table.take(pa.array(positions)).to_pydict()
        columns = [
            values if name in self._json else [_clean(value) for value in values]
            for name, values in found.items()
        ]
        return [
            {} if row.count(None) == len(row) else dict(zip(self.names, row, strict=True))
            for row in zip(*columns, strict=True)
        ]

    def find(self, wanted: Mapping[str, Sequence[Any]]) -> np.ndarray:
        """Returns which items have one of the values of every column, `[items]`.

        Raises:
            WrongFilterError: There is no such column, or it cannot hold such a value.
        """
        if (name := next((n for n in wanted if n not in self._places), None)) is not None:
            raise WrongFilterError(
                f"filter names unknown columns {[name[:100]]}; allowed: {', '.join(self._places)}"
            )
        allowed = np.ones(self._table.num_rows, bool)
        for name, values in wanted.items():
            has_one = np.zeros(len(allowed), bool)
            has_one[self._places[name].get(self._read_wanted(name, values))] = True
            allowed &= has_one
        return allowed

    def _read_wanted(self, name: str, values: Sequence[Any]) -> Sequence[Any]:
        """Returns values as a column may hold them: numbers may come as text."""
        if name in self._texts:
            value = next((one for one in values if isinstance(one, str) and "|" in one), None)
            if value is None:
                return values
            parts = [part[:50] for part in value.split("|")[:3]]
            raise WrongFilterError(
                f"filter.{name}: a value holds no '|', which separates several; for any of some "
                f"give a list: {parts}"
            )
        return [_read_number(name, value) for value in values] if name in self._numbers else values


@dataclass(frozen=True)
class _Places:
    """Where the values of a column stand.

    Attributes:
        values: The distinct ones, as text.
        starts: `[values + 1]`: where the positions of each begin.
        positions: Of the items that have it.
    """

    values: pa.Array
    starts: np.ndarray
    positions: np.ndarray

    def get(self, wanted: Sequence[Any]) -> np.ndarray:
        """Returns the positions of the items that have one of some values, in one pass."""
        texts = [text for value in wanted if (text := _find_text(value)) is not None]
        if len(texts) == 1:
            code = pc.index(self.values, pa.scalar(texts[0], self.values.type)).as_py()
            codes = [code] if code >= 0 else []
        else:
            value_set = pa.array(texts, self.values.type)
            codes = np.flatnonzero(pc.is_in(self.values, value_set=value_set)).tolist()
        parts = [self.positions[self.starts[code] : self.starts[code + 1]] for code in codes]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _read_number(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        with suppress(ValueError):
            return parse_whole(value)
        return parse_real(value)
    except ValueError as error:
        raise WrongFilterError(
            f"filter.{name}: the column holds numbers; received {value[:100]!r}"
        ) from error


def _find_text(value: Any) -> str | None:
    """Returns a value as text, as Arrow writes it; None: no column holds such a number or text."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # Arrow writes 1e+10 for 10000000000.0.
    try:
        return str(pa.scalar(value).cast(pa.string()).as_py())
    except (OverflowError, UnicodeError):
        return None


def _list_places(column: pa.ChunkedArray) -> _Places | None:
    """Lists where each value stands; values of text and lists are several, text between `|`."""
    values = column.combine_chunks()
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        values = pc.split_pattern(values, "|")
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        positions = pc.list_parent_indices(values).to_numpy(zero_copy_only=False)
        values = pc.list_flatten(values)
    else:
        positions = np.arange(len(values))
    if pa.types.is_floating(values.type):
        values = _to_whole(values)
    try:
        texts = values.cast(pa.string())
    except pa.ArrowException:
        return None  # A structure, such as a map.
    encoded = texts.dictionary_encode()
    is_value = texts.is_valid().to_numpy(zero_copy_only=False)
    codes = encoded.indices.filter(texts.is_valid()).to_numpy(zero_copy_only=False)
    order = np.argsort(codes, kind="stable")
    counts = np.bincount(codes, minlength=len(encoded.dictionary))
    starts = np.concatenate(([0], np.cumsum(counts)))
    return _Places(encoded.dictionary, starts, positions[is_value][order].astype(np.int32))


def _to_whole(values: pa.Array) -> pa.Array:
    """Returns floats as whole numbers where all of them are some, as pandas makes of nulls."""
    try:
        return values.cast(pa.int64())
    except pa.ArrowInvalid:
        return values


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_number(kind: pa.DataType) -> bool:
    leaf = getattr(kind, "value_type", kind)
    return bool(pa.types.is_integer(leaf) or pa.types.is_floating(leaf))


def _is_json(kind: pa.DataType) -> bool:
    """Whether JSON knows all values of a type."""
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_integer, pa.types.is_boolean)
    return any(test(kind) for test in tests)


def _clean(value: Any) -> Any:
    """Returns a value as JSON knows it."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (int, float, str, list, type(None))) else str(value)


def read_table(path: Path, texts: Iterable[str] = ()) -> pa.Table:
    """Reads a file of items: `.csv`, `.tsv`, `.jsonl`, `.ndjson` or `.parquet`.

    Args:
        path: The file. Arrow finds the types of CSV columns, but for the first one, the key, which
            is text: `007` is not `7`. An empty field is a missing value.
        texts: Further columns of CSV that are text.

    Raises:
        ConfigError: The format is not known by the name.
        InputDataError: The file cannot be read, or has no column.
    """
    kind = path.suffix.lower()
    try:
        if kind == ".parquet":
            return read_parquet(path)
        if kind in (".jsonl", ".ndjson"):
            return _read_json(path)
        if kind in (".csv", ".tsv"):
            return _read_csv(path, "\t" if kind == ".tsv" else ",", texts)
    except (OSError, pa.ArrowException) as error:
        raise InputDataError("the file of items cannot be read", received=f"{path}: {error}") from (
            error
        )
    raise ConfigError(
        "the format of the items is not known by the file's name",
        received=str(path),
        allowed=".csv, .tsv, .jsonl, .parquet",
    )


def _read_csv(path: Path, separator: str, texts: Iterable[str]) -> pa.Table:
    names = read_csv_names(path, separator, is_line_wise=True)
    types = dict.fromkeys((names[0], *texts), pa.string())
    try:
        form = CsvForm(separator, types, quoted_nulls=True, is_line_wise=True)
        rows = open_csv(path, names, form)
        return pa.Table.from_batches(rows.batches, rows.schema)
    except LongNumberError as error:
        return _read_csv(path, separator, (*types, error.column))


def _read_json(path: Path) -> pa.Table:
    table = pa_json.read_json(path)
    floats = [field.name for field in table.schema if pa.types.is_float64(field.type)]
    if not floats:
        return table
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(one, parse_int=str, parse_float=str) for one in lines if one.strip()]
    for name in floats:
        texts = pa.array([row.get(name) for row in rows], pa.string())
        if holds_long_number(texts):
            table = table.set_column(table.column_names.index(name), name, texts)
    return table


@dataclass(frozen=True)
class ItemFiles:
    """What is said of items beside exports and indexes.

    Attributes:
        columns: Titles and further columns, the first one the key; None: those of the index.
        blocked: Keys of items that are never recommended; None: all may be.
    """

    columns: pa.Table | None = None
    blocked: KeyList | None = None


NO_FILES = ItemFiles()


def read_item_files(items: Path | None, blocked: Path | None) -> ItemFiles:
    """Reads a file of items, and one of keys that are blocked, one a line.

    Raises:
        ConfigError: The format of the items is not known by the name.
        InputDataError: A file cannot be read, or a key is blocked twice.
    """
    columns = None if items is None else read_table(items)
    return ItemFiles(columns, None if blocked is None else KeyList.read(blocked))


def align_columns(table: pa.Table, keys: pa.Array) -> pa.Table:
    """Returns the columns of a file of items in the order of the catalogue.

    Args:
        table: The first column is the key; one behind it may have the same name.
        keys: `[items]`; the columns of an item that is not in the file are null.
    """
    of_file = table.column(0).combine_chunks()
    with suppress(pa.ArrowException):  # Texts that are no keys: the others are found as text.
        of_file = of_file.cast(keys.type)
    of_file = of_file.cast(pa.string())
    rows = pc.index_in(keys.cast(pa.string()), value_set=of_file, skip_nulls=True)
    return table.select(list(range(1, table.num_columns))).take(rows)


def select_columns(table: pa.Table) -> pa.Table:
    """Returns the columns that an index holds of its items, by their own names."""
    names = [name for name in table.column_names if name.startswith(COLUMN_PREFIX)]
    return table.select(names).rename_columns([n.removeprefix(COLUMN_PREFIX) for n in names])
