"""Lists: their values converted, null elements by policy, rows put together again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from etl.tfrecord.lowering.values import Converted, Refusal, ValueRule


def is_list(data_type: pa.DataType) -> bool:
    """Whether a type is a list of any layout, fixed-size ones included."""
    return (
        pa.types.is_list(data_type)
        or pa.types.is_large_list(data_type)
        or pa.types.is_fixed_size_list(data_type)
    )


@dataclass(frozen=True)
class Rows:
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

    def keep(self, mask: np.ndarray) -> Rows:
        """The rows without the values where the mask, bool `[values]`, is false."""
        kept = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
        return Rows(kept[self.offsets], self.is_null)

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
        places = np.zeros((len(self.is_null), target.list_size), np.int64)
        places[~self.is_null] = np.arange(len(values)).reshape(-1, target.list_size)
        absent = np.repeat(self.is_null, target.list_size)
        values = values.take(pa.array(places.reshape(-1), mask=absent))
        mask = pa.array(self.is_null)
        return pa.FixedSizeListArray.from_arrays(values, type=target, mask=mask)


def split_lists(column: pa.Array) -> tuple[pa.Array, Rows]:
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
    return column.flatten(), Rows(offsets, is_null)


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
    element: ValueRule
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
        """See `ValueRule`."""
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
        return Rows(rows.offsets, None).build(values, column.type)
    is_null = np.repeat(np.asarray(rows.is_null), column.type.list_size)
    places = np.cumsum(~is_null) - 1
    places[is_null] = len(values)
    filled = pa.array([default], column.type.value_type)
    values = pa.concat_arrays([values, filled]).take(pa.array(places))
    return pa.FixedSizeListArray.from_arrays(values, type=column.type)
