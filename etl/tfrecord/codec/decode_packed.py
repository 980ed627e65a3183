"""Decodes records in the packed layout into the columns of their features.

Each packed feature is decoded once, as a list; what is wanted of it is copied out column by column,
a few records at a time, so that they stay in the cache.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from conf.errors import InputDataError
from conf.schema import ABSENT_SLOTS_FEATURE, PACKED_FEATURES, PackedSlot, packed_lengths
from etl.tfrecord.codec.decode_columns import BadRecord, Decoder
from etl.tfrecord.codec.framing import RecordBlock, corrupt_record
from etl.tfrecord.codec.kernels import kernel, load_u32, load_u64, store_u32, store_u64
from etl.tfrecord.types.features import Kind, WireFeature

_RUN_ROWS = 64
_ALIGNMENT = 64


@kernel
def _copy_columns(source, rows, length, width, offsets, targets):
    """Copies columns `offsets` of a matrix `[rows, length]` to the addresses `targets`."""
    for low in range(0, rows, _RUN_ROWS):
        high = min(low + _RUN_ROWS, rows)
        for column in range(len(offsets)):
            at = source + width * (low * length + offsets[column])
            target = targets[column]
            if width == 8:
                for row in range(low, high):
                    store_u64(target + 8 * row, load_u64(at))
                    at += 8 * length
            else:
                for row in range(low, high):
                    store_u32(target + 4 * row, load_u32(at))
                    at += 4 * length


def has_slots(features: Sequence[WireFeature], slots: Sequence[PackedSlot]) -> bool:
    """Whether any of the features lies in a packed one."""
    packed = {slot.feature for slot in slots}
    return any(feature.name in packed for feature in features)


def slot_features(
    slots: Sequence[PackedSlot], features: Sequence[WireFeature] = ()
) -> list[WireFeature]:
    """The features that have slots, in their order.

    Args:
        slots: The slots.
        features: Features of the records, among them packed ones of other names than ours.
    """
    kinds: dict[str, Kind] = {feature.name: feature.kind for feature in features}
    kinds |= {packed: kind for kind, packed in PACKED_FEATURES.items()}
    return [WireFeature(slot.feature, kinds[slot.packed], slot.length > 1) for slot in slots]


def packed_features(
    features: Sequence[WireFeature], slots: Sequence[PackedSlot]
) -> tuple[WireFeature, ...]:
    """What to decode for some features: packed ones in the place of those that have a slot.

    Args:
        features: The features that are wanted.
        slots: Every slot of the records.
    """
    packed = {slot.feature: slot.packed for slot in slots}
    found: dict[str, WireFeature] = {}
    for feature in features:
        name = packed.get(feature.name)
        if name is None:
            found[feature.name] = feature
            continue
        found.setdefault(name, WireFeature(name, feature.kind, is_list=True))
        found.setdefault(
            ABSENT_SLOTS_FEATURE, WireFeature(ABSENT_SLOTS_FEATURE, "int64", is_list=True)
        )
    return tuple(found.values())


class Unpacking:
    """Takes features out of decoded packed ones.

    Args:
        features: The features that are wanted, in the order of the columns.
        slots: Every slot of the records, in the order of the manifest.

    Attributes:
        schema: Schema of the unpacked batches.
    """

    def __init__(self, features: Sequence[WireFeature], slots: Sequence[PackedSlot]) -> None:
        self.schema = pa.schema([(f.name, f.arrow_type) for f in features])
        self._features, self._slots = tuple(features), tuple(slots)
        self._numbers = {slot.feature: number for number, slot in enumerate(slots)}
        names = {feature.name for feature in features}
        self._wanted: dict[str, list[PackedSlot]] = {}
        for slot in slots:
            if slot.feature in names:
                self._wanted.setdefault(slot.packed, []).append(slot)
        lengths = packed_lengths(slots)
        self._lengths = {name: lengths[name] for name in self._wanted}

    def find_wrong(self, batch: pa.RecordBatch) -> dict[int, str]:
        """Rows whose packed features are not as the slots say, each with the reason."""
        wrong: dict[int, str] = {}
        for name, length in self._lengths.items():
            lengths = _lengths(batch.column(name))
            for row in np.flatnonzero(lengths != length).tolist():
                reason = f"feature {name!r} holds {lengths[row]} values instead of {length}"
                wrong.setdefault(row, reason)
        if self._lengths:
            numbers, rows = _find_absent(batch.column(ABSENT_SLOTS_FEATURE))
            outside = (numbers < 0) | (numbers >= len(self._slots))
            for row, number in zip(rows[outside].tolist(), numbers[outside].tolist(), strict=True):
                reason = (
                    f"feature {ABSENT_SLOTS_FEATURE!r} names slot {number} of {len(self._slots)}"
                )
                wrong.setdefault(row, reason)
        return wrong

    def check(self, batch: pa.RecordBatch, name: str) -> None:
        """Refuses a batch with rows that are not as the slots say.

        Args:
            batch: The batch.
            name: What to call its origin in the error.

        Raises:
            InputDataError: There is such a row.
        """
        wrong = self.find_wrong(batch)
        if wrong:
            raise InputDataError(
                f"{name}: a record of the packed layout is not as the manifest's slots say",
                received=wrong[min(wrong)],
                fix="restore the shard, roll back to an earlier version, or build again",
            )

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Unpacks a batch none of whose rows is wrong.

        Args:
            batch: What `packed_features` asks for, among other columns.

        Returns:
            As many rows, in `schema`.
        """
        columns: dict[str, pa.Array] = {}
        absent = _find_absent(batch.column(ABSENT_SLOTS_FEATURE)) if self._lengths else None
        for name, length in self._lengths.items():
            lists = batch.column(name)
            values = lists.flatten()
            columns |= self._split(name, values, batch.num_rows, length)
        arrays = []
        for feature in self._features:
            number = self._numbers.get(feature.name)
            if number is None or absent is None:
                arrays.append(batch.column(feature.name))
                continue
            missing = absent[1][absent[0] == number] if len(absent[0]) else absent[1]
            arrays.append(
                _finish(
                    feature, self._slots[number], columns[feature.name], batch.num_rows, missing
                )
            )
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _split(self, packed: str, values: pa.Array, rows: int, length: int) -> dict[str, pa.Array]:
        """Values of the wanted slots of one packed feature, `[rows * slot.length]` each."""
        slots = self._wanted[packed]
        if pa.types.is_binary(values.type):
            firsts = np.arange(rows)[:, None] * length
            return {
                slot.feature: values.take(
                    pa.array((firsts + slot.offset + np.arange(slot.length)).reshape(-1))
                )
                for slot in slots
            }
        single = [slot for slot in slots if slot.length == 1]
        arrays = dict(
            zip(
                [slot.feature for slot in single],
                _take_columns(values, rows, length, [slot.offset for slot in single]),
                strict=True,
            )
        )
        matrix = values.to_numpy().reshape(rows, length)
        for slot in slots:
            if slot.length > 1:
                part = matrix[:, slot.offset : slot.offset + slot.length]
                arrays[slot.feature] = pa.array(np.ascontiguousarray(part).reshape(-1))
        return arrays


