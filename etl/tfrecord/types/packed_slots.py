"""The packed layout of datasets: columns put into the slots that the manifest lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from conf.schema import ABSENT_SLOTS_FEATURE, PACKED_FEATURES, PackedSlot

_INT64, _FLOAT, _BYTES = (PACKED_FEATURES[dtype] for dtype in ("int64", "float32", "bytes"))
_VALUE_TYPES = {_INT64: pa.int64(), _FLOAT: pa.float32(), _BYTES: pa.large_binary()}
_DTYPES = {_INT64: np.int64, _FLOAT: np.float32}


@dataclass(frozen=True)
class _PackedColumns:
    """The columns that share a packed feature, by number, in the order of their slots."""

    name: str
    columns: tuple[int, ...]

    @property
    def type(self) -> pa.DataType:
        return pa.list_(_VALUE_TYPES[self.name], len(self.columns))

    def join(self, arrays: Sequence[pa.Array], rows: int) -> pa.Array:
        """Puts columns without nulls side by side, `[rows]` lists of one length."""
        columns = [arrays[number] for number in self.columns]
        values = (_join_bytes if self.name == _BYTES else _join_numbers)(self.name, columns, rows)
        return pa.FixedSizeListArray.from_arrays(values, len(columns))


class SlotPacking:
    """Puts the scalars of each type side by side.

    A list of fixed length has a place for every value: what a null leaves there means nothing, and
    `ABSENT_SLOTS_FEATURE` holds the numbers of such slots.

    Args:
        schema: Schema of the batches, before packing.
        slots: Every slot, one value each, in the order of the manifest.

    Attributes:
        schema: Schema of packed batches: the packed features, `ABSENT_SLOTS_FEATURE`, all other
            columns.

    Raises:
        KeyError: There is no column of a slot's name.
    """

    def __init__(self, schema: pa.Schema, slots: Sequence[PackedSlot]) -> None:
        numbers = {name: number for number, name in enumerate(schema.names)}
        self._columns = [numbers[slot.feature] for slot in slots]
        groups: dict[str, list[int]] = {}
        for slot, column in zip(slots, self._columns, strict=True):
            groups.setdefault(slot.packed, []).append(column)
        self._packed = [_PackedColumns(name, tuple(group)) for name, group in groups.items()]
        taken = set(self._columns)
        self._rest = [number for number in numbers.values() if number not in taken]
        self.schema = pa.schema(
            [
                *((packed.name, packed.type) for packed in self._packed),
                (ABSENT_SLOTS_FEATURE, pa.list_(pa.int64())),
                *((schema.names[number], schema.types[number]) for number in self._rest),
            ]
        )

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Packs a batch."""
        arrays = list(batch.columns)
        absent = _list_absent([arrays[column] for column in self._columns], batch.num_rows)
        for column in self._columns:
            if arrays[column].null_count:
                arrays[column] = _fill(arrays[column])
        packed = [group.join(arrays, batch.num_rows) for group in self._packed]
        rest = [arrays[number] for number in self._rest]
        return pa.RecordBatch.from_arrays([*packed, absent, *rest], schema=self.schema)


def _fill(column: pa.Array) -> pa.Array:
    is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    return column.fill_null(pa.scalar(0 if is_number else "", column.type))


def _list_absent(columns: Sequence[pa.Array], rows: int) -> pa.Array:
    """Numbers of the slots without a value by row; null where all have one."""
    kind = pa.list_(pa.int64())
    numbers = [number for number, column in enumerate(columns) if column.null_count]
    if not numbers:
        return pa.nulls(rows, kind)
    is_null = np.stack([np.asarray(columns[number].is_null()) for number in numbers], axis=1)
    counts = is_null.sum(axis=1)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    values = np.array(numbers, np.int64)[np.nonzero(is_null)[1]]
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(values), mask=pa.array(counts == 0)
    ).cast(kind)


def _join_numbers(name: str, columns: Sequence[pa.Array], rows: int) -> pa.Array:
    matrix = np.empty((rows, len(columns)), _DTYPES[name])
    for place, values in enumerate(columns):
        matrix[:, place] = values.to_numpy(zero_copy_only=False)
    return pa.array(matrix.reshape(-1))


def _join_bytes(name: str, columns: Sequence[pa.Array], rows: int) -> pa.Array:
    order = np.arange(len(columns) * rows).reshape(len(columns), rows).T
    joined = pa.concat_arrays([values.cast(_VALUE_TYPES[name]) for values in columns])
    return joined.take(pa.array(np.ascontiguousarray(order).reshape(-1)))
