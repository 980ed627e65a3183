"""Arrow arrays taken apart and put together: numbers, lists of any layout, steps of lists."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa


def holds_same(given: pa.DataType, planned: pa.DataType) -> bool:
    """Whether two types hold the same values: apart from zones, nullability and 64-bit offsets."""
    return bool(_canonical(given) == _canonical(planned))


def _canonical(data_type: pa.DataType) -> Hashable:
    t = pa.types
    if t.is_timestamp(data_type):
        return "timestamp", data_type.unit, data_type.tz is None
    if is_text(data_type) or is_bytes(data_type):
        return "text" if is_text(data_type) else "bytes"
    if not t.is_nested(data_type):
        return data_type
    kind = "list" if t.is_list(data_type) or t.is_large_list(data_type) else data_type.id
    parts = [data_type.field(k) for k in range(data_type.num_fields)]
    named = [(f.name if t.is_struct(data_type) else "", _canonical(f.type)) for f in parts]
    return kind, getattr(data_type, "list_size", None), *named


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
    return pa.types.is_binary(data_type) or pa.types.is_large_binary(data_type)


def is_text(data_type: pa.DataType) -> bool:
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
    """Where rows' values lie: `offsets` int64 `[rows + 1]`, from 0; null rows hold no value.

    `is_null`: bool `[rows]`, or None where none is.
    """

    offsets: np.ndarray
    is_null: np.ndarray | None

    @property
    def lengths(self) -> np.ndarray:
        """Values per row, int64 `[rows]`."""
        return np.diff(self.offsets)

    @property
    def mask(self) -> pa.Array | None:
        return None if self.is_null is None else pa.array(self.is_null)

    def row_of(self, index: int) -> int:
        return int(np.searchsorted(self.offsets, index, side="right")) - 1

    def keep(self, mask: np.ndarray) -> ListRows:
        """The rows without the values where the mask, bool `[values]`, is false."""
        kept = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
        return ListRows(kept[self.offsets], self.is_null)

    def build(self, values: pa.Array, target: pa.DataType) -> pa.Array:
        if pa.types.is_fixed_size_list(target):
            return self.build(values, pa.list_(target.value_field)).cast(target)
        large = pa.types.is_large_list(target)
        builder = pa.LargeListArray if large else pa.ListArray
        offsets = pa.array(self.offsets, pa.int64() if large else pa.int32())
        return builder.from_arrays(offsets, values, type=target, mask=self.mask)


def split_lists(column: pa.Array) -> tuple[pa.Array, ListRows]:
    """Takes lists `[rows]` of any layout apart, sliced or not.

    Returns the rows' values alone, nothing that lies below a null or outside a slice; and the rows.
    """
    is_null = null_mask(column)
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
