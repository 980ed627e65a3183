"""Items of an export: keys, vectors, columns for people and for filters, files that bring those."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.artefacts.export import EMBEDDINGS_DIR, ID, ITEMS_FILE, KEY, VECTOR, VECTORS
from conf.errors import InputDataError
from conf.key_lists import KeyList, refuse_twice
from conf.number_text import parse_real, parse_whole
from conf.storage.table_files import (
    CsvForm,
    OtherNumberError,
    open_csv,
    read_csv_names,
    read_parquet,
)
from training.raw_inputs.files import SEPARATORS, RawFile, file_errors, parse_lines

COLUMN_PREFIX = "column:"

Token = int | str


class ItemTable(NamedTuple):
    keys: pa.Array
    ids: np.ndarray  # int64, ascending; items at the end were added to an index and have none
    vectors: np.ndarray  # `[items, dim]`; `[items, 0]` where the file has none
    columns: pa.Table  # what lists are filtered by, by their own names; of an index alone


def find_items_file(card: Mapping[str, Any]) -> str | None:
    """Returns the file of a version's items by its `export.json`; None: it knows no items."""
    names = (f"{EMBEDDINGS_DIR}/{ITEMS_FILE}", ITEMS_FILE)
    return next((name for name in names if name in card["files"]), None)


def read_items(file: Path) -> ItemTable:
    table = read_parquet(file)
    names = [name for name in table.column_names if name.startswith(COLUMN_PREFIX)]
    columns = table.select(names).rename_columns([n.removeprefix(COLUMN_PREFIX) for n in names])
    keys, ids = table[KEY].combine_chunks(), table[ID].drop_null().to_numpy()
    return ItemTable(keys, ids, read_vectors(table), columns)


