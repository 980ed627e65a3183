"""One vocabulary fitted by itself."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from etl.encoders.vocabulary_fit import TokenLimits, VocabularyRequest, fit_vocabularies


def fit_vocabulary(
    frame: Any, columns: list[str], limits: TokenLimits | None = None, **request: Any
) -> pa.Table:
    """Fits the vocabulary of some columns."""
    return fit_vocabularies(
        frame, [VocabularyRequest(columns, limits or TokenLimits(), **request)]
    )[0]
