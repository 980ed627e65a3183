"""Raw values of some rows as the arrays that a model takes.

The only code that knows how a raw value looks after the build: types, times, lists and pairs in
text, missing values, padding.
"""

from __future__ import annotations

import base64
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import InputDataError, did_you_mean
from training.raw_inputs.inputs import TYPES, Choice, InputColumn, SourceNames, WrittenForm

FINITE = "finite numbers up to 3.4e38, the largest float32"
_EXACT = 1 << 53  # Whole numbers below it are exact in float64; others may have been another one.
_BAD_VALUES = (pa.ArrowException, TypeError, ValueError, OverflowError)
_NULL = type(None)

Column: TypeAlias = pa.Array | Sequence[Any]
Columns: TypeAlias = Mapping[str, Column]


@dataclass(eq=False)
class WrongValueError(Exception):
    """A value is not what an input takes."""

    column: str
    said: str  # what is wrong, after the column's name
    place: tuple[int, ...] = ()  # row from 0, position in a list; nothing where all are meant


@dataclass(frozen=True)
class RawRows:
    """Some rows of a source, as the encoders take them."""

    first: int  # number of the first one; the source's first row is 1
    ids: pa.Array  # numbers of the rows, or the values of the column that names them
    inputs: dict[str, np.ndarray]  # by name, `[rows]` or `[rows, length]`; text as bytes


class RawColumns:
    """Turns columns of raw values, once `choose` says which are read, into what a model takes."""

    def __init__(self, inputs: Sequence[InputColumn], place: str) -> None:
        self.inputs, self._place = tuple(inputs), place
        self._names = SourceNames(self.inputs)
        self._chosen: dict[str, Choice] = {}
        self._id_column: str | None = None
        self._id_type: pa.DataType | None = None

    def choose(self, found: Sequence[str], id_column: str | None = None) -> list[str]:
        self._id_column, self._id_type = id_column, None
        self._chosen = {item.name: self._names.choose(item.name, found) for item in self.inputs}
        ids = [] if id_column is None else [id_column]
        missing = [name for name, chosen in self._chosen.items() if not chosen.names]
        if missing := [*missing, *(name for name in ids if name not in found)]:
            read = [f"{i.name} (of {i.column}, {_describe_type(i)})" for i in self.inputs]
            raise InputDataError(
                f"{self._place} lacks columns that the model reads",
                received=f"missing: {', '.join(missing)}; found: {', '.join(found)}",
                allowed=", ".join(read),
                fix=did_you_mean(missing[0], found),
            )
        return list(dict.fromkeys(chain(*(one.names for one in self._chosen.values()), ids)))

    def build(self, columns: Columns, first: int) -> RawRows:
        """Builds rows from number `first` on; a wrong value is named by its row."""
        items = self._names.by_name.items()
        try:
            inputs = {name: build_input(i, self._chosen[name], columns) for name, i in items}
        except WrongValueError as error:
            row = f"row {first + error.place[0]}" if error.place else f"from row {first} on"
            said = f"{self._place}, {row}: column {error.column!r} {error.said}"
            raise InputDataError(said) from error
        return RawRows(first, self._build_ids(columns, first), inputs)

    def _build_ids(self, columns: Columns, first: int) -> pa.Array:
        if (name := self._id_column) is None:
            return pa.array(np.arange(first, first + len(next(iter(columns.values())))))
        try:
            ids = columns[name]
            ids = ids if isinstance(ids, pa.Array) else pa.array(ids)
            ids = ids.cast(self._id_type or ids.type)
        except pa.ArrowException as error:
            place = f"{self._place}, from row {first} on: column {name!r}"
            raise InputDataError(f"{place} has ids of several types", received=error) from error
        self._id_type = ids.type
        return ids


