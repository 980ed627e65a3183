"""Raw values of some rows, in Arrow, as the arrays that a model takes.

The only code that knows how a raw value looks after the build: types, times, lists and pairs in
text, missing values, padding. Values of JSON become Arrow's by `json_columns`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import InputDataError, nearest
from training.raw_inputs.inputs import Choice, InputColumn, SourceNames, WrittenForm
from training.raw_inputs.json_columns import EXACT, Column, show, to_arrow
from training.raw_inputs.times import describe_time, find_wrong_times, read_times, scale_epochs

FINITE = "finite numbers up to 3.4e38, the largest float32"
"""What a model takes of numbers, in words."""
DEFAULT_SEPARATOR = "|"
"""Separates the values of lists in CSV, where neither the build nor the user says otherwise."""
BAD_VALUES = (pa.ArrowException, TypeError, ValueError, OverflowError)
_WORDS = {
    "int32": "whole numbers",
    "int64": "whole numbers",
    "float32": "numbers",
    "float64": "numbers",
    "string": "text",
}
_WHOLE = r"^[+-]?[0-9]+$"

Columns = Mapping[str, Column]
"""Values of some rows by column: of Arrow, or as JSON has them."""


class WrongValueError(Exception):
    """A value is not what an input takes.

    Attributes:
        column: Column that holds it.
        place: Its row from 0, and its position in a list; nothing where all rows are meant.
        received: The value, in words.
        allowed: What would do, in words.
        problem: What is wrong with the column, in words; None: it does not hold what is allowed.
    """

    def __init__(
        self,
        column: str,
        place: Sequence[int],
        received: str,
        allowed: str,
        problem: str | None = None,
    ) -> None:
        super().__init__(problem or allowed)
        self.column, self.place, self.problem = column, tuple(place), problem
        self.received, self.allowed = received, allowed


class RawColumns:
    """Turns columns of raw values into what a model takes.

    Args:
        inputs: The inputs.
        place: What messages call the rows: a file's path.
        list_separator: Separates the values of lists that come as text; None: what the build
            declares.
        is_delimited: Whether the rows are of CSV: a list of which neither says anything is
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
        lists = [_separate(item, list_separator) if item.is_list else item for item in inputs]
        self.inputs = tuple(lists if is_delimited else inputs)
        self._place, self._names = place, SourceNames(self.inputs)
        self._chosen: dict[str, Choice] = {}

    def choose(self, found: Sequence[str], id_column: str | None = None) -> list[str]:
        """Returns the columns to read of those that are there, that of the ids among them.

        Raises:
            InputDataError: One is missing.
        """
        self._chosen = {item.name: self._names.choose(item.name, found) for item in self.inputs}
        missing = [name for name, chosen in self._chosen.items() if not chosen.names]
        ids = [] if id_column is None else [id_column]
        missing += [name for name in ids if name not in found]
        if missing:
            raise InputDataError(
                f"{self._place} lacks columns that the model reads",
                received=f"missing: {', '.join(missing)}; found: {', '.join(found)}",
                allowed=", ".join(map(self._describe, self.inputs)),
                fix=_advise_names(missing[0], found),
            )
        return list(dict.fromkeys(chain(*(one.names for one in self._chosen.values()), ids)))

    def _describe(self, item: InputColumn) -> str:
        source = self._names.sources.get(item.name, item.name)
        names = " or ".join(dict.fromkeys([item.name, source]))
        return f"{names} ({'list of ' if item.is_list else ''}{_WORDS[item.dtype]})"

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
        try:
            return {
                item.name: build_input(item, self._chosen[item.name], columns)
                for item in self.inputs
            }
        except WrongValueError as error:
            raise self._name_row(error, first) from error

    def build_ids(
        self, name: str, values: Column, first: int, kind: pa.DataType | None
    ) -> pa.Array:
        """Builds the ids of some rows: of a type, or of their own where it is None."""
        if isinstance(values, pa.Array):
            return values
        try:
            ids = pa.array(values)
            return ids if kind is None else ids.cast(kind)
        except BAD_VALUES as error:
            wanted = pa.array(values[:1]).type if kind is None else kind
            wrong = _find_wrong(
                name, values, lambda one: pa.array(one).cast(wanted), error, f"an id of {wanted}"
            )
            raise self._name_row(wrong, first) from error

    def _name_row(self, error: WrongValueError, first: int) -> InputDataError:
        row = f"row {first + error.place[0]}" if error.place else f"from row {first} on"
        problem = error.problem or "does not hold what the model reads"
        return InputDataError(
            f"{self._place}, {row}: column {error.column!r} {problem}",
            received=error.received,
            allowed=error.allowed,
            fix="correct the row, or leave it out" if error.place else None,
        )


