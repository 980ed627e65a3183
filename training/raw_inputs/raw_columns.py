"""Raw values of some rows as the inputs of a model: types, missing values, lists.

Columns are named as the raw inputs in `export.json`, or as the columns of the source that these are
made of; inputs of one raw column may share theirs. Text is read as the build read it
(`written_values`). This module imports neither TensorFlow nor, when
its functions run, anything of Sluice: it is shipped to executors that have neither.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import InputDataError, nearest
from conf.key_lists import BYTE_ORDER_MARK
from training.raw_inputs.column_values import (
    BAD_VALUES,
    TYPES,
    WORDS,
    ColumnReader,
    convert,
    find_texts,
)
from training.raw_inputs.input_columns import InputColumn, find_missing, find_padding
from training.raw_inputs.source_names import SourceNames, find_paired
from training.raw_inputs.value_checks import FINITE, find_bad_number, find_wrong_times

Columns = Mapping[str, pa.Array | list[Any]]
"""Values of some rows by column, as they are given."""


def _advise_names(missing: str, found: Sequence[str]) -> str:
    if (close := nearest(missing, found)) is not None:
        return f"did you mean {close!r}?"
    return (
        "name the columns as export.json does; of a log that lacks what a build makes, write rows "
        "by `sluice build … --rows-to`"
    )


class RawColumns:
    """Turns columns of raw values into what a model takes.

    Args:
        inputs: The inputs.
        place: What messages call the rows: a file's path.
        list_separator: Separates the values of lists that come as text; None: what the build
            declares, and nothing where it declares nothing.
        is_delimited: Whether the rows are of CSV: lists of which the build declares nothing are
            separated by `DEFAULT_SEPARATOR` there.
    """

    def __init__(
        self,
        inputs: Sequence[InputColumn],
        place: str,
        list_separator: str | None = None,
        *,
        is_delimited: bool = False,
    ) -> None:
        self.inputs = tuple(inputs)
        self._place, self._list_separator = place, list_separator
        self._is_delimited = is_delimited
        self._names: dict[str, list[str]] = {}
        self._sources: dict[str, str] = {}

    def choose(self, found: Sequence[str], id_column: str | None = None) -> list[str]:
        """Returns the columns to read of those that are there, that of the ids among them.

        Raises:
            InputDataError: One is missing.
        """
        extra = [] if id_column is None else [id_column]
        known = SourceNames.build([item.to_json() for item in self.inputs])
        sources = known.sources
        for item in self.inputs:
            source = sources.get(item.name, item.name)
            present = [name for name in known.list_names(item.name) if name in found]
            self._names[item.name] = list(dict.fromkeys(present)) or [item.name]
            is_input = any(source == other.name for other in self.inputs)
            if not is_input and {item.name, source} <= set(found):
                self._sources[item.name] = source
        names = list(dict.fromkeys([*chain.from_iterable(self._names.values()), *extra]))
        missing = [name for name in names if name not in found]
        if missing:
            raise InputDataError(
                f"{self._place} lacks columns that the model reads",
                received=f"missing: {', '.join(missing)}; found: {', '.join(found)}",
                allowed=", ".join(
                    f"{item.name}{_name_source(item, sources)} "
                    f"({'list of ' if item.is_list else ''}{WORDS[item.dtype]})"
                    for item in self.inputs
                ),
                fix=_advise_names(missing[0], found),
            )
        return names

    def build(self, columns: Columns, first: int) -> dict[str, np.ndarray]:
        """Builds the inputs of some rows.

        Args:
            columns: Their values, of the columns that were chosen.
            first: Number of the first row.

        Returns:
            By name, `[rows]` or `[rows, length]`; text as bytes.

        Raises:
            InputDataError: A value is not what the model reads; names the row and the column.
        """
        return {item.name: self._build_input(item, columns, first) for item in self.inputs}

    def build_ids(
        self, name: str, values: pa.Array | list[Any], first: int, kind: pa.DataType | None
    ) -> pa.Array:
        """Builds the ids of some rows: of a type, or of their own where it is None.

        Raises:
            InputDataError: One is of another type.
        """
        if kind is None:
            kind = values.type if isinstance(values, pa.Array) else _infer_type(values)
        found = kind
        try:
            return convert(values, found)
        except BAD_VALUES:
            read = partial(convert, target=found)
            self._refuse_first(name, values, read, first, f"an id of {found}")

    def _build_input(self, item: InputColumn, columns: Columns, first: int) -> np.ndarray:
        name, *others = self._names[item.name]
        array = self._read(item, name, columns[name], first)
        is_missing = find_missing_rows(columns[name])
        for other in others:
            if other == self._sources.get(item.name):
                self._check_same(item, array, columns, first)
            if not is_missing.any():
                continue
            given = keep_rows(columns[other], is_missing, is_text=self._is_paired(item, other))
            array = pc.coalesce(array, self._read(item, other, given, first))
            is_missing &= find_missing_rows(given)
        values = self._pad(item, array, first) if item.is_list else self._fill(item, array, first)
        fault = find_wrong_times(item, values)
        if fault is not None:
            raise InputDataError(
                f"{self._place}: column {name!r} {fault.problem}",
                received=f"from row {first} on {fault.received}",
                allowed=fault.allowed,
                fix="write the column in the unit of the build's, under its input's or its source "
                "column's name",
            )
        return values

    def _read(
        self, item: InputColumn, name: str, values: pa.Array | list[Any], first: int
    ) -> pa.Array:
        """Returns the values of a column as the type of an input."""
        reader = self._find_reader(item, name)
        try:
            array = reader.convert(values)
        except BAD_VALUES:
            allowed = reader.describe()
            self._refuse_first(name, values, reader.convert, first, allowed)
        self._check_finite(item, name, array, values, first)
        return array

    def _check_same(
        self, item: InputColumn, values: pa.Array, columns: Columns, first: int
    ) -> None:
        """Refuses a row that says one input by its name and by its source's column, differently."""
        source = self._sources[item.name]
        both = ~find_missing_rows(columns[source]) & ~find_missing_rows(columns[item.name])
        others = self._read(item, source, columns[source], first)
        if values.filter(pa.array(both)).equals(others.filter(pa.array(both))):
            return
        differ = (int(row) for row in np.flatnonzero(both) if values[row] != others[row])
        if (row := next(differ, None)) is not None:
            raise InputDataError(
                f"{self._place}, row {first + row}: {item.name!r} is made of {source!r}, and the "
                "two columns differ",
                received=f"{values[row].as_py()!r} and {others[row].as_py()!r}"[:200],
                allowed="either column, or both with the same values",
                fix="leave one of the columns out: both name the raw value of the source",
            )

    def _check_finite(
        self, item: InputColumn, name: str, array: pa.Array, given: Any, first: int
    ) -> None:
        """Refuses numbers that are not finite; a missing value is null, and no number."""
        if not pa.types.is_floating(TYPES[item.dtype]):
            return
        flat = array.flatten() if item.is_list else array
        bad = find_bad_number(flat.fill_null(0.0).to_numpy(zero_copy_only=False))
        if bad is None:
            return
        row = _find_row(_count_values(array), bad) if item.is_list else bad
        value = given[row].as_py() if isinstance(given, pa.Array) else given[row]
        allowed = f"{FINITE}; for a missing value nothing: null, in CSV an empty field"
        self._refuse(name, first + row, value, allowed)

    def _fill(self, item: InputColumn, values: pa.Array, first: int) -> np.ndarray:
        """Returns scalars `[rows]` with the null token where one is missing."""
        if values.null_count:
            missing = find_missing(item.dtype, item.null_token, item.is_required)
            if missing is None:
                row = int(values.is_null().to_numpy(zero_copy_only=False).argmax())
                self._refuse(
                    self._names[item.name][0],
                    first + row,
                    None,
                    "a value: the feature has no pad_value",
                )
            values = values.fill_null(pa.scalar(missing, values.type))
        return np.asarray(values.to_numpy(zero_copy_only=False))

    def _pad(self, item: InputColumn, values: pa.Array, first: int) -> np.ndarray:
        """Returns lists `[rows, length]` with the pad token behind their ends."""
        lengths = _count_values(values)
        if item.length is not None:
            bad = (lengths != item.length) & (lengths != 0)
            if bad.any():
                row = int(bad.argmax())
                allowed = f"a list of {item.length} values, or none"
                self._refuse(self._names[item.name][0], first + row, values[row].as_py(), allowed)
        flat = values.flatten()
        if flat.null_count:
            missing = find_missing(item.dtype, item.null_token, item.is_required)
            if missing is None:
                position = int(flat.is_null().to_numpy(zero_copy_only=False).argmax())
                row = _find_row(lengths, position)
                name, value = self._names[item.name][0], values[row].as_py()
                self._refuse(name, first + row, value, "a list without null")
            flat = flat.fill_null(pa.scalar(missing, flat.type))
        width = item.length or max(1, int(lengths.max(initial=0)))
        padding = find_padding(item.dtype, item.pad_token)
        shape, dtype = (len(values), width), object if item.dtype == "string" else item.dtype
        padded = np.full(shape, padding, dtype)
        padded[np.arange(width) < lengths[:, np.newaxis]] = flat.to_numpy(zero_copy_only=False)
        return padded

    def _find_reader(self, item: InputColumn, name: str) -> ColumnReader:
        is_paired = self._is_paired(item, name)
        return ColumnReader(item, self._list_separator, self._is_delimited, is_paired)

    def _is_paired(self, item: InputColumn, name: str) -> bool:
        """Whether a column's text has the values of an input as second ones of its entries."""
        return name in find_paired(item, self.inputs)

    def _refuse_first(
        self,
        name: str,
        values: Any,
        convert: Callable[[Any], pa.Array],
        first: int,
        allowed: str,
    ) -> NoReturn:
        """Refuses the first value that cannot be converted."""
        for row in range(len(values)):
            try:
                # Taken, not sliced: what is cast of a slice of lists are all values.
                is_array = isinstance(values, pa.Array)
                convert(values.take([row]) if is_array else values[row : row + 1])
            except BAD_VALUES:
                value = values[row].as_py() if isinstance(values, pa.Array) else values[row]
                self._refuse(name, first + row, value, allowed)
        self._refuse(name, first, f"{len(values)} values", allowed)

    def _refuse(self, name: str, row: int, value: Any, allowed: str) -> NoReturn:
        raise InputDataError(
            f"{self._place}, row {row}: column {name!r} does not hold what the model reads",
            received="no value" if value is None else repr(value)[:200],
            allowed=allowed,
            fix="correct the row, or leave it out",
        )


