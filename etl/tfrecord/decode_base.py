"""What the decoders of all record types share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError, InputDataError
from etl.tfrecord import decode_kernels_keys as k
from etl.tfrecord.decode_table import FeatureTable
from etl.tfrecord.features import KIND_CODES, WireFeature
from etl.tfrecord.framing import CorruptRecordError, RecordBlock, corrupt_record

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
