"""Values of a column as the type of an input: numbers, text, lists, times, and text of any of them.

What a build reads of a source is read here alike, of Arrow's columns and of JSON. Like
`training.raw_inputs.raw_columns` this is shipped to executors without TensorFlow and Sluice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from training.raw_inputs.input_columns import InputColumn
from training.raw_inputs.written_values import (
    EPOCHS,
    Scalar,
    convert_times,
    describe_time,
    parse_entry,
    parse_lists,
    parse_texts,
    parse_time,
    scale_epochs,
)

TYPES = {
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.binary(),
}
WORDS = {"int64": "whole numbers", "float32": "numbers", "float64": "numbers", "string": "text"}
BAD_VALUES = (pa.ArrowException, TypeError, ValueError, OverflowError)
DEFAULT_SEPARATOR = "|"
"""Separates the values of lists in CSV, where neither the build nor the user says otherwise."""
EXACT = 1 << 53
"""Below it a float64 holds every whole number; one that is not below may have been another one."""

Values: TypeAlias = pa.Array | list[Any]
"""Values of a column, as they are given: Arrow's, or those of JSON."""


@dataclass(frozen=True)
class ColumnReader:
    """Reads the values of a column for an input.

    Attributes:
        item: The input.
        list_separator: Separates the values of lists that come as text; None: what the build
            declares, and nothing where it declares nothing.
        is_delimited: Whether the column is of CSV.
        is_paired: Whether the column's text has the values as second ones of its entries.
    """

    item: InputColumn
    list_separator: str | None = None
    is_delimited: bool = False
    is_paired: bool = False

    @property
    def _target(self) -> pa.DataType:
        dtype = TYPES[self.item.dtype]
        return pa.list_(dtype) if self.item.is_list else dtype

    def convert(self, values: Values) -> pa.Array:
        """Returns values as the type of the input.

        Raises:
            pa.ArrowException, TypeError, ValueError or OverflowError: One is none of the type.
        """
        texts = find_texts(values)
        others = len(values) if texts is None else texts.null_count
        if self.is_paired and others > _count_nulls(values):
            raise ValueError("second values that are not in a text stand in a column of their own")
        if self.item.is_list:
            return self._convert_lists(values, texts)
        form, unit = self.item.written, self.item.read_unit
        if form is not None and form.pair_separator is not None and texts is not None:
            parsed = parse_texts(texts, self._parse_entry, TYPES[self.item.dtype])
            return _merge_texts(values, texts, parsed, self._target)
        if unit is None:
            return convert(values, self._target)
        return scale_times(self.item, self._convert_times(values, unit))

    def _convert_lists(self, values: Values, texts: pa.Array | None) -> pa.Array:
        form, target = self.item.written, self._target
        if texts is None:
            return convert(values, target)
        if self.list_separator is None and form is not None and form.separator is not None:
            parsed = parse_lists(texts, form, self.item.dtype, target.value_type)
            return _merge_texts(values, texts, parsed, target)
        if not self.is_delimited or self.is_paired:
            return convert(values, target)
        return convert(pc.split_pattern(texts, self.list_separator or DEFAULT_SEPARATOR), target)

    def _convert_times(self, values: Values, unit: str) -> pa.Array:
        if isinstance(values, pa.Array) and _is_temporal(values.type):
            return convert_times(values, unit).cast(self._target, safe=False)
        written = self.item.time_form
        values = _text_of_fractions(values, written)
        if (texts := find_texts(values)) is None:
            return convert(values, self._target)

        def parse(text: str) -> int | None:
            return parse_time(text, written, unit) if text else None

        times = parse_texts(texts, parse, pa.int64()).cast(self._target, safe=False)
        return _merge_texts(values, texts, times, self._target)

    def _parse_entry(self, text: str) -> Scalar | None:
        form = self.item.written
        return parse_entry(text, form, self.item.dtype) if form is not None and text else None

    def describe(self) -> str:
        """Returns in words what a value may be."""
        item, form = self.item, self.item.written
        if item.read_unit is not None and not item.is_list:
            return describe_time(item.time_form, item.read_unit)
        what = f"a list of {WORDS[item.dtype]}" if item.is_list else WORDS[item.dtype]
        if form is None or (form.separator is None and form.pair_separator is None):
            return what
        if self.list_separator is not None and item.is_list:
            return f"{what}, between {self.list_separator!r}"
        entry = "value" if form.pair_separator is None else f"value{form.pair_separator}second"
        if not item.is_list:
            return f"{entry!r}, as the build reads {form.column!r}; or {what}"
        order = ", the latest last" if form.is_oldest_first else ""
        own = f"text of entries {entry!r} between {form.separator!r}{order}, as the build reads it"
        return own if self.is_paired else f"{own}; or {what}, the latest first"


def scale_times(item: InputColumn, values: pa.Array) -> pa.Array:
    """Turns dates in the unit of the source into that which the model reads."""
    if item.written is None or item.written.time is None or not pa.types.is_int64(values.type):
        return values
    numbers = values.fill_null(0).to_numpy(zero_copy_only=False)
    scaled = scale_epochs(numbers, item.written.time, "ms")
    if scaled is numbers:
        return values
    return pa.array(scaled, values.type, mask=values.is_null().to_numpy(zero_copy_only=False))


def text_of_fraction(value: Any, written: str) -> Any:
    """Returns a float of JSON that an epoch may be as text, which is read to the digit."""
    is_fraction = type(value) is float and written in EPOCHS and not value.is_integer()
    return repr(value) if is_fraction else value