def separate_lists(inputs: Iterable[InputColumn], separator: str | None) -> list[InputColumn]:
    """Returns inputs whose lists come as text: between separators as given, of the build, or `|`.

    A separator that is given has single values between it, the latest first.
    """
    return [
        replace(item, written=WrittenForm(item.column, separator=separator or "|"))
        if item.is_list and (separator or item.separator is None)
        else item
        for item in inputs
    ]


def build_input(item: InputColumn, chosen: Choice, columns: Columns) -> np.ndarray:
    """Returns an input, `[rows]` or `[rows, length]`; text as bytes."""
    values, name = merge_columns(item, chosen, columns), chosen.names[0]
    if item.length is not None:
        lengths = _count_values(values)
        bad = (lengths != item.length) & (lengths != 0)
        if bad.any():
            row, allowed = int(bad.argmax()), f"a list of {item.length} values, or none"
            raise _refuse(name, allowed, _take(values, row), (row,))
    array = to_dense(_fill_nulls(item, name, values), item.padding, item.length)
    if item.time_unit is not None and (said := item.find_wrong_times(array)) is not None:
        raise WrongValueError(name, said)
    return array


def to_dense(values: pa.Array, padding: float | bytes = 0, width: int | None = None) -> np.ndarray:
    """Returns values without nulls `[rows]`; lists `[rows, width]`, or as wide as the longest."""
    if not _is_list(values):
        return np.asarray(values.to_numpy(zero_copy_only=False))
    lengths, flat = _count_values(values), values.flatten().to_numpy(zero_copy_only=False)
    width = width or max(1, int(lengths.max(initial=0)))
    if len(flat) == width * len(lengths):
        return np.asarray(flat.reshape(len(lengths), width))
    dense = np.full((len(lengths), width), padding, flat.dtype)
    dense[np.arange(width) < lengths[:, np.newaxis]] = flat
    return dense


def merge_columns(item: InputColumn, chosen: Choice, columns: Columns) -> pa.Array:
    """Returns the values of an input as its Arrow type: in each row the first that is there."""
    first, *others = chosen.names
    found = _read(item, first, columns[first], is_paired=first in chosen.paired)
    for name in others:
        if found.null_count or name == chosen.twin:
            values = _read(item, name, columns[name], is_paired=name in chosen.paired)
            if name == chosen.twin:
                _check_same(chosen, found, values)
            found = pc.coalesce(found, values)
    # A list in place of a text lacks the second values that the text would have.
    for name in set(chosen.paired).intersection(chosen.names) if found.null_count else ():
        for row in np.flatnonzero(found.is_null().to_numpy(zero_copy_only=False)).tolist():
            if isinstance(value := _take(columns[name], row), list) and value:
                raise _refuse(name, describe(item), value, (row,))
    return found


def _refuse(name: str, allowed: str, value: Any, place: tuple[int, ...]) -> WrongValueError:
    return WrongValueError(name, f"must be {allowed}; received {show(value)}", place)


def _take(column: Column, row: int) -> Any:
    return column[row].as_py() if isinstance(column, pa.Array) else column[row]


def _read(item: InputColumn, name: str, column: Column, *, is_paired: bool) -> pa.Array:

    def read(given: Any) -> pa.Array:
        is_arrow = isinstance(given, pa.Array)
        parts = [given] if is_arrow else _split_json(given, item, texts_only=is_paired)
        arrays = [_convert(item, one) for one in parts if not is_paired or _is_text(one)]
        if len(arrays) == 1:
            return arrays[0]
        return pc.coalesce(*arrays) if arrays else pa.nulls(len(given), item.arrow_type)

    try:
        values = read(column)
    except _BAD_VALUES:
        raise _find_wrong(item, name, column, read) from None
    if item.dtype.startswith("float"):
        _check_finite(name, values, column)
    return values


