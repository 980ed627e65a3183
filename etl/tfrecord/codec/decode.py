"""Decodes TFRecord bytes into Arrow, column by column, without a Python object per record."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError, InputDataError
from conf.schema import PackedSlot
from conf.storage.locations import Opener, open_local
from etl.tfrecord.codec import decode_kernels as k
from etl.tfrecord.codec.decode_kernels import KEY_FIELDS, KeyTable, check_record_type
from etl.tfrecord.codec.framing import RecordBlock, corrupt_record, read_record_blocks
from etl.tfrecord.codec.kernels import (
    LINE_BYTES,
    allocate,
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
from etl.tfrecord.types.features import BYTE_ARRAY_FEATURE, KIND_CODES, Kind, WireFeature

_MAX_OFFSET = 2**31 - 1
_DTYPES: dict[Kind, np.dtype[Any]] = {
    "int64": np.dtype(np.int64),
    "float32": np.dtype(np.float32),
    "bytes": np.dtype(np.uint8),
}


def _check_totals(total: int) -> None:
    """Refuses more values than Arrow's offsets reach."""
    if total > _MAX_OFFSET:
        raise InputDataError(
            "too many values for one batch", received=total,
            allowed=_MAX_OFFSET, fix="decode fewer records at a time",
        )  # fmt: skip


class _Arena:
    """Hands out pieces of Arrow's pool, so that ten thousand columns need few allocations."""

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
            self._chunk, self._left = pa.allocate_buffer(self._CHUNK_BYTES), self._CHUNK_BYTES
            self._view = np.frombuffer(self._chunk, np.uint8)
        at = self._CHUNK_BYTES - self._left
        self._left -= taken
        return self._chunk.slice(at, size), self._view[at : at + size]


class _Column:
    """Memory of one feature of a block of records, and the array that it becomes."""

    def __init__(
        self, feature: WireFeature, rows: int, rooms: Sequence[int], arena: _Arena
    ) -> None:
        """Lays it out, with room for so many values of lists, bytes of strings and inner lists."""
        count, size, lists = rooms
        self._type, self._dtype = feature.arrow_type, _DTYPES[feature.kind]
        self._depth, is_bytes = _depth(feature), feature.kind == "bytes"
        values = count if self._depth else rows
        lengths = [rows, lists][: self._depth] + [values] * is_bytes
        self._offsets = [self._allocate_offsets(length, arena) for length in lengths]
        self._values, self._view = arena.allocate(
            size if is_bytes else values * self._dtype.itemsize
        )

    @staticmethod
    def _allocate_offsets(length: int, arena: _Arena) -> pa.Buffer:
        buffer, view = arena.allocate(4 * (length + 1))
        view[:4] = 0
        return buffer

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """Of values, and of offsets of rows, bytes and inner lists; any number for what is not."""
        places = [buffer.address for buffer in self._offsets] or [0]
        return self._values.address, places[0], places[-1], places[min(1, len(places) - 1)]

    def build(self, valid: np.ndarray, filled: Sequence[int]) -> pa.Array:
        """The Arrow column of what has been filled; `valid` rows, uint8 `[rows]`, hold a value."""
        validity = None
        if not valid.all():
            validity = pa.py_buffer(np.packbits(valid, bitorder="little"))
            if not self._offsets:  # values below a null are not left to chance
                self._view.view(self._dtype)[valid == 0] = 0
        count, _, lists = filled
        lengths = [len(valid), *[lists, count][2 - self._depth :]]
        return self._nest(self._type, lengths, self._offsets, validity)

    def _nest(
        self, data_type: pa.DataType, lengths: list[int], offsets: list[pa.Buffer],
        validity: pa.Buffer | None = None,
    ) -> pa.Array:  # fmt: skip
        if len(lengths) == 1:
            buffers = [validity, *offsets, self._values]
            return pa.Array.from_buffers(data_type, lengths[0], buffers)
        child = self._nest(data_type.value_type, lengths[1:], offsets[1:])
        buffers = [validity, offsets[0]]
        return pa.Array.from_buffers(data_type, lengths[0], buffers, children=[child])


def _depth(feature: WireFeature) -> int:
    return 2 if feature.is_sequence else int(feature.is_list)


def _columns_of(first: str, last: str) -> slice:
    """Neighbouring fields of the feature table, as columns of integers."""
    names = list(k.FEATURE.names or ())
    return slice(names.index(first), names.index(last) + 1)