def _text_of_fractions(values: Values, written: str) -> Values:
    if not isinstance(values, pa.Array):
        return [text_of_fraction(value, written) for value in values]
    is_float = pa.types.is_floating(values.type)
    if written not in EPOCHS or not (is_float or pa.types.is_decimal(values.type)):
        return values
    if is_float:
        _check_exact(values)
    return values.cast(pa.string())


def find_texts(values: Values) -> pa.Array | None:
    """Returns values that are text, null where they are something else; None: none is text."""
    if isinstance(values, pa.Array):
        is_text = pa.types.is_string(values.type) or pa.types.is_large_string(values.type)
        return values.cast(pa.string()) if is_text else None
    if not any(type(value) is str for value in values):
        return None
    return pa.array([value if type(value) is str else None for value in values], pa.string())


def _count_nulls(values: Values) -> int:
    if isinstance(values, pa.Array):
        return int(values.null_count)
    return sum(value is None for value in values)


def _merge_texts(
    values: Values, texts: pa.Array, parsed: pa.Array, target: pa.DataType
) -> pa.Array:
    """Returns parsed texts, with the other values of JSON where it has both."""
    if isinstance(values, pa.Array) or texts.null_count == _count_nulls(values):
        return parsed
    others = [None if type(value) is str else value for value in values]
    return pc.coalesce(parsed, convert(others, target))


def convert(values: Values, target: pa.DataType) -> pa.Array:
    """Returns values as a type.

    Raises:
        pa.ArrowException, TypeError, ValueError or OverflowError: One is none of the type.
    """
    if not isinstance(values, pa.Array):
        return pa.array(_check_json(values, target), target)
    if _is_temporal(values.type) and values.type != target:
        # A number of what unit: the build's column had one, the file's another.
        raise pa.ArrowInvalid(f"values of type {values.type} cannot become {target}")
    leaf, parsed = (getattr(kind, "value_type", kind) for kind in (target, values.type))
    if pa.types.is_binary(leaf) and _has_exact_text(parsed):
        as_text = pa.list_(pa.string()) if leaf is not target else pa.string()
        return values.cast(as_text).cast(target)
    if pa.types.is_integer(leaf) and pa.types.is_floating(parsed):
        _check_exact(values if parsed is values.type else values.flatten())
    if pa.types.is_string(parsed) and not pa.types.is_binary(leaf):
        flat = pc.ascii_trim_whitespace(values if parsed is values.type else values.flatten())
        numbers = _parse_whole(flat) if pa.types.is_integer(leaf) else flat.cast(leaf)
        return numbers if parsed is values.type else _wrap(numbers, values)
    # Whole numbers become the nearest floats; floats become whole numbers only if they are.
    is_rounded = pa.types.is_floating(leaf) and pa.types.is_integer(parsed)
    return values.cast(target, safe=not is_rounded)


_WHOLE = r"^[+-]?[0-9]+$"


def _parse_whole(texts: pa.Array) -> pa.Array:
    """Returns texts as int64; `10.0` is what pandas writes of 10 where others are missing.

    Raises:
        pa.ArrowException: One is no whole number, or may have been another one.
    """
    is_whole = pc.match_substring_regex(texts, _WHOLE)
    whole = pc.if_else(is_whole, pc.replace_substring_regex(texts, r"^\+", ""), None)
    others = pc.if_else(is_whole, None, texts).cast(pa.float64())
    _check_exact(others)
    return pc.coalesce(whole.cast(pa.int64()), others.cast(pa.int64()))


def _wrap(flat: pa.Array, lists: pa.Array) -> pa.Array:
    """Returns values in the lists that they came in."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    return pa.ListArray.from_arrays(offsets, flat, mask=lists.is_null())


def _has_exact_text(kind: pa.DataType) -> bool:
    """Whether every engine writes the values of a type as the same text; of floats none does."""
    is_exact = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_decimal)
    return any(test(kind) for test in is_exact)


def to_text(value: Any) -> Any:
    """Returns a whole number or a boolean of JSON as the text that a build reads of it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else value


def _check_json(values: list[Any], target: pa.DataType) -> list[Any]:
    """Returns values of JSON that Arrow would take for others: it reads true as 1.0, 2.5 as 2."""
    leaf = target.value_type if pa.types.is_list(target) else target
    if leaf is not target:
        if any(isinstance(one, str) for one in values):
            raise TypeError("text is no list")
        return [one if one is None else _check_json(list(one), leaf) for one in values]
    if pa.types.is_binary(leaf):
        return [to_text(value) for value in values]
    if not (pa.types.is_floating(leaf) or pa.types.is_integer(leaf)):
        return values
    kinds = set(map(type, values))
    if not kinds <= {int, float, type(None)}:
        raise TypeError(kinds)
    if pa.types.is_floating(leaf):  # Arrow refuses whole numbers that a float32 rounds.
        return values if int not in kinds else [v if v is None else float(v) for v in values]
    if float not in kinds:
        return values
    return [to_whole(value) if type(value) is float else value for value in values]


def to_whole(value: float) -> int:
    """Returns a float that is a whole number as one: `10.0` is 10.

    Raises:
        ValueError: It is none, or not below 2^53, where it may have been another one.
    """
    if not value.is_integer() or abs(value) >= EXACT:
        raise ValueError(f"{value} is no whole number below 2^53")
    return int(value)


def _check_exact(values: pa.Array) -> None:
    """Refuses floats that may have been other whole numbers; whether they are any, a cast tells."""
    if pc.any(pc.greater_equal(pc.abs(values), float(EXACT))).as_py():
        raise pa.ArrowInvalid("whole numbers beyond 2^53")


def _is_temporal(kind: pa.DataType) -> bool:
    """Whether values are times, or lists of them."""
    return bool(pa.types.is_temporal(getattr(kind, "value_type", kind)))
