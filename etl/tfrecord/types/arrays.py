"""Arrow arrays taken apart and put together: numbers, lists of any layout, steps of lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError, did_you_mean


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


def innermost(data_type: pa.DataType) -> pa.DataType:
    """Type of the values in lists of any depth."""
    while is_list(data_type):
        data_type = data_type.value_type
    return data_type


def is_bytes(data_type: pa.DataType) -> bool:
    """Whether values are bytes that need not be text."""
    return pa.types.is_binary(data_type) or pa.types.is_large_binary(data_type)


def is_text(data_type: pa.DataType) -> bool:
    """Whether values are text."""
    return pa.types.is_string(data_type) or pa.types.is_large_string(data_type)


def buffer_address(buffer: pa.Buffer | None) -> int:
    """Address of an Arrow buffer, 0 where there is none."""
    return 0 if buffer is None else buffer.address


def as_numbers(values: pa.Array) -> np.ndarray:
    """Numbers `[values]`, with zeros where they are null."""
    if values.null_count:
        values = values.fill_null(False if pa.types.is_boolean(values.type) else 0)
    return values.to_numpy(zero_copy_only=False)


def null_mask(values: pa.Array) -> np.ndarray | None:
    """Which values are null, bool `[values]`, or None where none is."""
    return values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None


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

    def build_maps(self, keys: pa.Array, values: pa.Array, target: pa.MapType) -> pa.Array:
        """Puts the rows' keys and values into maps."""
        mask = None if self.is_null is None else pa.array(self.is_null)
        offsets = pa.array(self.offsets, pa.int32())
        return pa.MapArray.from_arrays(offsets, keys, values, type=target, mask=mask)


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
    return column.flatten(), ListRows(offsets_of(lengths), is_null)


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Offsets of rows by their lengths, int64 `[rows + 1]`."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def split_maps(column: pa.Array) -> list[pa.Array]:
    """Maps as the lists of their keys and the lists of their values."""
    entries = column.values
    lists = pa.Array.from_buffers(
        pa.list_(entries.type),
        len(column),
        column.buffers()[:2],
        column.null_count,
        column.offset,
        [entries],
    )
    visible, rows = split_lists(lists)
    keys, values = visible.field(0), visible.field(1)
    return [rows.build(keys, pa.list_(keys.type)), rows.build(values, pa.list_(values.type))]


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
    values, rows = split_lists(column)
    places = pa.array(np.arange(len(values) + 1, dtype=np.int32))
    steps = pa.ListArray.from_arrays(places, values, type=column.type)
    return rows.build(steps, pa.list_(column.type))


def _flatten(column: pa.ListArray) -> pa.ListArray:
    steps, rows = split_lists(column)
    values, ends = split_lists(steps)
    return ListRows(ends.offsets[rows.offsets], rows.is_null).build(values, steps.type)
