"""One vocabulary fitted by itself."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from etl.encoders.feature_plan import VocabularyPlan
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
