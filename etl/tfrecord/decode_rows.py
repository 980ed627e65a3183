"""Decoded columns, row by row, into the places of larger arrays.

A shuffle writes each row once, where it ends up: what a reader holds is its output alone.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import numpy as np
import pyarrow as pa

from etl.tfrecord.kernels import (
    copy_bytes,
    kernel,
    load_i32,
    load_u32,
    load_u64,
    prefetch,
    store_u32,
    store_u64,
)

_AHEAD = 16  # rows between asking for a cache line and writing to it


@kernel
def _scatter_scalars(source, width, places, target):
    """Copies value `i` to place `places[i]`; leaves out those whose place is negative."""
    if width == 8:
        for i in range(len(places)):
            if places[i] >= 0:
                store_u64(target + 8 * places[i], load_u64(source + 8 * i))
    else:
        for i in range(len(places)):
            if places[i] >= 0:
                store_u32(target + 4 * places[i], load_u32(source + 4 * i))


@kernel
def _scatter_lists(source, offsets, width, places, target, length, pad):
    """Copies list `i` to row `places[i]`, cut or padded to `length` values."""
    row_bytes = length * width
    for i in range(len(places)):
        if i + _AHEAD < len(places):
            prefetch(target + row_bytes * places[i + _AHEAD])
        if places[i] < 0:
            continue
        start = np.int64(load_i32(offsets + 4 * i))
        size = min((np.int64(load_i32(offsets + 4 * i + 4)) - start) * width, row_bytes)
        row = target + row_bytes * places[i]
        copy_bytes(row, source + start * width, size)
        if width == 8:
            for at in range(row + size, row + row_bytes, 8):
                store_u64(at, pad)
        else:
            for at in range(row + size, row + row_bytes, 4):
                store_u32(at, np.uint32(pad & np.uint64(0xFFFFFFFF)))


def scatter_rows(
    column: pa.Array, places: np.ndarray, out: np.ndarray, pad: int | float = 0
) -> None:
    """Writes each row of a column to its place in an array; releases the GIL.

    Args:
        column: int64 or float32, or lists of them, `[rows]`. What lies below a null scalar is
            written; a null list counts as empty.
        places: Row of `out` for each row, int64 `[rows]`; negative leaves it out.
        out: C-contiguous array of the same type: `[size]` for scalars, `[size, length]` for
            lists, which are cut or padded to `length`.
        pad: What follows a list that is shorter.

    Raises:
        IndexError: A place is outside of `out`.
        TypeError: `out` has another type or is not contiguous.
    """
    places = np.ascontiguousarray(places, np.int64)
    is_list = pa.types.is_list(column.type)
    value_type = column.type.value_type if is_list else column.type
    if out.dtype != np.dtype(value_type.to_pandas_dtype()) or not out.flags.c_contiguous:
        raise TypeError(f"cannot write {column.type} into an array of {out.dtype}")
    if len(places) != len(column) or out.ndim != 1 + is_list:
        raise IndexError(f"{len(places)} places for {len(column)} rows of {column.type}")
    if not len(places):
        return
    if int(places.max()) >= len(out):
        raise IndexError(f"place {int(places.max())} in an array of {len(out)} rows")
    width, target = out.dtype.itemsize, out.ctypes.data
    if not is_list:
        source = column.buffers()[1].address + width * column.offset
        _scatter_scalars(source, width, places, target)
        return
    if out.shape[1] == 0:
        return
    bits = np.array(pad, out.dtype).tobytes().ljust(8, b"\0")
    values = column.values.buffers()[1]
    source = 0 if values is None else values.address + width * column.values.offset
    offsets = column.buffers()[1].address + 4 * column.offset
    _scatter_lists(
        source, offsets, width, places, target, out.shape[1], np.frombuffer(bits, np.uint64)[0]
    )


def list_lengths(column: pa.Array) -> np.ndarray:
    """Number of values of each list, int64 `[rows]`; a null list has none."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)
    window = offsets[column.offset : column.offset + len(column) + 1]
    return np.diff(window).astype(np.int64)


def join_steps(column: pa.Array) -> pa.Array:
    """Feature lists, lists of lists `[rows]`, as one list per row: its steps one after another."""
    steps = column.values
    outer = np.frombuffer(column.buffers()[1], np.int32)
    outer = outer[column.offset : column.offset + len(column) + 1]
    inner = np.frombuffer(steps.buffers()[1], np.int32)[steps.offset :]
    return pa.ListArray.from_arrays(pa.array(inner[outer], pa.int32()), steps.values)
