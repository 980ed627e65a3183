"""Arrow columns taken apart and put together: lists, structs, maps and Spark's ML vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from conf.errors import InputDataError
from etl.tfrecord.types.features import TypeOptions
from etl.tfrecord.types.refusals import UnfitError


def as_numbers(values: pa.Array) -> np.ndarray:
    """Numbers `[values]`, with zeros where they are null."""
    if values.null_count:
        values = values.fill_null(False if pa.types.is_boolean(values.type) else 0)
    return values.to_numpy(zero_copy_only=False)


def null_mask(values: pa.Array) -> np.ndarray | None:
    """Which values are null, bool `[values]`, or None where none is."""
    return values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None


@dataclass(frozen=True)
class ListRows:
    """Where rows' values lie: `offsets` int64 `[rows + 1]`, from 0; null rows hold no value.

    `is_null`: bool `[rows]`, or None where none is.
    """

    offsets: np.ndarray
    is_null: np.ndarray | None

    @property
    def lengths(self) -> np.ndarray:
        """Values per row, int64 `[rows]`."""
        return np.diff(self.offsets)

    @property
    def mask(self) -> pa.Array | None:
        return None if self.is_null is None else pa.array(self.is_null)

    def row_of(self, index: int) -> int:
        return int(np.searchsorted(self.offsets, index, side="right")) - 1

    def keep(self, mask: np.ndarray) -> ListRows:
        """The rows without the values where the mask, bool `[values]`, is false."""
        kept = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
        return ListRows(kept[self.offsets], self.is_null)

    def build(self, values: pa.Array, target: pa.DataType) -> pa.Array:
        if pa.types.is_fixed_size_list(target):
            return self.build(values, pa.list_(target.value_field)).cast(target)
        large = pa.types.is_large_list(target)
        builder = pa.LargeListArray if large else pa.ListArray
        offsets = pa.array(self.offsets, pa.int64() if large else pa.int32())
        return builder.from_arrays(offsets, values, type=target, mask=self.mask)


def split_lists(column: pa.Array) -> tuple[pa.Array, ListRows]:
    """Takes lists `[rows]` of any layout apart, sliced or not.

    Returns the rows' values alone, nothing that lies below a null or outside a slice; and the rows.
    """
    is_null = null_mask(column)
    if pa.types.is_fixed_size_list(column.type):
        lengths = np.full(len(column), column.type.list_size, np.int64)
    else:
        bounds = np.asarray(column.offsets).astype(np.int64)
        if is_null is None:
            return column.flatten(), ListRows(bounds - bounds[0], None)
        lengths = bounds[1:] - bounds[:-1]
    if is_null is not None:
        lengths[is_null] = 0
    return column.flatten(), ListRows(offsets_of(lengths), is_null)


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Offsets of rows by their lengths, int64 `[rows + 1]`."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def list_lengths(column: pa.Array) -> np.ndarray:
    """Number of values of each list, int64 `[rows]`; a null list has none."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)
    window = offsets[column.offset : column.offset + len(column) + 1]
    return np.diff(window).astype(np.int64)


def join_steps(column: pa.Array) -> pa.Array:
    """Feature lists, lists of lists `[rows]`, as one list per row: its steps one after another."""
    steps = column.values
    outer = np.frombuffer(column.buffers()[1], np.int32)
    outer = outer[column.offset : column.offset + len(column) + 1]
    inner = np.frombuffer(steps.buffers()[1], np.int32)[steps.offset :]
    return pa.ListArray.from_arrays(pa.array(inner[outer], pa.int32()), steps.values)


SEPARATOR = "."
"""Between the name of a column and that of its part."""
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
_SPARSE, _DENSE = 0, 1
_INDICES, _VALUES = pa.list_(pa.int32()), pa.list_(pa.float64())
_ALL_VALUES = pa.large_list(pa.float64())

Split = Callable[[pa.Array], list[pa.Array]]
Join = Callable[[list[pa.Array], pa.DataType], pa.Array]


@dataclass(frozen=True)
class Parts:
    """How a column falls into parts: `fields`, each named by its path.

    `is_struct`: the parts are fields of their own, each of which may not fit.
    """

    fields: tuple[pa.Field, ...]
    split: Split
    join: Join
    is_struct: bool = False


def find_parts(column: pa.Field, options: TypeOptions) -> Parts | None:
    """The parts of a column that is named by its path; None where it is one feature."""
    path, kind = column.name, column.type
    if is_vector(column):
        if options.vectors == "dense":
            return Parts((pa.field(path, _ALL_VALUES),), split_dense, join_dense)
        sparse = {"indices": _INDICES, "values": _VALUES, "size": pa.int32()}
        return Parts(_below(path, sparse), split_sparse, join_sparse)
    if pa.types.is_struct(kind):
        fields = tuple(f.with_name(f"{path}{SEPARATOR}{f.name}") for f in kind)
        return Parts(fields, pa.StructArray.flatten, join_struct, is_struct=True)
    if not pa.types.is_map(kind):
        return None
    if options.maps == "error":
        raise UnfitError("option maps=entries")
    lists = {"keys": pa.list_(kind.key_type), "values": pa.list_(kind.item_type)}
    return Parts(_below(path, lists), split_maps, join_maps)


def _below(path: str, types: Mapping[str, pa.DataType]) -> tuple[pa.Field, ...]:
    return tuple(pa.field(f"{path}{SEPARATOR}{name}", kind) for name, kind in types.items())


