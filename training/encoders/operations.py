"""Encoder operations in TensorFlow: what `etl.encoders` does on Arrow, on tensors.

Ids, hashes and parts of dates are bit-equal. Scaled numbers, sines and weights are float64 until
the last step; they are equal to one unit in the last place of float32 (of 1, for sines).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from conf.dates import MONDAY_SECONDS, PERIOD_SECONDS, UNITS_PER_SECOND
from conf.encoders.bags import Length, MultiHot, SparseIndices, VectorBytes, Weights
from conf.encoders.dates import Cyclical, DatePart
from conf.encoders.declaration import Operation
from conf.encoders.hashing import CROSS_SEPARATOR, Cross, Hash
from conf.encoders.numbers import LEAST_NUMBER, Bucketize, IsMissing, Normalize
from conf.encoders.target import Statistic
from conf.encoders.text import Ngrams
from conf.schema import FIRST_TOKEN_ID, OOV_ID, PAD_ID

_DAY = 86_400
_ERA_DAYS = 146_097  # 400 years
_SEPARATORS = r"[\x00-\x2f\x3a-\x40\x5b-\x60\x7b-\x7f]+"


@dataclass(frozen=True)
class RawValues:
    """One raw input."""

    values: tf.Tensor  # `[batch]`, or `[batch, length]` of a list
    is_null: tf.Tensor  # which values are missing
    is_pad: tf.Tensor | None  # which positions lie behind the end of a list; None of a scalar
    max_len: int | None = None  # values that the feature keeps of a list; None keeps all

    @property
    def text(self) -> tf.Tensor:
        """The values as text: integers by their decimal digits."""
        values = self.values
        return values if values.dtype == tf.string else tf.strings.as_string(values)

    @property
    def numbers(self) -> tf.Tensor:
        """The values as float64, NaN where one is missing."""
        numbers = tf.cast(self.values, tf.float64)
        numbers = tf.where(tf.abs(numbers) < LEAST_NUMBER, tf.zeros_like(numbers), numbers)
        return tf.where(self.is_null, tf.constant(math.nan, tf.float64), numbers)

    def finish(self, encoded: tf.Tensor, null: int | float) -> tf.Tensor:
        """Replaces the values of null and padding; padding is 0."""
        return self.pad(tf.where(self.is_null, tf.cast(null, encoded.dtype), encoded))

    def pad(self, encoded: tf.Tensor) -> tf.Tensor:
        if self.is_pad is None:
            return encoded
        return tf.where(self.is_pad, tf.cast(PAD_ID, encoded.dtype), encoded)


@dataclass(frozen=True)
class Resources:
    ids: Mapping[str, Callable[[RawValues], tf.Tensor]]  # encoder of raw tokens by vocabulary
    statistics: Mapping[str, tf.Tensor]  # float32 `[vocabulary_size]` by table


@functools.singledispatch
def apply_operation(
    operation: Operation, inputs: Sequence[RawValues], resources: Resources
) -> tf.Tensor:
    """Executes an operation on its raw inputs, in the plan's order; lists are not yet cut."""
    raise NotImplementedError(f"nothing executes {operation.kind!r}")


def hash_text(text: tf.Tensor, buckets: int) -> tf.Tensor:
    """Returns `FIRST_TOKEN_ID` + the bucket of each string, int64 of the same shape."""
    return tf.strings.to_hash_bucket_fast(text, buckets) + FIRST_TOKEN_ID


@apply_operation.register(Hash)
def _hash(operation: Hash, inputs: Sequence[RawValues], _: Resources) -> tf.Tensor:
    (raw,) = inputs
    if operation.buckets is not None:
        return raw.finish(hash_text(raw.text, operation.buckets), OOV_ID)
    flat = tf.reshape(raw.text, [-1])
    keys = tf.reshape(tf.bitcast(tf.fingerprint(flat), tf.int64), tf.shape(raw.values))
    taken = (keys >= 0) & (keys < FIRST_TOKEN_ID)
    return raw.finish(tf.where(taken, keys + FIRST_TOKEN_ID, keys), OOV_ID)


