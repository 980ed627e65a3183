"""TFRecord bytes to Arrow, column by column, without a Python object per record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError, InputDataError
from etl.tfrecord import decode_kernels as k
from etl.tfrecord.features import KIND_CODES, KeyTable, Kind, WireFeature
from etl.tfrecord.framing import Compression, RecordBlock, corrupt_record, read_record_blocks
from etl.tfrecord.infer import infer_features

__all__ = [
    "ExampleDecoder", "Kind", "WireFeature", "infer_features", "read_batches", "read_tfrecords"
]  # fmt: skip

_MAX_OFFSET = 2**31 - 1


class ExampleDecoder:
    """Decodes the wanted features of `tf.train.Example` records; skips all others.

    A feature that a record lacks is null, and so is an empty list where a scalar is wanted. A
    decoder learns the order of the features as it goes and belongs to one thread.
    """

    def __init__(self, features: Sequence[WireFeature]) -> None:
        """Plans the decoding.

        Args:
            features: What to decode, in the order of the columns.

        Raises:
            ConfigError: An unknown kind, or a name that occurs twice.
        """
        self.features = tuple(features)
        self.schema = pa.schema([(f.name, f.arrow_type) for f in _check_features(self.features)])
        self._keys = KeyTable([feature.name.encode() for feature in self.features])
        self._successors = (np.arange(len(self.features) + 1) + 1) % max(1, len(self.features))
        self._successors[-1] = 0

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
            CorruptRecordError: A record is not a well-formed Example.
            InputDataError: A feature holds another kind of values than wanted, or several where a
                scalar is wanted.
            IndexError: The index reaches outside the buffer.
        """
        return self.decode_block(RecordBlock(data, index, 0, 0), name)

    def decode_block(self, block: RecordBlock, name: str = "<buffer>") -> pa.RecordBatch:
        """Decodes a block of records; see `decode`."""
        data = np.ascontiguousarray(block.data)
        index = _check_index(block.index, data.size)
        rows = len(index)
        if not self.features:
            return pa.RecordBatch.from_struct_array(pa.array([{}] * rows, pa.struct([])))
        columns = [_Column(feature, rows) for feature in self.features]
        table = np.array(
            [column.fields(*key) for column, key in zip(columns, self._keys.places, strict=True)],
            np.int64,
        )
        base, limit = data.ctypes.data, data.ctypes.data + data.size
        outcome, record, feature = k.scan(
            base, index, limit, table, self._keys.table, self._successors
        )
        if outcome != k.OK:
            raise self._error(outcome, block, int(record), int(feature), name)
        arrays = []
        for number, column in enumerate(columns):
            array, bad = column.build(table[number], limit)
            if bad >= 0:
                raise self._error(k.MALFORMED, block, bad, number, name)
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _error(
        self, outcome: int, block: RecordBlock, record: int, feature: int, name: str
    ) -> InputDataError:
        number, offset = block.first_record + record, block.offset + int(block.index[record, 0])
        if outcome == k.MALFORMED:
            where = f" in feature {self.features[feature].name!r}" if feature >= 0 else ""
            return corrupt_record(name, offset, number, f"not a tf.train.Example{where}")
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


def _check_features(features: tuple[WireFeature, ...]) -> tuple[WireFeature, ...]:
    names = [feature.name for feature in features]
    for feature in features:
        if feature.kind not in KIND_CODES:
            raise ConfigError(
                f"feature {feature.name!r} has an unknown kind",
                received=repr(feature.kind),
                allowed=", ".join(KIND_CODES),
            )
        if names.count(feature.name) > 1:
            raise ConfigError("a feature is wanted twice", received=feature.name)
    return features


def _check_index(index: np.ndarray, size: int) -> np.ndarray:
    index = np.ascontiguousarray(index, np.int64).reshape(-1, 2)
    starts, lengths = index[:, 0], index[:, 1]
    if len(index) and (
        starts.min() < 0 or lengths.min() < 0 or (lengths > size - starts).any()
    ):  # fmt: skip
        raise IndexError(f"record index reaches outside a buffer of {size} bytes")
    return index


