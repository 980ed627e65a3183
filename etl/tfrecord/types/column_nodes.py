"""How one column becomes features: leaves, structs, maps and ML vectors, as a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import InputDataError
from etl.tfrecord.types.conversions import (
    ListRows,
    ValueConversion,
    as_numbers,
    fill_nulls,
    split_lists,
)


@dataclass(frozen=True)
class FeatureColumn:
    """A feature to be.

    Attributes:
        name: Its name, before collisions are resolved.
        type: Type of the column that the encoder gets.
    """

    name: str
    type: pa.DataType


@dataclass(frozen=True)
class ColumnLeaf:
    """A column that gives one feature.

    Attributes:
        name: Column name, with the names of the structs around it.
        rule: Conversion of its values.
        nulls: Policy of null rows, see `ColumnPolicy`.
        default: What stands for a null row.
    """

    name: str
    rule: ValueConversion
    nulls: Literal["absent", "default", "error"] = "absent"
    default: Any = None

    @property
    def outputs(self) -> tuple[FeatureColumn, ...]:
        """What it gives."""
        return (FeatureColumn(self.name, self.rule.target),)

    @property
    def is_identity(self) -> bool:
        """Whether it gives the column itself."""
        return self.rule.is_identity and self.nulls == "absent"

    def apply(self, column: pa.Array) -> list[pa.Array]:
        """Turns the column of a batch into features.

        Raises:
            InputDataError: A value that the policies refuse; names the column and the row.
        """
        converted, refusal = self.rule.convert(column)
        if refusal is not None:
            raise InputDataError(
                f"column {self.name!r} has {refusal.what}",
                received=f"{refusal.received} in row {refusal.index} of the batch",
                allowed=refusal.allowed,
                fix=refusal.fix,
            )
        if self.nulls != "absent" and converted.null_count:
            if self.nulls == "error":
                refuse_null(self.name, converted, "policy nulls=error allows none")
            converted = fill_nulls(converted, self.default)
        return [converted]


def refuse_null(name: str, column: pa.Array, why: str) -> None:
    """Raises the error of a column's first null."""
    row = int(np.argmax(np.asarray(column.is_null())))
    raise InputDataError(
        f"column {name!r} has a null: {why}",
        received=f"null in row {row} of the batch",
        fix="policy nulls=default with a value of your choice, or filter the rows",
    )


@dataclass(frozen=True)
class ColumnBranch:
    """A struct, map or ML vector that gives the features of its parts; picklable.

    Attributes:
        children: One per part.
        split: Takes a column apart: an array per child.
        arguments: What `split` takes beside the column.
    """

    children: tuple[ColumnNode, ...]
    split: Callable[..., Sequence[pa.Array]]
    arguments: tuple[Any, ...] = ()
    is_identity: ClassVar[bool] = False

    @property
    def outputs(self) -> tuple[FeatureColumn, ...]:
        """What it gives."""
        return join_feature_columns(self.children)

    def apply(self, column: pa.Array) -> list[pa.Array]:
        """Turns the column of a batch into features.

        Raises:
            InputDataError: A value that the policies refuse; names the column and the row.
        """
        parts = zip(self.children, self.split(column, *self.arguments), strict=True)
        return [feature for child, part in parts for feature in child.apply(part)]


ColumnNode = ColumnLeaf | ColumnBranch
"""How one column, or one field of a struct, becomes features."""


def join_feature_columns(nodes: Iterable[ColumnNode]) -> tuple[FeatureColumn, ...]:
    """What several nodes give, one after the other."""
    return tuple(output for node in nodes for output in node.outputs)


def split_struct(column: pa.Array) -> list[pa.Array]:
    """A struct's fields, null where the struct is."""
    fields: list[pa.Array] = column.flatten()
    return fields


def _split_maps(column: pa.Array) -> tuple[pa.Array, pa.Array, ListRows]:
    """Keys and values of all rows, and the rows."""
    entries = column.values
    lists = pa.Array.from_buffers(
        pa.list_(entries.type),
        len(column),
        column.buffers()[:2],
        column.null_count,
        column.offset,
        [entries],
    )
    visible, rows = split_lists(lists)
    return visible.field(0), visible.field(1), rows


def split_map_entries(
    column: pa.Array, key_lists: pa.DataType, value_lists: pa.DataType, drop_null_values: bool
) -> list[pa.Array]:
    """A map as the list of its keys and the list of its values, in the same order.

    Args:
        column: Maps `[rows]`.
        key_lists: Type of the lists of keys.
        value_lists: Type of the lists of values.
        drop_null_values: Whether entries without a value are left out, keys included.
    """
    keys, values, rows = _split_maps(column)
    if drop_null_values and values.null_count:
        mask = np.asarray(values.is_valid())
        keys, values, rows = keys.filter(mask), values.drop_null(), rows.keep(mask)
    return [rows.build(keys, key_lists), rows.build(values, value_lists)]