def _separate(item: InputColumn, separator: str | None) -> InputColumn:
    """Returns a list whose text is separated as the user says, else the build, else by default."""
    if separator is None and item.separator is not None:
        return item
    written = WrittenForm(item.column, separator=separator or DEFAULT_SEPARATOR)
    return replace(item, written=written)


def _advise_names(missing: str, found: Sequence[str]) -> str:
    if (close := nearest(missing, found)) is not None:
        return f"did you mean {close!r}?"
    return (
        "name the columns as export.json does; of a log that lacks what a build makes, write rows "
        "by `sluice build … --rows-to`"
    )


def build_input(item: InputColumn, chosen: Choice, columns: Columns) -> np.ndarray:
    """Returns an input, `[rows]` or `[rows, length]`; text as bytes.

    Args:
        item: The input.
        chosen: Which columns stand for it.
        columns: Their values.

    Raises:
        WrongValueError: A value is not what it takes.
    """
    values, name = merge_columns(item, chosen, columns), chosen.names[0]
    array = _pad(item, name, values) if item.is_list else _fill(item, name, values)
    if item.time_unit is not None and (fault := find_wrong_times(item, array)) is not None:
        raise WrongValueError(name, (), fault.received, fault.allowed, fault.problem)
    return array


def merge_columns(item: InputColumn, chosen: Choice, columns: Columns) -> pa.Array:
    """Returns the values of an input as its Arrow type: in each row the first that is there.

    Arguments and what is raised are those of `build_input`.
    """
    first, *others = chosen.names
    found = _read(item, first, columns[first], is_paired=first in chosen.paired)
    for name in others:
        if found.null_count or name == chosen.twin:
            values = _read(item, name, columns[name], is_paired=name in chosen.paired)
            if name == chosen.twin:
                _check_same(chosen, found, values)
            found = pc.coalesce(found, values)
    if chosen.paired and found.null_count:
        _refuse_unpaired(item, chosen, columns, found)
    return found


def _read(item: InputColumn, name: str, column: Column, *, is_paired: bool) -> pa.Array:
    """Returns the values of a column as the Arrow type of an input."""

    def read(given: Column) -> pa.Array:
        is_arrow = isinstance(given, pa.Array)
        parts = [given] if is_arrow else to_arrow(given, item, texts_only=is_paired)
        arrays = [convert(item, one) for one in parts if not is_paired or _is_text(one.type)]
        return pc.coalesce(*arrays) if arrays else pa.nulls(len(given), item.arrow_type)

    try:
        values = read(column)
    except BAD_VALUES as error:
        raise _find_wrong(name, column, read, error, describe(item)) from error
    if item.dtype in ("float32", "float64"):
        _check_finite(name, values, column)
    return values


def _find_wrong(
    name: str,
    column: Column,
    read: Callable[[Any], pa.Array],
    error: Exception,
    allowed: str,
) -> WrongValueError:
    """Finds the first row that cannot be read."""
    for row in range(len(column)):
        try:
            read(column[row : row + 1])
        except BAD_VALUES as own:
            received = _show_row(column, row) + _give_reason(own)
            return WrongValueError(name, (row,), received, allowed)
    return WrongValueError(name, (), f"{len(column)} values{_give_reason(error)}", allowed)


def _give_reason(error: Exception) -> str:
    return f" ({error})" if type(error) is ValueError else ""


def _show_row(column: Column, row: int) -> str:
    value = column[row].as_py() if isinstance(column, pa.Array) else column[row]
    return "no value" if value is None else show(value)


def _check_finite(name: str, values: pa.Array, column: Column) -> None:
    """Refuses numbers that are not finite; a missing value is null, and no number."""
    is_list = pa.types.is_list(values.type)
    flat = values.flatten() if is_list else values
    bad = find_bad_number(flat.fill_null(0.0).to_numpy(zero_copy_only=False))
    if bad is None:
        return
    place = _find_place(_count_values(values), bad) if is_list else (bad,)
    allowed = f"{FINITE}; for a missing value nothing: null, in CSV an empty field"
    raise WrongValueError(name, place, _show_row(column, place[0]), allowed)


def find_bad_number(values: np.ndarray) -> int | None:
    """Returns where the first number stands that no model can read; None: there is none.

    Refused are NaN, infinities, and what overflows float32, the type that models compute in.

    Args:
        values: Floats of any shape.

    Returns:
        Its position in the flattened array.
    """
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(values.astype(np.float32, copy=False))
    return None if is_finite.all() else int(is_finite.argmin())


