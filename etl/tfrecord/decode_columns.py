"""The memory into which features are decoded, and the Arrow columns that it becomes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from conf.errors import InputDataError
from etl.tfrecord import decode_kernels_keys as k
from etl.tfrecord.decode_kernels import gather
from etl.tfrecord.features import KIND_CODES, WireFeature
from etl.tfrecord.walk_kernels import BYTES, FLOAT, INT

_MAX_OFFSET = 2**31 - 1
_DTYPES: dict[int, np.dtype[Any]] = {
    INT: np.dtype(np.int64),
    FLOAT: np.dtype(np.float32),
    BYTES: np.dtype(np.uint8),
}
# Outputs have room for so much more than the rows so far let expect.
_MARGIN, _SPARE = 1.04, 64


class Arena:
    """Hands out memory in pieces, so that ten thousand columns need few allocations.

    It is of Arrow's pool, which keeps its pages where numpy's go back to the system.
    """

    _CHUNK_BYTES = 64 << 10
    _ALIGNMENT = 64

    def __init__(self) -> None:
        self._left = 0

    def allocate(self, size: int) -> tuple[pa.Buffer, np.ndarray]:
        """Returns a buffer of `size` bytes, whatever they hold, and the same for writing."""
        taken = max(1, -(-size // self._ALIGNMENT)) * self._ALIGNMENT
        if taken >= self._CHUNK_BYTES:
            buffer = pa.allocate_buffer(size)
            return buffer, np.frombuffer(buffer, np.uint8)
        if taken > self._left:
            self._chunk, self._next = pa.allocate_buffer(self._CHUNK_BYTES), 0
            self._view, self._left = np.frombuffer(self._chunk, np.uint8), self._CHUNK_BYTES
        at = self._next
        self._next += taken
        self._left -= taken
        return self._chunk.slice(at, size), self._view[at : at + size]


class Scratch:
    """Memory that a decoder uses block after block, without asking the system for it again."""

    _KEPT_BYTES = 64 << 20

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, size: int) -> np.ndarray:
        """So many bytes, uint8 `[size]`; gives up what was handed out before."""
        if self._memory.size < size or self._memory.size > self._KEPT_BYTES:
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size]


class Column:
    """One feature of a block of records: the memory of its values, and what becomes of it.

    How much its lists and byte strings take shows while they are decoded: room for them is made
    as the rows so far let expect, in the pool's memory, where growing seldom means copying.
    """

    def __init__(self, feature: WireFeature, rows: int, arena: Arena) -> None:
        self._feature, self._code, self._rows = feature, KIND_CODES[feature.kind], rows
        self._depth = 2 if feature.is_sequence else int(feature.is_list)
        self._is_noted = self._depth > 0 or self._code == BYTES
        self._width = _DTYPES[self._code].itemsize
        self._byte_offsets = self._list_offsets = None
        if self._is_noted:
            self._values = _allocate(0)
            self._row_offsets, offsets = arena.allocate(4 * (rows + 1))
            offsets[:4] = 0
            if self._depth > 0 and self._code == BYTES:
                self._byte_offsets = _allocate(4)
                _set_first(self._byte_offsets)
            if self._depth > 1:
                self._list_offsets = _allocate(4)
                _set_first(self._list_offsets)
        else:
            self._values, self._numbers = arena.allocate(self._width * rows)

    def reserve(self, fields: np.ndarray, rooms: tuple[int, int, int]) -> None:
        """Makes room for so many values, bytes and inner lists; keeps what is there.

        Args:
            fields: The feature's row of the feature table, int64 `[FEATURE_FIELDS]`; updated.
            rooms: For how many values of lists, bytes of byte strings, and inner lists.
        """
        if not self._is_noted:
            fields[k.VALUES] = self._values.address
            return
        count, size, lists = rooms
        is_bytes = self._code == BYTES
        self._values.resize(size if is_bytes else count * self._width)
        fields[k.COUNT_ROOM : k.LIST_ROOM + 1] = rooms
        fields[k.VALUES], fields[k.ROW_OFFSETS] = self._values.address, self._row_offsets.address
        if self._byte_offsets is not None:
            self._byte_offsets.resize(4 * (count + 1))
            fields[k.BYTE_OFFSETS] = self._byte_offsets.address
        if self._list_offsets is not None:
            self._list_offsets.resize(4 * (lists + 1))
            fields[k.LIST_OFFSETS] = self._list_offsets.address

    def build(self, fields: np.ndarray, valid: np.ndarray) -> pa.Array:
        """Builds the Arrow column, when all rows have been decoded.

        Args:
            fields: The feature's row of the feature table.
            valid: Which rows hold the feature, uint8 `[rows]`.
        """
        data_type, validity = self._feature.arrow_type, _validity(valid)
        if not self._is_noted:
            if validity is not None:  # what lies below a null is not left to chance
                self._numbers.view(_DTYPES[self._code])[valid == 0] = 0
            return pa.Array.from_buffers(data_type, self._rows, [validity, self._values])
        count, size, lists = fields[k.COUNT : k.LISTS + 1].tolist()
        is_bytes = self._code == BYTES
        self._values.resize(size if is_bytes else count * self._width)
        if self._depth == 0:
            buffers = [validity, self._row_offsets, self._values]
            return pa.Array.from_buffers(data_type, self._rows, buffers)
        leaf_type = data_type.value_type if self._depth == 1 else data_type.value_type.value_type
        leaves = [None, self._values]
        if self._byte_offsets is not None:
            self._byte_offsets.resize(4 * (count + 1))
            leaves.insert(1, self._byte_offsets)
        child = pa.Array.from_buffers(leaf_type, count, leaves)
        if self._list_offsets is not None:
            self._list_offsets.resize(4 * (lists + 1))
            buffers = [None, self._list_offsets]
            child = pa.Array.from_buffers(data_type.value_type, lists, buffers, children=[child])
        buffers = [validity, self._row_offsets]
        return pa.Array.from_buffers(data_type, self._rows, buffers, children=[child])


def expect_rooms(per_row: np.ndarray, rows: int, most: int) -> np.ndarray:
    """For how much to make room, by what a row has taken so far.

    Args:
        per_row: What a row takes, float64 of any shape.
        rows: Rows to come.
        most: What they cannot exceed.

    Returns:
        int64 of the same shape.
    """
    expected = np.minimum(per_row * (rows * _MARGIN) + _SPARE, most)
    return np.where(per_row > 0, expected, 0).astype(np.int64)


def _allocate(size: int) -> pa.Buffer:
    """Memory that can grow."""
    return pa.allocate_buffer(size, resizable=True)


def _set_first(offsets: pa.Buffer) -> None:
    np.frombuffer(offsets, np.int32, 1)[0] = 0


def _validity(valid: np.ndarray) -> pa.Buffer | None:
    if valid.all():
        return None
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


def check_totals(total: int) -> None:
    """Refuses more values than Arrow's offsets reach.

    Raises:
        InputDataError: There are.
    """
    if total > _MAX_OFFSET:
        raise InputDataError(
            "too many values for one batch", received=total,
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
    check_totals(int(lengths.sum()))
    values = np.empty(int(lengths.sum()), np.uint8)
    gather(data.ctypes.data, index, values.ctypes.data)
    buffers = [None, _offsets(lengths), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.binary(), len(index), buffers)
