"""Encoders of numbers and times.

Parts of dates and positions within a period are integers all the way, so that every engine agrees
to the bit; times are taken apart into days and seconds before an offset is added: nothing can
overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.dates import MONDAY_SECONDS, PERIOD_SECONDS, UNITS_PER_SECOND
from conf.encoders.dates import Cyclical, DatePart
from conf.encoders.numbers import Bucketize, IsMissing, Normalize
from conf.schema import FIRST_TOKEN_ID, OOV_ID
from etl.encoders.arrow_columns import Encoded, Fitted, RawValues, encode, to_arrow, valid_mask
from etl.tfrecord.types.parts import ListRows, null_mask

_DAY = 86_400


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
