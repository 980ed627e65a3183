"""How decoded features become one column again: leaves, structs, maps and ML vectors, as a tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import InputDataError
from etl.tfrecord.types.column_nodes import DOUBLE_BYTES
from etl.tfrecord.types.conversions import ListRows, is_list, split_lists

_BYTES, _TEXT = pa.binary(), pa.string()


def cast_values(column: pa.Array, target: pa.DataType, form: str) -> pa.Array:
    """Casts decoded values, or lists of them.

    Args:
        column: int64, float32, binary, lists or lists of lists of these `[rows]`.
        target: Type to cast to, as deep in lists.
        form: How dates (`days`, `iso`) or timestamps (`s`, `ms`, `us`, `iso`) were written; of no
            meaning for other types.

    Returns:
        The column in that type `[rows]`.

    Raises:
        pa.ArrowInvalid: A value does not fit.
    """
    if column.type == target:
        return column
    if not is_list(target):
        return _cast_scalars(column, target, form)
    values, rows = split_lists(column)
    if pa.types.is_fixed_size_list(target):
        lengths = rows.lengths if rows.is_null is None else rows.lengths[~rows.is_null]
        if (lengths != target.list_size).any():
            raise pa.ArrowInvalid(f"a list that has not {target.list_size} values")
    return rows.build(cast_values(values, target.value_type, form), target)


def _cast_scalars(values: pa.Array, target: pa.DataType, form: str) -> pa.Array:
    t = pa.types
    if target == _TEXT and values.type == _BYTES and _is_ascii(values):
        return pa.Array.from_buffers(
            target, len(values), values.buffers(), values.null_count, values.offset
        )
    if t.is_decimal(target):
        # The shortest digits that give back the float32: 12.34, not 12.340000152587891.
        return values.cast(pa.string()).cast(target)
    if t.is_boolean(target):
        wrong = np.asarray(values.drop_null())
        wrong = wrong[(wrong != 0) & (wrong != 1)]
        if wrong.size:
            raise pa.ArrowInvalid(f"{wrong[0]} is no boolean, which is 0 or 1")
    elif t.is_date(target):
        if form == "iso":
            return values.cast(pa.string()).cast(target)
        return values.cast(pa.int32()).cast(pa.date32()).cast(target)
    elif t.is_timestamp(target):
        if form == "iso":
            return values.cast(pa.string()).cast(target)
        return values.cast(pa.timestamp(form, target.tz)).cast(target)
    return values.cast(target)


def _is_ascii(values: pa.Array) -> bool:
    """Whether all bytes are ASCII, and so text; one look at them all, not one per value."""
    _, offsets, data = values.buffers()
    if data is None or not len(values):
        return False
    bounds = np.frombuffer(offsets, np.int32)
    first, last = bounds[values.offset], bounds[values.offset + len(values)]
    text = np.frombuffer(data, np.int8)[first:last]
    return not text.size or bool(text.min() >= 0)


@dataclass(frozen=True)
class DecodedLeaf:
    """A column from one feature.

    Attributes:
        feature: The feature's name.
        target: Type of the column.
        form: How dates and timestamps were written, see `cast_values`.
        shown: The column's name in an error.
    """

    feature: str
    target: pa.DataType
    form: str
    shown: str

    def build(self, batch: pa.RecordBatch, name: str) -> pa.Array:
        """Builds it for a decoded batch of the origin `name`.

        Raises:
            InputDataError: A value that does not fit; names the origin and the feature.
        """
        column = batch.column(self.feature)
        try:
            return cast_values(column, self.target, self.form)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise InputDataError(
                f"{name}: feature {self.shown!r} does not fit the type it is to be read as",
                received=str(error),
                allowed=str(self.target),
                fix=_advise(column.type, self.target, self.shown),
            ) from error


@dataclass(frozen=True)
class DecodedBranch:
    """A struct, map or ML vector from its parts; picklable.

    Attributes:
        target: Type of the column.
        children: One per part.
        join: Puts the parts together: takes their arrays, the type, and what else there is.
        arguments: What `join` takes beside these.
    """

    target: pa.DataType
    children: tuple[DecodedNode, ...]
    join: Callable[..., pa.Array]
    arguments: tuple[Any, ...] = ()

    def build(self, batch: pa.RecordBatch, name: str) -> pa.Array:
        """Builds it for a decoded batch of the origin `name`.

        Raises:
            InputDataError: A value that does not fit; names the origin and the feature.
        """
        if not self.children:  # a struct without fields
            return pa.StructArray.from_buffers(self.target, batch.num_rows, [None])
        arrays = [child.build(batch, name) for child in self.children]
        try:
            return self.join(arrays, self.target, *self.arguments)
        except InputDataError as error:
            what, fix = f"{name}: {error.what}", error.fix
            raise InputDataError(
                what, received=error.received, allowed=error.allowed, fix=fix
            ) from None


DecodedNode = DecodedLeaf | DecodedBranch
"""Builds a column, or a field of a struct, from decoded features."""


def join_struct(arrays: list[pa.Array], target: pa.StructType, shown: str) -> pa.Array:
    """A struct from its fields; null where all of them are.

    Raises:
        InputDataError: A field that is not nullable is missing; names the column by `shown`.
    """
    absent = np.logical_and.reduce([np.asarray(array.is_null()) for array in arrays])
    for field, array in zip(target, arrays, strict=True):
        missing = np.asarray(array.is_null()) & ~absent
        if not field.nullable and missing.any():
            raise InputDataError(
                f"field {field.name!r} of {shown!r} is missing in {missing.sum()} record(s), but "
                "is not nullable",
                fix="make the field nullable in the schema",
            )
    mask = pa.array(absent) if absent.any() else None
    return pa.StructArray.from_arrays(arrays, fields=list(target), mask=mask)


def join_map_entries(arrays: list[pa.Array], target: pa.MapType, shown: str) -> pa.Array:
    """A map from the list of its keys and the list of its values.

    Raises:
        InputDataError: Their numbers differ; names the column by `shown`.
    """
    (keys, rows), (values, value_rows) = map(split_lists, arrays)
    if not np.array_equal(rows.offsets, value_rows.offsets):
        row = int(np.argmax(rows.lengths != value_rows.lengths))
        raise InputDataError(
            f"map {shown!r} has other numbers of keys than of values",
            received=f"{rows.lengths[row]} keys and {value_rows.lengths[row]} values in row "
            f"{row} of the batch",
            allowed="a value for each key",
        )
    return build_maps(keys, values, rows, target)


def join_map_keys(arrays: list[pa.Array], target: pa.MapType, keys: tuple[str, ...]) -> pa.Array:
    """A map from a feature for each of some keys, given as text; null where a row has none."""
    present = np.stack([np.asarray(array.is_valid()) for array in arrays], axis=1)
    row, key = np.nonzero(present)
    offsets = np.concatenate([[0], np.cumsum(present.sum(axis=1))])
    values = pa.concat_arrays(arrays).take(pa.array(key * len(present) + row))
    repeated = pa.array(keys).cast(target.key_type).take(pa.array(key))
    absent = np.asarray(~present.any(axis=1))
    return build_maps(repeated, values, ListRows(offsets, absent if absent.any() else None), target)


def build_maps(keys: pa.Array, values: pa.Array, rows: ListRows, target: pa.MapType) -> pa.Array:
    """Puts keys and values of all rows into maps."""
    mask = None if rows.is_null is None else pa.array(rows.is_null)
    offsets = pa.array(rows.offsets, pa.int32())
    return pa.MapArray.from_arrays(offsets, keys, values, type=target, mask=mask)


def join_vector(arrays: list[pa.Array], target: pa.StructType) -> pa.Array:
    """An ML vector in Spark's storage, from a list of values or from indices, values and size."""
    is_sparse = len(arrays) > 1
    indices, values, size = arrays if is_sparse else (None, arrays[0], None)
    absent = np.logical_or.reduce([np.asarray(array.is_null()) for array in arrays])
    kinds = pa.array(np.full(len(values), 0 if is_sparse else 1, np.int8))
    fields = list(target)
    nothing = [pa.nulls(len(values), field.type) for field in fields]
    return pa.StructArray.from_arrays(
        [kinds, size if is_sparse else nothing[1], indices if is_sparse else nothing[2], values],
        fields=fields,
        mask=pa.array(absent) if absent.any() else None,
    )


