"""Arrow columns as the encoder takes them: the plan made from a schema, and a batch's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.codec import encode_kernels as k
from etl.tfrecord.types.conversions import buffer_address, is_list
from etl.tfrecord.types.wire_kinds import find_wire_kind

_ALLOWED = (
    "int8/16/32/64, uint8/16/32 and bool (int64 list); float16/32/64 and decimal (float list); "
    "string and binary (bytes list); list, large_list and fixed_size_list of these"
)
_LANES = {
    "int32": k.INT32, "int64": k.INT64, "float32": k.FLOAT32, "float64": k.FLOAT64,
    "binary": k.BINARY,
}  # fmt: skip
_ALLOWED_SEQUENCE = f"{_ALLOWED}; and lists of such lists (feature lists)"


@dataclass(frozen=True)
class ColumnPlan:
    """How one column goes onto the wire.

    Attributes:
        name: Column name, the feature's key.
        key: The same in UTF-8.
        kind: Value kind of `encode_kernels`.
        value_type: Arrow type that values are cast to first, or None where they are used as is.
        is_list: Whether a row holds a list.
        is_sequence: Whether a row holds a list of lists: a feature list of a SequenceExample.
    """

    name: str
    key: bytes
    kind: int
    value_type: pa.DataType | None
    is_list: bool
    is_sequence: bool = False

    @property
    def is_compact(self) -> bool:
        """Whether an entry is one number under a short key, which has kernels of its own."""
        is_number = self.kind != k.BINARY and not self.is_list
        return is_number and len(self.key) <= k.COMPACT_KEY_BYTES


@dataclass(frozen=True)
class BoundColumn:
    """A column's memory: addresses for the kernels and the objects that keep them alive."""

    fields: tuple[int, ...]
    keep_alive: tuple[Any, ...]


class BoundBatch:
    """The column table of one batch and all that its addresses point to.

    Attributes:
        batch: The batch.
        table: Column table, int64 `[columns, COLUMN_FIELDS]`.
    """

    def __init__(self, batch: pa.RecordBatch, columns: tuple[BoundColumn, ...]) -> None:
        self._columns = columns
        self.batch = batch
        self.table = np.array([column.fields for column in columns], np.int64).reshape(
            len(columns), k.COLUMN_FIELDS
        )


def plan_columns(schema: pa.Schema, record_type: str = "Example") -> tuple[ColumnPlan, ...]:
    """Checks a schema against the wire and plans each of its columns.

    Args:
        schema: Arrow schema of the batches to come.
        record_type: `"Example"`, or `"SequenceExample"`, which takes lists of lists too.

    Returns:
        One plan per column, in the schema's order.

    Raises:
        ConfigError: A column has an unsupported type, or a name occurs twice; one error names
            every such column.
    """
    plans, bad, seen = [], [], set()
    for field in schema:
        depth, value_type = _list_depth(field.type)
        kind = find_wire_kind(value_type)
        if kind is None or depth > 2 or (depth == 2 and record_type != "SequenceExample"):
            bad.append(f"{field.name} ({field.type})")
        elif field.name in seen:
            bad.append(f"{field.name} (name occurs twice)")
        else:
            key = field.name.encode()
            lane = _LANES[kind.lane]
            plans.append(ColumnPlan(field.name, key, lane, kind.cast, depth > 0, depth == 2))
        seen.add(field.name)
    if bad:
        raise ConfigError(
            f"{len(bad)} column(s) cannot be written as tf.train.{record_type}",
            received=", ".join(bad),
            allowed=_ALLOWED_SEQUENCE if record_type == "SequenceExample" else _ALLOWED,
            fix="cast them (timestamps to int64 milliseconds, uint64 to int64, structs to "
            "columns), rename, or drop them before the write; lists of lists need record type "
            "SequenceExample",
        )
    return tuple(plans)


def _list_depth(data_type: pa.DataType) -> tuple[int, pa.DataType]:
    """How many lists are nested, and what the innermost holds."""
    depth = 0
    while is_list(data_type):
        depth, data_type = depth + 1, data_type.value_type
    return depth, data_type


