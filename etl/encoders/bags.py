"""Encoders of lists: multi-hot vectors, merged index spaces, weights, lengths, vectors' bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.encoders.bags import Length, MultiHot, SparseIndices, VectorBytes, Weights
from conf.schema import FIRST_TOKEN_ID, OOV_ID
from etl.encoders.arrow_columns import MAX_VALUES, Encoder, build_lists, cast_values, flatten_lists
from etl.encoders.numbers import read_numbers
from etl.tfrecord.types.parts import ListRows, offsets_of


@dataclass(frozen=True)
class MultiHotEncoder:
    """1.0 or a weight at each id of a row; a null list stays null, an unknown token is OOV."""

    encoder: Encoder  # of tokens
    operation: MultiHot
    is_list: bool
    weight_types: tuple[pa.DataType, ...] = ()  # of the weights, where there are any
    output_type = pa.list_(pa.float32())

    def encode(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Encodes tokens, and weights of the same shape, `[rows]`, to float32 vectors `[rows]`."""
        values, size = columns[0], self.operation.size
        is_null, rows = None, np.arange(len(values))
        if self.is_list:
            values, lists = flatten_lists(values)
            is_null, rows = lists.is_null, np.repeat(rows, lists.lengths)
        positions = rows * size + self.encoder.encode(values).to_numpy()
        vectors = np.zeros(len(columns[0]) * size, np.float32)
        if not self.weight_types:
            vectors[positions] = 1.0
        else:
            vectors = self._add_weights(positions, columns)
        offsets = np.arange(len(columns[0]) + 1, dtype=np.int64) * size
        return build_lists(ListRows(offsets, is_null), pa.array(vectors))

    def _add_weights(self, positions: np.ndarray, columns: Sequence[pa.Array]) -> np.ndarray:
        """Adds each value's weight at its position, float32 `[rows * size]`."""
        weights = columns[1]
        if self.is_list:
            weights, lists = flatten_lists(weights)
            _check_aligned(lists, columns[0])
        numbers = read_numbers(weights, self.weight_types[0])
        present = np.where(np.isnan(numbers), 0.0, numbers)
        sums = np.bincount(positions, present, len(columns[0]) * self.operation.size)
        with np.errstate(over="ignore"):  # beyond the range is infinite, as anywhere in training
            return sums.astype(np.float32)


@dataclass(frozen=True)
class SparseIndicesEncoder:
    """Index spaces merged into one, column after column; null where every list is."""

    operation: SparseIndices
    max_len: int | None
    output_type = pa.list_(pa.int64())

    def encode(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Merges list columns of integers `[rows]` to lists of int64 ids `[rows]`."""
        merged, first = [], FIRST_TOKEN_ID
        for column, size in zip(columns, self.operation.sizes, strict=True):
            values, rows = flatten_lists(column)
            indices = cast_values(values, pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
            known = (indices >= 0) & (indices < size)
            merged.append((rows, np.where(known, indices + first, OOV_ID)))
            first += size
        return _merge_lists(merged, self.max_len)


@dataclass(frozen=True)
class WeightsEncoder:
    """Weights of the ids in the same places."""

    raw_types: tuple[pa.DataType, ...]  # of the columns of weights
    operation: Weights
    max_len: int | None
    output_type = pa.list_(pa.float32())

    def encode(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Encodes columns of weights, then as many of ids `[rows]`, to float32 lists `[rows]`."""
        half = len(columns) // 2
        merged = []
        for weights, ids, raw_type in zip(
            columns[:half], columns[half:], self.raw_types, strict=True
        ):
            values, rows = flatten_lists(weights)
            _check_aligned(rows, ids)
            numbers = read_numbers(values, raw_type)
            merged.append((rows, np.where(np.isnan(numbers), 0.0, numbers)))
        cut = _merge_lists(merged, self.max_len)
        if self.operation.scaled:
            cut = _scale(cut)
        return cut.cast(self.output_type, safe=False)


@dataclass(frozen=True)
class LengthEncoder:
    """Numbers of values of lists; a null list has none."""

    operation: Length
    output_type = pa.int64()

    def encode(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Counts the values of one list column, int64 `[rows]`."""
        (lists,) = columns
        lengths = pc.fill_null(pc.list_value_length(lists), 0).cast(self.output_type)
        most = self.operation.max_len
        return lengths if most is None else pc.min_element_wise(lengths, most)


@dataclass(frozen=True)
class VectorBytesEncoder:
    """Lists of numbers as the bytes of their values; a null list has none."""

    raw_type: pa.DataType
    operation: VectorBytes
    output_type = pa.binary()

    def encode(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Encodes one list column `[rows]` to bytes; a missing or infinite value is refused."""
        values, rows = flatten_lists(columns[0], exact_len=self.operation.length)
        dtype = np.dtype(self.operation.dtype).newbyteorder("<")
        with np.errstate(over="ignore"):
            numbers = read_numbers(values, self.raw_type).astype(dtype)
        if not (is_finite := np.isfinite(numbers)).all():
            row = rows.row_of(int((~is_finite).argmax()))
            raise pa.ArrowInvalid(
                f"the vector of row {row} has a value that is missing or infinite"
            )
        offsets = rows.offsets * dtype.itemsize
        if offsets[-1] > MAX_VALUES:
            raise pa.ArrowInvalid(f"{offsets[-1]} bytes in one batch; at most {MAX_VALUES} fit")
        buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(numbers)]
        return pa.Array.from_buffers(self.output_type, len(offsets) - 1, buffers)


def _merge_lists(parts: Sequence[tuple[ListRows, np.ndarray]], max_len: int | None) -> pa.Array:
    """Joins the lists of each row, part after part, with other values in the place of theirs.

    A list is null where those of every part are; `max_len` of its values are kept, or all.
    """
    offsets = offsets_of(np.sum([rows.lengths for rows, _ in parts], axis=0))
    values = np.empty(offsets[-1], parts[0][1].dtype)
    starts = offsets[:-1]
    for rows, own in parts:
        shift = np.repeat(starts - rows.offsets[:-1], rows.lengths)
        values[shift + np.arange(len(own))] = own
        starts = starts + rows.lengths
    nulls = [rows.is_null for rows, _ in parts if rows.is_null is not None]
    is_null = np.logical_and.reduce(nulls) if len(nulls) == len(parts) else None
    joined = build_lists(ListRows(offsets, is_null), pa.array(values))
    if max_len is None:
        return joined
    cut, kept = flatten_lists(joined, max_len)
    return build_lists(kept, cut)


def _check_aligned(weights: ListRows, ids: pa.Array) -> None:
    own, wanted = weights.lengths, flatten_lists(ids)[1].lengths
    if (differs := own != wanted).any():
        row = int(differs.argmax())
        raise pa.ArrowInvalid(f"row {row} has {own[row]} weights for {wanted[row]} ids")


def _scale(lists: pa.Array) -> pa.Array:
    values, rows = flatten_lists(lists)
    numbers = values.to_numpy(zero_copy_only=False)
    row = np.repeat(np.arange(len(lists)), rows.lengths)
    sums = np.bincount(row, numbers, len(lists))
    with np.errstate(invalid="ignore"):
        scaled = numbers / np.where(sums == 0, 1.0, sums)[row]
        scaled = np.where(numbers == 0, numbers, scaled)  # Where infinite weights have no sum.
    return build_lists(rows, pa.array(scaled))
