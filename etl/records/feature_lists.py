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
    fields = [
        pa.field(field.name, pa.list_(field.type)) if field.name in names else field
        for field in schema
    ]
    return pa.schema(fields)


def nest_lists(batch: pa.RecordBatch, names: Collection[str]) -> pa.RecordBatch:
    """Makes each value of the named list columns a step of its own, a list of one."""
    columns = [
        _nest(column) if name in names else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=nest_schema(batch.schema, names))


def flatten_lists(batch: pa.RecordBatch, names: Collection[str]) -> pa.RecordBatch:
    """Undoes `nest_lists`: the named columns hold lists of values again."""
    columns = [
        _flatten(column) if name in names else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _nest(column: pa.ListArray) -> pa.ListArray:
    values, rows = split_lists(column)
    places = pa.array(np.arange(len(values) + 1, dtype=np.int32))
    steps = pa.ListArray.from_arrays(places, values, type=column.type)
    return rows.build(steps, pa.list_(column.type))


def _flatten(column: pa.ListArray) -> pa.ListArray:
    steps, rows = split_lists(column)
    values, ends = split_lists(steps)
    return ListRows(ends.offsets[rows.offsets], rows.is_null).build(values, steps.type)
