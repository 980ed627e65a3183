"""Spark's ML vectors to dense lists, or to indices, values and size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from etl.tfrecord.lowering.lists import Rows, split_lists
from etl.tfrecord.lowering.nodes import Leaf, Output
from etl.tfrecord.lowering.values import numbers

# How a column of vectors is marked in an Arrow schema.
VECTOR_METADATA = {b"sluice.type": b"vector"}
# Spark's storage of a vector, as Spark 4 hands it to Python's Arrow writers and to mapInArrow, and
# wants it back, without a mark: type 0 is sparse, 1 dense (without size and indices).
VECTOR_STORAGE = pa.struct(
    [
        pa.field("type", pa.int8(), nullable=False),
        pa.field("size", pa.int32()),
        pa.field("indices", pa.list_(pa.field("element", pa.int32(), nullable=False))),
        pa.field("values", pa.list_(pa.field("element", pa.float64(), nullable=False))),
    ]
)
DENSE_LISTS = pa.large_list(pa.float64())
_SPARSE, _DENSE = 0, 1


def is_vector(field: pa.Field) -> bool:
    """Whether a field holds vectors in Spark's storage."""
    marked = (field.metadata or {}).get(b"sluice.type") == b"vector"
    return marked and pa.types.is_struct(field.type)


@dataclass(frozen=True)
class _Vectors:
    """The parts of a column of vectors.

    `is_dense` and `sizes` are per row; `indices` and `values` are of all rows, split by
    `index_rows` and `value_rows`.
    """

    is_dense: np.ndarray
    is_null: np.ndarray | None
    sizes: np.ndarray
    indices: np.ndarray
    values: np.ndarray
    value_rows: Rows

    @classmethod
    def split(cls, column: pa.Array) -> _Vectors:
        """Takes a column `[rows]` apart."""
        kinds, sizes, indices, values = column.flatten()
        flat_indices, _ = split_lists(indices)
        flat_values, value_rows = split_lists(values)
        is_null = np.asarray(column.is_null()) if column.null_count else None
        is_dense = numbers(kinds) == _DENSE
        if is_null is not None:
            is_dense &= ~is_null
        lengths = np.where(is_dense, value_rows.lengths, numbers(sizes)).astype(np.int64)
        return cls(is_dense, is_null, lengths, numbers(flat_indices), numbers(flat_values),
                   value_rows)  # fmt: skip

    def places(self) -> np.ndarray:
        """Index of each value in its vector, int64 `[values]`."""
        lengths = self.value_rows.lengths
        places = np.arange(len(self.values)) - np.repeat(self.value_rows.offsets[:-1], lengths)
        places[~np.repeat(self.is_dense, lengths)] = self.indices
        return places


@dataclass(frozen=True)
class DenseVectors:
    """Vectors as lists of all their values.

    Attributes:
        leaf: Lowers the lists.
    """

    leaf: Leaf
    is_identity: bool = False

    @property
    def outputs(self) -> tuple[Output, ...]:
        """See `Node`."""
        return self.leaf.outputs

    def apply(self, column: pa.Array) -> list[pa.Array]:
        """See `Node`."""
        vectors = _Vectors.split(column)
        offsets = np.zeros(len(column) + 1, np.int64)
        np.cumsum(vectors.sizes, out=offsets[1:])
        values = np.zeros(offsets[-1], np.float64)
        values[np.repeat(offsets[:-1], vectors.value_rows.lengths) + vectors.places()] = (
            vectors.values
        )
        lists = Rows(offsets, vectors.is_null).build(pa.array(values), DENSE_LISTS)
        return self.leaf.apply(lists)


@dataclass(frozen=True)
class SparseVectors:
    """Vectors as indices, values and size; of a dense one, what is not zero.

    Attributes:
        indices: Lowers the lists of indices.
        values: Lowers the lists of values.
        size: Lowers the sizes.
    """

    indices: Leaf
    values: Leaf
    size: Leaf
    is_identity: bool = False

    @property
    def outputs(self) -> tuple[Output, ...]:
        """See `Node`."""
        return (*self.indices.outputs, *self.values.outputs, *self.size.outputs)

    def apply(self, column: pa.Array) -> list[pa.Array]:
        """See `Node`."""
        vectors = _Vectors.split(column)
        lengths = vectors.value_rows.lengths
        keep = ~np.repeat(vectors.is_dense, lengths) | (vectors.values != 0)
        rows = Rows(vectors.value_rows.offsets, vectors.is_null).keep(keep)
        indices = pa.array(vectors.places()[keep].astype(np.int32))
        sizes = pa.array(vectors.sizes.astype(np.int32), mask=vectors.is_null)
        return [
            *self.indices.apply(rows.build(indices, pa.list_(pa.int32()))),
            *self.values.apply(rows.build(pa.array(vectors.values[keep]), pa.list_(pa.float64()))),
            *self.size.apply(sizes),
        ]
