"""Rows of decoded columns, put where they belong in larger arrays; and reused memory for these.

A shuffle writes each row once, where it ends up: what a reader holds is its output alone. Fresh
memory of this size comes from the system page by page, at a cost of the order of decoding, so
that blocks are used again when nobody holds them any more.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from etl.tfrecord.codec.kernels import (
    LINE_BYTES,
    copy_bytes,
    fence,
    inlined,
    kernel,
    load_i32,
    load_u32,
    load_u64,
    prefetch,
    store_u32,
    store_u64,
    stream_bytes,
)

ALIGNMENT = 64
"""TensorFlow takes over memory that is aligned so, and copies any other."""

_MOST_KEPT, _MOST_LARGE = 12, 2
_LARGE_BYTES = 64 << 20
_LEAST_SHARE = 0.5
_FREE: list[np.ndarray] = []
# A finalizer may run inside `_take`, in the same thread.
_LOCK = threading.RLock()


def allocate(shapes: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> dict[str, np.ndarray]:
    """Returns arrays of these shapes and types, of any content, aligned, in one piece of memory.

    It is kept for the next call when the last of the arrays, and of all views of them, has gone.
    """
    sizes = {name: int(np.prod(shape)) * dtype.itemsize for name, (shape, dtype) in shapes.items()}
    padded = {name: -(-size // ALIGNMENT) * ALIGNMENT for name, size in sizes.items()}
    owner = _take(sum(padded.values()) + ALIGNMENT)
    # Views of an array refer to what that array itself refers to: behind a memoryview, to it.
    memory = np.frombuffer(memoryview(owner), np.uint8)  # type: ignore[arg-type]
    weakref.finalize(memory, _give_back, owner).atexit = False
    start, arrays = -memory.ctypes.data % ALIGNMENT, {}
    for name, (shape, dtype) in shapes.items():
        arrays[name] = memory[start : start + sizes[name]].view(dtype).reshape(shape)
        start += padded[name]
    return arrays


def _take(size: int) -> np.ndarray:
    with _LOCK:
        for number, owner in enumerate(_FREE):
            if size <= owner.size and size >= _LEAST_SHARE * owner.size:
                return _FREE.pop(number)
    return np.empty(size, np.uint8)


def _give_back(owner: np.ndarray) -> None:
    with _LOCK:
        if owner.size >= _LARGE_BYTES:
            large = [number for number, kept in enumerate(_FREE) if kept.size >= _LARGE_BYTES]
            if len(large) >= _MOST_LARGE:
                del _FREE[large[0]]
        _FREE.append(owner)
        del _FREE[:-_MOST_KEPT]


_TYPES = {
    "int64": (pa.int64(), pa.list_(pa.int64())),
    "float32": (pa.float32(), pa.list_(pa.float32())),
}
_AHEAD = 16  # rows between asking for a cache line and writing to it
# Arrays that are larger together than any cache of a core's share are written past the cache:
# otherwise each line would be fetched from memory only to be overwritten, and push out what is
# being decoded.
_FAR_BYTES = 32 << 20
_FAR_ROW_BYTES = 3 * LINE_BYTES  # shorter rows have too few whole lines

# Fields of a column's row of the table that the kernel takes.
_SOURCE, _OFFSETS, _WIDTH, _TARGET, _LENGTH, _PAD, _IS_FAR, _FIELDS = range(8)


@inlined
def _scatter_scalars(fields, places):
    source, target = fields[_SOURCE], fields[_TARGET]
    if fields[_WIDTH] == 8:
        for i in range(len(places)):
            if places[i] >= 0:
                store_u64(target + 8 * places[i], load_u64(source + 8 * i))
    else:
        for i in range(len(places)):
            if places[i] >= 0:
                store_u32(target + 4 * places[i], load_u32(source + 4 * i))


@inlined
def _scatter_lists(fields, places):
    source, offsets, width = fields[_SOURCE], fields[_OFFSETS], fields[_WIDTH]
    row_bytes = fields[_LENGTH] * width
    pad, is_far = np.uint64(fields[_PAD]), fields[_IS_FAR] != 0
    for i in range(len(places)):
        if i + _AHEAD < len(places):
            ahead = fields[_TARGET] + row_bytes * places[i + _AHEAD]
            prefetch(ahead)
            if is_far:  # of the lines that are not written as a whole, the other one
                prefetch(ahead + row_bytes - 1)
        if places[i] < 0:
            continue
        start = np.int64(load_i32(offsets + 4 * i))
        size = min((np.int64(load_i32(offsets + 4 * i + 4)) - start) * width, row_bytes)
        row = fields[_TARGET] + row_bytes * places[i]
        if is_far:
            stream_bytes(row, source + start * width, size)
        else:
            copy_bytes(row, source + start * width, size)
        if width == 8:
            for at in range(row + size, row + row_bytes, 8):
                store_u64(at, pad)
        else:
            for at in range(row + size, row + row_bytes, 4):
                store_u32(at, np.uint32(pad & np.uint64(0xFFFFFFFF)))


@kernel
def _scatter(table, places):
    """Copies row `i` of each column to place `places[i]`; leaves out negative places."""
    for column in range(len(table)):
        if table[column, _OFFSETS] == 0:
            _scatter_scalars(table[column], places)
        else:
            _scatter_lists(table[column], places)
    fence()


class RowWriter:
    """Writes decoded columns into arrays, each row at a given position."""

    def __init__(self, outs: Sequence[np.ndarray], pads: Sequence[int | float]) -> None:
        """Takes C-contiguous arrays of int64 or float32, and what follows a list that is shorter.

        They are `[size]` for scalars, `[size, length]` for lists, which are cut or padded.
        """
        self._outs = tuple(outs)
        self._size = len(outs[0]) if outs else 0
        self._table = np.zeros((len(outs), _FIELDS), np.int64)
        is_far = sum(out.nbytes for out in outs) >= _FAR_BYTES
        for row, out, pad in zip(self._table, outs, pads, strict=True):
            if str(out.dtype) not in _TYPES or not out.flags.c_contiguous or out.ndim > 2:
                raise TypeError(f"cannot write decoded rows into an array of {out.dtype}")
            if len(out) != self._size:
                raise TypeError(f"arrays of {self._size} and {len(out)} rows")
            bits = np.array(pad, out.dtype).tobytes().ljust(8, b"\0")
            row[_WIDTH], row[_TARGET] = out.dtype.itemsize, out.ctypes.data
            row[_LENGTH] = out.shape[1] if out.ndim == 2 else 0
            row[_IS_FAR] = is_far and row[_LENGTH] * row[_WIDTH] >= _FAR_ROW_BYTES
            row[_PAD] = int(np.frombuffer(bits, np.int64)[0])
        self._wanted = [
            (_TYPES[str(out.dtype)][out.ndim - 1], out.ndim == 2, out.dtype.itemsize)
            for out in outs
        ]

    def write(self, columns: Sequence[pa.Array], places: np.ndarray) -> None:
        """Writes rows; releases the GIL, and several threads may write different places.

        Args:
            columns: One per array, of its type: scalars, or lists, `[rows]`. What lies below a
                null scalar is written; a null list counts as empty.
            places: Where each row goes, int64 `[rows]`; negative leaves it out.
        """
        places = np.ascontiguousarray(places, np.int64)
        if not len(places) or not self._outs:
            return
        if int(places.max()) >= self._size:
            raise IndexError(f"place {int(places.max())} in arrays of {self._size} rows")
        table = self._table.copy()
        sources, offsets = [], []
        for column, (wanted, is_list, width) in zip(columns, self._wanted, strict=True):
            if column.type != wanted or len(column) != len(places):
                raise TypeError(
                    f"{len(column)} rows of {column.type} where {len(places)} of {wanted} go"
                )
            own, leaf, at = column.buffers()[1], column, 0
            if is_list:
                at, leaf = own.address + 4 * column.offset, column.values
                own = leaf.buffers()[1]
            offsets.append(at)
            sources.append(0 if own is None else own.address + width * leaf.offset)
        table[:, _SOURCE], table[:, _OFFSETS] = sources, offsets
        _scatter(table, places)


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
