"""Arrow columns as the encoder takes them: the plan made from a schema, and a batch's memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.codec import encode_kernels as k
from etl.tfrecord.codec.messages import build_head
from etl.tfrecord.types.arrays import buffer_address, is_list
from etl.tfrecord.types.features import find_wire_kind

_ALLOWED = (
    "int8/16/32/64, uint8/16/32 and bool (int64 list); float16/32/64 and decimal (float list); "
    "string and binary (bytes list); list, large_list and fixed_size_list of these"
)
_ALLOWED_SEQUENCE = f"{_ALLOWED}; and lists of such lists (feature lists)"
_LANES = {
    "int32": k.INT32, "int64": k.INT64, "float32": k.FLOAT32, "float64": k.FLOAT64,
    "binary": k.BINARY,
}  # fmt: skip
# Bytes of an entry that holds a number of no bytes, its key, its own tag and length aside.
_EMPTY_ENTRY_BYTES = 8


@dataclass(frozen=True)
class ColumnPlan:
    """How one column goes onto the wire.

    Attributes:
        name: Column name, the feature's key.
        kind: Value kind of `encode_kernels`.
        value_type: Arrow type that values are cast to first, or None where they are used as is.
        depth: 0 for one value, 1 for a list, 2 for a list of lists: a feature list.
    """

    name: str
    kind: int
    value_type: pa.DataType | None
    depth: int

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
    """Checks a schema against the wire and plans each of its columns.

    Raises:
        ConfigError: A column has an unsupported type, or a name occurs twice; one error names
            every such column. SequenceExamples take lists of lists too.
    """
    plans, bad, seen = [], [], set()
    deepest = 2 if record_type == "SequenceExample" else 1
    for field in schema:
        depth, value_type = _list_depth(field.type)
        kind = find_wire_kind(value_type)
        if kind is None or depth > deepest:
            bad.append(f"{field.name} ({field.type})")
        elif field.name in seen:
            bad.append(f"{field.name} (name occurs twice)")
        else:
            plans.append(ColumnPlan(field.name, _LANES[kind.lane], kind.cast, depth))
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
    offsets = np.frombuffer(values.buffers()[1], np.int64 if large else np.int32)
    return offsets[values.offset : values.offset + len(values) + 1].astype(np.int64)


def _check_no_null(
    plan: ColumnPlan, values: pa.Array, parents: list[tuple[pa.Array, np.ndarray]]
) -> None:
    """Refuses a null among values of lists; what lies below a null list does not count."""
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
            fix=f"write array_compact({plan.name}), or fill them before the write",
        )


def _as_plain(column: pa.Array, data_type: pa.DataType | None) -> pa.Array:
    if data_type is None:
        return column
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return column.cast(data_type)


class ColumnMemory:
    """Columns of a batch: their `table`, int64 `[columns, COLUMN_FIELDS]`, and their memory."""

    def __init__(self, plans: Iterable[ColumnPlan], columns: Iterable[pa.Array]) -> None:
        bound = [_bind_column(*pair) for pair in zip(plans, columns, strict=True)]
        self._kept_alive = [keep for _, keep in bound]
        fields = [row for row, _ in bound]
        self.table = np.array(fields, np.int64).reshape(len(fields), k.COLUMN_FIELDS)


def _bind_column(plan: ColumnPlan, column: pa.Array) -> tuple[list[int], list[Any]]:
    """Resolves where a column's values, offsets and validity lie; refuses a null inside a list.

    Returns:
        Row of the column table, and the objects that its addresses point to.
    """
    fields, keep = [*plan.fields], list[Any]()

    def hold(field: int, array: np.ndarray) -> None:
        keep.append(array)
        fields[field] = array.ctypes.data

    values, parents = column, list[tuple[pa.Array, np.ndarray]]()
    for level in range(plan.depth):
        values, offsets = _row_offsets(lists := values)
        parents.append((lists, offsets))
        _check_no_null(plan, values, parents)
        hold(k.ROW_OFFSETS if level + 1 == plan.depth else k.OUTER_OFFSETS, offsets)
    values = _as_plain(values, plan.value_type)
    rows = column if plan.depth else values
    if plan.kind == k.BINARY:
        hold(k.BYTE_OFFSETS, read_byte_offsets(values))
        fields[k.VALUES] = buffer_address(values.buffers()[2])
    else:
        width = 8 if plan.kind in (k.INT64, k.FLOAT64) else 4
        fields[k.VALUES] = buffer_address(values.buffers()[1]) + width * values.offset
    if not plan.is_compact:
        hold(k.SIZES, np.empty(len(parents[-1][0]) if parents else len(column), np.int64))
    if plan.depth > 1:
        hold(k.OUTER_SIZES, np.empty(len(column), np.int64))
    fields[k.VALIDITY] = buffer_address(rows.buffers()[0]) if rows.null_count else 0
    fields[k.VALIDITY_BIT] = rows.offset
    return fields, [*keep, rows, values]


_ALLOWED_DOUBLES = (
    "fractions (stored as the nearest float32), whole numbers that float32 holds exactly, "
    "infinities and NaN"
)


def find_refused_double(values: np.ndarray) -> np.ndarray:
    """Which float64 values the encoder refuses, bool `[values]`.

    Refused are finite values beyond the float32 range, values other than zero that would become
    zero, and whole numbers that would become others: those are ids or times, not measurements.
    """
    with np.errstate(over="ignore", under="ignore"):
        narrow = values.astype(np.float32)
    changed = (narrow.astype(np.float64) != values) & np.isfinite(values)
    return changed & ((np.floor(values) == values) | (narrow == 0))


def describe_refusal(name: str, column: pa.Array, row: int) -> InputDataError:
    """Builds the error for a row of a column of doubles or decimals with a refused value."""
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
        fix=f"cast ids and times to int64, rescale the column, or write cast({name} as float); "
        "option float64=cast takes all",
    )
