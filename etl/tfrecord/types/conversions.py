"""Conversions of values and lists from one Arrow type to another, and what refuses them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class Refusal:
    """A value that cannot be converted.

    Attributes:
        index: Where it stands among the values converted.
        what: What is wrong with it, after the words "column x has".
        received: The value.
        allowed: What would have been accepted.
        fix: What to do about it.
    """

    index: int
    what: str
    received: str
    allowed: str
    fix: str


Converted = tuple[pa.Array, Refusal | None]


@dataclass(frozen=True)
class ValueRule:
    """Conversion of values of one type; picklable.

    Attributes:
        target: Type of the result.
        function: Converts values, nulls remaining nulls, and finds the first that is refused;
            None where values stay as they are.
        arguments: What the function takes beside the values.
    """

    target: pa.DataType
    function: Callable[..., Converted] | None = None
    arguments: tuple[Any, ...] = ()

    @property
    def is_identity(self) -> bool:
        """Whether nothing is converted."""
        return self.function is None

    def convert(self, values: pa.Array) -> Converted:
        """Converts values; also returns the first that is refused."""
        return (values, None) if self.function is None else self.function(values, *self.arguments)


def cast_values(values: pa.Array, target: pa.DataType) -> Converted:
    """Casts to a type that holds all values of the source type."""
    return values.cast(target), None


def decode_dictionary(values: pa.Array) -> Converted:
    """Replaces dictionary indices by what they stand for."""
    return values.dictionary_decode(), None


def chain_rules(first: ValueRule, second: ValueRule) -> ValueRule:
    """Both rules in turn, without what does nothing; each keeps the number of values."""
    if first.is_identity:
        return second
    if second.is_identity:
        return first
    return ValueRule(second.target, _convert_in_turn, (first, second))


def _convert_in_turn(values: pa.Array, first: ValueRule, second: ValueRule) -> Converted:
    values, refusal = first.convert(values)
    return second.convert(values) if refusal is None else (values, refusal)


def as_numbers(values: pa.Array) -> np.ndarray:
    """Numbers `[values]`, with zeros where they are null."""
    if values.null_count:
        values = values.fill_null(False if pa.types.is_boolean(values.type) else 0)
    return values.to_numpy(zero_copy_only=False)


def buffer_address(buffer: pa.Buffer | None) -> int:
    """Address of an Arrow buffer, 0 where there is none."""
    return 0 if buffer is None else buffer.address


def null_mask(values: pa.Array) -> np.ndarray | None:
    """Which values are null, bool `[values]`, or None where none is."""
    return values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None


def refuse_first(
    bad: np.ndarray, values: pa.Array, what: str, allowed: str, fix: str
) -> Refusal | None:
    """Refusal of the first value of a bool mask `[values]`, or None where the mask is empty."""
    if not bad.any():
        return None
    index = int(bad.argmax())
    return Refusal(index, what, _show(values, index), allowed, fix)


def _show(values: pa.Array, index: int) -> str:
    """A value as text; Python's own dates hold less than Arrow's."""
    one = values.slice(index, 1)
    if pa.types.is_timestamp(values.type):
        return f"{one.cast(pa.int64())[0]} {values.type.unit} since 1970"
    if pa.types.is_date(values.type):
        return str(one.cast(pa.string())[0])
    return repr(one[0].as_py())


def holds_same(given: pa.DataType, planned: pa.DataType) -> bool:
    """Whether two types hold the same values: apart from zones, nullability and 64-bit offsets."""
    return bool(_canonical(given) == _canonical(planned))


def _canonical(data_type: pa.DataType) -> pa.DataType:
    t = pa.types
    if t.is_timestamp(data_type):
        return pa.timestamp(data_type.unit, None if data_type.tz is None else "UTC")
    if t.is_large_string(data_type):
        return pa.string()
    if t.is_large_binary(data_type):
        return pa.binary()
    if t.is_list(data_type) or t.is_large_list(data_type):
        return pa.list_(_canonical(data_type.value_type))
    if t.is_fixed_size_list(data_type):
        return pa.list_(_canonical(data_type.value_type), data_type.list_size)
    if t.is_struct(data_type):
        return pa.struct([(field.name, _canonical(field.type)) for field in data_type])
    if t.is_map(data_type):
        return pa.map_(_canonical(data_type.key_type), _canonical(data_type.item_type))
    return data_type


def is_list(data_type: pa.DataType) -> bool:
    """Whether a type is a list of any layout, fixed-size ones included."""
    return (
        pa.types.is_list(data_type)
        or pa.types.is_large_list(data_type)
        or pa.types.is_fixed_size_list(data_type)
    )


@dataclass(frozen=True)
class ListRows:
    """Where rows' values lie.

    Attributes:
        offsets: Into the values, int64 `[rows + 1]`, from 0.
        is_null: Null rows, bool `[rows]`, or None where there are none; they hold no value.
    """

    offsets: np.ndarray
    is_null: np.ndarray | None

    @property
    def lengths(self) -> np.ndarray:
        """Values per row, int64 `[rows]`."""
        return np.diff(self.offsets)

    def row_of(self, index: int) -> int:
        """Row that a value belongs to."""
        return int(np.searchsorted(self.offsets, index, side="right")) - 1

    def keep(self, mask: np.ndarray) -> ListRows:
        """The rows without the values where the mask, bool `[values]`, is false."""
        kept = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
        return ListRows(kept[self.offsets], self.is_null)

    def build(self, values: pa.Array, target: pa.DataType) -> pa.Array:
        """Puts the rows' values into lists."""
        mask = None if self.is_null is None else pa.array(self.is_null)
        if pa.types.is_fixed_size_list(target):
            return self._build_fixed(values, target)
        large = pa.types.is_large_list(target)
        builder = pa.LargeListArray if large else pa.ListArray
        offsets = pa.array(self.offsets, pa.int64() if large else pa.int32())
        return builder.from_arrays(offsets, values, type=target, mask=mask)

    def _build_fixed(self, values: pa.Array, target: pa.DataType) -> pa.Array:
        if self.is_null is None:
            return pa.FixedSizeListArray.from_arrays(values, type=target)
        positions = np.zeros((len(self.is_null), target.list_size), np.int64)
        positions[~self.is_null] = np.arange(len(values)).reshape(-1, target.list_size)
        absent = np.repeat(self.is_null, target.list_size)
        values = values.take(pa.array(positions.reshape(-1), mask=absent))
        mask = pa.array(self.is_null)
        return pa.FixedSizeListArray.from_arrays(values, type=target, mask=mask)


