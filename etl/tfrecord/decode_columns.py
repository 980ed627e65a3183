"""The memory into which features are decoded, and the Arrow columns that it becomes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from conf.errors import InputDataError
from etl.tfrecord.decode_kernels import fill, fill_strings, gather, total
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


class Scratch:
    """Memory in which a decoder notes where lists and byte strings lie, block after block.

    It is neither zeroed nor asked of the system again; what it holds counts only for rows whose
    feature is marked as present.
    """

    _KEPT_BYTES = 256 << 20

    def __init__(self) -> None:
        self._memory = np.empty(0, np.int64)
        self._taken = 0

    def begin(self, words: int) -> None:
        """Makes room for so many words, giving up what was handed out before."""
        if self._memory.size < words or 8 * self._memory.size > self._KEPT_BYTES:
            self._memory = np.empty(words, np.int64)
        self._taken = 0

    def take(self, words: int) -> int:
        """Address of the next so many words."""
        address = self._memory.ctypes.data + 8 * self._taken
        self._taken += words
        return address


PLACES = 6  # words per row: starts, ends, counts, byte counts, since, outer counts


class Column:
    """One feature of a block of records."""

    def __init__(self, feature: WireFeature, rows: int, arena: Arena, scratch: Scratch) -> None:
        self._feature, self._code, self._rows = feature, KIND_CODES[feature.kind], rows
        self._is_nested = feature.is_list or feature.is_sequence
        self._is_scalar = not self._is_nested and self._code != BYTES
        valid, self._valid_at = arena.allocate(rows)
        self._valid = np.frombuffer(valid, np.uint8)
        width = _DTYPES[self._code].itemsize if self._is_scalar else 0
        self._values, self._values_at = arena.allocate(width * rows)
        self._places_at = scratch.take(0 if self._is_scalar else PLACES * rows)

    def fields(self, key: int, key_bytes: int) -> tuple[int, ...]:
        """Row of the feature table."""
        starts, ends, counts, byte_counts, since, outer = (
            self._places_at + 8 * self._rows * i for i in range(PLACES)
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
        depth = 2 if self._feature.is_sequence else int(self._is_nested)
        totals = [int(number) for number in total(fields, depth, self._rows)]
        _check_totals(*totals)
        count, size, lists = totals
        is_bytes = self._code == BYTES
        values = _allocate(size if is_bytes else count * _DTYPES[self._code].itemsize)
        rows = _allocate_offsets(self._rows)
        inputs = (fields, self._rows, limit, values.address)
        if depth == 0:
            fill_strings(*inputs, rows.address)
            return self._array([self._validity(), rows, values]), -1
        byte_offsets = _allocate_offsets(count if is_bytes else 0)
        offsets = _allocate_offsets(lists)
        if depth == 1:
            bad = fill(*inputs, byte_offsets.address, rows.address, malformed)
        else:
            bad = fill_feature_lists(
                *inputs, byte_offsets.address, offsets.address, rows.address, malformed
            )
        if bad >= 0:
            return None, int(bad)
        child_type = self._feature.arrow_type.value_type
        leaf_type = child_type if depth == 1 else child_type.value_type
        leaves = [None, byte_offsets, values] if is_bytes else [None, values]
        child = pa.Array.from_buffers(leaf_type, count, leaves)
        if depth == 2:
            child = pa.Array.from_buffers(child_type, lists, [None, offsets], children=[child])
        return self._array([self._validity(), rows], [child]), -1

    def _array(
        self, buffers: list[pa.Buffer | None], children: list[pa.Array] | None = None
    ) -> pa.Array:
        data_type = self._feature.arrow_type
        return pa.Array.from_buffers(data_type, self._rows, buffers, children=children)

    def _validity(self) -> pa.Buffer | None:
        if self._valid.all():
            return None
        return pa.py_buffer(np.packbits(self._valid, bitorder="little"))


def _allocate(size: int) -> pa.Buffer:
    """Memory of Arrow's pool, which keeps its pages where numpy's go back to the system."""
    return pa.allocate_buffer(size)


def _allocate_offsets(count: int) -> pa.Buffer:
    """Room for int32 `[count + 1]`, the first one zero."""
    buffer = _allocate(4 * (count + 1))
    np.frombuffer(buffer, np.int32, 1)[0] = 0
    return buffer


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