def _find_wrong(
    item: InputColumn, name: str, column: Column, read: Callable[[Any], pa.Array]
) -> WrongValueError:
    """Finds the first row that cannot be read, by halves: a request may hold very many."""

    def find_error(rows: range) -> Exception | None:
        try:
            read(column[rows.start : rows.stop])
        except _BAD_VALUES as error:
            return error
        return None

    rows = range(len(column))
    while (half := len(rows) // 2) > 0:
        rows = rows[half:] if find_error(rows[:half]) is None else rows[:half]
    error, row = find_error(rows), rows.start
    reason = f" ({error})" if type(error) is ValueError else ""
    said = f"must be {describe(item)}; received {show(_take(column, row))}{reason}"
    return WrongValueError(name, said, (row,))


def _check_finite(name: str, values: pa.Array, column: Column) -> None:
    """Refuses numbers that are not finite; a missing value is null, and no number."""
    flat = _flatten(values)
    flat = flat.fill_null(0.0) if flat.null_count else flat
    bad = find_bad_number(flat.to_numpy(zero_copy_only=False))
    if bad is not None:
        place, allowed = _find_place(values, bad), f"{FINITE}, and null or an empty field of CSV"
        raise _refuse(name, f"{allowed} where one is missing", _take(column, place[0]), place)


def find_bad_number(values: np.ndarray) -> int | None:
    """Returns the flat position of the first NaN, infinity or overflow of float32, if there is."""
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(values.astype(np.float32, copy=False))
    return None if is_finite.all() else int(is_finite.argmin())


def _check_same(chosen: Choice, own: pa.Array, source: pa.Array) -> None:
    """Refuses a row that says one input by its name and by its source's column, differently."""
    both = pc.and_(own.is_valid(), source.is_valid())
    if not own.filter(both).equals(source.filter(both)):
        pairs = list(zip(own.to_pylist(), source.to_pylist(), strict=True))
        row = next(n for n, (a, b) in enumerate(pairs) if None not in (a, b) and a != b)
        shown = " and ".join(map(show, pairs[row]))
        said = f"is made of {chosen.twin!r}, and both are given and differ: {shown}"
        raise WrongValueError(chosen.names[0], said, (row,))


def _fill_nulls(item: InputColumn, name: str, values: pa.Array) -> pa.Array:
    flat = _flatten(values)
    if not flat.null_count:
        return values
    if item.missing is None:
        position = int(flat.is_null().to_numpy(zero_copy_only=False).argmax())
        place = _find_place(values, position)
        raise WrongValueError(name, "has no value for a missing one", place)
    flat = flat.fill_null(pa.scalar(item.missing, flat.type))
    return _make_lists(flat, _count_values(values)) if item.is_list else flat


def _flatten(values: pa.Array) -> pa.Array:
    return values.flatten() if _is_list(values) else values


def _make_lists(flat: pa.Array, lengths: np.ndarray, mask: pa.Array | None = None) -> pa.Array:
    ends = np.concatenate(([0], np.cumsum(lengths)))
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), flat, mask=mask)


def _count_values(lists: pa.Array) -> np.ndarray:
    """Returns the lengths of lists, `[rows]`; a list that is null has none."""
    if isinstance(lists, pa.ListArray) and not lists.null_count:  # Many times as fast.
        ends = lists.offsets.to_numpy()
        return np.asarray(ends[1:] - ends[:-1])
    return np.asarray(pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False))


def _find_place(values: pa.Array, position: int) -> tuple[int, ...]:
    """Returns the row of a value among all those of rows, and of lists its position there."""
    if not _is_list(values):
        return (position,)
    ends = np.cumsum(_count_values(values))
    row = int(np.searchsorted(ends, position, side="right"))
    return row, position - int(ends[row - 1] if row else 0)


def _convert(item: InputColumn, values: pa.Array) -> pa.Array:
    if _is_text(values):
        values = values.cast(pa.string())
        if item.is_parsed:
            values = pc.if_else(pc.equal(values, ""), pa.scalar(None, pa.string()), values)
    if item.is_list:
        return _convert_lists(item, values)
    if _is_text(values):
        values = _take_pairs(item.written, values)
    times = values if item.read_unit is None else item.read_times(values)
    return _cast(times, item.arrow_type)