def split_lists(column: pa.Array) -> tuple[pa.Array, ListRows]:
    """Takes lists apart.

    Args:
        column: Lists of any layout, sliced or not `[rows]`.

    Returns:
        The rows' values alone, nothing that lies below a null or outside a slice; and the rows.
    """
    is_null = np.asarray(column.is_null()) if column.null_count else None
    if pa.types.is_fixed_size_list(column.type):
        lengths = np.full(len(column), column.type.list_size, np.int64)
    else:
        bounds = np.asarray(column.offsets).astype(np.int64)
        lengths = bounds[1:] - bounds[:-1]
    if is_null is not None:
        lengths[is_null] = 0
    offsets = np.zeros(len(column) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return column.flatten(), ListRows(offsets, is_null)


@dataclass(frozen=True)
class ConvertLists:
    """Converts the values of lists.

    Attributes:
        source: Type of the lists.
        element: Conversion of their values, lists themselves or not.
        null_elements: Policy, see `ColumnPolicy`.
        default: What stands for a null element that is no list.
    """

    source: pa.DataType
    element: ValueRule | ConvertLists
    null_elements: Literal["error", "drop", "default"] = "error"
    default: Any = None

    @property
    def is_identity(self) -> bool:
        """Whether nothing is converted; the encoder refuses null elements by itself."""
        return self.element.is_identity and self.null_elements == "error"

    @property
    def target(self) -> pa.DataType:
        """Type of the result; fixed sizes stay, except where elements may be left out."""
        if self.is_identity:
            return self.source
        size = self.source.list_size if pa.types.is_fixed_size_list(self.source) else 0
        if size and self.null_elements != "drop":
            return pa.list_(self.element.target, size)
        if pa.types.is_large_list(self.source):
            return pa.large_list(self.element.target)
        return pa.list_(self.element.target)

    def convert(self, values: pa.Array) -> Converted:
        """Converts lists; also returns the first that is refused."""
        if self.is_identity:
            return values, None
        elements, rows = split_lists(values)
        converted, refusal = self.element.convert(elements)
        if refusal is not None:
            row = rows.row_of(refusal.index)
            return values, Refusal(
                row, refusal.what, refusal.received, refusal.allowed, refusal.fix
            )
        if converted.null_count and self.null_elements == "drop":
            rows = rows.keep(np.asarray(converted.is_valid()))
            converted = converted.drop_null()
        elif converted.null_count and self.null_elements == "default":
            converted = fill_nulls(converted, self.default)
        return rows.build(converted, self.target), None


ValueConversion = ValueRule | ConvertLists


def fill_nulls(column: pa.Array, default: Any) -> pa.Array:
    """Puts a default in the place of nulls.

    Args:
        column: Values or lists `[rows]`.
        default: A value; a list of fixed size takes it for each of its elements, any other list
            becomes an empty one.
    """
    if column.null_count == 0:
        return column
    if not is_list(column.type):
        return column.fill_null(pa.scalar(default, column.type))
    values, rows = split_lists(column)
    if not pa.types.is_fixed_size_list(column.type):
        return ListRows(rows.offsets, None).build(values, column.type)
    is_null = np.repeat(np.asarray(rows.is_null), column.type.list_size)
    positions = np.cumsum(~is_null) - 1
    positions[is_null] = len(values)
    filled = pa.array([default], column.type.value_type)
    values = pa.concat_arrays([values, filled]).take(pa.array(positions))
    return pa.FixedSizeListArray.from_arrays(values, type=column.type)


def nest_schema(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    """Schema of what `nest_lists` returns.

    Raises:
        ConfigError: A name is no list column.
    """
    for name in names:
        if name not in schema.names or not pa.types.is_list(schema.field(name).type):
            lists = [field.name for field in schema if pa.types.is_list(field.type)]
            raise ConfigError(
                f"{name!r} cannot go into the feature lists: it is no list column",
                received=str(schema.field(name).type) if name in schema.names else "no such column",
                allowed=", ".join(lists) or "no column is a list",
                fix=did_you_mean(name, lists) if lists else None,
            )
    fields = [
        pa.field(field.name, pa.list_(field.type)) if field.name in names else field
        for field in schema
    ]
    return pa.schema(fields)


def nest_lists(batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """Makes each value of the named list columns a step of its own, a list of one."""
    columns = [
        _nest(column) if name in names else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=nest_schema(batch.schema, names))


def flatten_lists(batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """Undoes `nest_lists`: the named columns hold lists of values again."""
    columns = [
        _flatten(column) if name in names else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _nest(column: pa.ListArray) -> pa.ListArray:
    values, offsets = column.flatten(), _offsets(column)
    steps = pa.ListArray.from_arrays(pa.array(np.arange(len(values) + 1, dtype=np.int32)), values)
    return pa.ListArray.from_arrays(pa.array(offsets), steps, mask=column.is_null()).cast(
        pa.list_(column.type)
    )


def _flatten(column: pa.ListArray) -> pa.ListArray:
    steps = column.flatten()
    ends = _offsets(steps)
    return pa.ListArray.from_arrays(
        pa.array(ends[_offsets(column)]), steps.flatten(), mask=column.is_null()
    )


def _offsets(column: pa.ListArray) -> np.ndarray:
    """Offsets of the rows' lists in `column.flatten()`, int32 `[rows + 1]`; null is empty."""
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