def split_map_keys(
    column: pa.Array, chosen: Sequence[Any], key_type: pa.DataType
) -> list[pa.Array]:
    """A map's values under some keys; null where a row lacks the key.

    Args:
        column: Maps `[rows]`.
        chosen: The keys, of the map's key type.
        key_type: That type, without a dictionary.
    """
    keys, values, rows = _split_maps(column)
    if pa.types.is_dictionary(keys.type):
        keys = keys.dictionary_decode()
    row_of_entry = np.repeat(np.arange(len(column)), rows.lengths)
    arrays: list[pa.Array] = []
    for key in chosen:
        positions = np.flatnonzero(np.asarray(pc.equal(keys, pa.scalar(key, key_type))))
        entries = np.full(len(column), -1, np.int64)
        entries[row_of_entry[positions]] = positions  # of a key that occurs twice, the last
        arrays.append(values.take(pa.array(entries, mask=entries < 0)))
    return arrays


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
DOUBLE_BYTES = 8
DENSE_LISTS = pa.large_list(pa.float64())
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
    is_null: np.ndarray | None
    sizes: np.ndarray
    indices: np.ndarray
    values: np.ndarray
    value_rows: ListRows

    @classmethod
    def split(cls, column: pa.Array) -> _Vectors:
        """Takes a column `[rows]` apart."""
        kinds, sizes, indices, values = column.flatten()
        flat_indices, _ = split_lists(indices)
        flat_values, value_rows = split_lists(values)
        is_null = np.asarray(column.is_null()) if column.null_count else None
        is_dense = as_numbers(kinds) == _DENSE
        if is_null is not None:
            is_dense &= ~is_null
        lengths = np.where(is_dense, value_rows.lengths, as_numbers(sizes)).astype(np.int64)
        return cls(is_dense, is_null, lengths, as_numbers(flat_indices), as_numbers(flat_values),
                   value_rows)  # fmt: skip

    def positions(self) -> np.ndarray:
        """Index of each value in its vector, int64 `[values]`."""
        lengths = self.value_rows.lengths
        positions = np.arange(len(self.values)) - np.repeat(self.value_rows.offsets[:-1], lengths)
        positions[~np.repeat(self.is_dense, lengths)] = self.indices
        return positions


def split_dense_vectors(column: pa.Array) -> list[pa.Array]:
    """Vectors as lists of all their values."""
    values, rows = _list_all_values(column)
    return [rows.build(pa.array(values), DENSE_LISTS)]


def split_vector_bytes(column: pa.Array) -> list[pa.Array]:
    """Vectors as the bytes of all their values: float64, little-endian."""
    values, rows = _list_all_values(column)
    is_valid = None
    if rows.is_null is not None:
        is_valid = pa.array(~rows.is_null).buffers()[1]
    data = [is_valid, pa.py_buffer(rows.offsets * DOUBLE_BYTES), pa.py_buffer(values.astype("<f8"))]
    return [pa.Array.from_buffers(pa.large_binary(), len(column), data)]


def _list_all_values(column: pa.Array) -> tuple[np.ndarray, ListRows]:
    """The values of all vectors, zeros included, and how they are split into rows."""
    vectors = _Vectors.split(column)
    offsets = np.zeros(len(column) + 1, np.int64)
    np.cumsum(vectors.sizes, out=offsets[1:])
    values = np.zeros(offsets[-1], np.float64)
    places = np.repeat(offsets[:-1], vectors.value_rows.lengths) + vectors.positions()
    values[places] = vectors.values
    return values, ListRows(offsets, vectors.is_null)


def split_sparse_vectors(column: pa.Array) -> list[pa.Array]:
    """Vectors as indices, values and size; of a dense one, what is not zero."""
    vectors = _Vectors.split(column)
    lengths = vectors.value_rows.lengths
    keep = ~np.repeat(vectors.is_dense, lengths) | (vectors.values != 0)
    rows = ListRows(vectors.value_rows.offsets, vectors.is_null).keep(keep)
    indices = pa.array(vectors.positions()[keep].astype(np.int32))
    return [
        rows.build(indices, pa.list_(pa.int32())),
        rows.build(pa.array(vectors.values[keep]), pa.list_(pa.float64())),
        pa.array(vectors.sizes.astype(np.int32), mask=vectors.is_null),
    ]