def join_vector_bytes(arrays: list[pa.Array], target: pa.StructType, shown: str) -> pa.Array:
    """An ML vector in Spark's storage, from the bytes of its values.

    Raises:
        InputDataError: Bytes that are no whole float64s; names the column by `shown`.
    """
    column = arrays[0].cast(pa.large_binary())
    lengths = pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
    if (lengths % DOUBLE_BYTES).any():
        row = int(np.argmax(lengths % DOUBLE_BYTES != 0))
        raise InputDataError(
            f"vector {shown!r} was not written as float64 in bytes",
            received=f"{lengths[row]} bytes in row {row} of the batch",
            allowed=f"a multiple of {DOUBLE_BYTES}",
        )
    joined = b"".join(value for value in column.to_pylist() if value is not None)
    offsets = np.concatenate([[0], np.cumsum(lengths // DOUBLE_BYTES)]).astype(np.int64)
    is_null = np.asarray(column.is_null()) if column.null_count else None
    values = ListRows(offsets, is_null).build(
        pa.array(np.frombuffer(joined, "<f8")), target.field("values").type
    )
    return join_vector([values], target)


def _advise(wire: pa.DataType, target: pa.DataType, shown: str) -> str:
    """What a schema should ask for where a feature does not fit."""
    values, wanted = _innermost(wire), _innermost(target)
    if pa.types.is_string(wanted) and pa.types.is_binary(values):
        return f"give a schema with {shown!r} as binary: its bytes are no text"
    return "read it as a wider type"


def _innermost(kind: pa.DataType) -> pa.DataType:
    while is_list(kind):
        kind = kind.value_type
    return kind
