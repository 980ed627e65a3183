"""Decodes TFRecord bytes into Arrow, column by column, without a Python object per record."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError, InputDataError
from conf.schema import PackedSlot
from conf.storage.locations import Compression, Opener, open_local
from etl.tfrecord.codec.decode_columns import FeatureTable, gather_binary
from etl.tfrecord.codec.decode_kernels import MALFORMED, NOT_SCALAR, OK
from etl.tfrecord.codec.framing import (
    CorruptRecordError,
    RecordBlock,
    corrupt_record,
    read_record_blocks,
)
from etl.tfrecord.codec.messages import check_record_type
from etl.tfrecord.types.features import BYTE_ARRAY_FEATURE, KIND_CODES, WireFeature

_STOP_AT_FIRST = np.empty((0, 2), np.int64)


@dataclass(frozen=True)
class BadRecord:
    """A record that was left out: its number in the block, and what is wrong with it."""

    record: int
    reason: str


class Decoder(ABC):
    """What all record types share; a decoder belongs to one thread."""

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

        Returns:
            One column per feature, and which records were left out, in their order.
        """


class ColumnDecoder(Decoder):
    """Decodes the wanted features of Examples or SequenceExamples; skips all others.

    A feature that a record lacks is null, and so is an empty list where a scalar is wanted. A
    feature list becomes a list of lists, an empty inner list for a feature without values.
    """

    def __init__(self, features: Sequence[WireFeature], record_type: str) -> None:
        self.features = _check_features(tuple(features))
        nested = next((f for f in self.features if f.is_sequence), None)
        if record_type == "Example" and nested is not None:
            raise ConfigError(
                f"feature {nested.name!r} is a feature list, which tf.train.Example lacks",
                fix="read the files with record type SequenceExample",
            )
        self.schema = pa.schema([(f.name, f.arrow_type) for f in self.features])
        self._message, self._table = f"tf.train.{record_type}", FeatureTable(self.features)

    def decode_block(self, block: RecordBlock, name: str = "<buffer>") -> pa.RecordBatch:
        """Decodes a block of records; see `decode`."""
        data = np.ascontiguousarray(block.data)
        index = _check_index(block.index, data.size)
        if not self.features:
            return _build_empty(len(index))
        outcome, record, feature, arrays = self._table.decode(data, index, _STOP_AT_FIRST)
        if outcome != OK:
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
        index = _check_index(block.index, data.size)
        outcomes = np.zeros((len(index), 2), np.int64)
        self._table.decode(data, index, outcomes)
        refused = (outcomes[:, 0] != OK) & (outcomes[:, 0] != MALFORMED)
        if refused.any():
            record = int(refused.argmax())
            outcome, feature = outcomes[record].tolist()
            raise self._error(outcome, block, record, feature, name)
        bad = np.flatnonzero(outcomes[:, 0] == MALFORMED).tolist()
        return [BadRecord(record, self._reason(int(outcomes[record, 1]))) for record in bad]

    def _reason(self, feature: int) -> str:
        where = f" in feature {self.features[feature].name!r}" if feature >= 0 else ""
        return f"not a {self._message}{where}"

    def _error(
        self, outcome: int, block: RecordBlock, record: int, feature: int, name: str
    ) -> InputDataError:
        offset, number = block.locate(record)
        if outcome == MALFORMED:
            return corrupt_record(name, offset, number, self._reason(feature))
        wanted = self.features[feature]
        if outcome == NOT_SCALAR:
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


class ByteArrayDecoder(Decoder):
    """Takes records as they are: one binary column, copied once; none to count records only."""

    def __init__(self, features: Sequence[WireFeature] = (BYTE_ARRAY_FEATURE,)) -> None:
        self.features = _check_features(tuple(features))
        if len(features) > 1 or any(f.arrow_type != pa.binary() for f in features):
            raise ConfigError(
                "record type ByteArray holds one byte string per record",
                received=", ".join(f"{f.name} ({f.arrow_type})" for f in features),
                allowed="one feature of kind bytes, no list",
            )
        self.schema = pa.schema([(f.name, f.arrow_type) for f in self.features])

    def decode_block(self, block: RecordBlock, name: str = "<buffer>") -> pa.RecordBatch:
        """Decodes a block of records; see `decode`."""
        data = np.ascontiguousarray(block.data)
        index = _check_index(block.index, data.size)
        if not self.features:
            return _build_empty(len(index))
        return pa.RecordBatch.from_arrays([gather_binary(data, index)], schema=self.schema)

    def decode_sound(
        self, block: RecordBlock, name: str = "<buffer>"
    ) -> tuple[pa.RecordBatch, list[BadRecord]]:
        """As `decode_block`: no byte string is malformed."""
        return self.decode_block(block, name), []


