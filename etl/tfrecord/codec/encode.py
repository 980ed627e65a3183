"""Encodes Arrow batches as TFRecord bytes, column by column, without a Python object per row."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError, InputDataError
from conf.schema import PackedSlot
from etl.tfrecord.codec import encode_kernels as k
from etl.tfrecord.codec.encode_columns import (
    BoundBatch,
    bind_column,
    describe_refusal,
    plan_columns,
    read_byte_offsets,
)
from etl.tfrecord.codec.encode_kernels import BINARY, measure
from etl.tfrecord.codec.framing import FOOTER_BYTES, HEADER_BYTES, MAX_RECORD_BYTES
from etl.tfrecord.types.conversions import buffer_address
from etl.tfrecord.types.features import RECORD_TYPES, RecordType
from etl.tfrecord.types.packed_slots import SlotPacking

# Rows encoded into one buffer at a time: small enough for the cache, large enough for the calls.
CHUNK_ROWS = 2048


class _ColumnEncoder(ABC):
    """What the two column-wise record types share.

    Buffers are reused between calls, so an encoder belongs to one thread.
    """

    _record_type: RecordType

    def __init__(self, schema: pa.Schema) -> None:
        """Plans the encoding.

        Args:
            schema: Schema of the batches.

        Raises:
            ConfigError: Columns that the wire cannot carry, all named in one error.
        """
        self.schema = schema
        self._plans = plan_columns(schema, self._record_type)
        self._buffer = np.empty(0, np.uint8)

    def encode(self, batch: pa.RecordBatch) -> np.ndarray:
        """Encodes a batch.

        Args:
            batch: Rows in the planned schema, sliced or not.

        Returns:
            Framed records, uint8 `[bytes]`, owned by the caller.

        Raises:
            InputDataError: Null inside a list, a value that float32 cannot stand for, another
                schema than planned, or a record beyond 2 GiB - 1; names the column and the row.
        """
        bound = self._bind(batch)
        sizes, total = self._measure(bound, 0, batch.num_rows)
        out = np.empty(total + k.SLACK_BYTES, np.uint8)
        self._write(bound, 0, sizes, out)
        return out[:total]

    def encode_chunks(
        self, batch: pa.RecordBatch, chunk_rows: int = CHUNK_ROWS
    ) -> Iterator[np.ndarray]:
        """Encodes a batch in pieces that stay in the cache until they are written.

        Args:
            batch: Rows in the planned schema, sliced or not.
            chunk_rows: Rows per piece, at least 1.

        Yields:
            Framed records, uint8 `[bytes]`: a view that the next piece overwrites.

        Raises:
            InputDataError: As for `encode`.
        """
        bound = self._bind(batch)
        for first in range(0, batch.num_rows, chunk_rows):
            sizes, total = self._measure(bound, first, min(chunk_rows, batch.num_rows - first))
            if self._buffer.size < total + k.SLACK_BYTES:
                self._buffer = np.empty(total + total // 4 + k.SLACK_BYTES, np.uint8)
            self._write(bound, first, sizes, self._buffer)
            yield self._buffer[:total]

    def _bind(self, batch: pa.RecordBatch) -> BoundBatch:
        given, planned = batch.schema, self.schema
        if not given.equals(planned) and (
            given.names != planned.names or given.types != planned.types
        ):  # nullability and metadata may differ
            raise InputDataError(
                "a batch has another schema than the encoder was built for",
                received=str(batch.schema),
                allowed=str(self.schema),
            )
        if batch.num_rows == 0:
            return BoundBatch(batch, ())
        pairs = zip(self._plans, batch.columns, strict=True)
        return BoundBatch(batch, tuple(bind_column(plan, array) for plan, array in pairs))

    @abstractmethod
    def _measure(self, bound: BoundBatch, first: int, rows: int) -> tuple[Any, int]:
        """Sizes that `_write` wants, and bytes of all framed records."""

    @abstractmethod
    def _write(self, bound: BoundBatch, first: int, sizes: Any, out: np.ndarray) -> None:
        """Writes the framed records."""


def _check_record_bytes(largest: int, row: int) -> None:
    if largest > MAX_RECORD_BYTES:
        raise InputDataError(
            "a record is longer than a protobuf message may be",
            received=f"{largest} bytes in row {row} of the batch",
            allowed=f"at most {MAX_RECORD_BYTES} bytes",
            fix="truncate the longest list or string of that row",
        )


class ExampleEncoder(_ColumnEncoder):
    """Encodes batches of one schema as framed `tf.train.Example` records.

    Features stand in the order of the columns; a null is a feature left out. An encoder belongs
    to one thread.
    """

    _record_type = "Example"

    def _measure(self, bound: BoundBatch, first: int, rows: int) -> tuple[Any, int]:
        sizes = np.empty(rows, np.int64)
        total, largest = measure(bound.table, first, sizes)
        _check_record_bytes(largest, first + int(sizes.argmax()) if rows else 0)
        return sizes, total

    def _write(self, bound: BoundBatch, first: int, sizes: Any, out: np.ndarray) -> None:
        cursors = np.empty(len(sizes), np.int64)
        column, row = k.write(bound.table, first, sizes, cursors, out.ctypes.data)
        if column >= 0:
            raise describe_refusal(
                self._plans[column].name, bound.batch.column(int(column)), int(row)
            )


class SequenceEncoder(_ColumnEncoder):
    """Encodes batches of one schema as framed `tf.train.SequenceExample` records.

    Lists of lists become feature lists, all other columns the context; within each, entries stand
    in the order of the columns. A null list of lists is a feature list left out, an empty one a
    feature list without features, and an empty inner list a feature with an empty list. An
    encoder belongs to one thread.
    """

    _record_type = "SequenceExample"

    @functools.cached_property
    def _parts(self) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the context's columns, and of the feature lists."""
        is_sequence = np.array([plan.is_sequence for plan in self._plans], bool)
        return np.flatnonzero(~is_sequence), np.flatnonzero(is_sequence)

    def _measure(self, bound: BoundBatch, first: int, rows: int) -> tuple[Any, int]:
        sizes = np.empty((2, rows), np.int64)
        total, largest = k.measure_sequences(*self._tables(bound), first, *sizes)
        _check_record_bytes(largest, first + int(sizes.sum(axis=0).argmax()) if rows else 0)
        return sizes, total

    def _write(self, bound: BoundBatch, first: int, sizes: Any, out: np.ndarray) -> None:
        cursors = np.empty(sizes.shape[1], np.int64)
        part, column, row = k.write_sequences(
            *self._tables(bound), first, *sizes, cursors, out.ctypes.data
        )
        if part >= 0:
            number = int(self._parts[part][column])
            raise describe_refusal(self._plans[number].name, bound.batch.column(number), int(row))

    def _tables(self, bound: BoundBatch) -> tuple[np.ndarray, np.ndarray]:
        if len(bound.table) == 0:
            return bound.table, bound.table
        context, lists = self._parts
        return bound.table[context], bound.table[lists]


