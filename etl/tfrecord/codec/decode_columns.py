"""The features that a decoder wants, and the memory and Arrow columns that they become."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.codec import message_kernels as k
from etl.tfrecord.codec.decode_kernels import NO_ROOM, decode, gather
from etl.tfrecord.codec.framing import CorruptRecordError, RecordBlock, corrupt_record
from etl.tfrecord.codec.message_kernels import BYTES, FLOAT, INT
from etl.tfrecord.types.features import KIND_CODES, WireFeature


def _entry_head(key: bytes) -> np.ndarray:
    """First bytes of an entry, its own length left out, padded to whole words with zeros."""
    lengths = bytes([0x0A, 0, 0x0A, len(key) & 0xFF])
    return np.frombuffer(lengths + key + bytes(-(len(key) + 4) % 8), np.uint8)


class KeyTable:
    """Feature keys in memory, and their hash table."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        heads = [_entry_head(key) for key in keys]
        self._memory = np.concatenate([*heads, np.zeros(8, np.uint8)])
        starts = np.cumsum([0, *(head.size for head in heads)], dtype=np.int64)
        self.places = [
            (self._memory.ctypes.data + int(start), len(key))
            for key, start in zip(keys, starts[:-1], strict=True)
        ]
        fields = np.zeros((max(1, len(keys)), k.FEATURE_FIELDS), np.int64)
        for row, (address, length) in enumerate(self.places):
            fields[row, k.HEAD], fields[row, k.KEY_BYTES] = address, length
        if not keys:
            fields[0, k.KEY_BYTES] = -1  # a key of no length at all: matches nothing
        self.fields = fields
        self.table = np.empty(1 << (2 * len(keys) + 1).bit_length(), np.int64)
        k.build_key_table(fields[: len(keys)], self.table)


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


class DecodedColumn:
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
            if validity is not None:  # values below a null are not left to chance
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


# Records are decoded in runs of about this size, with what is noted of them: they stay in the
# cache between the two halves of the work.
_RUN_BYTES = 192 << 10
_LEAST_RUN = 8

_FILLED, _ROOMS = slice(k.COUNT, k.LISTS + 1), slice(k.COUNT_ROOM, k.LIST_ROOM + 1)
_NEEDS = slice(k.COUNT_NEED, k.LIST_NEED + 1)


class _Part:
    """The wanted features of one map: their keys and how they tend to follow each other."""

    def __init__(self, features: Sequence[WireFeature]) -> None:
        self.keys = KeyTable([feature.name.encode() for feature in features])
        self.table = self.keys.table
        self.successors = (np.arange(len(features) + 1) + 1) % max(1, len(features))
        self.successors[-1] = 0


