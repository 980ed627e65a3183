"""Encoders of lists: multi-hot vectors, merged index spaces, weights, lengths, vectors' bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.encoders import ColumnEncoding
from conf.encoders.bags import (
    Length,
    LengthConfig,
    MultiHot,
    MultiHotConfig,
    SparseIndices,
    SparseIndicesConfig,
    VectorBytes,
    Weights,
)
from conf.errors import ConfigError, InputDataError
from conf.schema import FIRST_TOKEN_ID, OOV_ID, FeatureSpec
from etl.encoders.arrow_columns import FlatLists, cast_values, flatten_lists
from etl.encoders.base import RAW_TYPES, Encoder, Fitted, fits, number_requests, row_encoders
from etl.encoders.number_fit import NumberRequest, name_request
from etl.encoders.numbers import read_numbers
from etl.encoders.vocabulary import first_token_id

if TYPE_CHECKING:
    from conf.etl.encodings import FeatureConfig
    from etl.encoders.fit import OperationFit
    from etl.features.plan import FeaturePlan

_MAX_MULTI_HOT = 10_000  # a vector of 40 kB per row
_MAX_INDICES = 2**53


@dataclass(frozen=True)
class MultiHotEncoder:
    """1.0 or a weight at each id of a row; a null list stays null, an unknown token is OOV.

    Attributes:
        encoder: Tokens to ids.
        operation: The vocabulary, and whether weights stand in the place of 1.0.
        is_list: Whether rows are lists.
        weight_type: Declared type of the weights, or None.
    """

    encoder: Encoder
    operation: MultiHot
    is_list: bool
    weight_type: pa.DataType | None = None
    output_type = pa.list_(pa.float32())

    def encode(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Encodes one column, lists or scalars `[rows]`, to float32 vectors `[rows]`.

        Args:
            columns: The tokens, and the weights of the same shape where there are any.
        """
        column, size = columns[0], self.operation.size
        missing, values, rows = None, column, np.arange(len(column))
        if self.is_list:
            lists = flatten_lists(column)
            missing, values = lists.missing, lists.values
            rows = np.repeat(rows, np.diff(lists.offsets))
        ids = self.encoder.encode(values).to_numpy()
        vectors = np.zeros((len(column), size), np.float32)
        if self.weight_type is None:
            vectors[rows, ids] = 1.0
        else:
            vectors = self._add_weights(rows * size + ids, columns).reshape(vectors.shape)
        offsets = np.arange(len(column) + 1, dtype=np.int64) * size
        return FlatLists(vectors, _to_int32(offsets), missing).rebuild(
            pa.array(vectors.reshape(-1))
        )

    def _add_weights(self, positions: np.ndarray, columns: Sequence[pa.Array]) -> np.ndarray:
        """Adds each value's weight at its position, float32 `[rows * size]`."""
        weights = columns[1]
        if self.is_list:
            lists = flatten_lists(weights)
            _check_aligned(lists, flatten_lists(columns[0]))
            weights = lists.values
        numbers = read_numbers(weights, self.weight_type)
        present = np.where(np.isnan(numbers), 0.0, numbers)
        sums = np.bincount(positions, present, len(columns[0]) * self.operation.size)
        with np.errstate(over="ignore"):  # beyond the range is infinite, as anywhere in training
            return sums.astype(np.float32)