class ByteArrayEncoder:
    """Encodes the single binary column of its batches as raw framed payloads."""

    def __init__(self, schema: pa.Schema) -> None:
        """Plans the encoding.

        Args:
            schema: Schema of the batches: one column, string or binary.

        Raises:
            ConfigError: Another number of columns, or another type.
        """
        self.schema = schema
        plans = plan_columns(schema) if len(schema) == 1 else ()
        if len(plans) != 1 or plans[0].kind != BINARY or plans[0].is_list:
            raise ConfigError(
                "record type ByteArray takes one binary column",
                received=", ".join(f"{field.name} ({field.type})" for field in schema) or "none",
                allowed="one column of type binary, large_binary, string or large_string",
                fix="select the payload column before the write, or use record type Example",
            )
        self._plan = plans[0]

    def encode(self, batch: pa.RecordBatch) -> np.ndarray:
        """Encodes a batch.

        Args:
            batch: Rows in the planned schema, sliced or not.

        Returns:
            Framed records, uint8 `[bytes]`.

        Raises:
            InputDataError: A row is null, which has no place outside an Example.
        """
        column = batch.column(0)
        if column.null_count:
            raise InputDataError(
                f"column {self._plan.name!r} has a null, which ByteArray cannot express",
                received=f"row {int(np.argmax(np.asarray(column.is_null())))} of the batch",
                allowed="binary values, empty ones included",
                fix="filter the null rows before the write",
            )
        if len(column) == 0:
            return np.empty(0, np.uint8)
        if self._plan.value_type is not None:
            column = column.cast(self._plan.value_type)
        offsets = read_byte_offsets(column)
        framing = len(column) * (HEADER_BYTES + FOOTER_BYTES)
        out = np.empty(int(offsets[-1] - offsets[0]) + framing, np.uint8)
        k.write_raw(buffer_address(column.buffers()[2]), offsets, out.ctypes.data)
        return out

    def encode_chunks(
        self, batch: pa.RecordBatch, chunk_rows: int = CHUNK_ROWS
    ) -> Iterator[np.ndarray]:
        """Encodes a batch in pieces; arguments and errors as for `ExampleEncoder`."""
        for first in range(0, batch.num_rows, chunk_rows):
            yield self.encode(batch.slice(first, chunk_rows))