@apply_operation.register(Cross)
def _cross(operation: Cross, inputs: Sequence[RawValues], _: Resources) -> tf.Tensor:
    fields = [_cross_field(operation.preparation(number), raw) for number, raw in enumerate(inputs)]
    lists = [raw for raw in inputs if raw.is_pad is not None]
    is_pad = lists[0].is_pad if lists else None
    if len(lists) > 1:
        combined, is_pad = multiply_lists([raw.is_pad for raw in lists], lists[0].max_len)
        positions = iter(combined)
        fields = [
            field if raw.is_pad is None else pick_values(field, next(positions))
            for field, raw in zip(fields, inputs, strict=True)
        ]
    if is_pad is not None:  # scalars stand beside each value
        fields = [
            tuple(part[:, tf.newaxis] for part in field) if raw.is_pad is None else field
            for field, raw in zip(fields, inputs, strict=True)
        ]
    shape = tf.shape(fields[0][0] if is_pad is None else is_pad)
    texts = [tf.broadcast_to(text, shape) for text, _ in fields]
    missing = functools.reduce(tf.logical_or, [is_missing for _, is_missing in fields])
    ids = hash_text(tf.strings.join(texts, separator=CROSS_SEPARATOR), operation.buckets)
    return RawValues(ids, tf.broadcast_to(missing, shape), is_pad).finish(ids, OOV_ID)


def _cross_field(preparation: Operation | None, raw: RawValues) -> tuple[tf.Tensor, tf.Tensor]:
    if preparation is None:
        return raw.text, raw.is_null
    ids = apply_operation(preparation, [raw], Resources({}, {}))
    return tf.strings.as_string(ids), tf.equal(ids, OOV_ID)


