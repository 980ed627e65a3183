"""Encodes Arrow batches as TFRecord bytes, column by column, without a Python object per row."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.codec import encode_kernels as k
from etl.tfrecord.codec.encode_columns import (
    ColumnMemory,
    describe_refusal,
    plan_columns,
    read_byte_offsets,
)
from etl.tfrecord.codec.framing import FOOTER_BYTES, HEADER_BYTES, MAX_RECORD_BYTES
from etl.tfrecord.codec.messages import check_record_type
from etl.tfrecord.types.arrays import buffer_address

# Rows encoded into one buffer at a time: small enough for the cache, large enough for the calls.
CHUNK_ROWS = 2048


class RecordEncoder:
    """Encodes batches of one schema as framed Examples or SequenceExamples.

    Features stand in the order of the columns; a null is a feature left out. In SequenceExamples
    lists of lists become feature lists, an empty one without features, and all other columns the
    context. Buffers are reused between calls, so an encoder belongs to one thread.
    """

    def __init__(self, schema: pa.Schema, record_type: str = "Example") -> None:
        """Plans the encoding.

        Args:
            schema: Schema of the batches.
            record_type: `"Example"` or `"SequenceExample"`.

        Raises:
            ConfigError: Columns that the wire cannot carry, all named in one error.
        """
        self.schema = schema
        self._plans = plan_columns(schema, record_type)
        self._parts = tuple(
            [i for i, plan in enumerate(self._plans) if (plan.depth > 1) == is_nested]
            for is_nested in (False, True)
        )
        self._sections = 1 if record_type == "Example" else 2
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
        columns = self._bind(batch)
        sizes, total = self._measure(columns, 0, batch.num_rows)
        out = np.empty(total + k.SLACK_BYTES, np.uint8)
        self._write(batch, columns, 0, sizes, out[:total])
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
        columns = self._bind(batch)
        for first in range(0, batch.num_rows, chunk_rows):
            rows = min(chunk_rows, batch.num_rows - first)
            sizes, total = self._measure(columns, first, rows)
            if self._buffer.size < total + k.SLACK_BYTES:
                self._buffer = np.empty(total + total // 4 + k.SLACK_BYTES, np.uint8)
            out = self._buffer[:total]
            self._write(batch, columns, first, sizes, out)
            yield out

    def _bind(self, batch: pa.RecordBatch) -> tuple[ColumnMemory, ColumnMemory]:
        """Memory of the context's columns and of the feature lists."""
        given, planned = batch.schema, self.schema
        if not given.equals(planned) and (
            given.names != planned.names or given.types != planned.types
        ):  # nullability and metadata may differ
            raise InputDataError(
                "a batch has another schema than the encoder was built for",
                received=str(batch.schema),
                allowed=str(self.schema),
            )
        parts = self._parts if batch.num_rows else ((), ())
        context, lists = (
            ColumnMemory([self._plans[i] for i in part], [batch.column(i) for i in part])
            for part in parts
        )
        return context, lists

    def _measure(
        self, columns: tuple[ColumnMemory, ColumnMemory], first: int, rows: int
    ) -> tuple[np.ndarray, int]:
        """Bytes of sections and records, int64 `[sections + 1, rows]`, and of the output."""
        sizes = np.empty((self._sections + 1, rows), np.int64)
        total, largest = k.measure(*(memory.table for memory in columns), first, sizes)
        if largest > MAX_RECORD_BYTES:
            row = first + int(sizes[-1].argmax())
            raise InputDataError(
                "a record is longer than a protobuf message may be",
                received=f"{largest} bytes in row {row} of the batch",
                allowed=f"at most {MAX_RECORD_BYTES} bytes",
                fix="truncate the longest list or string of that row",
            )
        return sizes, total

    def _write(
        self, batch: pa.RecordBatch, columns: tuple[ColumnMemory, ColumnMemory], first: int,
        sizes: np.ndarray, out: np.ndarray,
    ) -> None:  # fmt: skip
        tables = (memory.table for memory in columns)
        cursors = np.empty(sizes.shape[1], np.int64)
        part, column, row = k.write(*tables, first, sizes, out.size, cursors, out.ctypes.data)
        if part >= 0:
            number = self._parts[part][column]
            raise describe_refusal(self._plans[number].name, batch.column(number), int(row))


class ByteArrayEncoder:
    """Encodes the single binary column of its batches as raw framed payloads."""

    def __init__(self, schema: pa.Schema) -> None:
        """Plans the encoding; refuses what is not one column, string or binary."""
        self.schema = schema
        plans = plan_columns(schema) if len(schema) == 1 else ()
        if len(plans) != 1 or plans[0].kind != k.BINARY or plans[0].depth > 0:
            raise ConfigError(
                "record type ByteArray takes one binary column",
                received=", ".join(f"{field.name} ({field.type})" for field in schema) or "none",
                allowed="one column of type binary, large_binary, string or large_string",
                fix="select the payload column before the write, or use record type Example",
            )
        self._plan = plans[0]

    def encode(self, batch: pa.RecordBatch) -> np.ndarray:
        """Encodes a batch as framed records, uint8 `[bytes]`; refuses nulls."""
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
        """Encodes a batch in pieces; arguments and errors as for `RecordEncoder`."""
        for first in range(0, batch.num_rows, chunk_rows):
            yield self.encode(batch.slice(first, chunk_rows))


def build_encoder(
    schema: pa.Schema, record_type: str = "Example"
) -> RecordEncoder | ByteArrayEncoder:
    """Builds the encoder of a record type.

    Args:
        schema: Schema of the batches.
        record_type: `"Example"`, `"SequenceExample"` or `"ByteArray"`.

    Returns:
        An encoder with `encode` and `encode_chunks`.

    Raises:
        ConfigError: Unknown record type, or a schema that it cannot carry.
    """
    check_record_type(record_type)
    if record_type == "ByteArray":
        return ByteArrayEncoder(schema)
    return RecordEncoder(schema, record_type)


def encode(batch: pa.RecordBatch, record_type: str = "Example") -> np.ndarray:
    """Encodes one batch, as `build_encoder` does; build an encoder once where there are many."""
    return build_encoder(batch.schema, record_type).encode(batch)