_ADDRESSES = _columns_of("values", "list_offsets")
_ROOMS, _FILLED = _columns_of("count_room", "list_room"), _columns_of("count", "lists")
# Outputs have room for so much more than the rows so far let expect.
_MARGIN, _SPARE = 1.04, 64


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
        self._fixed = np.zeros(len(features), k.FEATURE)
        for name in KEY_FIELDS:
            self._fixed[name] = self._keys.rows[name][: len(features)]
        self._fixed["kind"] = [KIND_CODES[feature.kind] for feature in features]
        self._fixed["depth"] = [_depth(feature) for feature in features]
        self._fixed["row"] = -1
        self._successors = _chain(self._fixed["depth"] > 1)
        # A scalar's number of values is that of the rows.
        self._is_counted = np.ones((len(features), 3), bool)
        self._is_counted[:, 0] = self._fixed["depth"] > 0
        self._per_row = np.zeros((len(features), 3))

    def decode(
        self, data: np.ndarray, index: np.ndarray, malformed: np.ndarray
    ) -> tuple[int, int, int, list[pa.Array]]:
        """Decodes records; again where there was less room than they need.

        Takes the buffer, uint8 `[bytes]`, and what `decode_kernels.decode` does; returns what that
        does, and the columns, if the outcome is `OK`.
        """
        rows, base = len(index), data.ctypes.data
        expected = np.minimum(self._per_row * (rows * _MARGIN) + _SPARE, _MAX_OFFSET)
        rooms = np.where(self._per_row > 0, expected, 0).astype(np.int64)
        while True:
            malformed.fill(k.SOUND)
            table, valid = self.lay_out(rows)
            grid, arena = table.view(np.int64).reshape(len(table), -1), _Arena()
            columns = [
                _Column(feature, rows, room, arena)
                for feature, room in zip(self._features, rooms.tolist(), strict=True)
            ]
            grid[:, _ROOMS], grid[:, _ADDRESSES] = rooms, [c.addresses for c in columns]
            end = self.run_kernel(base, index, base + data.size, table, malformed)
            filled = np.where(self._is_counted, grid[:, _FILLED], 0)
            if (filled <= rooms).all():
                break
            _check_totals(int(filled.max()))
            rooms = np.maximum(rooms, filled)
        if end[0] != k.OK:
            return *end, []
        self._per_row = np.maximum(self._per_row, filled / max(1, rows))
        built = zip(columns, valid, filled.tolist(), strict=True)
        return *end, [column.build(*args) for column, *args in built]

    def lay_out(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """A feature table without outputs, and `valid`, uint8 `[features, rows]`, all zero."""
        shape = len(self._features), rows
        valid = allocate({"valid": (shape, np.dtype(np.uint8))})["valid"]
        valid.fill(0)
        table = self._fixed.copy()
        table["valid"] = valid.ctypes.data + rows * np.arange(len(self._features))
        return table, valid

    def run_kernel(
        self, base: int, index: np.ndarray, limit: int, table: np.ndarray, malformed: np.ndarray
    ) -> tuple[int, int, int]:
        """Calls `decode_kernels.decode` with the keys of this table."""
        outcome, record, feature = k.decode(
            base, index, limit, table, self._keys.table, self._successors, malformed
        )
        return int(outcome), int(record), int(feature)


@dataclass(frozen=True)
class BadRecord:
    """A record that was left out: its number in the block, and what is wrong with it."""

    record: int
    reason: str


class Decoder(ABC):
    """What all record types share; a decoder belongs to one thread."""

    def __init__(self, features: Sequence[WireFeature]) -> None:
        self.features = tuple(features)
        names = [feature.name for feature in features]
        if len(set(names)) < len(names):
            raise ConfigError("a feature is wanted twice", received=", ".join(names))
        self.schema = pa.schema([(f.name, f.arrow_type) for f in self.features])

    def decode(self, data: np.ndarray, index: np.ndarray, name: str = "<buffer>") -> pa.RecordBatch:
        """Decodes records in memory, uint8 `[bytes]`; index as of `framing.index_records`."""
        return self.decode_block(RecordBlock(data, index, 0, 0), name)

    def decode_block(self, block: RecordBlock, name: str = "<buffer>") -> pa.RecordBatch:
        """Decodes a block of records to one column per feature, `[rows]`.

        Raises:
            CorruptRecordError: A record is not well-formed.
            InputDataError: A feature holds another kind of values than wanted, or several where a
                scalar is wanted.
            IndexError: The index reaches outside the buffer.
        """
        return self._decode(_check_index(block), name, None)

    def decode_sound(
        self, block: RecordBlock, name: str = "<buffer>"
    ) -> tuple[pa.RecordBatch, list[BadRecord]]:
        """Decodes the well-formed records of a block and leaves out the others.

        A record that is well-formed but holds another kind of values than wanted is still refused:
        leaving those out would hide that the wrong features are being read.

        Returns:
            One column per feature, and which records were left out, in their order.
        """
        bad: list[BadRecord] = []
        return self._decode(_check_index(block), name, bad), bad

    @abstractmethod
    def _decode(self, block: RecordBlock, name: str, bad: list[BadRecord] | None) -> pa.RecordBatch:
        """Decodes a block of records; malformed ones go to `bad`, or are raised without it."""


class ColumnDecoder(Decoder):
    """Decodes the wanted features of Examples or SequenceExamples; skips all others.

    A feature that a record lacks is null, and so is an empty list where a scalar is wanted. A
    feature list becomes a list of lists, an empty inner list for a feature without values.
    """

    def __init__(self, features: Sequence[WireFeature], record_type: str) -> None:
        super().__init__(features)
        nested = next((f for f in self.features if f.is_sequence), None)
        if record_type == "Example" and nested is not None:
            raise ConfigError(
                f"feature {nested.name!r} is a feature list, which tf.train.Example lacks",
                fix="read the files with record type SequenceExample",
            )
        self._message, self._table = f"tf.train.{record_type}", FeatureTable(self.features)

    def _decode(self, block: RecordBlock, name: str, bad: list[BadRecord] | None) -> pa.RecordBatch:
        if not self.features:
            return _build_empty(len(block.index))
        malformed = np.empty(0 if bad is None else len(block.index), np.int64)
        outcome, record, feature, arrays = self._table.decode(block.data, block.index, malformed)
        if outcome != k.OK:
            raise self._error(outcome, block, record, feature, name)
        batch = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        is_sound = malformed == k.SOUND
        if bad is None or is_sound.all():
            return batch
        for row in np.flatnonzero(~is_sound).tolist():
            bad.append(BadRecord(row, self._reason(int(malformed[row]))))
        return batch.filter(pa.array(is_sound))

    def _reason(self, feature: int) -> str:
        where = f" in feature {self.features[feature].name!r}" if feature >= 0 else ""
        return f"not a {self._message}{where}"

    def _error(
        self, outcome: int, block: RecordBlock, record: int, feature: int, name: str
    ) -> InputDataError:
        offset, number = block.locate(record)
        if outcome == k.MALFORMED:
            return corrupt_record(name, offset, number, self._reason(feature))
        wanted = self.features[feature]
        received = f"record {number}, at byte offset {offset}"
        if outcome == k.NOT_SCALAR:
            return InputDataError(
                f"{name}: feature {wanted.name!r} holds several values where one is wanted",
                received=received,
                fix="read it as a list",
            )
        return InputDataError(
            f"{name}: feature {wanted.name!r} holds another kind of values",
            received=received,
            allowed=wanted.kind,
            fix="read it as the kind that was written",
        )


class ByteArrayDecoder(Decoder):
    """Takes records as they are: one binary column, copied once; none to count records only."""

    def __init__(self, features: Sequence[WireFeature] = (BYTE_ARRAY_FEATURE,)) -> None:
        super().__init__(features)
        if len(features) > 1 or any(f.arrow_type != pa.binary() for f in features):
            raise ConfigError(
                "record type ByteArray holds one byte string per record",
                received=", ".join(f"{f.name} ({f.arrow_type})" for f in features),
                allowed="one feature of kind bytes, no list",
            )

    def _decode(self, block: RecordBlock, name: str, bad: list[BadRecord] | None) -> pa.RecordBatch:
        if not self.features:
            return _build_empty(len(block.index))
        lengths = block.index[:, 1]
        total = int(lengths.sum())
        _check_totals(total)
        values, offsets = np.empty(total, np.uint8), np.zeros(len(lengths) + 1, np.int32)
        k.gather(block.data.ctypes.data, block.index, values.ctypes.data)
        np.cumsum(lengths, out=offsets[1:])
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(values)]
        column = pa.Array.from_buffers(pa.binary(), len(lengths), buffers)
        return pa.RecordBatch.from_arrays([column], schema=self.schema)