def build_encoder(
    schema: pa.Schema, record_type: str = "Example"
) -> ExampleEncoder | SequenceEncoder | ByteArrayEncoder:
    """Builds the encoder of a record type.

    Args:
        schema: Schema of the batches.
        record_type: `"Example"`, `"SequenceExample"` or `"ByteArray"`.

    Returns:
        An encoder with `encode` and `encode_chunks`.

    Raises:
        ConfigError: Unknown record type, or a schema that it cannot carry.
    """
    if record_type == "Example":
        return ExampleEncoder(schema)
    if record_type == "SequenceExample":
        return SequenceEncoder(schema)
    if record_type == "ByteArray":
        return ByteArrayEncoder(schema)
    raise ConfigError(
        "unknown TFRecord record type",
        received=repr(record_type),
        allowed=", ".join(RECORD_TYPES),
    )


def encode(batch: pa.RecordBatch, record_type: str = "Example") -> np.ndarray:
    """Encodes one batch; build an encoder once where there are many.

    Args:
        batch: Rows, sliced or not.
        record_type: `"Example"`, `"SequenceExample"` or `"ByteArray"`.

    Returns:
        Framed records, uint8 `[bytes]`.

    Raises:
        ConfigError: Unknown record type, or a schema that it cannot carry.
        InputDataError: A value that it cannot carry.
    """
    return build_encoder(batch.schema, record_type).encode(batch)


class PackedEncoder:
    """Packs batches of one schema and encodes them; belongs to one thread."""

    def __init__(self, schema: pa.Schema, record_type: str, slots: Sequence[PackedSlot]) -> None:
        """Plans the encoding.

        Args:
            schema: Schema of the batches, before packing.
            record_type: `"Example"` or `"SequenceExample"`.
            slots: Every slot, in the order of the manifest.

        Raises:
            ConfigError: Columns that the wire cannot carry.
        """
        self.schema, self._packing = schema, SlotPacking(schema, slots)
        self._encoder = build_encoder(self._packing.schema, record_type)

    def encode_chunks(
        self, batch: pa.RecordBatch, chunk_rows: int = CHUNK_ROWS
    ) -> Iterator[np.ndarray]:
        """Encodes a batch in pieces; arguments and errors as for `ExampleEncoder`."""
        yield from self._encoder.encode_chunks(self._packing.apply(batch), chunk_rows)
