"""Feature lists of a SequenceExample: list columns whose values are steps."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pyarrow as pa

from etl.tfrecord.types.parts import ListRows, split_lists
from etl.tfrecord.types.refusals import refuse_unknown


def nest_schema(schema: pa.Schema, names: Collection[str]) -> pa.Schema:
    lists = [field.name for field in schema if pa.types.is_list(field.type)]
    unfit = [name for name in names if name not in lists]
    refuse_unknown("no list column, which alone can go into the feature lists", unfit, lists)
    for name in names:
        place = schema.get_field_index(name)
        schema = schema.set(place, pa.field(name, pa.list_(schema.field(place).type)))
    return schema


def nest_lists(batch: pa.RecordBatch, names: Collection[str]) -> pa.RecordBatch:
    """Makes each value of the named list columns a step of its own, a list of one."""
    for name in names:
        values, rows = split_lists(batch.column(name))
        ends = pa.array(np.arange(len(values) + 1, dtype=np.int32))
        steps = pa.ListArray.from_arrays(ends, values, type=batch.column(name).type)
        batch = _replace(batch, name, rows.build(steps, pa.list_(steps.type)))
    return batch


def flatten_lists(batch: pa.RecordBatch, names: Collection[str]) -> pa.RecordBatch:
    """Undoes `nest_lists`: the named columns hold lists of values again."""
    for name in names:
        steps, rows = split_lists(batch.column(name))
        values, ends = split_lists(steps)
        joined = ListRows(ends.offsets[rows.offsets], rows.is_null)
        batch = _replace(batch, name, joined.build(values, steps.type))
    return batch


def _replace(batch: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    return batch.set_column(batch.schema.get_field_index(name), name, column)
