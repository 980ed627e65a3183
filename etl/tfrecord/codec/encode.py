"""Encodes Arrow batches as TFRecord bytes, column by column, without a Python object per row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.codec import encode_kernels as k
from etl.tfrecord.codec.decode_kernels import build_head, check_record_type
from etl.tfrecord.codec.framing import FOOTER_BYTES, HEADER_BYTES, MAX_RECORD_BYTES
from etl.tfrecord.types.features import buffer_address, find_wire_kind, is_list
from etl.tfrecord.types.parts import ListRows, split_lists

# Rows encoded into one buffer at a time: small enough for the cache, large enough for the calls.
CHUNK_ROWS = 2048

_LANES = {
    "int32": k.INT32, "int64": k.INT64, "float32": k.FLOAT32, "float64": k.FLOAT64,
    "binary": k.BINARY,
}  # fmt: skip
# Bytes of an entry that holds a number of no bytes, its key, its own tag and length aside.
_EMPTY_ENTRY_BYTES = 8


@dataclass(frozen=True)
class ColumnPlan:
    """How one column goes onto the wire."""

    name: str
    kind: int  # of `encode_kernels`
    value_type: pa.DataType | None  # what values are cast to first, None where they need not be
    depth: int  # 0 for one value, 1 for a list, 2 for a list of lists: a feature list

    @cached_property
    def is_compact(self) -> bool:
        """Whether an entry is one number under a short key, which has kernels of its own."""
        is_number = self.kind != k.BINARY and self.depth == 0
        return is_number and self.fields[k.KEY_BYTES] <= k.COMPACT_KEY_BYTES

    @cached_property
    def head(self) -> np.ndarray:
        """First bytes of an entry with a number of no bytes; the key starts at the fifth."""
        key = self.name.encode()
        return build_head(key, len(key) + _EMPTY_ENTRY_BYTES)

    @cached_property
    def fields(self) -> tuple[int, ...]:
        """Row of the column table, as far as it is the same in all batches."""
        known = {k.KIND: self.kind, k.DEPTH: self.depth, k.HEAD: self.head.ctypes.data,
                 k.KEY_BYTES: len(self.name.encode())}  # fmt: skip
        return tuple(known.get(field, 0) for field in range(k.COLUMN_FIELDS))


def plan_columns(schema: pa.Schema, record_type: str = "Example") -> tuple[ColumnPlan, ...]:
    """Plans each column of a schema that `plan_to_example` made, which says what does not fit."""
    plans: dict[str, ColumnPlan] = {}
    deepest = 2 if record_type == "SequenceExample" else 1
    for field in schema:
        depth, value_type = 0, field.type
        while is_list(value_type):
            depth, value_type = depth + 1, value_type.value_type
        kind = find_wire_kind(value_type)
        if kind is None or depth > deepest or field.name in plans:
            raise ConfigError(f"column {field} cannot be written as tf.train.{record_type}")
        plans[field.name] = ColumnPlan(field.name, _LANES[kind.lane], kind.cast, depth)
    return tuple(plans.values())


def read_byte_offsets(values: pa.Array) -> np.ndarray:
    """Offsets of binary values in their data buffer, int64 `[values + 1]`."""
    if len(values) == 0:
        return np.zeros(1, np.int64)
    large = pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type)
    offsets = np.frombuffer(values.buffers()[1], np.int64 if large else np.int32)
    return offsets[values.offset : values.offset + len(values) + 1].astype(np.int64)


def _refuse_null(plan: ColumnPlan, values: pa.Array, parents: list[ListRows]) -> None:
    """Refuses a null among values of lists."""
    row = int(np.argmax(np.asarray(values.is_null())))
    for lists in reversed(parents):
        row = lists.row_of(row)
    raise InputDataError(
        f"column {plan.name!r} has a null inside a list",
        received=f"row {row} of the batch",
        allowed="null for the whole list (the feature is left out), never for an element",
        fix=f"write array_compact({plan.name}), or fill them before the write",
    )


def _as_plain(column: pa.Array, data_type: pa.DataType | None) -> pa.Array:
    if data_type is None:
        return column
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(data_type)


def _bind_column(plan: ColumnPlan, column: pa.Array) -> tuple[list[int], list[Any]]:
    """Row of the column table, and the objects that its addresses point to.

    Refuses a null inside a list.
    """
    fields, keep = [*plan.fields], list[Any]()

    def hold(field: int, array: np.ndarray) -> None:
        keep.append(array)
        fields[field] = array.ctypes.data

    values, parents = column, list[ListRows]()
    for level in range(plan.depth):
        values, lists = split_lists(values)
        parents.append(lists)
        if values.null_count:
            _refuse_null(plan, values, parents)
        hold(k.ROW_OFFSETS if level + 1 == plan.depth else k.OUTER_OFFSETS, lists.offsets)
    values = _as_plain(values, plan.value_type)
    rows = column if plan.depth else values
    if plan.kind == k.BINARY:
        hold(k.BYTE_OFFSETS, read_byte_offsets(values))
        fields[k.VALUES] = buffer_address(values.buffers()[2])
    else:
        width = 8 if plan.kind in (k.INT64, k.FLOAT64) else 4
        fields[k.VALUES] = buffer_address(values.buffers()[1]) + width * values.offset
    if not plan.is_compact:
        hold(k.SIZES, np.empty(len(parents[-1].offsets) - 1 if parents else len(column), np.int64))
    if plan.depth > 1:
        hold(k.OUTER_SIZES, np.empty(len(column), np.int64))
    fields[k.VALIDITY] = buffer_address(rows.buffers()[0]) if rows.null_count else 0
    fields[k.VALIDITY_BIT] = rows.offset
    return fields, [*keep, rows, values]


def describe_refusal(name: str, column: pa.Array, row: int) -> InputDataError:
    """Builds the error for a row of a column of doubles or decimals with a refused value."""
    values = column.slice(row, 1)
    while hasattr(values.type, "value_field"):
        values = values.flatten()
    plain = values.drop_null().cast(pa.float64()).to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore", under="ignore"):
        narrow = plain.astype(np.float32)
    changed = (narrow != plain) & np.isfinite(plain)
    value = float(plain[changed & ((np.floor(plain) == plain) | (narrow == 0))][0])
    return InputDataError(
        f"column {name!r} has a value that float32 cannot stand for",
        received=f"{value!r} in row {row} of the batch",
        allowed="fractions (stored as the nearest float32), whole numbers that float32 holds "
        "exactly, infinities and NaN",
        fix=f"cast ids and times to int64, rescale the column, or write cast({name} as float); "
        "option float64=cast takes all",
    )


class RecordEncoder:
    """Encodes batches of one schema as framed Examples or SequenceExamples.

    Features stand in the order of the columns; a null is a feature left out. In SequenceExamples
    lists of lists become feature lists, an empty one without features, and all other columns the
    context. Buffers are reused between calls, so an encoder belongs to one thread.
    """

    def __init__(self, schema: pa.Schema, record_type: str = "Example") -> None:
        self.schema = schema
        self._plans = plan_columns(schema, record_type)
        # Numbers of the context's columns, and of the feature lists.
        self._parts = tuple(
            [i for i, plan in enumerate(self._plans) if (plan.depth > 1) == is_nested]
            for is_nested in (False, True)
        )
        self._sections = 1 if record_type == "Example" else 2
        self._buffer = np.empty(0, np.uint8)

    def encode(self, batch: pa.RecordBatch) -> np.ndarray:
        """Encodes a batch as one piece that the caller owns; see `encode_chunks`."""
        chunks = [chunk.copy() for chunk in self.encode_chunks(batch)]
        return np.concatenate(chunks) if chunks else np.empty(0, np.uint8)

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
            InputDataError: Null inside a list, a value that float32 cannot stand for, another
                schema than planned, or a record beyond 2 GiB - 1; names the column and the row.
        """
        self._check_schema(batch.schema)
        if not batch.num_rows:
            return
        bound = [_bind_column(*pair) for pair in zip(self._plans, batch.columns, strict=True)]
        fields = np.array([row for row, _ in bound], np.int64).reshape(-1, k.COLUMN_FIELDS)
        tables = fields[self._parts[0]], fields[self._parts[1]]
        for first in range(0, batch.num_rows, chunk_rows):
            rows = min(chunk_rows, batch.num_rows - first)
            yield self._encode_rows(batch, tables, first, rows)

    def _check_schema(self, given: pa.Schema) -> None:
        planned = self.schema
        if not given.equals(planned) and (
            given.names != planned.names or given.types != planned.types
        ):  # nullability and metadata may differ
            raise InputDataError(
                "a batch has another schema than the encoder was built for",
                received=str(given),
                allowed=str(planned),
            )

    def _encode_rows(
        self, batch: pa.RecordBatch, tables: tuple[np.ndarray, np.ndarray], first: int, rows: int
    ) -> np.ndarray:
        """Encodes some rows by the tables of the context's columns and of the feature lists."""
        sizes = np.empty((self._sections + 1, rows), np.int64)
        total, largest = k.measure(*tables, first, sizes)
        if largest > MAX_RECORD_BYTES:
            row = first + int(sizes[-1].argmax())
            raise InputDataError(
                "a record is longer than a protobuf message may be",
                received=f"{largest} bytes in row {row} of the batch",
                allowed=f"at most {MAX_RECORD_BYTES} bytes",
                fix="truncate the longest list or string of that row",
            )
        if self._buffer.size < total + k.SLACK_BYTES:
            self._buffer = np.empty(total + total // 4 + k.SLACK_BYTES, np.uint8)
        cursors, address = np.empty(rows, np.int64), self._buffer.ctypes.data
        part, column, bad = k.write(*tables, first, sizes, total, cursors, address)
        if part >= 0:
            number = self._parts[part][column]
            raise describe_refusal(self._plans[number].name, batch.column(number), int(bad))
        return self._buffer[:total]


class ByteArrayEncoder:
    """Encodes the single binary column of its batches as raw framed payloads."""

    def __init__(self, schema: pa.Schema) -> None:
        """Plans the encoding; refuses what is not one column, string or binary."""
        plans = plan_columns(schema)
        if [(plan.kind, plan.depth) for plan in plans] != [(k.BINARY, 0)]:
            raise ConfigError("record type ByteArray takes one binary column", received=schema)
        self.schema, self._plan = schema, plans[0]

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


Encoder = RecordEncoder | ByteArrayEncoder


def build_encoder(schema: pa.Schema, record_type: str = "Example") -> Encoder:
    """Builds the encoder of a record type; refuses a schema that it cannot carry."""
    check_record_type(record_type)
    if record_type == "ByteArray":
        return ByteArrayEncoder(schema)
    return RecordEncoder(schema, record_type)


def encode(batch: pa.RecordBatch, record_type: str = "Example") -> np.ndarray:
    """Encodes one batch, as `build_encoder` does; build an encoder once where there are many."""
    return build_encoder(batch.schema, record_type).encode(batch)