def _row_offsets(column: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Values of the rows' lists alone, and int64 offsets `[rows + 1]` into them."""
    if pa.types.is_fixed_size_list(column.type):
        size = column.type.list_size
        offsets = (np.arange(len(column) + 1, dtype=np.int64) + column.offset) * size
    else:
        offsets = np.asarray(column.offsets).astype(np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    return column.values.slice(first, last - first), offsets - first


def read_byte_offsets(values: pa.Array) -> np.ndarray:
    """Offsets of binary values in their data buffer, int64 `[values + 1]`."""
    if len(values) == 0:
        return np.zeros(1, np.int64)
    large = pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type)
    width = np.int64 if large else np.int32
    offsets = np.frombuffer(values.buffers()[1], width)
    return offsets[values.offset : values.offset + len(values) + 1].astype(np.int64)


def _check_no_null(
    plan: ColumnPlan, values: pa.Array, parents: list[tuple[pa.Array, np.ndarray]]
) -> None:
    """Refuses a null inside a list; values below a null list do not count.

    Args:
        plan: The column's plan.
        values: Elements of the innermost of the parents.
        parents: Lists and their offsets, the column itself first.
    """
    if values.null_count == 0:
        return
    rows = np.flatnonzero(np.asarray(values.is_null()))
    for lists, offsets in reversed(parents):
        rows = np.searchsorted(offsets, rows, side="right") - 1
        rows = rows[np.asarray(lists.is_valid())[rows]]
    if len(rows):
        raise InputDataError(
            f"column {plan.name!r} has a null inside a list",
            received=f"row {int(rows[0])} of the batch",
            allowed="null for the whole list (the feature is left out), never for an element",
            fix="option nullElements=drop or nullElements=default, or fill them before the write",
        )


def _as_plain(column: pa.Array, data_type: pa.DataType | None) -> pa.Array:
    if data_type is None:
        return column
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(data_type)


def bind_column(plan: ColumnPlan, column: pa.Array) -> BoundColumn:
    """Resolves where a column's values, offsets and validity lie in memory.

    Args:
        plan: The column's plan.
        column: Its data in one batch, sliced or not.

    Returns:
        Addresses in the order of the column table's fields.

    Raises:
        InputDataError: A list holds a null.
    """
    keep: list[Any] = []
    parents: list[tuple[pa.Array, np.ndarray]] = []
    values, row_offsets, outer_offsets, outer_sizes = column, 0, 0, 0
    for _ in range(plan.is_list + plan.is_sequence):
        values, offsets = _row_offsets(lists := values)
        parents.append((lists, offsets))
        _check_no_null(plan, values, parents)
        keep.append(offsets)
        outer_offsets, row_offsets = row_offsets, offsets.ctypes.data
    values = _as_plain(values, plan.value_type)
    if not plan.is_list:
        column = values
    byte_offsets, sizes = 0, 0
    if plan.kind == k.BINARY:
        keep.append(read_byte_offsets(values))
        byte_offsets, address = keep[-1].ctypes.data, buffer_address(values.buffers()[2])
    else:
        width = 8 if plan.kind in (k.INT64, k.FLOAT64) else 4
        address = buffer_address(values.buffers()[1]) + width * values.offset
    if not plan.is_compact:
        keep.append(np.empty(len(parents[-1][0]) if parents else len(column), np.int64))
        sizes = keep[-1].ctypes.data
    if plan.is_sequence:
        keep.append(np.empty(len(column), np.int64))
        outer_sizes = keep[-1].ctypes.data
    head = _entry_head(plan.key)
    bitmap = buffer_address(column.buffers()[0]) if column.null_count else 0
    fields = (plan.kind, plan.is_list, address, bitmap, column.offset, row_offsets, byte_offsets,
              head.ctypes.data, len(plan.key), sizes, outer_offsets, outer_sizes)  # fmt: skip
    return BoundColumn(tuple(int(field) for field in fields), (*keep, head, column, values))


def _entry_head(key: bytes) -> np.ndarray:
    """First bytes of a compact entry, padded to whole words; the key starts at the fifth byte."""
    lengths = bytes([0x0A, (len(key) + 8) & 0xFF, 0x0A, len(key) & 0xFF])
    padding = bytes(-(len(key) + 4) % 8)
    return np.frombuffer(lengths + key + padding, np.uint8)


_ALLOWED_DOUBLES = (
    "fractions (stored as the nearest float32), whole numbers that float32 holds exactly, "
    "infinities and NaN"
)


def find_refused_double(values: np.ndarray) -> np.ndarray:
    """Which float64 values the encoder refuses.

    Refused are finite values beyond the float32 range, values other than zero that would become
    zero, and whole numbers that would become others: those are ids or times, not measurements.

    Args:
        values: float64 `[values]`.

    Returns:
        bool `[values]`.
    """
    with np.errstate(over="ignore", under="ignore"):
        narrow = values.astype(np.float32)
    changed = (narrow.astype(np.float64) != values) & np.isfinite(values)
    return changed & ((np.floor(values) == values) | (narrow == 0))


def describe_refusal(name: str, column: pa.Array, row: int) -> InputDataError:
    """Builds the error for a row with a refused value.

    Args:
        name: Column name.
        column: Its data: float64 or decimal, or lists of these, nested or not.
        row: Row of the batch.
    """
    values = column.slice(row, 1)
    while hasattr(values.type, "value_field"):
        values = values.flatten()
    plain = values.drop_null().cast(pa.float64()).to_numpy(zero_copy_only=False)
    value = float(plain[find_refused_double(plain)][0])
    with np.errstate(over="ignore", under="ignore"):
        narrow = np.float32(value)
    if np.isinf(narrow):
        problem = "has a value beyond the float32 range"
    elif narrow == 0:
        problem = "has a value so small that it would become zero as float32"
    else:
        problem = f"has a whole number that would become {int(narrow)} as float32"
    return InputDataError(
        f"column {name!r} {problem}",
        received=f"{value!r} in row {row} of the batch",
        allowed=_ALLOWED_DOUBLES,
        fix="cast ids and times to int64, rescale the column, or choose another float64 policy "
        "for it (cast, clip)",
    )