class FeatureTable:
    """The features of an Example, or those of a SequenceExample's context and its feature lists.

    It learns the order of the features, and what a record takes, as it goes.
    """

    def __init__(self, features: Sequence[WireFeature]) -> None:
        is_sequence = [feature.is_sequence for feature in features]
        self._order = np.argsort(is_sequence, kind="stable")  # feature lists last
        self._split = len(features) - sum(is_sequence)
        self._features = [features[number] for number in self._order]
        parts = self._features[: self._split], self._features[self._split :]
        self._context, self._lists = (_Part(part) for part in parts)
        self._fixed = np.zeros((len(features), k.FEATURE_FIELDS), np.int64)
        places = [*self._context.keys.places, *self._lists.keys.places]
        for row, feature, (key, key_bytes) in zip(self._fixed, self._features, places, strict=True):
            row[k.KIND], row[k.HEAD], row[k.KEY_BYTES] = KIND_CODES[feature.kind], key, key_bytes
            row[k.DEPTH] = 2 if feature.is_sequence else int(feature.is_list)
        self._noted = sum(f.kind == "bytes" or f.is_list or f.is_sequence for f in features)
        self._per_row = np.zeros((len(features), 3))
        self._scratch = Scratch()

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
        self._reserve(columns, table, expect_rooms(self._per_row, rows, data.size))
        outcome, record, feature = self._run(data, index, columns, table, run_rows, outcomes)
        if feature >= 0:
            feature = int(self._order[feature])
        known = outcomes[:, 1] >= 0
        outcomes[known, 1] = self._order[outcomes[known, 1]]
        if outcome != k.OK or len(outcomes):
            return outcome, record, feature, []
        self._per_row = table[:, _FILLED] / max(1, rows)
        arrays = [c.build(*args) for c, *args in zip(columns, table, valid, strict=True)]
        return outcome, record, feature, [arrays[i] for i in np.argsort(self._order)]

    def _run_rows(self, index: np.ndarray) -> int:
        row_bytes = int(index[:, 1].sum()) // max(1, len(index)) + k.PLACE_BYTES * self._noted
        return min(max(_LEAST_RUN, _RUN_BYTES // max(1, row_bytes)), max(1, len(index)))

    def lay_out(self, rows: int, run_rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Lays out what belongs to no column alone.

        Args:
            rows: Records to decode.
            run_rows: Records per run.

        Returns:
            A feature table without outputs, int64 `[features, FEATURE_FIELDS]`, and which rows
            hold which feature, uint8 `[features, rows]`, all zero; until the next call.
        """
        numbers = np.arange(len(self._features))
        # An odd number of places: columns do not compete for the same sets of the cache.
        place_bytes = k.PLACE_BYTES * (run_rows | 1)
        memory = self._scratch.take(len(numbers) * (place_bytes + rows))
        valid = memory[len(numbers) * place_bytes :].reshape(len(numbers), rows)
        valid.fill(0)
        table = self._fixed.copy()
        table[:, k.PLACES] = memory.ctypes.data + place_bytes * numbers
        table[:, k.VALID] = valid.ctypes.data + rows * numbers
        return table, valid

    def parts(self, table: np.ndarray) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
        """Splits a table that `lay_out` has made, as the kernel takes it.

        Returns:
            Rows, hash table and successors: of the context's features, and of the feature lists.
        """
        context, lists = self._context, self._lists
        return (
            (table[: self._split], context.table, context.successors),
            (table[self._split :], lists.table, lists.successors),
        )

    def _reserve(self, columns: list[DecodedColumn], table: np.ndarray, rooms: np.ndarray) -> None:
        for column, fields, room in zip(columns, table, rooms.tolist(), strict=True):
            column.reserve(fields, tuple(room))

    def _run(
        self, data: np.ndarray, index: np.ndarray, columns: list[DecodedColumn], table: np.ndarray,
        run_rows: int, outcomes: np.ndarray,
    ) -> tuple[int, int, int]:  # fmt: skip
        """Runs the kernel, making room as it asks for it."""
        base, limit = data.ctypes.data, data.ctypes.data + data.size
        context, lists = self.parts(table)
        first = 0
        while True:
            outcome, record, feature = decode(
                base, index, limit, *context, *lists, first, run_rows, outcomes
            )
            if outcome != NO_ROOM:
                return int(outcome), int(record), int(feature)
            first, done = int(record), min(int(record) + run_rows, len(index))
            check_totals(int(table[:, _NEEDS].max()))
            left = int(index[done:, 1].sum())
            needs = table[:, _NEEDS]
            rooms = needs + expect_rooms(needs / done, len(index) - done, left)
            rooms = np.where(needs > table[:, _ROOMS], rooms, table[:, _ROOMS])
            self._reserve(columns, table, rooms)


_STOP_AT_FIRST = np.empty((0, 2), np.int64)


@dataclass(frozen=True)
class BadRecord:
    """A record that was left out.

    Attributes:
        record: Its number in the block.
        reason: What is wrong with it.
    """

    record: int
    reason: str


class Decoder(ABC):
    """What all record types share: the calls, and the choice between refusing and skipping."""

    schema: pa.Schema

    def decode(self, data: np.ndarray, index: np.ndarray, name: str = "<buffer>") -> pa.RecordBatch:
        """Decodes records in memory.

        Args:
            data: Buffer that holds the records, uint8 `[bytes]`.
            index: Start and length of each record's payload, int64 `[rows, 2]`; see
                `framing.index_records`.
            name: What to call the buffer in an error.

        Returns:
            One column per feature, `[rows]`.

        Raises:
            CorruptRecordError: A record is not well-formed.
            InputDataError: A feature holds another kind of values than wanted, or several where a
                scalar is wanted.
            IndexError: The index reaches outside the buffer.
        """
        return self.decode_block(RecordBlock(data, index, 0, 0), name)

    @abstractmethod
    def decode_block(self, block: RecordBlock, name: str = "<buffer>") -> pa.RecordBatch:
        """Decodes a block of records; see `decode`."""

    @abstractmethod
    def decode_sound(
        self, block: RecordBlock, name: str = "<buffer>"
    ) -> tuple[pa.RecordBatch, list[BadRecord]]:
        """Decodes the well-formed records of a block and leaves out the others.

        A record that is well-formed but holds another kind of values than wanted is still refused:
        leaving those out would hide that the wrong features are being read.

        Args:
            block: Records whose framing is sound.
            name: What to call the file in an error.

        Returns:
            One column per feature, and which records were left out, in their order.

        Raises:
            InputDataError: As for `decode`, malformed records aside.
            IndexError: The index reaches outside the buffer.
        """


class ColumnDecoder(Decoder):
    """Decodes features into columns; a decoder learns their order and belongs to one thread."""

    _message: str  # protobuf type, for errors

    def __init__(self, features: Sequence[WireFeature]) -> None:
        self.features = check_features(tuple(features))
        self.schema = pa.schema([(f.name, f.arrow_type) for f in self.features])
        self._table = FeatureTable(self.features)

    def decode_block(self, block: RecordBlock, name: str = "<buffer>") -> pa.RecordBatch:
        """Decodes a block of records; see `decode`."""
        data = np.ascontiguousarray(block.data)
        index = check_index(block.index, data.size)
        if not self.features:
            return build_empty(len(index))
        outcome, record, feature, arrays = self._table.decode(data, index, _STOP_AT_FIRST)
        if outcome != k.OK:
            raise self._error(outcome, block, record, feature, name)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def decode_sound(
        self, block: RecordBlock, name: str = "<buffer>"
    ) -> tuple[pa.RecordBatch, list[BadRecord]]:
        """Decodes the well-formed records and leaves out the others; see `Decoder`."""
        try:
            return self.decode_block(block, name), []
        except CorruptRecordError:
            bad = self._find_malformed(block, name)
        sound = np.delete(block.index, [record.record for record in bad], axis=0)
        batch = self.decode_block(RecordBlock(block.data, sound, block.offset, 0), name)
        return batch, bad

    def _find_malformed(self, block: RecordBlock, name: str) -> list[BadRecord]:
        """Finds all malformed records in one more pass."""
        data = np.ascontiguousarray(block.data)
        index = check_index(block.index, data.size)
        outcomes = np.zeros((len(index), 2), np.int64)
        self._table.decode(data, index, outcomes)
        refused = (outcomes[:, 0] != k.OK) & (outcomes[:, 0] != k.MALFORMED)
        if refused.any():
            record = int(refused.argmax())
            outcome, feature = outcomes[record].tolist()
            raise self._error(outcome, block, record, feature, name)
        bad = np.flatnonzero(outcomes[:, 0] == k.MALFORMED).tolist()
        return [BadRecord(record, self._reason(int(outcomes[record, 1]))) for record in bad]

    def _reason(self, feature: int) -> str:
        where = f" in feature {self.features[feature].name!r}" if feature >= 0 else ""
        return f"not a {self._message}{where}"

    def _error(
        self, outcome: int, block: RecordBlock, record: int, feature: int, name: str
    ) -> InputDataError:
        number, offset = block.first_record + record, block.offset + int(block.index[record, 0])
        if outcome == k.MALFORMED:
            return corrupt_record(name, offset, number, self._reason(feature))
        wanted = self.features[feature]
        if outcome == k.NOT_SCALAR:
            return InputDataError(
                f"{name}: feature {wanted.name!r} holds several values where one is wanted",
                received=f"record {number}, at byte offset {offset}",
                fix="read it as a list",
            )
        return InputDataError(
            f"{name}: feature {wanted.name!r} holds another kind of values",
            received=f"record {number}, at byte offset {offset}",
            allowed=wanted.kind,
            fix="read it as the kind that was written",
        )


def build_empty(rows: int) -> pa.RecordBatch:
    """A batch of rows without columns."""
    return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))


def check_features(features: tuple[WireFeature, ...]) -> tuple[WireFeature, ...]:
    """Refuses unknown kinds and names that occur twice."""
    seen = set()
    for feature in features:
        if feature.kind not in KIND_CODES:
            raise ConfigError(
                f"feature {feature.name!r} has an unknown kind",
                received=repr(feature.kind),
                allowed=", ".join(KIND_CODES),
            )
        if feature.name in seen:
            raise ConfigError("a feature is wanted twice", received=feature.name)
        seen.add(feature.name)
    return features


def check_index(index: np.ndarray, size: int) -> np.ndarray:
    """Returns an index as the kernels take it, having checked that it stays in the buffer."""
    index = np.ascontiguousarray(index, np.int64).reshape(-1, 2)
    starts, lengths = index[:, 0], index[:, 1]
    if len(index) and (
        starts.min() < 0 or lengths.min() < 0 or (lengths > size - starts).any()
    ):  # fmt: skip
        raise IndexError(f"record index reaches outside a buffer of {size} bytes")
    return index