def _check_same(chosen: Choice, own: pa.Array, source: pa.Array) -> None:
    """Refuses a row that says one input by its name and by its source's column, differently."""
    name, twin = chosen.names[0], chosen.twin
    both = pc.and_(own.is_valid(), source.is_valid())
    if own.filter(both).equals(source.filter(both)):
        return
    pairs = enumerate(zip(own.to_pylist(), source.to_pylist(), strict=True))
    row, differ = next((n, pair) for n, pair in pairs if None not in pair and pair[0] != pair[1])
    raise WrongValueError(
        name,
        (row,),
        " and ".join(map(show, differ)),
        "either column, or both with the same values",
        f"is made of {twin!r}, and both are given and differ",
    )


def _refuse_unpaired(item: InputColumn, chosen: Choice, columns: Columns, found: pa.Array) -> None:
    """Refuses lists in place of the text that would have the second values too."""
    missing = found.is_null().to_numpy(zero_copy_only=False)
    for name in set(chosen.paired).intersection(chosen.names):
        rows = np.flatnonzero(missing & _find_lists(columns[name]))
        if len(rows):
            received = _show_row(columns[name], int(rows[0]))
            raise WrongValueError(name, (int(rows[0]),), received, describe(item))


def _find_lists(column: Column) -> np.ndarray:
    """Returns which rows have a list that is not empty, bool `[rows]`."""
    if not isinstance(column, pa.Array):
        return np.array([isinstance(value, list) and bool(value) for value in column], bool)
    return _count_values(column) > 0 if _is_list(column.type) else np.zeros(len(column), bool)


def _fill(item: InputColumn, name: str, values: pa.Array) -> np.ndarray:
    """Returns scalars `[rows]` with the null token where one is missing."""
    if values.null_count:
        row = int(values.is_null().to_numpy(zero_copy_only=False).argmax())
        values = _fill_nulls(item, name, values, lambda _: (row,))
    return np.asarray(values.to_numpy(zero_copy_only=False))


def _pad(item: InputColumn, name: str, values: pa.Array) -> np.ndarray:
    """Returns lists `[rows, length]` with the pad token behind their ends."""
    lengths, flat = _count_values(values), values.flatten()
    if item.length is not None:
        bad = (lengths != item.length) & (lengths != 0)
        if bad.any():
            row = int(bad.argmax())
            allowed = f"a list of {item.length} values, or none"
            raise WrongValueError(name, (row,), show(values[row].as_py()), allowed)
    if flat.null_count:
        flat = _fill_nulls(item, name, flat, lambda position: _find_place(lengths, position))
    width = item.length or max(1, int(lengths.max(initial=0)))
    array = np.asarray(flat.to_numpy(zero_copy_only=False))
    if len(array) == width * len(lengths):
        return array.reshape(len(lengths), width)
    padded = np.full((len(lengths), width), item.padding, array.dtype)
    padded[np.arange(width) < lengths[:, np.newaxis]] = array
    return padded


def _fill_nulls(
    item: InputColumn, name: str, values: pa.Array, place: Callable[[int], tuple[int, ...]]
) -> pa.Array:
    if (missing := item.missing) is None:
        position = int(values.is_null().to_numpy(zero_copy_only=False).argmax())
        problem = "has no value for a missing one: give it"
        raise WrongValueError(name, place(position), "no value", _WORDS[item.dtype], problem)
    return values.fill_null(pa.scalar(missing, values.type))


def _count_values(lists: pa.Array) -> np.ndarray:
    """Returns the lengths of lists, `[rows]`; a list that is null has none."""
    lengths = pc.list_value_length(lists)
    return np.asarray(lengths.fill_null(0).to_numpy(zero_copy_only=False))


def _find_place(lengths: np.ndarray, position: int) -> tuple[int, int]:
    """Returns the row of a value among the values of all lists, and its position there."""
    ends = np.cumsum(lengths)
    row = int(np.searchsorted(ends, position, side="right"))
    return row, position - int(ends[row] - lengths[row])


def convert(item: InputColumn, values: pa.Array) -> pa.Array:
    """Returns values of a column, or text that the build parses, as the Arrow type of an input.

    Raises:
        pa.ArrowException, TypeError, ValueError or OverflowError: One is none of the type.
    """
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if _is_text(values.type):
        values = values.cast(pa.string())
        if item.is_parsed:
            values = pc.if_else(pc.equal(values, ""), pa.scalar(None, pa.string()), values)
            values = values if item.is_list else _take_pairs(item, values)
    if item.is_list:
        return _convert_lists(item, values)
    if item.read_unit is None:
        return _cast(values, item.arrow_type)
    return scale_epochs(item, _cast(read_times(item, values), item.arrow_type))


