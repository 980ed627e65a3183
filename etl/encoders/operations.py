"""Encoder operations on Arrow: what `training.encoders` does on tensors.

Every operation is executed by one function, which `encode` finds: of the values and rows of raw
columns it makes those of a feature. Parts of dates and positions within a period are integers all
the way, so that every engine agrees to the bit; times are taken apart into days and seconds before
an offset is added: nothing can overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, singledispatch
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.dates import MONDAY_SECONDS, PERIOD_SECONDS, UNITS_PER_SECOND
from conf.encoders.bags import Length, MultiHot, SparseIndices, VectorBytes, Weights
from conf.encoders.dates import Cyclical, DatePart
from conf.encoders.declaration import Operation
from conf.encoders.hashing import CROSS_SEPARATOR, Cross, Hash
from conf.encoders.numbers import LEAST_NUMBER, Bucketize, IsMissing, Normalize
from conf.encoders.target import Statistic
from conf.encoders.text import Ngrams
from conf.schema import FIRST_TOKEN_ID, OOV_ID
from etl.encoders.arrow_columns import (
    MAX_VALUES,
    cast_values,
    check_lengths,
    cut_lists,
    multiply_lists,
    to_arrow,
    valid_mask,
)
from etl.encoders.hashing import hash_grams, hash_values
from etl.tfrecord.types.parts import ListRows, null_mask, offsets_of

_DAY = 86_400

Encoded = tuple[pa.Array, ListRows | None]
"""Values `[values]` of a feature, and of lists where those of each row lie; None: one per row."""


@dataclass(frozen=True)
class RawValues:
    """Values of a raw column `[values]`, and of lists where those of each row lie."""

    values: pa.Array
    type: pa.DataType  # as declared
    rows: ListRows | None = None

    @property
    def lists(self) -> ListRows:
        """Where the values of each row lie, of a column of lists."""
        return cast(ListRows, self.rows)

    @property
    def as_declared(self) -> pa.Array:
        """The values in the declared type."""
        return cast_values(self.values, self.type)

    @property
    def numbers(self) -> np.ndarray:
        """The values as float64 `[values]`, NaN where one is missing."""
        # Integers beyond 2**53 are rounded to the nearest, as TensorFlow's cast does.
        column = pc.cast(self.as_declared, pa.float64(), safe=False)
        numbers = np.array(column.to_numpy(zero_copy_only=False), np.float64)
        numbers[np.abs(numbers) < LEAST_NUMBER] = 0.0
        return numbers


@dataclass(frozen=True)
class Fitted:
    """What the encoder of a feature has beside its operation."""

    max_len: int | None = None  # of the feature's lists
    tokens: Any = None  # encodes the tokens of its vocabulary
    table: Any = None  # statistics, float32 `[vocabulary_size, 1 + folds]`


@singledispatch
def encode(operation: Operation, inputs: Sequence[RawValues], fitted: Fitted) -> Encoded:
    """Executes an operation on the raw columns that it reads.

    Lists come cut to the feature's `max_len`, but for those of weights; those that are counted
    come whole.

    Raises:
        pa.ArrowInvalid: A value cannot be encoded; who calls names the column.
    """
    raise NotImplementedError(f"nothing encodes {operation.kind!r}")


@encode.register(Bucketize)
def bucketize(operation: Bucketize, inputs: Sequence[RawValues], fitted: Fitted) -> Encoded:
    """Ids of the intervals between boundaries; a missing value is OOV."""
    [raw] = inputs
    numbers = raw.numbers
    boundaries = _round_boundaries(operation, raw.type == pa.float32())
    ids = np.searchsorted(boundaries, numbers, side="right") + FIRST_TOKEN_ID
    ids[np.isnan(numbers)] = OOV_ID
    return to_arrow(ids.astype(np.int64)), raw.rows


@lru_cache(maxsize=256)
def _round_boundaries(operation: Bucketize, is_float32: bool) -> np.ndarray:
    return np.asarray(operation.round_boundaries(is_float32), np.float64)


@encode.register(IsMissing)
def mark_missing(operation: IsMissing, inputs: Sequence[RawValues], fitted: Fitted) -> Encoded:
    """Float32 1.0 for a missing value; NaN is one."""
    [raw] = inputs
    is_missing = pc.is_null(raw.as_declared, nan_is_null=True).to_numpy(zero_copy_only=False)
    return to_arrow(is_missing.astype(np.float32)), raw.rows


@encode.register(Normalize)
def normalize(operation: Normalize, inputs: Sequence[RawValues], fitted: Fitted) -> Encoded:
    """Float32 numbers on a scale; never null or NaN."""
    [raw] = inputs
    numbers = raw.numbers
    missing = np.isnan(numbers)
    if operation.fill is not None:
        numbers[missing] = operation.fill
    with np.errstate(over="ignore"):  # beyond the range is infinite, as anywhere in training
        if operation.minimum is not None:
            numbers = np.maximum(numbers, operation.minimum)
        if operation.maximum is not None:
            numbers = np.minimum(numbers, operation.maximum)
        if operation.log1p:
            numbers = np.sign(numbers) * np.log1p(np.abs(numbers))
        scaled = (numbers - operation.center) * operation.factor
        if operation.fill is None:
            scaled[missing] = 0.0
        return to_arrow(scaled.astype(np.float32)), raw.rows


@encode.register(DatePart)
def date_part(operation: DatePart, inputs: Sequence[RawValues], fitted: Fitted) -> Encoded:
    """2 + the part of the date; null is OOV."""
    [raw] = inputs
    values = raw.as_declared
    days, rest = np.divmod(_seconds(values, operation.unit), _DAY)
    over, rest = np.divmod(rest + 60 * operation.utc_offset_minutes, _DAY)
    ids = _part(operation.part, days + over, rest) + FIRST_TOKEN_ID
    ids[~valid_mask(values)] = OOV_ID
    return to_arrow(ids), raw.rows


@encode.register(Cyclical)
def cyclical(operation: Cyclical, inputs: Sequence[RawValues], fitted: Fitted) -> Encoded:
    """Float32 sine and cosine of the position within a period; null stays null."""
    values = inputs[0].as_declared
    period, shift = PERIOD_SECONDS[operation.period], 60 * operation.utc_offset_minutes
    if operation.period == "week":
        shift += MONDAY_SECONDS
    phase = (_seconds(values, operation.unit) % period + shift) % period
    angle = phase.astype(np.float64) * (2.0 * np.pi / period)
    pairs = np.stack([np.sin(angle), np.cos(angle)], axis=1).astype(np.float32)
    offsets = np.arange(0, 2 * len(values) + 1, 2)
    return to_arrow(pairs.reshape(-1)), ListRows(offsets, null_mask(values))


def _seconds(values: pa.Array, unit: str) -> np.ndarray:
    return values.fill_null(0).to_numpy(zero_copy_only=False) // UNITS_PER_SECOND[unit]


def _part(part: str, days: np.ndarray, second_of_day: np.ndarray) -> np.ndarray:
    if part == "hour":
        return second_of_day // 3_600
    if part == "minute":
        return second_of_day // 60 % 60
    weekday = (days + 3) % 7
    if part == "weekday":
        return weekday
    if part == "is_weekend":
        return (weekday >= 5).astype(np.int64)
    dates = days.astype("datetime64[D]")
    months = dates.astype("datetime64[M]")
    if part == "month":
        return months.astype(np.int64) % 12
    start = months if part == "day" else dates.astype("datetime64[Y]")
    return (dates - start).astype(np.int64)


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


@encode.register(Hash)
def hash_column(operation: Hash, inputs: Sequence[RawValues], fitted: Fitted) -> Encoded:
    """Ids of values by their hash."""
    [raw] = inputs
    return hash_values(raw.as_declared, operation.buckets), raw.rows


@encode.register(Cross)
def cross(operation: Cross, inputs: Sequence[RawValues], fitted: Fitted) -> Encoded:
    """Ids from the hash of several fields; OOV where one of them is missing.

    Of lists each combination of their values is crossed, the last list's varying fastest: the first
    `max_len` ones hold no later value of any list.
    """
    texts = [_read_field(raw, operation.preparation(n)) for n, raw in enumerate(inputs)]
    lists = [raw.rows for raw in inputs if raw.rows is not None]
    rows: ListRows | None = None
    if lists:
        rows, row, positions = multiply_lists(lists, fitted.max_len)
        places = iter(positions)
        texts = [
            text.take(pa.array(row if raw.rows is None else next(places)))
            for text, raw in zip(texts, inputs, strict=True)
        ]
    separator = CROSS_SEPARATOR.encode()
    joined = pc.binary_join_element_wise(*texts, separator, null_handling="emit_null")
    return hash_values(joined, operation.buckets), rows


def _read_field(raw: RawValues, preparation: Operation | None) -> pa.Array:
    """The text of each value or of its id, binary `[values]`, null where it is missing."""
    values = raw.as_declared
    if preparation is not None:
        ids, _ = encode(preparation, [raw], Fitted())
        values = pc.if_else(pc.equal(ids, OOV_ID), pa.scalar(None, pa.int64()), ids)
    if values.type != pa.binary():
        values = cast_values(values, pa.string())
    return values.cast(pa.binary())


@encode.register(Ngrams)
def ngrams(operation: Ngrams, inputs: Sequence[RawValues], fitted: Fitted) -> Encoded:
    """Hashed n-grams of a text; null stays null, text without words gives an empty list."""
    texts = cast_values(inputs[0].values, pa.string())
    ids, offsets = hash_grams(texts, operation, fitted.max_len)
    return to_arrow(ids), ListRows(offsets, null_mask(texts))


@encode.register(Statistic)
def statistic(operation: Statistic, inputs: Sequence[RawValues], fitted: Fitted) -> Encoded:
    """A token's statistic, float32, of all train rows but those of the row's own fold.

    Beside the tokens folds may stand: null outside of train.
    """
    tokens, *folds = inputs
    ids = fitted.tokens.encode(tokens.values).to_numpy()
    if not folds:
        return to_arrow(fitted.table[ids, 0]), None
    own = cast_values(folds[0].values, pa.int64()).fill_null(-1)
    return to_arrow(fitted.table[ids, own.to_numpy(zero_copy_only=False) + 1]), None