def is_vector(field: pa.Field) -> bool:
    """Whether a field holds vectors in Spark's storage."""
    marked = (field.metadata or {}).get(b"sluice.type") == b"vector"
    return marked and pa.types.is_struct(field.type)


def check_nulls(field: pa.Field, array: pa.Array, absent: np.ndarray | None = None) -> None:
    """Refuses nulls of a field that is not nullable, but for rows where all around it is absent."""
    if not field.nullable and array.null_count:
        missing = np.asarray(array.is_null()) & (True if absent is None else ~absent)
        if missing.any():
            raise InputDataError(
                f"{field.name!r} is missing in {missing.sum()} record(s), but is not nullable",
                fix="make it nullable in the schema",
            )


def join_struct(arrays: list[pa.Array], target: pa.StructType) -> pa.Array:
    """A struct from its fields; null where all of them are."""
    absent = np.logical_and.reduce([np.asarray(array.is_null()) for array in arrays])
    for child, array in zip(target, arrays, strict=True):
        check_nulls(child, array, absent)
    return _build_struct(arrays, absent, target)


def _build_struct(arrays: list[pa.Array], absent: np.ndarray, target: pa.StructType) -> pa.Array:
    mask = pa.array(absent) if absent.any() else None
    return pa.StructArray.from_arrays(arrays, fields=list(target), mask=mask)


def split_maps(column: pa.Array) -> list[pa.Array]:
    visible, rows = split_lists(column.cast(pa.list_(column.values.type)))
    return [rows.build(part, pa.list_(part.type)) for part in visible.flatten()]


def join_maps(arrays: list[pa.Array], target: pa.MapType) -> pa.Array:
    (keys, rows), (values, value_rows) = map(split_lists, arrays)
    if not np.array_equal(rows.offsets, value_rows.offsets):
        row = int(np.argmax(rows.lengths != value_rows.lengths))
        raise InputDataError(
            "a map has other numbers of keys than of values",
            received=f"{rows.lengths[row]} keys and {value_rows.lengths[row]} values in row "
            f"{row} of the batch",
            allowed="a value for each key",
        )
    offsets = pa.array(rows.offsets, pa.int32())
    return pa.MapArray.from_arrays(offsets, keys, values, type=target, mask=rows.mask)


class _Stored(NamedTuple):
    """What vectors hold: `positions` and `values` of all rows, which `rows` divides.

    `is_dense` and `sizes`, their lengths, are per row.
    """

    is_dense: np.ndarray
    sizes: np.ndarray
    positions: np.ndarray
    values: np.ndarray
    rows: ListRows


def _take_apart(column: pa.Array) -> _Stored:
    kinds, sizes, indices, values = column.flatten()
    flat, rows = split_lists(values)
    is_dense = as_numbers(kinds) == _DENSE
    positions = np.arange(len(flat)) - np.repeat(rows.offsets[:-1], rows.lengths)
    positions[~np.repeat(is_dense, rows.lengths)] = as_numbers(split_lists(indices)[0])
    lengths = np.where(is_dense, rows.lengths, as_numbers(sizes)).astype(np.int64)
    rows = ListRows(rows.offsets, null_mask(column))
    return _Stored(is_dense, lengths, positions, as_numbers(flat), rows)


def split_dense(column: pa.Array) -> list[pa.Array]:
    """Vectors as lists of all their values, zeros included."""
    vectors = _take_apart(column)
    offsets = offsets_of(vectors.sizes)
    values = np.zeros(offsets[-1], np.float64)
    starts = np.repeat(offsets[:-1], vectors.rows.lengths)
    values[starts + vectors.positions] = vectors.values
    return [ListRows(offsets, vectors.rows.is_null).build(pa.array(values), _ALL_VALUES)]


def split_sparse(column: pa.Array) -> list[pa.Array]:
    """Vectors as indices, values and size; of a dense one, what is not zero."""
    vectors = _take_apart(column)
    keep = ~np.repeat(vectors.is_dense, vectors.rows.lengths) | (vectors.values != 0)
    rows = vectors.rows.keep(keep)
    return [
        rows.build(pa.array(vectors.positions[keep].astype(np.int32)), _INDICES),
        rows.build(pa.array(vectors.values[keep]), _VALUES),
        pa.array(vectors.sizes.astype(np.int32), mask=rows.is_null),
    ]


def join_dense(arrays: list[pa.Array], target: pa.StructType) -> pa.Array:
    rows = len(arrays[0])
    size, indices = (pa.nulls(rows, target.field(name).type) for name in ("size", "indices"))
    values = _relist(arrays[0], target.field("values").type)
    kinds = pa.array(np.full(rows, _DENSE, np.int8))
    return _build_struct([kinds, size, indices, values], np.asarray(values.is_null()), target)


def join_sparse(arrays: list[pa.Array], target: pa.StructType) -> pa.Array:
    absent = np.logical_or.reduce([np.asarray(part.is_null()) for part in arrays])
    indices, values = (
        _relist(part, target.field(name).type)
        for part, name in zip(arrays, ("indices", "values"), strict=False)
    )
    kinds = pa.array(np.full(len(values), _SPARSE, np.int8))
    return _build_struct([kinds, arrays[2], indices, values], absent, target)


def _relist(column: pa.Array, target: pa.DataType) -> pa.Array:
    values, rows = split_lists(column)
    return rows.build(values, target)