def _name_source(item: InputColumn, sources: Mapping[str, str]) -> str:
    source = sources.get(item.name, item.name)
    return "" if source == item.name else f" or {source}"


def find_missing_rows(values: pa.Array | list[Any]) -> np.ndarray:
    """Returns which rows of a column have no value, bool `[rows]`."""
    if isinstance(values, pa.Array):
        return np.array(values.is_null().to_numpy(zero_copy_only=False))
    return np.fromiter((value is None for value in values), bool, len(values))


def keep_rows(values: pa.Array | list[Any], rows: np.ndarray, *, is_text: bool) -> Any:
    """Returns a column whose other rows have no value; where it is of text, what is none neither.

    Args:
        values: `[rows]`.
        rows: Those that are kept, bool `[rows]`.
        is_text: Whether it is of text.
    """
    if is_text:
        texts = find_texts(values)
        values = pa.nulls(len(rows), pa.string()) if texts is None else texts
    if isinstance(values, pa.Array):
        return pc.if_else(pa.array(rows), values, pa.scalar(None, values.type))
    return [value if kept else None for value, kept in zip(values, rows, strict=True)]


def regroup(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.RecordBatch]:
    """Yields the same rows in batches of one size; the last one may be shorter."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(part.num_rows for part in held) >= rows:
            *whole, rest = _cut(held, rows)
            yield from whole
            held = [rest]
    yield from (batch for batch in _cut(held, rows) if batch.num_rows)


def _cut(held: list[pa.RecordBatch], rows: int) -> list[pa.RecordBatch]:
    """Returns batches of `rows` rows, and last what is left, perhaps nothing."""
    if not held:
        return []
    columns = pa.Table.from_batches(held).combine_chunks()
    [whole] = columns.to_batches() or [pa.RecordBatch.from_pylist([], columns.schema)]
    return [whole.slice(start, rows) for start in range(0, whole.num_rows + 1, rows)]


def decode_columns(batch: pa.RecordBatch, names: Iterable[str]) -> dict[str, pa.Array]:
    """Returns columns of a batch by name: values, not positions in a dictionary."""
    columns = {name: batch.column(name) for name in names}
    return {
        name: values.dictionary_decode() if isinstance(values, pa.DictionaryArray) else values
        for name, values in columns.items()
    }


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


def _infer_type(values: list[Any]) -> pa.DataType:
    try:
        return pa.array(values).type
    except BAD_VALUES:
        return pa.string()


def _count_values(lists: pa.Array) -> np.ndarray:
    """Returns the lengths of lists, `[rows]`; a list that is null has none."""
    lengths = pc.list_value_length(lists).fill_null(0)
    return np.asarray(lengths.to_numpy(zero_copy_only=False))


def _find_row(lengths: np.ndarray, position: int) -> int:
    """Returns the row of a value by its position among the values of all lists."""
    return int(np.searchsorted(np.cumsum(lengths), position, side="right"))
