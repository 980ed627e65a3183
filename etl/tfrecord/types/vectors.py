"""Spark's ML vectors in their storage: to lists, to sparse parts, to bytes, and back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import InputDataError
from etl.tfrecord.types.arrays import ListRows, as_numbers, offsets_of, split_lists

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
SPARSE_PARTS = {
    "indices": pa.list_(pa.int32()),
    "values": pa.list_(pa.float64()),
    "size": pa.int32(),
}
DENSE_LISTS = pa.large_list(pa.float64())
_DOUBLE_BYTES = 8
_SPARSE, _DENSE = 0, 1


def is_vector(field: pa.Field) -> bool:
    """Whether a field holds vectors in Spark's storage."""
    marked = (field.metadata or {}).get(b"sluice.type") == b"vector"
    return marked and pa.types.is_struct(field.type)


@dataclass(frozen=True)
class _Vectors:
    """The parts of a column of vectors.

    `is_dense` and `sizes` are per row; `indices` and `values` are of all rows; `value_rows` splits
    the values into rows.
    """

    is_dense: np.ndarray
    sizes: np.ndarray
    indices: np.ndarray
    values: np.ndarray
    value_rows: ListRows

    @classmethod
    def split(cls, column: pa.Array) -> _Vectors:
        """Takes a column `[rows]` apart."""
        kinds, sizes, indices, values = column.flatten()
        flat_indices, _ = split_lists(indices)
        flat_values, rows = split_lists(values)
        is_null = np.asarray(column.is_null()) if column.null_count else None
        is_dense = as_numbers(kinds) == _DENSE
        if is_null is not None:
            is_dense &= ~is_null
        lengths = np.where(is_dense, rows.lengths, as_numbers(sizes)).astype(np.int64)
        value_rows = ListRows(rows.offsets, is_null)
        return cls(is_dense, lengths, as_numbers(flat_indices), as_numbers(flat_values), value_rows)

    def positions(self) -> np.ndarray:
        """Index of each value in its vector, int64 `[values]`."""
        lengths = self.value_rows.lengths
        positions = np.arange(len(self.values)) - np.repeat(self.value_rows.offsets[:-1], lengths)
        positions[~np.repeat(self.is_dense, lengths)] = self.indices
        return positions

    def list_all(self) -> tuple[np.ndarray, ListRows]:
        """The values of all vectors, zeros included, and how they are split into rows."""
        offsets = offsets_of(self.sizes)
        values = np.zeros(offsets[-1], np.float64)
        values[np.repeat(offsets[:-1], self.value_rows.lengths) + self.positions()] = self.values
        return values, ListRows(offsets, self.value_rows.is_null)


def split_dense(column: pa.Array) -> list[pa.Array]:
    """Vectors as lists of all their values."""
    values, rows = _Vectors.split(column).list_all()
    return [rows.build(pa.array(values), DENSE_LISTS)]


def split_bytes(column: pa.Array) -> list[pa.Array]:
    """Vectors as the bytes of all their values: float64, little-endian."""
    values, rows = _Vectors.split(column).list_all()
    is_valid = None if rows.is_null is None else pa.array(~rows.is_null).buffers()[1]
    offsets = pa.py_buffer(rows.offsets * _DOUBLE_BYTES)
    data = [is_valid, offsets, pa.py_buffer(values.astype("<f8"))]
    return [pa.Array.from_buffers(pa.large_binary(), len(column), data)]


def split_sparse(column: pa.Array) -> list[pa.Array]:
    """Vectors as `SPARSE_PARTS`; of a dense one, what is not zero."""
    vectors = _Vectors.split(column)
    lengths = vectors.value_rows.lengths
    keep = ~np.repeat(vectors.is_dense, lengths) | (vectors.values != 0)
    rows = vectors.value_rows.keep(keep)
    indices = pa.array(vectors.positions()[keep].astype(np.int32))
    return [
        rows.build(indices, SPARSE_PARTS["indices"]),
        rows.build(pa.array(vectors.values[keep]), SPARSE_PARTS["values"]),
        pa.array(vectors.sizes.astype(np.int32), mask=rows.is_null),
    ]


def join_dense(arrays: list[pa.Array], target: pa.StructType) -> pa.Array:
    """Vectors from lists of all their values."""
    return _join(_DENSE, None, None, arrays[0], target)


def join_sparse(arrays: list[pa.Array], target: pa.StructType) -> pa.Array:
    """Vectors from `SPARSE_PARTS`."""
    indices, values, size = arrays
    return _join(_SPARSE, size, indices, values, target)


def _join(
    kind: int,
    size: pa.Array | None,
    indices: pa.Array | None,
    values: pa.Array,
    target: pa.StructType,
) -> pa.Array:
    parts = [pa.array(np.full(len(values), kind, np.int8)), size, indices, values]
    given = [part for part in parts[1:] if part is not None]
    absent = np.logical_or.reduce([np.asarray(part.is_null()) for part in given])
    arrays = [
        pa.nulls(len(values), field.type) if part is None else part
        for field, part in zip(target, parts, strict=True)
    ]
    mask = pa.array(absent) if absent.any() else None
    return pa.StructArray.from_arrays(arrays, fields=list(target), mask=mask)


def join_bytes(arrays: list[pa.Array], target: pa.StructType) -> pa.Array:
    """Vectors from the bytes of their values.

    Raises:
        InputDataError: Bytes that are no whole float64s.
    """
    column = arrays[0].cast(pa.large_binary())
    lengths = pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
    if (lengths % _DOUBLE_BYTES).any():
        row = int(np.argmax(lengths % _DOUBLE_BYTES != 0))
        raise InputDataError(
            "a vector was not written as float64 in bytes",
            received=f"{lengths[row]} bytes in row {row} of the batch",
            allowed=f"a multiple of {_DOUBLE_BYTES}",
        )
    joined = b"".join(value for value in column.to_pylist() if value is not None)
    is_null = np.asarray(column.is_null()) if column.null_count else None
    rows = ListRows(offsets_of(lengths // _DOUBLE_BYTES), is_null)
    values = rows.build(pa.array(np.frombuffer(joined, "<f8")), target.field("values").type)
    return join_dense([values], target)