class PackedDecoder(Decoder):
    """Decodes features of packed records; belongs to one thread.

    Args:
        inner: Decoder of what `packed_features` returns for these features and slots.
        features: The features that are wanted, in the order of the columns.
        slots: Every slot of the records, in the order of the manifest.
    """

    def __init__(
        self,
        inner: Decoder,
        features: Sequence[WireFeature],
        slots: Sequence[PackedSlot],
    ) -> None:
        self._inner, self._unpacking = inner, Unpacking(features, slots)
        self.features, self.schema = tuple(features), self._unpacking.schema

    def decode_block(self, block: RecordBlock, name: str = "<buffer>") -> pa.RecordBatch:
        """Decodes a block of records; see `decode_base.Decoder`.

        Raises:
            CorruptRecordError: A record is not well-formed, or a packed feature is not as long as
                the slots say.
        """
        batch = self._inner.decode_block(block, name)
        wrong = self._unpacking.find_wrong(batch)
        if wrong:
            record = min(wrong)
            offset = block.offset + int(block.index[record, 0])
            raise corrupt_record(name, offset, block.first_record + record, wrong[record])
        return self._unpacking.apply(batch)

    def decode_sound(
        self, block: RecordBlock, name: str = "<buffer>"
    ) -> tuple[pa.RecordBatch, list[BadRecord]]:
        """Decodes the well-formed records of a block, and tells which were left out."""
        batch, bad = self._inner.decode_sound(block, name)
        wrong = self._unpacking.find_wrong(batch)
        if wrong:
            numbers = np.delete(np.arange(len(block.index)), [record.record for record in bad])
            bad = [*bad, *(BadRecord(int(numbers[row]), why) for row, why in wrong.items())]
            bad.sort(key=lambda record: record.record)
            batch = batch.take(pa.array(np.delete(np.arange(batch.num_rows), list(wrong))))
        return self._unpacking.apply(batch), bad


def _lengths(column: pa.Array) -> np.ndarray:
    """Values of each list, 0 of a null one."""
    return column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)


def _find_absent(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of slots without a value, and the row of each."""
    numbers = column.flatten().to_numpy()
    if not len(numbers):
        return numbers, np.empty(0, np.int64)
    return numbers, np.repeat(np.arange(len(column)), _lengths(column))


def _take_columns(values: pa.Array, rows: int, length: int, offsets: list[int]) -> list[pa.Array]:
    """Columns of a matrix `[rows, length]` of numbers, contiguous, in one piece of memory."""
    width = values.type.bit_width // 8
    row_bytes = -(-rows * width // _ALIGNMENT) * _ALIGNMENT
    memory = pa.allocate_buffer(max(1, len(offsets)) * row_bytes)
    targets = memory.address + row_bytes * np.arange(len(offsets), dtype=np.int64)
    if rows and offsets:
        source = values.buffers()[1].address + width * values.offset
        _copy_columns(source, rows, length, width, np.array(offsets, np.int64), targets)
    return [
        pa.Array.from_buffers(values.type, rows, [None, memory.slice(row_bytes * i, rows * width)])
        for i in range(len(offsets))
    ]


def _finish(
    feature: WireFeature, slot: PackedSlot, values: pa.Array, rows: int, missing: np.ndarray
) -> pa.Array:
    """The column of a feature: its values, without those that stand for none."""
    if not len(missing) and not feature.is_list:
        return values
    valid = np.ones(rows, bool)
    valid[missing] = False
    if not feature.is_list:
        return values.take(pa.array(np.arange(rows), mask=~valid))
    counts = np.where(valid, slot.length, 0)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    taken = values.filter(pa.array(np.repeat(valid, slot.length)))
    validity: Any = None
    if len(missing):
        validity = pa.py_buffer(np.packbits(valid, bitorder="little"))
    buffers = [validity, pa.py_buffer(offsets)]
    return pa.Array.from_buffers(feature.arrow_type, rows, buffers, children=[taken])
