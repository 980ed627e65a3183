"""One operation on columns of rows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from conf.encoders.declaration import Operation
from etl.encoders.arrow_columns import Fitted, RawValues, build_lists, encode, flatten_lists


def encode_columns(operation: Operation, *columns: pa.Array, **fitted: Any) -> list[Any]:
    """Encodes columns `[rows]`, declared with the types that they have."""
    inputs = []
    for column in columns:
        is_list = pt.is_list(column.type) and operation.kind != "length"
        values, rows = flatten_lists(column) if is_list else (column, None)
        inputs.append(RawValues(values, values.type, rows))
    values, rows = encode(operation, inputs, Fitted(**fitted))
    return (values if rows is None else build_lists(rows, values)).to_pylist()
