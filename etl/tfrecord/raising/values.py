"""Decoded values to wanted types; what does not fit is an error of Arrow's."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from etl.tfrecord.lowering.lists import is_list, split_lists

_BYTES, _TEXT = pa.binary(), pa.string()


def cast_values(column: pa.Array, target: pa.DataType, form: str) -> pa.Array:
    """Casts decoded values, or lists of them.

    Args:
        column: int64, float32, binary, lists or lists of lists of these `[rows]`.
        target: Wanted type, as deep in lists.
        form: How dates (`days`, `iso`) or timestamps (`s`, `ms`, `us`, `iso`) were written; of no
            meaning for other types.

    Returns:
        The column in the wanted type `[rows]`.

    Raises:
        pa.ArrowInvalid: A value does not fit.
    """
    if column.type == target:
        return column
    if not is_list(target):
        return _cast_scalars(column, target, form)
    values, rows = split_lists(column)
    if pa.types.is_fixed_size_list(target):
        lengths = rows.lengths if rows.is_null is None else rows.lengths[~rows.is_null]
        if (lengths != target.list_size).any():
            raise pa.ArrowInvalid(f"a list that has not {target.list_size} values")
    return rows.build(cast_values(values, target.value_type, form), target)


def _cast_scalars(values: pa.Array, target: pa.DataType, form: str) -> pa.Array:
    t = pa.types
    if target == _TEXT and values.type == _BYTES and _is_ascii(values):
        return pa.Array.from_buffers(
            target, len(values), values.buffers(), values.null_count, values.offset
        )
    if t.is_decimal(target):
        # The shortest digits that give back the float32: 12.34, not 12.340000152587891.
        return values.cast(pa.string()).cast(target)
    if t.is_boolean(target):
        wrong = np.asarray(values.drop_null())
        wrong = wrong[(wrong != 0) & (wrong != 1)]
        if wrong.size:
            raise pa.ArrowInvalid(f"{wrong[0]} is no boolean, which is 0 or 1")
    elif t.is_date(target):
        if form == "iso":
            return values.cast(pa.string()).cast(target)
        return values.cast(pa.int32()).cast(pa.date32()).cast(target)
    elif t.is_timestamp(target):
        if form == "iso":
            return values.cast(pa.string()).cast(target)
        return values.cast(pa.timestamp(form, target.tz)).cast(target)
    return values.cast(target)


def _is_ascii(values: pa.Array) -> bool:
    """Whether all bytes are ASCII, and so text; one look at them all, not one per value."""
    _, offsets, data = values.buffers()
    if data is None or not len(values):
        return False
    bounds = np.frombuffer(offsets, np.int32)
    first, last = bounds[values.offset], bounds[values.offset + len(values)]
    text = np.frombuffer(data, np.int8)[first:last]
    return not text.size or bool(text.min() >= 0)
