"""Columns that are several features: structs, maps and Spark's ML vectors, to parts and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import InputDataError
from etl.tfrecord.types.arrays import ListRows, as_numbers, null_mask, offsets_of, split_lists
from etl.tfrecord.types.features import TypeOptions
from etl.tfrecord.types.refusals import UnfitError, refuse_unknown

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
_DOUBLE_BYTES = 8

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
        if options.vectors == "bytes":
            return Parts((pa.field(path, pa.large_binary()),), split_bytes, join_bytes)
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


def _list_all(column: pa.Array) -> tuple[np.ndarray, ListRows]:
    """The values of all vectors, zeros included, and how they are split into rows."""
    vectors = _take_apart(column)
    offsets = offsets_of(vectors.sizes)
    values = np.zeros(offsets[-1], np.float64)
    starts = np.repeat(offsets[:-1], vectors.rows.lengths)
    values[starts + vectors.positions] = vectors.values
    return values, ListRows(offsets, vectors.rows.is_null)


def split_dense(column: pa.Array) -> list[pa.Array]:
    values, rows = _list_all(column)
    return [rows.build(pa.array(values), _ALL_VALUES)]


def split_bytes(column: pa.Array) -> list[pa.Array]:
    """Vectors as the bytes of all their values: float64, little-endian."""
    values, rows = _list_all(column)
    is_valid = None if rows.is_null is None else pa.array(~rows.is_null).buffers()[1]
    offsets = pa.py_buffer(rows.offsets * _DOUBLE_BYTES)
    data = [is_valid, offsets, pa.py_buffer(values.astype("<f8"))]
    return [pa.Array.from_buffers(pa.large_binary(), len(column), data)]


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


def join_bytes(arrays: list[pa.Array], target: pa.StructType) -> pa.Array:
    lengths = as_numbers(pc.binary_length(arrays[0]))
    if (lengths % _DOUBLE_BYTES).any():
        row = int(np.argmax(lengths % _DOUBLE_BYTES != 0))
        raise InputDataError(
            "a vector was not written as float64 in bytes",
            received=f"{lengths[row]} bytes in row {row} of the batch",
            allowed=f"a multiple of {_DOUBLE_BYTES}",
        )
    joined = b"".join(value for value in arrays[0].to_pylist() if value is not None)
    rows = ListRows(offsets_of(lengths // _DOUBLE_BYTES), null_mask(arrays[0]))
    return join_dense([rows.build(pa.array(np.frombuffer(joined, "<f8")), _ALL_VALUES)], target)


def nest_schema(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    lists = [field.name for field in schema if pa.types.is_list(field.type)]
    unfit = [name for name in names if name not in lists]
    refuse_unknown("no list column, which alone can go into the feature lists", unfit, lists)
    fields = [
        pa.field(field.name, pa.list_(field.type)) if field.name in names else field
        for field in schema
    ]
    return pa.schema(fields)


def nest_lists(batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """Makes each value of the named list columns a step of its own, a list of one."""
    columns = [
        _nest(column) if name in names else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=nest_schema(batch.schema, names))


def flatten_lists(batch: pa.RecordBatch, names: Sequence[str]) -> pa.RecordBatch:
    """Undoes `nest_lists`: the named columns hold lists of values again."""
    columns = [
        _flatten(column) if name in names else column
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _nest(column: pa.ListArray) -> pa.ListArray:
    values, rows = split_lists(column)
    places = pa.array(np.arange(len(values) + 1, dtype=np.int32))
    steps = pa.ListArray.from_arrays(places, values, type=column.type)
    return rows.build(steps, pa.list_(column.type))


def _flatten(column: pa.ListArray) -> pa.ListArray:
    steps, rows = split_lists(column)
    values, ends = split_lists(steps)
    return ListRows(ends.offsets[rows.offsets], rows.is_null).build(values, steps.type)