def read_vectors(table: pa.Table) -> np.ndarray:
    """Returns float32 `[rows, dim]`; of users with several vectors `[rows, interests, dim]`."""
    if VECTOR in table.column_names:
        return np.asarray(table[VECTOR].combine_chunks().flatten()).reshape(len(table), -1)
    if VECTORS not in table.column_names:
        return np.zeros((len(table), 0), np.float32)
    vectors = table[VECTORS].combine_chunks().flatten()
    shape = (len(table), len(vectors) // len(table), -1)
    return np.asarray(vectors.flatten()).reshape(shape)


class WrongFilterError(ValueError):
    """A filter that no item can ever fit."""


class ItemColumns:
    """Titles and further columns: a row of a table per item, in the order of positions."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table.combine_chunks()
        found = {name: _list_values(self._table[name]) for name in table.column_names}
        self._values = {name: values for name, values in found.items() if values is not None}

    def get(self, positions: np.ndarray) -> list[dict[str, Any]]:
        """Returns the columns of items; none of an item of which nothing is known."""
        found = self._table.take(pa.array(positions))
        rows = ({n: _clean(value) for n, value in row.items()} for row in found.to_pylist())
        return [row if any(one is not None for one in row.values()) else {} for row in rows]

    def find(self, wanted: Mapping[str, Sequence[Any]]) -> np.ndarray:
        """Returns which items have one of the values of every column, `[items]`."""
        if unknown := [name[:100] for name in wanted if name not in self._values]:
            known = ", ".join(self._values)
            raise WrongFilterError(f"filter names unknown columns {unknown[:1]}; allowed: {known}")
        allowed = np.ones(self._table.num_rows, bool)
        for name, values in wanted.items():
            has_one = np.zeros(len(allowed), bool)
            has_one[self._values[name].find(name, values)] = True
            allowed &= has_one
        return allowed


@dataclass(frozen=True)
class _Values:
    """Distinct values of a column as text; items of the n-th: `positions[starts[n:n + 2]]`."""

    is_text: bool
    are_numbers: bool
    texts: pa.Array
    starts: np.ndarray
    positions: np.ndarray

    def find(self, name: str, wanted: Sequence[Any]) -> np.ndarray:
        texts = [_find_text(self._read_wanted(name, value)) for value in wanted]
        value_set = pa.array([text for text in texts if text is not None], self.texts.type)
        codes = np.flatnonzero(pc.is_in(self.texts, value_set=value_set))
        parts = [self.positions[self.starts[code] : self.starts[code + 1]] for code in codes]
        return np.concatenate([np.zeros(0, np.int32), *parts])

    def _read_wanted(self, name: str, value: Any) -> Any:
        """Returns a value as the column may hold it: numbers may come as text."""
        if not isinstance(value, str):
            return value
        if self.is_text and "|" in value:
            raise WrongFilterError(f"filter.{name}: '|' separates values; give a list for several")
        if not self.are_numbers:
            return value
        try:
            with suppress(ValueError):
                return parse_whole(value)
            return parse_real(value)
        except ValueError as error:
            problem = f"filter.{name}: the column holds numbers; received {value[:100]!r}"
            raise WrongFilterError(problem) from error


def _find_text(value: Any) -> str | None:
    """Returns a value as text, as Arrow writes it; None: no column holds such text."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # Arrow writes 1e+10 for 10000000000.0.
    if type(value) is int:  # Of uint64 too.
        return str(value)
    try:
        return str(pa.scalar(value).cast(pa.string()).as_py())
    except UnicodeError:
        return None


def _list_values(column: pa.ChunkedArray) -> _Values | None:
    """Lists where each value stands; text holds several between `|`. None: they are structures."""
    values = column.combine_chunks()
    is_text = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
    if is_text:
        values = pc.split_pattern(values, "|")
    positions = np.arange(len(values))
    if pa.types.is_list(values.type) or pa.types.is_large_list(values.type):
        positions = pc.list_parent_indices(values).to_numpy(zero_copy_only=False)
        values = pc.list_flatten(values)
    if pa.types.is_decimal(values.type) and values.type.scale > 0:
        values = values.cast(pa.float64())  # `10.00` is no other number's text.
    are_numbers = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
    if are_numbers:
        with suppress(pa.ArrowInvalid):  # pandas makes floats of whole numbers beside nulls.
            values = values.cast(pa.int64())
    try:
        texts = values.cast(pa.string())
    except pa.ArrowException:
        return None
    is_value = texts.is_valid()
    encoded = texts.filter(is_value).dictionary_encode()
    codes, distinct = encoded.indices.to_numpy(zero_copy_only=False), encoded.dictionary
    if pa.types.is_floating(values.type):  # As numbers of a filter: not `1e+10`, nor `-0`.
        distinct = pa.array([_find_text(float(one)) for one in distinct.to_pylist()], pa.string())
    positions = positions[is_value.to_numpy(zero_copy_only=False)]
    counts = np.bincount(codes, minlength=len(distinct))
    starts = np.concatenate(([0], np.cumsum(counts)))
    positions = positions[np.argsort(codes, kind="stable")].astype(np.int32)
    return _Values(is_text, are_numbers, distinct, starts, positions)


def _clean(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (int, float, str, list, type(None))) else str(value)


def read_table(path: Path, *, as_text: bool = False) -> pa.Table:
    """Reads a file of items, whose first column is the key; of CSV it is text, or all are."""
    kind = RawFile(path).format
    with file_errors(path):
        if kind in SEPARATORS:
            table = _read_csv(path, SEPARATORS[kind], as_text)
        else:
            table = read_parquet(path) if kind == ".parquet" else _read_json(path)
        keys = table.column(0).cast(pa.string()).to_pylist() if table.num_columns else ()
    refuse_twice(path, ((row, key) for row, key in enumerate(keys, 1) if key is not None), "row")
    return table


def _read_csv(path: Path, separator: str, as_text: bool, texts: Iterable[str] = ()) -> pa.Table:
    names = read_csv_names(path, separator, is_line_wise=True)
    types = dict.fromkeys(names if as_text else (names[0], *texts), pa.string())
    try:
        form = CsvForm(separator, types, quoted_nulls=True, is_line_wise=True)
        rows = open_csv(path, names, form)
        return pa.Table.from_batches(rows.batches, rows.schema)
    except OtherNumberError as error:
        return _read_csv(path, separator, as_text, (*texts, error.column))


def _read_json(path: Path) -> pa.Table:
    rows = list(parse_lines(path, skip_empty=True))
    names = dict.fromkeys(chain.from_iterable(rows))
    return pa.table({name: _build_column([row.get(name) for row in rows]) for name in names})


def _build_column(values: list[Any]) -> pa.Array:
    """Builds a column of JSON; numbers that no type holds, such as 64-bit hashes, are text."""
    try:
        return pa.array(values)
    except (OverflowError, pa.ArrowInvalid) as error:
        if not set(map(type, values)) <= {int, float, type(None)}:
            raise pa.ArrowInvalid(str(error)) from error
        return pa.array([None if value is None else str(value) for value in values])


@dataclass(frozen=True)
class ItemFiles:
    """Columns of items in the place of an index's, the first one the key, and blocked items."""

    columns: pa.Table | None = None
    blocked: KeyList | None = None


NO_FILES = ItemFiles()


def read_item_files(items: Path | None, blocked: Path | None) -> ItemFiles:
    columns = None if items is None else read_table(items)
    return ItemFiles(columns, None if blocked is None else KeyList.read(blocked))


def align_columns(table: pa.Table, keys: pa.Array) -> pa.Table:
    """Returns the columns of a file of items in the order of keys `[items]`; null where none is."""
    of_file, names = table.column(0).combine_chunks(), table.column_names[1:]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputDataError("a file of items has two columns of one name", received=twice[0])
    with suppress(pa.ArrowException):  # Texts that are no keys: the others are found as text.
        of_file = of_file.cast(keys.type)
    of_file = of_file.cast(pa.string())
    rows = pc.index_in(keys.cast(pa.string()), value_set=of_file, skip_nulls=True)
    return table.select(list(range(1, table.num_columns))).take(rows)


def are_empty(columns: pa.Table) -> bool:
    """Whether there are columns, and no item has a value: its file has the key elsewhere."""
    return bool(columns.num_columns) and all(c.null_count == len(c) for c in columns.columns)
