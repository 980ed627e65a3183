"""The packed layout of datasets: columns put into the slots that the manifest lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from conf.schema import ABSENT_SLOTS_FEATURE, PackedSlot
from etl.tfrecord.types.bare_packed import PACKED_PREFIX, ColumnPacking, ColumnSlot
from etl.tfrecord.types.column_nodes import FeatureColumn


class SlotPacking:
    """Puts the scalars of each type side by side.

    A list of fixed length has a place for every value: what a null leaves there means nothing, and
    `ABSENT_FEATURE` holds the numbers of such slots.

    Args:
        schema: Schema of the batches, before packing.
        slots: Every slot, in the order of the manifest.

    Attributes:
        schema: Schema of packed batches: the packed features, `ABSENT_FEATURE`, all other columns.

    Raises:
        KeyError: There is no column of a slot's name.
    """

    def __init__(self, schema: pa.Schema, slots: Sequence[PackedSlot]) -> None:
        numbers = {name: number for number, name in enumerate(schema.names)}
        self._columns = [numbers[slot.feature] for slot in slots]
        self._packing = _plan_packing(numbers, slots)
        outputs = self._packing.outputs([FeatureColumn(field.name, field.type) for field in schema])
        fields = [pa.field(output.name, output.type) for output in outputs]
        self._packed = len(self._packing.groups)
        fields.insert(self._packed, pa.field(ABSENT_SLOTS_FEATURE, pa.list_(pa.int64())))
        self.schema = pa.schema(fields)

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Packs a batch."""
        arrays = list(batch.columns)
        absent = _list_absent([arrays[column] for column in self._columns], batch.num_rows)
        for column in self._columns:
            if arrays[column].null_count:
                arrays[column] = _fill(arrays[column])
        arrays = self._packing.apply(arrays, batch.num_rows)
        arrays.insert(self._packed, absent)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _plan_packing(numbers: Mapping[str, int], slots: Sequence[PackedSlot]) -> ColumnPacking:
    groups: dict[str, list[tuple[int, ColumnSlot]]] = {}
    for slot in slots:
        members = groups.setdefault(slot.packed.removeprefix(PACKED_PREFIX), [])
        members.append((numbers[slot.feature], ColumnSlot(slot.feature, slot.length)))
    taken = {slot.feature for slot in slots}
    rest = tuple(number for name, number in numbers.items() if name not in taken)
    return ColumnPacking(tuple((kind, tuple(members)) for kind, members in groups.items()), rest)


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