@dataclass(frozen=True)
class SparseIndicesEncoder:
    """Index spaces merged into one, column after column; null where every list is.

    Attributes:
        operation: The sizes of the index spaces.
        max_len: Indices kept of each row; None keeps all.
    """

    operation: SparseIndices
    max_len: int | None
    output_type = pa.list_(pa.int64())

    def encode(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Merges list columns of integers `[rows]` to lists of int64 ids `[rows]`."""
        merged, first = [], FIRST_TOKEN_ID
        for column, size in zip(columns, self.operation.sizes, strict=True):
            lists = flatten_lists(column)
            raw = cast_values(lists.values, pa.int64())
            indices = raw.fill_null(-1).to_numpy(zero_copy_only=False)
            known = (indices >= 0) & (indices < size)
            merged.append((lists, np.where(known, indices + first, OOV_ID)))
            first += size
        return merge_lists(merged, self.max_len)


@dataclass(frozen=True)
class WeightsEncoder:
    """Weights of the ids in the same places.

    Attributes:
        raw_types: Declared type of each column of weights.
        operation: Whether weights are divided by their sum.
        max_len: Weights kept of each row; None keeps all.
    """

    raw_types: tuple[pa.DataType, ...]
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
            lists = flatten_lists(weights)
            _check_aligned(lists, flatten_lists(ids))
            numbers = read_numbers(lists.values, raw_type)
            merged.append((lists, np.where(np.isnan(numbers), 0.0, numbers)))
        cut = merge_lists(merged, self.max_len)
        if self.operation.scaled:
            cut = _scale(cut)
        return cut.cast(self.output_type, safe=False)


@dataclass(frozen=True)
class LengthEncoder:
    """Numbers of values of lists; a null list has none.

    Attributes:
        operation: How many are counted at most.
    """

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
    """Lists of numbers as the bytes of their values; a null list has none.

    Attributes:
        raw_type: Declared type of the numbers.
        operation: Type and number of the values.
    """

    raw_type: pa.DataType
    operation: VectorBytes
    output_type = pa.binary()

    def encode(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Encodes one list column `[rows]` to bytes `[rows]`.

        Raises:
            pa.ArrowInvalid: A list has another length, or a value that is missing or not finite.
        """
        lists = flatten_lists(columns[0], exact_len=self.operation.length)
        dtype = np.dtype(self.operation.dtype).newbyteorder("<")
        with np.errstate(over="ignore"):
            values = read_numbers(lists.values, self.raw_type).astype(dtype)
        if not (is_finite := np.isfinite(values)).all():
            row = int(np.searchsorted(lists.offsets, int((~is_finite).argmax()), side="right")) - 1
            raise pa.ArrowInvalid(
                f"the vector of row {row} has a value that is missing or infinite"
            )
        offsets = _to_int32(lists.offsets.astype(np.int64) * dtype.itemsize)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(values)]
        return pa.Array.from_buffers(self.output_type, len(offsets) - 1, buffers)


@row_encoders.declare(MultiHot)
def _build_multi_hot(
    operation: MultiHot, _: FeatureSpec, column: ColumnEncoding, fitted: Fitted
) -> MultiHotEncoder:
    is_list = column.inputs[0].is_list
    weight_type = RAW_TYPES[column.inputs[1].dtype] if operation.is_weighted else None
    return MultiHotEncoder(fitted.tokens[operation.vocabulary], operation, is_list, weight_type)


