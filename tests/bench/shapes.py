"""The rows that are measured: each shape as an Arrow batch and as Spark expressions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from etl.tfrecord.types.features import WireFeature

ColumnKind = Literal["int64", "float32", "string"]

_WORD_BYTES = 16  # of one hash in hexadecimal, what the strings are made of


@dataclass(frozen=True)
class ColumnShape:
    """One column.

    Attributes:
        name: Column name, the feature's key.
        kind: Type of its values.
        length: Values per row; None for a scalar.
        cardinality: int64: values lie in [0, cardinality).
        words: string: words of 16 bytes per value.
    """

    name: str
    kind: ColumnKind = "int64"
    length: int | None = None
    cardinality: int = 200_000
    words: int = 1


@dataclass(frozen=True)
class RowShape:
    """A table of the benchmark.

    Attributes:
        name: What the command line calls it.
        title: What it stands for.
        columns: Its columns.
    """

    name: str
    title: str
    columns: tuple[ColumnShape, ...]

    @property
    def has_lists(self) -> bool:
        """Whether any column holds lists."""
        return any(column.length is not None for column in self.columns)

    @property
    def features(self) -> list[WireFeature]:
        """The features that its records hold."""
        return [
            WireFeature(c.name, "bytes" if c.kind == "string" else c.kind, c.length is not None)
            for c in self.columns
        ]


def _scalars(prefix: str, count: int, **options: Any) -> tuple[ColumnShape, ...]:
    return tuple(ColumnShape(f"{prefix}_{k}", **options) for k in range(count))


_LABEL = ColumnShape("label", cardinality=2)
_DENSE = _scalars("dense", 13, kind="float32")

SHAPES: dict[str, RowShape] = {
    shape.name: shape
    for shape in (
        RowShape("ctr", "CTR: 26 int64, 13 float32, label", (_LABEL, *_DENSE, *_scalars("id", 26))),
        RowShape(
            "history",
            "history: 4 lists of 50 int64, 3 int64",
            (*_scalars("id", 3), *_scalars("history", 4, length=50, cardinality=50_000)),
        ),
        RowShape(
            "history2",
            "history: 2 lists of 50 int64, 8 int64",
            (*_scalars("id", 8), *_scalars("history", 2, length=50, cardinality=50_000)),
        ),
        RowShape(
            "strings",
            "strings: 10 of 16 to 48 bytes, a list of 10, 4 int64",
            (
                *_scalars("id", 4),
                *_scalars("token", 6, kind="string"),
                *_scalars("text", 4, kind="string", words=3),
                ColumnShape("tags", "string", length=10),
            ),
        ),
        RowShape(
            "vectors",
            "vectors: 512 float32, 1 int64, label",
            (_LABEL, ColumnShape("id"), ColumnShape("embedding", "float32", length=512)),
        ),
        RowShape(
            "narrow",
            "narrow, for scale: 4 int64, 3 float32, label",
            (_LABEL, *_scalars("dense", 3, kind="float32"), *_scalars("id", 4)),
        ),
    )
}


def build_batch(shape: RowShape, rows: int, seed: int = 0) -> pa.RecordBatch:
    """Builds rows of a shape.

    Args:
        shape: Which columns.
        rows: How many rows, 0 or more.
        seed: Of the random values.

    Returns:
        One column per column of the shape, `[rows]`; lists are `list`, strings `string`.
    """
    rng = np.random.default_rng(seed)
    arrays = []
    for column in shape.columns:
        values = _random_values(column, rows * (column.length or 1), rng)
        if column.length is not None:
            offsets = np.arange(rows + 1, dtype=np.int32) * column.length
            values = pa.ListArray.from_arrays(pa.array(offsets), values)
        arrays.append(values)
    return pa.RecordBatch.from_arrays(arrays, [column.name for column in shape.columns])


def _random_values(column: ColumnShape, count: int, rng: np.random.Generator) -> pa.Array:
    if column.kind == "int64":
        return pa.array(rng.integers(0, column.cardinality, count))
    if column.kind == "float32":
        return pa.array(rng.random(count, dtype=np.float32))
    size = column.words * _WORD_BYTES
    text = np.frombuffer(rng.bytes(count * size // 2).hex().encode(), np.uint8)
    offsets = np.arange(count + 1, dtype=np.int32) * size
    return pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(text))


def spark_expressions(shape: RowShape) -> list[str]:
    """SQL expressions over a column `id` that give the shape's columns.

    Values are hashes of the row's number: the same rows whatever the partitioning, and nothing
    to read or collect.
    """
    return [
        f"{_spark_value(column, number)} AS {column.name}"
        for number, column in enumerate(shape.columns)
    ]


def _spark_value(column: ColumnShape, number: int) -> str:
    if column.length is None:
        return _spark_scalar(column, f"xxhash64(id, {number})")
    element = _spark_scalar(column, f"xxhash64(id, {number}, i)")
    return f"transform(sequence(1, {column.length}), i -> {element})"


def _spark_scalar(column: ColumnShape, hashed: str) -> str:
    if column.kind == "int64":
        return f"pmod({hashed}, {column.cardinality}L)"
    if column.kind == "float32":
        return f"CAST(pmod({hashed}, 1000003L) / 1000003D AS FLOAT)"
    words = [f"lpad(lower(hex({hashed} + {k}L)), {_WORD_BYTES}, '0')" for k in range(column.words)]
    return f"concat({', '.join(words)})"