def _convert_lists(item: InputColumn, values: pa.Array) -> pa.Array:
    if values.type.equals(item.arrow_type):
        return values
    if pa.types.is_null(values.type):
        return pa.nulls(len(values), item.arrow_type)
    if is_text := _is_text(values) and item.separator is not None:
        values = pc.split_pattern(values, item.separator)
    if not _is_list(values):
        raise TypeError(f"{values.type} is no list")
    flat, lengths = values.flatten(), _count_values(values)
    flat = _cast(_take_pairs(item.written, flat) if is_text else flat, item.arrow_type.value_type)
    if is_text and flat.null_count:
        raise ValueError("an entry has no second value")
    if is_text and item.written is not None and item.written.is_oldest_first:
        ends = np.cumsum(lengths)
        mirrored = np.repeat(2 * ends - lengths - 1, lengths)
        flat = flat.take(pa.array(mirrored - np.arange(len(flat))))
    return _make_lists(flat, lengths, values.is_null())


def _take_pairs(form: WrittenForm | None, entries: pa.Array) -> pa.Array:
    """Returns an input's values of entries of one or two values; null where none is there."""
    if form is None or form.pair_separator is None:
        return entries
    parts = pc.split_pattern(entries, form.pair_separator)
    lengths, flat = _count_values(parts), parts.flatten()
    if (lengths > 2).any() or pc.any(pc.equal(flat, "")).as_py():
        raise ValueError(f"an entry is no `value` or `value{form.pair_separator}second`")
    starts = np.cumsum(lengths) - lengths
    taken = flat.take(pa.array(starts + form.is_second, mask=lengths <= form.is_second))
    if not form.is_second or form.default is None:
        return taken
    return pc.if_else(pa.array(lengths == 1), pa.scalar(str(form.default)), taken)


def _cast(values: pa.Array, target: pa.DataType) -> pa.Array:
    """Returns values as a type of an input, text of numbers as a build reads it."""
    kind, types = values.type, pa.types
    if kind.equals(target):
        return values
    if types.is_temporal(kind):
        # A number of what unit: the build's column had one, the file's another.
        raise TypeError(f"values of type {kind} cannot become {target}")
    if types.is_binary(target):
        # Every engine writes these values as the same text; of floats none does.
        if types.is_integer(kind) or types.is_boolean(kind) or types.is_decimal(kind):
            values = values.cast(pa.string())
        return values.cast(target)
    if _is_text(values):
        texts = pc.ascii_trim_whitespace(values)
        return _parse_whole(texts, target) if types.is_integer(target) else texts.cast(target)
    if types.is_integer(target) and types.is_floating(kind):
        _check_exact(values)
    # Whole numbers become the nearest floats; floats become whole numbers only if they are.
    return values.cast(target, safe=not (types.is_floating(target) and types.is_integer(kind)))


def _parse_whole(texts: pa.Array, target: pa.DataType) -> pa.Array:
    """Returns texts as whole numbers; `10.0` is what pandas writes of 10 beside missing ones."""
    is_whole = pc.match_substring_regex(texts, "^[+-]?[0-9]+$")
    whole = pc.if_else(is_whole, pc.replace_substring_regex(texts, r"^\+", ""), None)
    others = pc.if_else(is_whole, None, texts).cast(pa.float64())
    _check_exact(others)
    return pc.coalesce(whole.cast(target), others.cast(target))


def _check_exact(values: pa.Array) -> None:
    """Refuses floats that may have been other whole numbers; whether they are any, a cast tells."""
    if pc.any(pc.greater_equal(pc.abs(values), float(_EXACT))).as_py():
        raise ValueError("whole numbers beyond 2^53")


def _is_text(values: pa.Array) -> bool:
    return bool(pa.types.is_string(values.type) or pa.types.is_large_string(values.type))


def _is_list(values: pa.Array) -> bool:
    return pa.types.is_nested(values.type) and hasattr(values.type, "value_type")


