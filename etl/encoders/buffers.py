"""Arrow arrays as the addresses that compiled loops read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa

from etl.tfrecord.kernels import inlined, is_valid, load_i32, load_i64

WIDE_TYPES = (pa.large_string(), pa.large_binary())
BYTES_TYPES = (pa.string(), pa.binary(), *WIDE_TYPES)


class Cells(NamedTuple):
    """Where the values of an array lie; the array must outlive it.

    Attributes:
        validity: Address of the bitmap, 0 where all are valid.
        offsets: Address of the offsets of strings and binaries, else 0.
        data: Address of the values or bytes.
        first: Position of the first row in all three.
        wide: Whether the offsets have 64 bits.
    """

    validity: int
    offsets: int
    data: int
    first: int
    wide: bool


def int64_cells(values: pa.Array) -> Cells:
    """Returns the cells of an int64 array, possibly sliced."""
    validity, data = values.buffers()
    return Cells(_validity(values, validity), 0, _address(data), values.offset, False)


def bytes_cells(values: pa.Array) -> Cells:
    """Returns the cells of a string or binary array, possibly sliced."""
    validity, offsets, data = values.buffers()
    wide = values.type in WIDE_TYPES
    return Cells(
        _validity(values, validity), _address(offsets), _address(data), values.offset, wide
    )


def to_arrow(values: np.ndarray) -> pa.Array:
    """Returns an array without nulls that shares the memory of a NumPy one `[rows]`."""
    data_type = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(data_type, len(values), [None, pa.py_buffer(values)], null_count=0)


def valid_mask(values: pa.Array) -> np.ndarray:
    """Returns which rows are not null, bool `[rows]`."""
    if not values.null_count:
        return np.ones(len(values), np.bool_)
    return values.is_valid().to_numpy(zero_copy_only=False)


@inlined
def has_value(cells, row):  # type: ignore[no-untyped-def]
    """Whether a row is not null."""
    return is_valid(cells[0], cells[3] + row)


@inlined
def load_span(cells, row):  # type: ignore[no-untyped-def]
    """Address and length of the bytes of a row."""
    position = cells[3] + row
    if cells[4]:
        start = load_i64(cells[1] + 8 * position)
        length = load_i64(cells[1] + 8 * position + 8) - start
    else:
        start = np.int64(load_i32(cells[1] + 4 * position))
        length = np.int64(load_i32(cells[1] + 4 * position + 4)) - start
    return cells[2] + start, length


def _address(buffer: pa.Buffer | None) -> int:
    return 0 if buffer is None else buffer.address


def _validity(values: pa.Array, buffer: pa.Buffer | None) -> int:
    return _address(buffer) if values.null_count else 0
