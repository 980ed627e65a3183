"""Encoders of lists: multi-hot vectors, merged index spaces, weights, lengths, vectors' bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.encoders.bags import Length, MultiHot, SparseIndices, VectorBytes, Weights
from conf.schema import FIRST_TOKEN_ID, OOV_ID
from etl.encoders.arrow_columns import (
    MAX_VALUES,
    Encoded,
    Fitted,
    RawValues,
    cast_values,
    check_lengths,
    cut_lists,
    encode,
    to_arrow,
)
from etl.tfrecord.types.parts import ListRows, offsets_of


@encode.register(MultiHot)
def multi_hot(operation: MultiHot, inputs: Sequence[RawValues], fitted: Fitted) -> Encoded:
    """1.0 or the sum of weights at each id of a row, float32; a null list stays null."""
    tokens, *weights = inputs
    lists, size = tokens.rows, operation.size
    count = len(tokens.values) if lists is None else len(lists.lengths)
    rows = np.arange(count) if lists is None else _row_of_each(lists)
    positions = rows * size + fitted.tokens.encode(tokens.values).to_numpy()
    if weights:
        if lists is not None:
            _check_aligned(weights[0], tokens)
        vectors = np.bincount(positions, _fill_missing(weights[0]), count * size)
    else:
        vectors = np.zeros(count * size, np.float32)
        vectors[positions] = 1.0
    is_null = None if lists is None else lists.is_null
    return _to_float32(vectors), ListRows(np.arange(count + 1) * size, is_null)


@encode.register(SparseIndices)
def sparse_indices(
    operation: SparseIndices, inputs: Sequence[RawValues], fitted: Fitted
) -> Encoded:
    """Index spaces merged into one, column after column; null where every list is."""
    merged, first = [], FIRST_TOKEN_ID
    for raw, size in zip(inputs, operation.sizes, strict=True):
        values = cast_values(raw.values, pa.int64()).fill_null(-1)
        indices = values.to_numpy(zero_copy_only=False)
        known = (indices >= 0) & (indices < size)
        merged.append((np.where(known, indices + first, OOV_ID), raw.lists))
        first += size
    return _merge_lists(merged, fitted.max_len)


@encode.register(Weights)
def weights(operation: Weights, inputs: Sequence[RawValues], fitted: Fitted) -> Encoded:
    """Float32 weights of the ids in the same places: of columns of weights, then as many of ids."""
    half = len(inputs) // 2
    for own, ids in zip(inputs[:half], inputs[half:], strict=True):
        _check_aligned(own, ids)
    merged = [(_fill_missing(own), own.lists) for own in inputs[:half]]
    values, rows = _merge_lists(merged, fitted.max_len)
    numbers = values.to_numpy()
    if operation.scaled:
        numbers = _scale(numbers, rows)
    return _to_float32(numbers), rows


@encode.register(Length)
def length(operation: Length, inputs: Sequence[RawValues], fitted: Fitted) -> Encoded:
    """Numbers of values of lists, int64; a null list has none."""
    lengths = pc.fill_null(pc.list_value_length(inputs[0].values), 0).cast(pa.int64())
    most = operation.max_len
    return lengths if most is None else pc.min_element_wise(lengths, most), None


@encode.register(VectorBytes)
def vector_bytes(operation: VectorBytes, inputs: Sequence[RawValues], fitted: Fitted) -> Encoded:
    """Lists of numbers as the bytes of their values; a missing or infinite value is refused."""
    [raw] = inputs
    check_lengths(raw.lists, operation.length)
    dtype = np.dtype(operation.dtype).newbyteorder("<")
    with np.errstate(over="ignore"):
        numbers = raw.numbers.astype(dtype)
    if not (is_finite := np.isfinite(numbers)).all():
        row = raw.lists.row_of(int((~is_finite).argmax()))
        raise pa.ArrowInvalid(f"the vector of row {row} has a value that is missing or infinite")
    offsets = raw.lists.offsets * dtype.itemsize
    if offsets[-1] > MAX_VALUES:
        raise pa.ArrowInvalid(f"{offsets[-1]} bytes in one batch; at most {MAX_VALUES} fit")
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(numbers)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers), None


def _row_of_each(lists: ListRows) -> np.ndarray:
    """The row of each value, int64 `[values]`."""
    return np.repeat(np.arange(len(lists.lengths)), lists.lengths)


def _fill_missing(weights: RawValues) -> np.ndarray:
    numbers = weights.numbers
    return np.where(np.isnan(numbers), 0.0, numbers)


def _to_float32(numbers: np.ndarray) -> pa.Array:
    with np.errstate(over="ignore"):  # beyond the range is infinite, as anywhere in training
        return to_arrow(numbers.astype(np.float32, copy=False))


def _merge_lists(
    parts: Sequence[tuple[np.ndarray, ListRows]], max_len: int | None
) -> tuple[pa.Array, ListRows]:
    """Joins the lists of each row, part after part; null where those of every part are."""
    offsets = offsets_of(np.sum([rows.lengths for _, rows in parts], axis=0))
    values = np.empty(offsets[-1], parts[0][0].dtype)
    starts = offsets[:-1]
    for own, rows in parts:
        shift = np.repeat(starts - rows.offsets[:-1], rows.lengths)
        values[shift + np.arange(len(own))] = own
        starts = starts + rows.lengths
    nulls = [rows.is_null for _, rows in parts if rows.is_null is not None]
    is_null = np.logical_and.reduce(nulls) if len(nulls) == len(parts) else None
    return cut_lists(to_arrow(values), ListRows(offsets, is_null), max_len)


def _check_aligned(weights: RawValues, ids: RawValues) -> None:
    own, wanted = weights.lists.lengths, ids.lists.lengths
    if (differs := own != wanted).any():
        row = int(differs.argmax())
        raise pa.ArrowInvalid(f"row {row} has {own[row]} weights for {wanted[row]} ids")


def _scale(numbers: np.ndarray, rows: ListRows) -> np.ndarray:
    row = _row_of_each(rows)
    sums = np.bincount(row, numbers, len(rows.lengths))
    with np.errstate(invalid="ignore"):
        scaled = numbers / np.where(sums == 0, 1.0, sums)[row]
        return np.where(numbers == 0, numbers, scaled)  # Where infinite weights have no sum.