def _build_empty(rows: int) -> pa.RecordBatch:
    """A batch of rows without columns."""
    return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))


def _check_features(features: tuple[WireFeature, ...]) -> tuple[WireFeature, ...]:
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


def _check_index(index: np.ndarray, size: int) -> np.ndarray:
    """Returns an index as the kernels take it, having checked that it stays in the buffer."""
    index = np.ascontiguousarray(index, np.int64).reshape(-1, 2)
    starts, lengths = index[:, 0], index[:, 1]
    if len(index) and (
        starts.min() < 0 or lengths.min() < 0 or (lengths > size - starts).any()
    ):  # fmt: skip
        raise IndexError(f"record index reaches outside a buffer of {size} bytes")
    return index


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
        self._inner, self.features = inner, _check_features(tuple(features))
        self.schema = pa.schema([(f.name, f.arrow_type) for f in self.features])
        self._slots = {slot.feature: slot for slot in slots}
        self._lengths = {
            name: 1 + max(slot.offset for slot in slots if slot.packed == name)
            for name in {slot.packed for slot in slots} & set(inner.schema.names)
        }

    def decode_block(self, block: RecordBlock, name: str = "<buffer>") -> pa.RecordBatch:
        """Decodes a block of records; a list of another length than the slots' is damage."""
        batch = self._inner.decode_block(block, name)
        wrong = self._find_wrong(batch)
        if wrong:
            record = min(wrong)
            raise corrupt_record(name, *block.locate(record), wrong[record])
        return self._take_scalars(batch)

    def decode_sound(
        self, block: RecordBlock, name: str = "<buffer>"
    ) -> tuple[pa.RecordBatch, list[BadRecord]]:
        """Decodes the well-formed records of a block, and tells which were left out."""
        batch, bad = self._inner.decode_sound(block, name)
        wrong = self._find_wrong(batch)
        if wrong:
            numbers = np.delete(np.arange(len(block.index)), [record.record for record in bad])
            bad = [*bad, *(BadRecord(int(numbers[row]), why) for row, why in wrong.items())]
            bad.sort(key=lambda record: record.record)
            batch = batch.take(pa.array(np.delete(np.arange(batch.num_rows), list(wrong))))
        return self._take_scalars(batch), bad

    def _find_wrong(self, batch: pa.RecordBatch) -> dict[int, str]:
        """Rows whose lists are not as long as the slots say, each with the reason."""
        wrong: dict[int, str] = {}
        for name, length in self._lengths.items():
            lengths = batch.column(name).value_lengths().fill_null(0).to_numpy()
            for row in np.flatnonzero(lengths != length).tolist():
                reason = f"feature {name!r} holds {lengths[row]} values instead of {length}"
                wrong.setdefault(row, reason)
        return wrong

    def _take_scalars(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = [self._take(batch, feature) for feature in self.features]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

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
) -> ColumnDecoder | ByteArrayDecoder | PackedDecoder:
    """Builds the decoder of a record type.

    Args:
        features: What to decode, in the order of the columns.
        record_type: `"Example"`, `"SequenceExample"` or `"ByteArray"`.
        slots: Places of scalars that share a list, as the dataset's manifest tells them.

    Returns:
        A decoder with `schema`, `decode`, `decode_block` and `decode_sound`.

    Raises:
        ConfigError: Unknown record type, or features that it does not have.
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
    compression: Compression | Literal["auto"] | None = "auto",
    record_type: str = "Example",
    opener: Opener = open_local,
    slots: Sequence[PackedSlot] = (),
) -> Iterator[pa.RecordBatch]:
    """Reads a file batch by batch, each of some megabytes of records.

    Args:
        path: TFRecord file, plain or compressed.
        features: What to decode.
        compression: As for `read_record_blocks`.
        record_type: As for `build_decoder`.
        opener: As for `read_record_blocks`.
        slots: As for `build_decoder`.

    Yields:
        Batches in file order.

    Raises:
        CorruptRecordError: The file is damaged, or a record is not of the record type.
        InputDataError: A feature is not what was wanted.
    """
    decoder = build_decoder(features, record_type, slots)
    for block in read_record_blocks(path, compression=compression, opener=opener):
        yield decoder.decode_block(block, str(path))