class _Column:
    """The memory into which one feature is decoded."""

    def __init__(self, feature: WireFeature, rows: int) -> None:
        self._code, self._is_list = KIND_CODES[feature.kind], feature.is_list
        self._type, self._rows = feature.arrow_type, rows
        self._valid = np.zeros(rows, np.uint8)
        self._is_scalar = not feature.is_list and self._code != k.BYTES
        dtype = np.int64 if self._code == k.INT else np.float32
        self._values = np.zeros(rows if self._is_scalar else 0, dtype)
        # starts, ends, since, counts, byte counts
        self._places = np.zeros((5, 0 if self._is_scalar else rows), np.int64)

    def fields(self, key: int, key_bytes: int) -> tuple[int, ...]:
        """Row of the feature table."""
        starts, ends, since, counts, byte_counts = (row.ctypes.data for row in self._places)
        return (self._code, int(self._is_list), key, key_bytes, self._values.ctypes.data,
                self._valid.ctypes.data, starts, ends, counts, byte_counts, since)  # fmt: skip

    def build(self, fields: np.ndarray, limit: int) -> tuple[pa.Array | None, int]:
        """Builds the Arrow column; the second result is a malformed record, or -1."""
        validity = self._validity()
        if self._is_scalar:
            buffers = [validity, pa.py_buffer(self._values)]
            return pa.Array.from_buffers(self._type, self._rows, buffers), -1
        counts, byte_counts = self._places[3:] * self._valid
        total, total_bytes = int(counts.sum()), int(byte_counts.sum())
        if max(total, total_bytes) > _MAX_OFFSET:
            raise InputDataError(
                "too many values for one batch", received=max(total, total_bytes),
                allowed=_MAX_OFFSET, fix="decode fewer records at a time",
            )  # fmt: skip
        width = {k.INT: np.int64, k.FLOAT: np.float32, k.BYTES: np.uint8}[self._code]
        values = np.empty(total_bytes if self._code == k.BYTES else total, width)
        offsets = np.zeros(total + 1 if self._code == k.BYTES else 1, np.int64)
        bad = k.fill(fields, self._rows, limit, values.ctypes.data, offsets.ctypes.data)
        if bad >= 0:
            return None, int(bad)
        return self._assemble(validity, counts, byte_counts, values, offsets), -1

    def _assemble(
        self, validity: pa.Buffer | None, counts: np.ndarray, byte_counts: np.ndarray,
        values: np.ndarray, offsets: np.ndarray,
    ) -> pa.Array:  # fmt: skip
        data = pa.py_buffer(values)
        if not self._is_list:
            buffers = [validity, pa.py_buffer(_offsets(byte_counts)), data]
            return pa.Array.from_buffers(self._type, self._rows, buffers)
        value_type = self._type.value_type
        if self._code == k.BYTES:
            inner = [None, pa.py_buffer(offsets.astype(np.int32)), data]
            child = pa.Array.from_buffers(value_type, len(offsets) - 1, inner)
        else:
            child = pa.Array.from_buffers(value_type, len(values), [None, data])
        outer = [validity, pa.py_buffer(_offsets(counts))]
        return pa.Array.from_buffers(self._type, self._rows, outer, children=[child])

    def _validity(self) -> pa.Buffer | None:
        if self._valid.all():
            return None
        return pa.py_buffer(np.packbits(self._valid, bitorder="little"))


def _offsets(counts: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(counts) + 1, np.int32)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def read_batches(
    path: str | Path,
    features: Sequence[WireFeature],
    *,
    compression: Compression | Literal["auto"] | None = "auto",
) -> Iterator[pa.RecordBatch]:
    """Reads a file batch by batch, each of some megabytes of records.

    Args:
        path: TFRecord file of `tf.train.Example`, plain or compressed.
        features: What to decode.
        compression: As for `read_record_blocks`.

    Yields:
        Batches in file order.

    Raises:
        CorruptRecordError: The file is damaged, or a record is not an Example.
        InputDataError: A feature is not what was wanted.
    """
    decoder = ExampleDecoder(features)
    for block in read_record_blocks(path, compression=compression):
        yield decoder.decode_block(block, str(path))


def read_tfrecords(path: str | Path, features: Sequence[WireFeature] | None = None) -> pa.Table:
    """Reads a whole file.

    Args:
        path: TFRecord file of `tf.train.Example`, plain or compressed.
        features: What to decode; None to infer it, which reads the file twice.

    Returns:
        One column per feature.

    Raises:
        CorruptRecordError: The file is damaged, or a record is not an Example.
        InputDataError: A feature is not what was wanted, or not of one kind.
    """
    wanted: Any = infer_features([path]) if features is None else features
    batches = list(read_batches(path, wanted))
    return pa.Table.from_batches(batches, ExampleDecoder(wanted).schema)