def multiply_lists(
    pads: Sequence[tf.Tensor], max_len: int | None
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Combines the values of lists, the last list's varying fastest (as `itertools.product`).

    `pads` tell which positions lie behind the end of each list, bool `[batch, length]`; `max_len`
    combinations are kept of a row. Returns by list the position of each combination's value, int32
    `[batch, combinations]`, and which combinations are none, bool.
    """
    lengths = [
        tf.math.count_nonzero(tf.logical_not(is_pad), axis=1, keepdims=True, dtype=tf.int64)
        for is_pad in pads
    ]
    limit = tf.constant(tf.int32.max if max_len is None else max_len, tf.int64)
    strides = [tf.ones_like(lengths[0])]
    for length in reversed(lengths):
        strides.append(tf.minimum(strides[-1] * length, limit))
    counts, strides = strides[-1], strides[-2::-1]
    width = tf.reduce_max(tf.concat([[0], counts[:, 0]], axis=0))
    number = tf.range(width)[tf.newaxis, :]
    positions = [
        tf.cast(number // tf.maximum(stride, 1) % tf.maximum(length, 1), tf.int32)
        for stride, length in zip(strides, lengths, strict=True)
    ]
    return positions, number >= counts


def pick_values(
    parts: tuple[tf.Tensor, tf.Tensor], positions: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Picks both parts of lists' values `[batch, length]` by int32 `[batch, combinations]`."""
    # A list of no width gets one value, which is never shown.
    one, other = (tf.pad(part, [[0, 0], [0, 1]]) for part in parts)
    return tf.gather(one, positions, batch_dims=1), tf.gather(other, positions, batch_dims=1)


@apply_operation.register(Bucketize)
def _bucketize(operation: Bucketize, inputs: Sequence[RawValues], _: Resources) -> tf.Tensor:
    (raw,) = inputs
    numbers = raw.numbers
    missing = tf.math.is_nan(numbers)
    flat = tf.reshape(tf.where(missing, tf.zeros_like(numbers), numbers), [-1])
    rounded = operation.round_boundaries(raw.values.dtype == tf.float32)
    boundaries = tf.constant(rounded, tf.float64)
    found = tf.searchsorted(boundaries, flat, side="right", out_type=tf.int64)
    ids = tf.reshape(found, tf.shape(numbers)) + FIRST_TOKEN_ID
    return raw.finish(tf.where(missing, tf.cast(OOV_ID, tf.int64), ids), OOV_ID)


@apply_operation.register(Normalize)
def _normalize(operation: Normalize, inputs: Sequence[RawValues], _: Resources) -> tf.Tensor:
    (raw,) = inputs
    numbers = raw.numbers
    missing = tf.math.is_nan(numbers)
    numbers = tf.where(missing, tf.cast(operation.fill or 0.0, tf.float64), numbers)
    if operation.minimum is not None:
        numbers = tf.maximum(numbers, tf.cast(operation.minimum, tf.float64))
    if operation.maximum is not None:
        numbers = tf.minimum(numbers, tf.cast(operation.maximum, tf.float64))
    if operation.log1p:
        numbers = tf.sign(numbers) * tf.math.log1p(tf.abs(numbers))
    scaled = numbers - tf.cast(operation.center, tf.float64)
    scaled = tf.cast(scaled * tf.cast(operation.factor, tf.float64), tf.float32)
    if operation.fill is None:
        scaled = tf.where(missing, tf.zeros_like(scaled), scaled)
    return raw.pad(scaled)


@apply_operation.register(IsMissing)
def _is_missing(operation: IsMissing, inputs: Sequence[RawValues], _: Resources) -> tf.Tensor:
    (raw,) = inputs
    is_missing = raw.is_null
    if raw.values.dtype.is_floating:
        is_missing |= tf.math.is_nan(raw.values)
    return tf.cast(is_missing, tf.float32)


@apply_operation.register(MultiHot)
def _multi_hot(operation: MultiHot, inputs: Sequence[RawValues], resources: Resources) -> tf.Tensor:
    raw = inputs[0]
    ids = resources.ids[operation.vocabulary](raw)
    if raw.is_pad is None:
        ids = ids[:, tf.newaxis]
    # Padding is no class, and neither is -1.
    classes = tf.where(tf.equal(ids, PAD_ID), tf.cast(-1, tf.int64), ids)
    if not operation.is_weighted:
        hot = tf.one_hot(classes, operation.size, dtype=tf.float32)
        return tf.maximum(tf.reduce_max(hot, axis=1), 0.0)  # Of lists without a value it is -inf.
    numbers = tf.reshape(inputs[1].numbers, tf.shape(classes))
    weights = tf.where(tf.math.is_nan(numbers), tf.zeros_like(numbers), numbers)
    # Not a product: infinity times 0 is no number.
    is_there = tf.one_hot(classes, operation.size, on_value=True, off_value=False, dtype=tf.bool)
    own = tf.where(is_there, weights[:, :, tf.newaxis], tf.cast(0.0, tf.float64))
    return tf.reduce_sum(own, axis=1)


@apply_operation.register(SparseIndices)
def _sparse_indices(
    operation: SparseIndices, inputs: Sequence[RawValues], _: Resources
) -> tf.Tensor:
    merged, first = [], FIRST_TOKEN_ID
    for raw, size in zip(inputs, operation.sizes, strict=True):
        known = (raw.values >= 0) & (raw.values < size) & ~raw.is_null
        merged.append(tf.where(known, raw.values + first, tf.cast(OOV_ID, tf.int64)))
        first += size
    return _merge(inputs, merged)


@apply_operation.register(Weights)
def _weights(operation: Weights, inputs: Sequence[RawValues], _: Resources) -> tf.Tensor:
    half = len(inputs) // 2
    numbers = [raw.numbers for raw in inputs[:half]]
    present = [tf.where(tf.math.is_nan(own), tf.zeros_like(own), own) for own in numbers]
    return _merge(inputs[half:], present)


def _merge(inputs: Sequence[RawValues], values: Sequence[tf.Tensor]) -> tf.Tensor:
    """Joins the lists of each row without what pads them; `[batch, length]`, padded with 0."""
    kept = [
        tf.ragged.boolean_mask(own, tf.logical_not(raw.is_pad))
        for raw, own in zip(inputs, values, strict=True)
    ]
    return tf.concat(kept, axis=1).to_tensor(0)


def scale_weights(weights: tf.Tensor) -> tf.Tensor:
    """Divides float64 `[batch, length]` by the sums of rows if not 0; a weight of 0 stays 0."""
    sums = tf.reduce_sum(weights, axis=1, keepdims=True)
    scaled = weights / tf.where(tf.equal(sums, 0.0), tf.ones_like(sums), sums)
    return tf.where(tf.equal(weights, 0.0), weights, scaled)


@apply_operation.register(Length)
def _length(operation: Length, inputs: Sequence[RawValues], _: Resources) -> tf.Tensor:
    (raw,) = inputs
    count = tf.math.count_nonzero(tf.logical_not(raw.is_pad), axis=1, dtype=tf.int64)
    return count if operation.max_len is None else tf.minimum(count, operation.max_len)


@apply_operation.register(VectorBytes)
def _vector_bytes(operation: VectorBytes, inputs: Sequence[RawValues], _: Resources) -> tf.Tensor:
    (raw,) = inputs
    is_pad = tf.zeros_like(raw.is_null) if raw.is_pad is None else raw.is_pad
    # A position without a number makes one that is none: what reads it is refused.
    numbers = tf.where(is_pad, tf.constant(math.nan, tf.float64), raw.numbers)
    parts = tf.bitcast(tf.cast(numbers, tf.as_dtype(operation.dtype)), tf.uint8)
    single_bytes = tf.constant([bytes([value]) for value in range(256)])
    letters = tf.gather(single_bytes, tf.cast(parts, tf.int32))
    joined = tf.strings.reduce_join(tf.strings.reduce_join(letters, axis=2), axis=1)
    return tf.where(tf.reduce_all(is_pad, axis=1), tf.constant(b""), joined)


@apply_operation.register(DatePart)
def _date_part(operation: DatePart, inputs: Sequence[RawValues], _: Resources) -> tf.Tensor:
    (raw,) = inputs
    seconds = _seconds(raw, operation.unit)
    local = tf.math.floormod(seconds, _DAY) + 60 * operation.utc_offset_minutes
    days = tf.math.floordiv(seconds, _DAY) + tf.math.floordiv(local, _DAY)
    part = pick_date_part(operation.part, days, tf.math.floormod(local, _DAY))
    return raw.finish(part + FIRST_TOKEN_ID, OOV_ID)


@apply_operation.register(Cyclical)
def _cyclical(operation: Cyclical, inputs: Sequence[RawValues], _: Resources) -> tf.Tensor:
    (raw,) = inputs
    period = PERIOD_SECONDS[operation.period]
    shift = 60 * operation.utc_offset_minutes
    if operation.period == "week":
        shift += MONDAY_SECONDS
    within = tf.math.floormod(_seconds(raw, operation.unit), period)
    angle = tf.cast(tf.math.floormod(within + shift, period), tf.float64)
    angle *= tf.constant(2.0 * math.pi / period, tf.float64)
    pairs = tf.cast(tf.stack([tf.sin(angle), tf.cos(angle)], axis=1), tf.float32)
    return tf.where(raw.is_null[:, tf.newaxis], tf.zeros_like(pairs), pairs)


def _seconds(raw: RawValues, unit: str) -> tf.Tensor:
    return tf.math.floordiv(raw.values, tf.constant(UNITS_PER_SECOND[unit], tf.int64))


def pick_date_part(part: str, days: tf.Tensor, second_of_day: tf.Tensor) -> tf.Tensor:
    """Returns a part of dates, from 0; Monday is the first day of a week.

    `days` since 1970-01-01 and `second_of_day`, in `[0, 86400)`, are int64 of one shape.
    """
    if part == "hour":
        return second_of_day // 3_600
    if part == "minute":
        return tf.math.floormod(second_of_day // 60, 60)
    weekday = tf.math.floormod(tf.math.floormod(days, 7) + 3, 7)
    if part == "weekday":
        return weekday
    if part == "is_weekend":
        return tf.cast(weekday >= 5, tf.int64)
    day_of_year, month, day = _civil(days)
    return {"day_of_year": day_of_year, "month": month, "day": day}[part]


def _civil(days: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Day of the year, month and day of the month, from 0; Hinnant's `civil_from_days`."""
    day_of_era = tf.math.floormod(tf.math.floormod(days, _ERA_DAYS) + 719_468, _ERA_DAYS)
    leaps = day_of_era // 1_460 - day_of_era // 36_524 + day_of_era // 146_096
    year = (day_of_era - leaps) // 365
    from_march = day_of_era - (365 * year + year // 4 - year // 100)
    month_from_march = (5 * from_march + 2) // 153
    day = from_march - (153 * month_from_march + 2) // 5
    is_late = from_march >= 306  # January and February belong to the year after
    month = tf.where(is_late, month_from_march - 10, month_from_march + 2)
    divides = {n: tf.equal(tf.math.floormod(year, n), 0) for n in (4, 100, 400)}
    is_leap = tf.cast(divides[4] & (~divides[100] | divides[400]), tf.int64)
    return tf.where(is_late, from_march - 306, from_march + 59 + is_leap), month, day


@apply_operation.register(Ngrams)
def _ngrams(operation: Ngrams, inputs: Sequence[RawValues], _: Resources) -> tf.Tensor:
    (raw,) = inputs
    text = tf.where(raw.is_null, tf.constant(""), raw.values)
    if operation.lower:
        text = tf.strings.lower(text)
    plain = tf.strings.strip(tf.strings.regex_replace(text, _SEPARATORS, " "))
    by_word = operation.unit == "word"
    units = tf.strings.split(plain, " ") if by_word else tf.strings.unicode_split(plain, "UTF-8")
    if by_word:
        units = tf.ragged.boolean_mask(units, tf.not_equal(units, ""))
    separator = " " if by_word else ""
    grams = [tf.strings.ngrams(units, size, separator=separator) for size in operation.sizes]
    ids = tf.ragged.map_flat_values(hash_text, tf.concat(grams, axis=1), operation.buckets)
    return ids.to_tensor(PAD_ID)


@apply_operation.register(Statistic)
def _statistic(
    operation: Statistic, inputs: Sequence[RawValues], resources: Resources
) -> tf.Tensor:
    ids = resources.ids[operation.vocabulary](inputs[0])
    return tf.gather(resources.statistics[operation.table], ids)
