"""The memory into which features are decoded, and the Arrow columns that it becomes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from conf.errors import InputDataError
from etl.tfrecord.decode_kernels import fill, gather
from etl.tfrecord.decode_kernels_sequence import fill_feature_lists
from etl.tfrecord.features import KIND_CODES, WireFeature
from etl.tfrecord.walk_kernels import BYTES, FLOAT, INT

_MAX_OFFSET = 2**31 - 1
_DTYPES: dict[int, np.dtype[Any]] = {
    INT: np.dtype(np.int64),
    FLOAT: np.dtype(np.float32),
    BYTES: np.dtype(np.uint8),
}
_STOP_AT_FIRST = np.empty(0, np.uint8)


class Arena:
    """Hands out zeroed memory in pieces, so that ten thousand columns need few allocations."""

    _CHUNK_BYTES = 64 << 10  # below the size from which the allocator asks the system each time
    _ALIGNMENT = 64

    def __init__(self) -> None:
        self._left = 0

    def allocate(self, size: int) -> tuple[pa.Buffer, int]:
        """Returns a zeroed buffer of `size` bytes and its address."""
        taken = max(1, -(-size // self._ALIGNMENT)) * self._ALIGNMENT
        if taken > self._left:
            self._left = max(self._CHUNK_BYTES, taken)
            chunk = np.zeros(self._left, np.uint8)
            self._chunk, self._start, self._next = pa.py_buffer(chunk), chunk.ctypes.data, 0
        at = self._next
        self._next += taken
        self._left -= taken
        return self._chunk.slice(at, size), self._start + at


class Column:
    """One feature of a block of records."""

    def __init__(self, feature: WireFeature, rows: int, arena: Arena) -> None:
        self._feature, self._code, self._rows = feature, KIND_CODES[feature.kind], rows
        self._is_nested = feature.is_list or feature.is_sequence
        self._is_scalar = not self._is_nested and self._code != BYTES
        valid, self._valid_at = arena.allocate(rows)
        self._valid = np.frombuffer(valid, np.uint8)
        width = _DTYPES[self._code].itemsize if self._is_scalar else 0
        self._values, self._values_at = arena.allocate(width * rows)
        # starts, ends, counts, byte counts, since, outer counts
        self._places, self._places_at = arena.allocate(0 if self._is_scalar else 6 * 8 * rows)

    def fields(self, key: int, key_bytes: int) -> tuple[int, ...]:
        """Row of the feature table."""
        starts, ends, counts, byte_counts, since, outer = (
            self._places_at + 8 * self._rows * i for i in range(6)
        )
        return (self._code, int(self._feature.is_list), key, key_bytes, self._values_at,
                self._valid_at, starts, ends, counts, byte_counts, since, outer)  # fmt: skip

    def build(
        self, fields: np.ndarray, limit: int, malformed: np.ndarray = _STOP_AT_FIRST
    ) -> tuple[pa.Array | None, int]:
        """Builds the Arrow column.

        Args:
            fields: The feature's row of the feature table, int64 `[FEATURE_FIELDS]`.
            limit: Address past the input buffer.
            malformed: As for the kernels; with rows, the column returned is of no use.

        Returns:
            The column and -1, or None and the number of a malformed record.

        Raises:
            InputDataError: More values than Arrow's offsets reach.
        """
        if self._is_scalar:
            return self._array([self._validity(), self._values]), -1
        places = np.frombuffer(self._places, np.int64).reshape(6, self._rows)
        counts, byte_counts, outer = places[[2, 3, 5]] * (self._valid == 1)
        total, total_bytes = int(counts.sum()), int(byte_counts.sum())
        total_lists = int(outer.sum()) if self._feature.is_sequence else 0
        _check_totals(total, total_bytes, total_lists)
        values = np.empty(total_bytes if self._code == BYTES else total, _DTYPES[self._code])
        byte_offsets = np.zeros(total + 1 if self._code == BYTES else 1, np.int64)
        offsets = np.zeros(total_lists + 1, np.int64)
        inputs = (fields, self._rows, limit, values.ctypes.data, byte_offsets.ctypes.data)
        if self._feature.is_sequence:
            bad = fill_feature_lists(*inputs, offsets.ctypes.data, malformed)
        else:
            bad = fill(*inputs, malformed)
        if bad >= 0:
            return None, int(bad)
        if not self._is_nested:
            return self._array([self._validity(), _offsets(byte_counts), pa.py_buffer(values)]), -1
        value_type = self._feature.arrow_type.value_type
        if self._feature.is_sequence:
            inner = _leaf(value_type.value_type, self._code, values, byte_offsets)
            buffers = [None, pa.py_buffer(offsets.astype(np.int32))]
            child = pa.Array.from_buffers(value_type, total_lists, buffers, children=[inner])
            return self._array([self._validity(), _offsets(outer)], [child]), -1
        child = _leaf(value_type, self._code, values, byte_offsets)
        return self._array([self._validity(), _offsets(counts)], [child]), -1

    def _array(
        self, buffers: list[pa.Buffer | None], children: list[pa.Array] | None = None
    ) -> pa.Array:
        data_type = self._feature.arrow_type
        return pa.Array.from_buffers(data_type, self._rows, buffers, children=children)

    def _validity(self) -> pa.Buffer | None:
        if self._valid.all():
            return None
        return pa.py_buffer(np.packbits(self._valid, bitorder="little"))


def _leaf(
    value_type: pa.DataType, code: int, values: np.ndarray, byte_offsets: np.ndarray
) -> pa.Array:
    """The values of lists, as an array without nulls."""
    data = pa.py_buffer(values)
    if code != BYTES:
        return pa.Array.from_buffers(value_type, len(values), [None, data])
    buffers = [None, pa.py_buffer(byte_offsets.astype(np.int32)), data]
    return pa.Array.from_buffers(value_type, len(byte_offsets) - 1, buffers)


def _check_totals(*totals: int) -> None:
    if max(totals) > _MAX_OFFSET:
        raise InputDataError(
            "too many values for one batch", received=max(totals),
            allowed=_MAX_OFFSET, fix="decode fewer records at a time",
        )  # fmt: skip


def _offsets(counts: np.ndarray) -> pa.Buffer:
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return pa.py_buffer(offsets)


def gather_binary(data: np.ndarray, index: np.ndarray) -> pa.Array:
    """Copies records out of a block, once.

    Args:
        data: The block, uint8 `[bytes]`.
        index: Start and length of each record, int64 `[rows, 2]`, within the block.

    Returns:
        Binary array `[rows]`.

    Raises:
        InputDataError: More than 2 GiB - 1 in all.
    """
    lengths = np.ascontiguousarray(index[:, 1])
    _check_totals(int(lengths.sum()))
    values = np.empty(int(lengths.sum()), np.uint8)
    gather(data.ctypes.data, index, values.ctypes.data)
    buffers = [None, _offsets(lengths), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.binary(), len(index), buffers)