@row_encoders.declare(Weights)
def _build_weights(
    operation: Weights, spec: FeatureSpec, column: ColumnEncoding, _: Fitted
) -> WeightsEncoder:
    weights = column.inputs[: len(column.inputs) // 2]
    types = tuple(RAW_TYPES[raw.dtype] for raw in weights)
    return WeightsEncoder(types, operation, spec.max_len)


row_encoders.declare(SparseIndices)(
    lambda operation, spec, *_: SparseIndicesEncoder(operation, spec.max_len)
)
row_encoders.declare(Length)(lambda operation, *_: LengthEncoder(operation))
row_encoders.declare(VectorBytes)(
    lambda operation, _, column, __: VectorBytesEncoder(RAW_TYPES[column.raw_dtype], operation)
)


@fits.declare(MultiHotConfig)
def _fit_multi_hot(feature: FeatureConfig, config: MultiHotConfig, fit: OperationFit) -> MultiHot:
    name, vocabulary = fit.find_vocabulary(feature)
    size = first_token_id(vocabulary) + len(vocabulary)
    if size > _MAX_MULTI_HOT:
        raise ConfigError(
            f"feature {feature.name!r} would be a vector of {size:,} numbers per row",
            allowed=f"at most {_MAX_MULTI_HOT:,}",
            fix="set `max_size`, or encode it by `vocabulary`, which keeps a list of ids",
        )
    return MultiHot(name, size, config.weights is not None)


@number_requests.declare(SparseIndicesConfig)
def _request_indices(
    feature: FeatureConfig, config: SparseIndicesConfig, plan: FeaturePlan
) -> Mapping[str, NumberRequest]:
    columns = feature.columns if config.sizes is None else ()
    return {
        name_request(feature, column): NumberRequest(column, plan.is_list(feature.column))
        for column in columns
    }


@fits.declare(SparseIndicesConfig)
def _fit_sparse_indices(
    feature: FeatureConfig, config: SparseIndicesConfig, fit: OperationFit
) -> SparseIndices:
    if config.sizes is not None:
        return SparseIndices(config.sizes)
    found = [fit.numbers[name_request(feature, column)] for column in feature.columns]
    highest = [numbers.moments.maximum for numbers in found]
    if not 0 <= min(highest) <= max(highest) < _MAX_INDICES:
        raise InputDataError(
            f"feature {feature.name!r} has no index space: its highest indices are out of range",
            received=", ".join(f"{index:.0f}" for index in highest),
            allowed=f"0 to {_MAX_INDICES - 1}",
            fix="declare `sizes`, or clean the column",
        )
    return SparseIndices(tuple(int(index) + 1 for index in highest))


fits.declare(LengthConfig)(lambda feature, *_: Length(feature.max_len))


def merge_lists(parts: Sequence[tuple[FlatLists, np.ndarray]], max_len: int | None) -> pa.Array:
    """Joins the lists of each row, part after part.

    Args:
        parts: Lists, and the values that take the place of theirs `[values]`.
        max_len: Values kept of each joined list; None keeps all.

    Returns:
        Lists `[rows]`; null where the lists of every part are.
    """
    lengths = [np.diff(lists.offsets).astype(np.int64) for lists, _ in parts]
    offsets = np.concatenate(([0], np.cumsum(np.sum(lengths, axis=0))))
    values = np.empty(offsets[-1], parts[0][1].dtype)
    starts = offsets[:-1]
    for (lists, own), length in zip(parts, lengths, strict=True):
        shift = np.repeat(starts - lists.offsets[:-1], length)
        values[shift + np.arange(len(own))] = own
        starts = starts + length
    missing = None
    if all(lists.missing is not None for lists, _ in parts):
        masks = [lists.missing.to_numpy(zero_copy_only=False) for lists, _ in parts]  # type: ignore[union-attr]
        missing = pa.array(np.logical_and.reduce(masks))
    joined = FlatLists(values, _to_int32(offsets), missing).rebuild(pa.array(values))
    if max_len is None:
        return joined
    cut = flatten_lists(joined, max_len)
    return cut.rebuild(cut.values)


def _check_aligned(weights: FlatLists, ids: FlatLists) -> None:
    differs = np.diff(weights.offsets) != np.diff(ids.offsets)
    if differs.any():
        row = int(differs.argmax())
        lengths = [int(np.diff(part.offsets)[row]) for part in (weights, ids)]
        raise pa.ArrowInvalid(f"row {row} has {lengths[0]} weights for {lengths[1]} ids")


def _scale(lists: pa.Array) -> pa.Array:
    flat = flatten_lists(lists)
    numbers = flat.values.to_numpy(zero_copy_only=False)
    rows = np.repeat(np.arange(len(lists)), np.diff(flat.offsets))
    sums = np.bincount(rows, numbers, len(lists))
    with np.errstate(invalid="ignore"):
        scaled = numbers / np.where(sums == 0, 1.0, sums)[rows]
        scaled = np.where(numbers == 0, numbers, scaled)  # Where infinite weights have no sum.
    return flat.rebuild(pa.array(scaled))


def _to_int32(offsets: np.ndarray) -> np.ndarray:
    if offsets[-1] >= 2**31:
        raise pa.ArrowInvalid(f"{offsets[-1]} values or bytes in one batch; at most 2**31 - 1 fit")
    return offsets.astype(np.int32)