def _convert_lists(item: InputColumn, values: pa.Array) -> pa.Array:
    leaf, is_text = item.arrow_type.value_type, _is_text(values.type)
    if values.type.equals(item.arrow_type) or pa.types.is_null(values.type):
        return values.cast(item.arrow_type)
    if is_text and item.separator is not None:
        lists = pc.split_pattern(values, item.separator)
    elif _is_list(values.type):
        lists = values.cast(pa.list_(values.type.value_type))
    else:
        raise TypeError(f"{values.type} is no list")
    lengths = _count_values(lists)
    ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    flat = lists.flatten()
    flat = _cast(_take_pairs(item, flat) if is_text else flat, leaf)
    if is_text:
        if flat.null_count:
            raise ValueError("an entry has no second value")
        if item.written is not None and item.written.is_oldest_first:
            flat = flat.take(pa.array(_reverse(ends, lengths)))
    return pa.ListArray.from_arrays(pa.array(ends), flat, mask=lists.is_null())


def _reverse(ends: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the positions of all values, those of each list from its last one on."""
    starts, last = np.repeat(ends[:-1], lengths), np.repeat(ends[1:] - 1, lengths)
    return np.asarray(last - (np.arange(len(starts)) - starts))


def _take_pairs(item: InputColumn, entries: pa.Array) -> pa.Array:
    """Returns the values of an input of entries of one or two values; null where none is there."""
    form = item.written
    if form is None or form.pair_separator is None:
        return entries
    parts = pc.split_pattern(entries, form.pair_separator)
    lengths, flat = _count_values(parts), parts.flatten()
    if (lengths > 2).any() or pc.any(pc.equal(flat, "")).as_py():
        raise ValueError(f"an entry is no `value` or `value{form.pair_separator}second`")
    starts = np.cumsum(lengths) - lengths
    missing = lengths < (2 if form.is_second else 1)
    taken = flat.take(pa.array(starts + form.is_second, mask=missing))
    if not form.is_second or form.default is None:
        return taken
    return pc.if_else(pa.array(lengths == 1), pa.scalar(str(form.default)), taken)


def _cast(values: pa.Array, target: pa.DataType) -> pa.Array:
    """Returns values as a type of an input, text of numbers as a build reads it."""
    kind = values.type
    if kind.equals(target):
        return values
    if pa.types.is_temporal(kind):
        # A number of what unit: the build's column had one, the file's another.
        raise TypeError(f"values of type {kind} cannot become {target}")
    if pa.types.is_binary(target):
        # Every engine writes these values as the same text; of floats none does.
        is_exact = pa.types.is_integer, pa.types.is_boolean, pa.types.is_decimal
        return (values.cast(pa.string()) if any(f(kind) for f in is_exact) else values).cast(target)
    if _is_text(kind):
        texts = pc.ascii_trim_whitespace(values)
        return _parse_whole(texts, target) if pa.types.is_integer(target) else texts.cast(target)
    if pa.types.is_integer(target) and pa.types.is_floating(kind):
        _check_exact(values)
    # Whole numbers become the nearest floats; floats become whole numbers only if they are.
    is_rounded = pa.types.is_floating(target) and pa.types.is_integer(kind)
    return values.cast(target, safe=not is_rounded)


def _parse_whole(texts: pa.Array, target: pa.DataType) -> pa.Array:
    """Returns texts as whole numbers; `10.0` is what pandas writes of 10 beside missing ones."""
    is_whole = pc.match_substring_regex(texts, _WHOLE)
    whole = pc.if_else(is_whole, pc.replace_substring_regex(texts, r"^\+", ""), None)
    others = pc.if_else(is_whole, None, texts).cast(pa.float64())
    _check_exact(others)
    return pc.coalesce(whole.cast(target), others.cast(target))


def _check_exact(values: pa.Array) -> None:
    """Refuses floats that may have been other whole numbers; whether they are any, a cast tells."""
    if pc.any(pc.greater_equal(pc.abs(values), float(EXACT))).as_py():
        raise ValueError("whole numbers beyond 2^53")


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_list(kind: pa.DataType) -> bool:
    tests = pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list
    return any(test(kind) for test in tests)


def describe(item: InputColumn) -> str:
    """Returns in words what a value may be."""
    form = item.written
    if item.read_unit is not None and not item.is_list:
        return describe_time(item)
    what = f"a list of {_WORDS[item.dtype]}" if item.is_list else _WORDS[item.dtype]
    if form is None or (form.separator is None and form.pair_separator is None):
        return what
    entry = "value" if form.pair_separator is None else f"value{form.pair_separator}second"
    if not item.is_list:
        return f"{entry!r}, as the build reads {form.column!r}; or {what}"
    order = ", the latest last" if form.is_oldest_first else ""
    own = f"text of entries {entry!r} between {form.separator!r}{order}, as the build reads it"
    return f"{own}; or {what}, the latest first"
