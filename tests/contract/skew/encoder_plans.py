"""Features and vocabularies of plans that both executions of encoders are compared by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from conf.encoders import ColumnEncoding, RawColumn, VocabularySpec
from conf.encoders.declaration import Operation
from conf.encoders.hashing import Cross
from conf.schema import FIRST_TOKEN_ID, FeatureSpec, Role
from etl.encoders.vocabulary import write_vocabulary


def plan_feature(
    name: str,
    operation: Operation,
    columns: tuple[RawColumn, ...],
    max_len: int,
    role: Role = "context",
) -> tuple[FeatureSpec, ColumnEncoding]:
    """A feature that an operation makes of raw columns, as a build would describe it."""
    output = operation.output
    crosses = isinstance(operation, Cross)
    is_list = any(column.is_list for column in (columns if crosses else columns[:1]))
    shape = ((None,) if is_list else ()) if output.shape is None else output.shape
    encoding = f"{operation.kind}:{name}"
    spec = FeatureSpec(
        name,
        output.dtype,
        role,
        shape,
        max_len=max_len if shape == (None,) else None,
        encoding=encoding,
        vocabulary_size=output.vocabulary_size,
        pad_value=output.pad_value,
    )
    first = columns[0]
    return spec, ColumnEncoding(name, first.name, first.dtype, encoding, operation, columns)


def write_tokens(
    tokens: Sequence[Any], path: Path, oov_buckets: int | None = None
) -> VocabularySpec:
    """Writes a vocabulary of tokens in the order of their ids."""
    first = FIRST_TOKEN_ID + (oov_buckets or 0)
    ids = range(first, first + len(tokens))
    table = pa.table({"token": tokens, "id": ids, "count": [9] * len(tokens)})
    return write_vocabulary(table, path, **({"oov_buckets": oov_buckets} if oov_buckets else {}))