def describe(item: InputColumn) -> str:
    form, what = item.written, _describe_type(item)
    if item.read_unit is not None and not item.is_list:
        return item.describe_time()
    if form is None or not item.is_parsed:
        return what
    entry = "value" if form.pair_separator is None else f"value{form.pair_separator}second"
    between = f" between {form.separator!r}" if item.is_list else ""
    order = ", the latest last" if form.is_oldest_first else ""
    return f"text of entries {entry!r}{between}{order}, as the build reads it; or {what}"


def _describe_type(item: InputColumn) -> str:
    words = "whole numbers" if item.dtype.startswith("i") else "numbers"
    return f"{'a list of ' if item.is_list else ''}{'text' if item.dtype == 'string' else words}"


def _split_json(values: Sequence[Any], item: InputColumn, *, texts_only: bool) -> list[pa.Array]:
    """Returns text that is taken apart, and all other values: all rows, null where not of each."""
    if item.epoch_unit is not None:  # A fraction is read to the digit.
        values = [repr(v) if type(v) is float and not v.is_integer() else v for v in values]
    kinds, texts = set(map(type, values)), []
    if str in kinds and (item.is_parsed or item.is_list or item.dtype != "string"):
        if not item.is_parsed:
            raise TypeError("text")
        texts = [pa.array([v if type(v) is str else None for v in values], pa.string())]
        values = [None if type(v) is str else v for v in values]
        kinds = kinds - {str} | {_NULL}
    if texts_only or (texts and kinds == {_NULL}):
        return texts
    build = _build_lists if item.is_list else _build_leaves
    return [*texts, build(values, kinds, item.dtype)]


def _build_lists(values: Sequence[Any], kinds: set[type], dtype: str) -> pa.Array:
    if not kinds <= {list, _NULL}:
        raise TypeError(kinds)
    lengths = [0 if value is None else len(value) for value in values]
    leaves = list(chain.from_iterable(filter(None, values)))
    flat = _build_leaves(leaves, set(map(type, leaves)), dtype)
    mask = pa.array([value is None for value in values]) if _NULL in kinds else None
    return _make_lists(flat, np.array(lengths, np.int64), mask)


def _build_leaves(values: Sequence[Any], kinds: set[type], dtype: str) -> pa.Array:
    if dtype == "string":
        try:
            known = kinds <= {str, bytes, _NULL}
            return pa.array(values if known else map(_to_text, values), pa.binary())
        except UnicodeEncodeError as error:
            raise ValueError("text holds half of a character") from error
    if not kinds <= {int, float, _NULL}:  # Arrow takes true for 1.
        raise TypeError(kinds)
    if dtype.startswith("float"):  # Arrow refuses whole numbers that a float rounds.
        values = [float(v) if type(v) is int else v for v in values] if int in kinds else values
    elif float in kinds:  # A float becomes a whole number only if it is one.
        whole = pa.array([v if type(v) is int else None for v in values], TYPES[dtype])
        floats = pa.array([v if type(v) is float else None for v in values], pa.float64())
        return pc.coalesce(whole, _cast(floats, TYPES[dtype]))
    return pa.array(values, TYPES[dtype])


def _to_text(value: Any) -> str | bytes | None:
    """Returns text as a build reads it of whole numbers and booleans, bytes of `{"b64": …}`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict) and set(value) == {"b64"} and isinstance(value["b64"], str):
        try:
            return base64.b64decode(value["b64"], validate=True)
        except ValueError as error:
            raise ValueError(f"b64 does not decode: {error}") from error
    if value is None or isinstance(value, int | str | bytes):
        return str(value) if isinstance(value, int) else value
    raise TypeError(type(value))


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 100
_SHORT.maxlist, _SHORT.maxdict, _SHORT.maxlevel = 20, 10, 4


def show(value: Any) -> str:
    text = "no value" if value is None else _SHORT.repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
