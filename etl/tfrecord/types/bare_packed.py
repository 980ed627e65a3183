"""The packed layout of the bare writer: columns of one kind side by side in one list."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from etl.tfrecord.types.column_nodes import FeatureColumn, refuse_null
from etl.tfrecord.types.values import is_list, split_lists

PACKED_PREFIX = "packed."
_DTYPES = {"int64": np.int64, "float": np.float32}
_VALUE_TYPES = {"int64": pa.int64(), "float": pa.float32(), "bytes": pa.large_binary()}


@dataclass(frozen=True)
class ColumnSlot:
    """A column's place in a packed feature, after the slots before it.

    Attributes:
        name: Name that its own feature would have.
        width: Values per row.
    """

    name: str
    width: int


def packed_kind(data_type: pa.DataType) -> str | None:
    """`int64`, `float` or `bytes`; None where rows hold differing numbers of values."""
    if pa.types.is_fixed_size_list(data_type) and data_type.list_size:
        data_type = data_type.value_type
    if is_list(data_type):
        return None
    if pa.types.is_integer(data_type) or pa.types.is_boolean(data_type):
        return "int64"
    return "float" if pa.types.is_floating(data_type) else "bytes"


@dataclass(frozen=True)
class ColumnPacking:
    """Which columns go into which packed feature.

    Attributes:
        groups: Per kind, the columns' numbers and their slots.
        rest: Numbers of the columns that stay as they are.
    """

    groups: tuple[tuple[str, tuple[tuple[int, ColumnSlot], ...]], ...]
    rest: tuple[int, ...]

    @property
    def slots(self) -> dict[str, tuple[ColumnSlot, ...]]:
        """What lies where, by packed feature."""
        return {PACKED_PREFIX + kind: tuple(slot for _, slot in g) for kind, g in self.groups}

    def outputs(self, outputs: list[FeatureColumn]) -> list[FeatureColumn]:
        """Columns after packing: the packed ones, then the rest."""
        packed = [
            FeatureColumn(name, pa.list_(_VALUE_TYPES[kind], sum(slot.width for slot in slots)))
            for (kind, _), (name, slots) in zip(self.groups, self.slots.items(), strict=True)
        ]
        return [*packed, *(outputs[number] for number in self.rest)]

    def apply(self, arrays: list[pa.Array], rows: int) -> list[pa.Array]:
        """Packs the columns of a batch.

        Args:
            arrays: Columns `[rows]`.
            rows: Their length.

        Raises:
            InputDataError: A null, which has no place in a list of fixed size.
        """
        packed = []
        for kind, group in self.groups:
            columns = [(_flat(arrays[number], slot.name), slot.width) for number, slot in group]
            join = _join_bytes if kind == "bytes" else _join_numbers
            width = sum(slot.width for _, slot in group)
            values = join(kind, columns, rows, width)
            packed.append(pa.FixedSizeListArray.from_arrays(values, width))
        return [*packed, *(arrays[number] for number in self.rest)]


def plan_packing(outputs: list[FeatureColumn]) -> ColumnPacking:
    """Plans the packed layout of columns, each kind in column order."""
    groups: dict[str, list[tuple[int, ColumnSlot]]] = {kind: [] for kind in _VALUE_TYPES}
    rest = []
    for number, output in enumerate(outputs):
        kind = packed_kind(output.type)
        if kind is None:
            rest.append(number)
        else:
            width = output.type.list_size if is_list(output.type) else 1
            groups[kind].append((number, ColumnSlot(output.name, width)))
    filled = tuple((kind, tuple(group)) for kind, group in groups.items() if group)
    return ColumnPacking(filled, tuple(rest))


def _flat(column: pa.Array, name: str) -> pa.Array:
    """Values of a column without nulls, `[rows * width]`."""
    if column.null_count:
        refuse_null(name, column, "the packed layout has a place for every value")
    if not is_list(column.type):
        return column
    values, rows = split_lists(column)
    if values.null_count:
        is_null = np.asarray(values.is_null())
        marked = pa.array(np.zeros(len(column), np.int8), mask=np.logical_or.reduceat(
            is_null, rows.offsets[:-1]))  # fmt: skip
        refuse_null(name, marked, "an element is missing (see policy nullElements)")
    return values


def _join_numbers(
    kind: str, columns: list[tuple[pa.Array, int]], rows: int, width: int
) -> pa.Array:
    matrix = np.empty((rows, width), _DTYPES[kind])
    first = 0
    for values, size in columns:
        numbers = values.to_numpy(zero_copy_only=False)
        if size == 1:
            matrix[:, first] = numbers
        else:
            matrix[:, first : first + size] = numbers.reshape(rows, size)
        first += size
    return pa.array(matrix.reshape(-1))


def _join_bytes(kind: str, columns: list[tuple[pa.Array, int]], rows: int, width: int) -> pa.Array:
    order = np.empty((rows, width), np.int64)
    first = start = 0
    for values, size in columns:
        order[:, first : first + size] = start + np.arange(rows * size).reshape(rows, size)
        first, start = first + size, start + len(values)
    joined = pa.concat_arrays([values.cast(_VALUE_TYPES[kind]) for values, _ in columns])
    return joined.take(pa.array(order.reshape(-1)))
