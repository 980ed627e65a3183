"""Features of a block of records as Arrow columns: their memory, which grows as rows demand it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from conf.errors import InputDataError
from etl.tfrecord.codec import decode_kernels as k
from etl.tfrecord.codec.messages import BYTES, FLOAT, INT, KeyTable
from etl.tfrecord.codec.row_placement import allocate
from etl.tfrecord.types.features import KIND_CODES, WireFeature

_MAX_OFFSET = 2**31 - 1
_DTYPES: dict[int, np.dtype[Any]] = {
    INT: np.dtype(np.int64),
    FLOAT: np.dtype(np.float32),
    BYTES: np.dtype(np.uint8),
}


def check_totals(total: int) -> None:
    """Refuses more values than Arrow's offsets reach."""
    if total > _MAX_OFFSET:
        raise InputDataError(
            "too many values for one batch", received=total,
            allowed=_MAX_OFFSET, fix="decode fewer records at a time",
        )  # fmt: skip


# Outputs have room for so much more than the rows so far let expect.
_MARGIN, _SPARE = 1.04, 64


def expect_rooms(per_row: np.ndarray, rows: int, most: int) -> np.ndarray:
    """For how much to make room, int64, by what a row has taken so far; `most` at most."""
    expected = np.minimum(per_row * (rows * _MARGIN) + _SPARE, most)
    return np.where(per_row > 0, expected, 0).astype(np.int64)


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


def _grow_offsets() -> pa.Buffer:
    """Offsets that can grow, the first one set."""
    offsets = pa.allocate_buffer(4, resizable=True)
    np.frombuffer(offsets, np.int32, 1)[0] = 0
    return offsets


class DecodedColumn:
    """One feature of a block of records: the memory of its values, and what becomes of it.

    How much its lists and byte strings take shows while they are decoded: room for them is made
    as the rows so far let expect, in the pool's memory, where growing seldom means copying.
    """

    def __init__(self, feature: WireFeature, rows: int, arena: Arena) -> None:
        self._type, self._rows = feature.arrow_type, rows
        self._dtype = _DTYPES[KIND_CODES[feature.kind]]
        self._byte_offsets = self._list_offsets = None
        self._is_number = self._dtype != np.uint8 and not pa.types.is_list(self._type)
        if self._is_number:
            self._values, self._numbers = arena.allocate(self._dtype.itemsize * rows)
            return
        self._values = pa.allocate_buffer(0, resizable=True)
        self._row_offsets, offsets = arena.allocate(4 * (rows + 1))
        offsets[:4] = 0
        if pa.types.is_list(self._type) and feature.kind == "bytes":
            self._byte_offsets = _grow_offsets()
        if feature.is_sequence:
            self._list_offsets = _grow_offsets()

    def reserve(self, fields: np.ndarray, rooms: Sequence[int]) -> None:
        """Makes room for so many values of lists, bytes of strings and inner lists.

        Args:
            fields: The feature's row of the feature table, int64 `[FEATURE_FIELDS]`; updated.
            rooms: How many; what is there is kept.
        """
        if not self._is_number:
            self._resize(*rooms)
            fields[k.COUNT_ROOM : k.LIST_ROOM + 1] = rooms
            fields[k.ROW_OFFSETS] = self._row_offsets.address
        fields[k.VALUES] = self._values.address
        if self._byte_offsets is not None:
            fields[k.BYTE_OFFSETS] = self._byte_offsets.address
        if self._list_offsets is not None:
            fields[k.LIST_OFFSETS] = self._list_offsets.address

    def _resize(self, count: int, size: int, lists: int) -> None:
        is_bytes = self._dtype == np.uint8
        self._values.resize(size if is_bytes else count * self._dtype.itemsize)
        if self._byte_offsets is not None:
            self._byte_offsets.resize(4 * (count + 1))
        if self._list_offsets is not None:
            self._list_offsets.resize(4 * (lists + 1))

    def build(self, fields: np.ndarray, valid: np.ndarray) -> pa.Array:
        """Builds the Arrow column, when all rows have been decoded.

        Args:
            fields: The feature's row of the feature table.
            valid: Which rows hold the feature, uint8 `[rows]`.
        """
        validity = None
        if not valid.all():
            validity = pa.py_buffer(np.packbits(valid, bitorder="little"))
        if self._is_number:
            if validity is not None:  # values below a null are not left to chance
                self._numbers.view(self._dtype)[valid == 0] = 0
            return pa.Array.from_buffers(self._type, self._rows, [validity, self._values])
        count, size, lists = fields[k.COUNT : k.LISTS + 1].tolist()
        self._resize(count, size, lists)
        if not pa.types.is_list(self._type):
            buffers = [validity, self._row_offsets, self._values]
            return pa.Array.from_buffers(self._type, self._rows, buffers)
        child = self._build_values(count, lists)
        buffers = [validity, self._row_offsets]
        return pa.Array.from_buffers(self._type, self._rows, buffers, children=[child])

    def _build_values(self, count: int, lists: int) -> pa.Array:
        inner = self._type.value_type
        leaf_type = inner if self._list_offsets is None else inner.value_type
        buffers = [None, self._byte_offsets, self._values]
        if self._byte_offsets is None:
            buffers = [None, self._values]
        leaves = pa.Array.from_buffers(leaf_type, count, buffers)
        if self._list_offsets is None:
            return leaves
        return pa.Array.from_buffers(inner, lists, [None, self._list_offsets], children=[leaves])


