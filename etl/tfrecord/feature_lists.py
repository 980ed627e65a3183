"""List columns as feature lists of `tf.train.SequenceExample`: one value per step."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from conf.errors import ConfigError, did_you_mean


def parse_feature_lists(text: str) -> tuple[str, ...]:
    """Parses the option `featureLists`: a JSON list of column names.

    Raises:
        ConfigError: It is something else.
    """
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(
            "bad value of TFRecord option 'featureLists'",
            received=repr(text),
            allowed='a JSON list of column names, as in ["history"]',
        )
    return tuple(names)


def nest_schema(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    """Schema of what `nest_lists` returns.

    Raises:
        ConfigError: A name is no list column.
    """
    for name in names:
        if name not in schema.names or not pa.types.is_list(schema.field(name).type):
            lists = [field.name for field in schema if pa.types.is_list(field.type)]
            raise ConfigError(
                f"{name!r} cannot go into the feature lists: it is no list column",
                received=str(schema.field(name).type) if name in schema.names else "no such column",
                allowed=", ".join(lists) or "no column is a list",
                fix=did_you_mean(name, lists) if lists else None,
            )
    fields = [
        pa.field(field.name, pa.list_(field.type)) if field.name in names else field
        for field in schema
    ]
    return pa.schema(fields)


def nest_lists(batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """Makes each value of the named list columns a step of its own, a list of one."""
    columns = [
        _nest(column) if name in names else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=nest_schema(batch.schema, names))


def flatten_lists(batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """Undoes `nest_lists`: the named columns hold lists of values again."""
    columns = [
        _flatten(column) if name in names else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _nest(column: pa.ListArray) -> pa.ListArray:
    values, offsets = column.flatten(), _offsets(column)
    steps = pa.ListArray.from_arrays(pa.array(np.arange(len(values) + 1, dtype=np.int32)), values)
    return pa.ListArray.from_arrays(pa.array(offsets), steps, mask=column.is_null()).cast(
        pa.list_(column.type)
    )


def _flatten(column: pa.ListArray) -> pa.ListArray:
    steps = column.flatten()
    ends = _offsets(steps)
    return pa.ListArray.from_arrays(
        pa.array(ends[_offsets(column)]), steps.flatten(), mask=column.is_null()
    )


def _offsets(column: pa.ListArray) -> np.ndarray:
    """Offsets of the rows' lists in `column.flatten()`, int32 `[rows + 1]`; null is empty."""
    lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