def _build_empty(rows: int) -> pa.RecordBatch:
    """A batch of rows without columns."""
    return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))


def _check_index(block: RecordBlock) -> RecordBlock:
    """Returns a block as the kernels take it, having checked that the index stays in the buffer."""
    data = np.ascontiguousarray(block.data)
    index = np.ascontiguousarray(block.index, np.int64).reshape(-1, 2)
    starts, lengths = index[:, 0], index[:, 1]
    if len(index) and (
        starts.min() < 0 or lengths.min() < 0 or (lengths > data.size - starts).any()
    ):  # fmt: skip
        raise IndexError(f"record index reaches outside a buffer of {data.size} bytes")
    return RecordBlock(data, index, block.offset, block.first_record)


def listed_features(
    features: Sequence[WireFeature], slots: Sequence[PackedSlot]
) -> tuple[WireFeature, ...]:
    """What to decode for some features: lists in the place of the scalars that share them."""
    lists = {slot.feature: slot.packed for slot in slots}
    found: dict[str, WireFeature] = {}
    for feature in features:
        name = lists.get(feature.name)
        listed = feature if name is None else WireFeature(name, feature.kind, is_list=True)
        found.setdefault(listed.name, listed)
    return tuple(found.values())


class PackedDecoder(Decoder):
    """Decodes features of which some are scalars that share a list, by what decodes the lists."""

    def __init__(
        self, inner: Decoder, features: Sequence[WireFeature], slots: Sequence[PackedSlot]
    ) -> None:
        super().__init__(features)
        self._inner, self._slots = inner, {slot.feature: slot for slot in slots}
        self._lengths = {
            name: 1 + max(slot.offset for slot in slots if slot.packed == name)
            for name in {slot.packed for slot in slots} & set(inner.schema.names)
        }

    def _decode(self, block: RecordBlock, name: str, bad: list[BadRecord] | None) -> pa.RecordBatch:
        """Decodes a block of records; a list of another length than the slots' is damage."""
        batch = self._inner._decode(block, name, bad)
        wrong = self._find_wrong(batch)
        if wrong and bad is None:
            record = min(wrong)
            raise corrupt_record(name, *block.locate(record), wrong[record])
        if wrong and bad is not None:
            numbers = np.delete(np.arange(len(block.index)), [record.record for record in bad])
            bad += [BadRecord(int(numbers[row]), why) for row, why in wrong.items()]
            bad.sort(key=lambda record: record.record)
            batch = batch.take(pa.array(np.delete(np.arange(batch.num_rows), list(wrong))))
        columns = [self._take(batch, feature) for feature in self.features]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _find_wrong(self, batch: pa.RecordBatch) -> dict[int, str]:
        """Rows whose lists are not as long as the slots say, each with the reason."""
        wrong: dict[int, str] = {}
        for name, length in self._lengths.items():
            lengths = batch.column(name).value_lengths().fill_null(0).to_numpy()
            for row in np.flatnonzero(lengths != length).tolist():
                reason = f"feature {name!r} holds {lengths[row]} values instead of {length}"
                wrong.setdefault(row, reason)
        return wrong

    def _take(self, batch: pa.RecordBatch, feature: WireFeature) -> pa.Array:
        slot = self._slots.get(feature.name)
        if slot is None:
            return batch.column(feature.name)
        rows, length = batch.num_rows, self._lengths[slot.packed]
        places = pa.array(np.arange(rows) * length + slot.offset)
        values = batch.column(slot.packed).flatten().take(places)
        if not feature.is_list:
            return values
        return pa.ListArray.from_arrays(pa.array(np.arange(rows + 1, dtype=np.int32)), values)


def build_decoder(
    features: Sequence[WireFeature], record_type: str = "Example", slots: Sequence[PackedSlot] = ()
) -> Decoder:
    """Builds the decoder of a record type, for features in the order of the columns.

    `slots` are the places of scalars that share a list, as the dataset's manifest tells them.
    """
    if {slot.feature for slot in slots} & {feature.name for feature in features}:
        listed = listed_features(features, slots)
        return PackedDecoder(build_decoder(listed, record_type), features, slots)
    check_record_type(record_type)
    if record_type == "ByteArray":
        return ByteArrayDecoder(features)
    return ColumnDecoder(features, record_type)


def read_batches(
    path: str | Path,
    features: Sequence[WireFeature],
    *,
    record_type: str = "Example",
    opener: Opener = open_local,
    slots: Sequence[PackedSlot] = (),
) -> Iterator[pa.RecordBatch]:
    """Reads a file batch by batch, each of some megabytes of records; see what it calls."""
    decoder = build_decoder(features, record_type, slots)
    for block in read_record_blocks(path, opener=opener):
        yield decoder.decode_block(block, str(path))


# A shuffle writes each decoded row once, where it ends up: what a reader holds is its output alone.
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