# Records are decoded in runs of about this size, with what is noted of them: they stay in the
# cache between the two halves of the work.
_RUN_BYTES = 192 << 10
_LEAST_RUN = 8

_FILLED, _ROOMS = slice(k.COUNT, k.LISTS + 1), slice(k.COUNT_ROOM, k.LIST_ROOM + 1)
_NEEDS = slice(k.COUNT_NEED, k.LIST_NEED + 1)


def _chain(is_nested: np.ndarray) -> np.ndarray:
    """Successors of features that follow each other within context and feature lists."""
    successors = np.full(len(is_nested) + 2, -1, np.int64)
    for part in (False, True):
        numbers = np.flatnonzero(is_nested == part)
        if len(numbers):
            successors[numbers] = np.roll(numbers, -1)
            successors[len(is_nested) + part] = numbers[0]
    return successors


class FeatureTable:
    """The features of an Example, or those of a SequenceExample's context and its feature lists.

    It learns the order of the features, and what a record takes, as it goes.
    """

    def __init__(self, features: Sequence[WireFeature]) -> None:
        self._features = tuple(features)
        self._keys = KeyTable([feature.name.encode() for feature in features])
        self._fixed = np.zeros((len(features), k.FEATURE_FIELDS), np.int64)
        self._fixed[:, : k.KIND] = self._keys.rows[: len(features)]
        for row, feature in zip(self._fixed, features, strict=True):
            row[k.KIND] = KIND_CODES[feature.kind]
            row[k.DEPTH] = 2 if feature.is_sequence else int(feature.is_list)
        self._successors = _chain(self._fixed[:, k.DEPTH] > 1)
        self._noted = sum(f.kind == "bytes" or f.is_list or f.is_sequence for f in features)
        self._per_row = np.zeros((len(features), 3))

    def decode(
        self, data: np.ndarray, index: np.ndarray, outcomes: np.ndarray
    ) -> tuple[int, int, int, list[pa.Array]]:
        """Decodes records.

        Args:
            data: Buffer that holds them, uint8 `[bytes]`.
            index: Start and length of each, int64 `[rows, 2]`, within the buffer.
            outcomes: As for `decode_kernels.decode`.

        Returns:
            Outcome, record and feature, as `decode_kernels.decode` does; and the columns, where
            the outcome is `OK` and none were asked for.

        Raises:
            InputDataError: More values than Arrow's offsets reach.
        """
        rows, arena = len(index), Arena()
        columns = [DecodedColumn(feature, rows, arena) for feature in self._features]
        run_rows = self._run_rows(index)
        table, valid = self.lay_out(rows, run_rows)
        _reserve(columns, table, expect_rooms(self._per_row, rows, data.size))
        outcome, record, feature = self._run(data, index, columns, table, run_rows, outcomes)
        if outcome != k.OK or len(outcomes):
            return outcome, record, feature, []
        self._per_row = table[:, _FILLED] / max(1, rows)
        arrays = [c.build(*args) for c, *args in zip(columns, table, valid, strict=True)]
        return outcome, record, feature, arrays

    def _run_rows(self, index: np.ndarray) -> int:
        row_bytes = int(index[:, 1].sum()) // max(1, len(index)) + k.PLACE_BYTES * self._noted
        return min(max(_LEAST_RUN, _RUN_BYTES // max(1, row_bytes)), max(1, len(index)))

    def lay_out(self, rows: int, run_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Lays out what belongs to no column alone.

        Returns:
            A feature table without outputs, int64 `[features, FEATURE_FIELDS]`, and which rows
            hold which feature, uint8 `[features, rows]`, all zero; the table's places lie in the
            same memory.
        """
        numbers = np.arange(len(self._features))
        # An odd number of places: columns do not compete for the same sets of the cache.
        place_bytes = k.PLACE_BYTES * (run_rows | 1)
        size = len(numbers) * (place_bytes + rows)
        memory = allocate({"noted": ((size,), np.dtype(np.uint8))})["noted"]
        valid = memory[len(numbers) * place_bytes :].reshape(len(numbers), rows)
        valid.fill(0)
        table = self._fixed.copy()
        table[:, k.PLACES] = memory.ctypes.data + place_bytes * numbers
        table[:, k.VALID] = valid.ctypes.data + rows * numbers
        return table, valid

    def run_kernel(
        self, address: int, index: np.ndarray, limit: int, table: np.ndarray, first: int,
        run_rows: int, outcomes: np.ndarray,
    ) -> tuple[int, int, int]:  # fmt: skip
        """Calls `decode_kernels.decode` with the keys of this table."""
        return k.decode(
            address, index, limit, table, self._keys.table, self._successors, first, run_rows,
            outcomes,
        )  # fmt: skip

    def _run(
        self, data: np.ndarray, index: np.ndarray, columns: list[DecodedColumn], table: np.ndarray,
        run_rows: int, outcomes: np.ndarray,
    ) -> tuple[int, int, int]:  # fmt: skip
        """Runs the kernel, making room as it asks for it."""
        base, first, rows = data.ctypes.data, 0, len(index)
        while True:
            outcome, record, feature = self.run_kernel(
                base, index, base + data.size, table, first, run_rows, outcomes
            )
            if outcome != k.NO_ROOM:
                return int(outcome), int(record), int(feature)
            first, done = int(record), min(int(record) + run_rows, rows)
            needs = table[:, _NEEDS]
            check_totals(int(needs.max()))
            rooms = needs + expect_rooms(needs / done, rows - done, int(index[done:, 1].sum()))
            rooms = np.where(needs > table[:, _ROOMS], rooms, table[:, _ROOMS])
            _reserve(columns, table, rooms)


def _reserve(columns: list[DecodedColumn], table: np.ndarray, rooms: np.ndarray) -> None:
    for column, fields, room in zip(columns, table, rooms.tolist(), strict=True):
        column.reserve(fields, room)


def gather_binary(data: np.ndarray, index: np.ndarray) -> pa.Array:
    """Copies records out of a block, once; index as for `FeatureTable.decode`."""
    lengths = np.ascontiguousarray(index[:, 1])
    check_totals(int(lengths.sum()))
    values, offsets = np.empty(int(lengths.sum()), np.uint8), np.zeros(len(index) + 1, np.int32)
    k.gather(data.ctypes.data, index, values.ctypes.data)
    np.cumsum(lengths, out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.binary(), len(index), buffers)
