"""One vocabulary fitted, and one operation executed, by itself."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from conf.encoders.declaration import Operation
from etl.encoders.arrow_columns import build_lists, flatten_lists
from etl.encoders.feature_plan import VocabularyPlan
from etl.encoders.operations import Fitted, RawValues, encode
from etl.encoders.vocabulary_fit import VocabularyFit, count_tokens, number_tokens


def fit_vocabularies(
    frame: Any, fits: list[VocabularyFit], time_ms: str | None = None
) -> list[pa.Table]:
    """Fits vocabularies in one job."""
    return number_tokens(count_tokens(frame, fits, time_ms).toArrow(), fits)


def plan_vocabulary(frame: Any, columns: list[str], **limits: Any) -> VocabularyPlan:
    """Plans a vocabulary of some columns."""
    is_text = "string" in frame.schema[columns[0]].dataType.simpleString()
    return VocabularyPlan("v", tuple(columns), "string" if is_text else "int64", **limits)


def fit_vocabulary(
    frame: Any, columns: list[str], tokens: pa.Array | None = None, **limits: Any
) -> pa.Table:
    """Fits the vocabulary of some columns."""
    plan = plan_vocabulary(frame, columns, **limits)
    return fit_vocabularies(frame, [VocabularyFit(plan, tokens=tokens)])[0]


def encode_columns(operation: Operation, *columns: pa.Array, **fitted: Any) -> list[Any]:
    """Encodes columns `[rows]`, declared with the types that they have."""
    inputs = []
    for column in columns:
        is_list = pt.is_list(column.type) and operation.kind != "length"
        values, rows = flatten_lists(column) if is_list else (column, None)
        inputs.append(RawValues(values, values.type, rows))
    values, rows = encode(operation, inputs, Fitted(**fitted))
    return (values if rows is None else build_lists(rows, values)).to_pylist()
