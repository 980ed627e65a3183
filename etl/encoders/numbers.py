"""Encoders of numbers and times.

Numbers are scaled, cut into buckets, or marked where they are missing. Parts of dates and positions
within a period are integers all the way, so that every engine agrees to the bit; times are taken
apart into days and seconds before an offset is added: nothing can overflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.dates import MONDAY_SECONDS, PERIOD_SECONDS, UNITS_PER_SECOND
from conf.encoders.dates import Cyclical, DatePart
from conf.encoders.numbers import LEAST_NUMBER, Bucketize, IsMissing, Normalize
from conf.schema import FIRST_TOKEN_ID, OOV_ID
from etl.encoders.arrow_columns import cast_values, to_arrow, valid_mask

_DAY = 86_400


def read_numbers(values: pa.Array, raw_type: pa.DataType) -> np.ndarray:
    """Returns values as float64 `[rows]`, NaN where one is missing."""
    values = cast_values(values, raw_type)
    # Integers beyond 2**53 are rounded to the nearest, as TensorFlow's cast does.
    column = pc.cast(values, pa.float64(), safe=False)
    numbers = np.array(column.to_numpy(zero_copy_only=False), np.float64)
    numbers[np.abs(numbers) < LEAST_NUMBER] = 0.0
    return numbers


@dataclass(frozen=True)
class BucketizeEncoder:
    """Ids of the intervals between boundaries; a missing value is OOV."""

    raw_type: pa.DataType
    operation: Bucketize
    output_type = pa.int64()

    def encode(self, values: pa.Array) -> pa.Array:
        """Encodes numbers `[values]` to int64 ids `[values]`."""
        numbers = read_numbers(values, self.raw_type)
        ids = np.searchsorted(self._boundaries, numbers, side="right") + FIRST_TOKEN_ID
        ids[np.isnan(numbers)] = OOV_ID
        return to_arrow(ids.astype(np.int64))

    @cached_property
    def _boundaries(self) -> np.ndarray:
        rounded = self.operation.round_boundaries(self.raw_type == pa.float32())
        return np.asarray(rounded, np.float64)


@dataclass(frozen=True)
class MissingEncoder:
    """Marks of missing values; NaN is one."""

    raw_type: pa.DataType
    operation: IsMissing
    output_type = pa.float32()

    def encode(self, values: pa.Array) -> pa.Array:
        """Encodes values of any type `[values]` to float32 `[values]`: 1.0 for a missing one."""
        values = cast_values(values, self.raw_type)
        is_missing = pc.is_null(values, nan_is_null=True).to_numpy(zero_copy_only=False)
        return to_arrow(is_missing.astype(np.float32))


@dataclass(frozen=True)
class NormalizeEncoder:
    """Numbers brought to a scale; never null or NaN."""

    raw_type: pa.DataType
    operation: Normalize
    output_type = pa.float32()

    def encode(self, values: pa.Array) -> pa.Array:
        """Normalises numbers `[values]` to float32 `[values]`."""
        operation = self.operation
        numbers = read_numbers(values, self.raw_type)
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
            return to_arrow(scaled.astype(np.float32))


@dataclass(frozen=True)
class DatePartEncoder:
    """2 + the part of the date; null is OOV."""

    raw_type: pa.DataType
    operation: DatePart
    output_type = pa.int64()

    def encode(self, values: pa.Array) -> pa.Array:
        """Encodes times `[values]` to int64 ids `[values]`."""
        values = cast_values(values, self.raw_type)
        seconds = _seconds(values, self.operation.unit)
        days, rest = np.divmod(seconds, _DAY)
        over, rest = np.divmod(rest + 60 * self.operation.utc_offset_minutes, _DAY)
        ids = _part(self.operation.part, days + over, rest) + FIRST_TOKEN_ID
        ids[~valid_mask(values)] = OOV_ID
        return to_arrow(ids)


@dataclass(frozen=True)
class CyclicalEncoder:
    """Sine and cosine of the position within a period; null stays null."""

    operation: Cyclical
    output_type = pa.list_(pa.float32())

    def encode(self, columns: Sequence[pa.Array]) -> pa.Array:
        """Encodes one column of times `[rows]` to float32 pairs `[rows]`."""
        values = cast_values(columns[0], pa.int64())
        period = PERIOD_SECONDS[self.operation.period]
        shift = 60 * self.operation.utc_offset_minutes
        if self.operation.period == "week":
            shift += MONDAY_SECONDS
        phase = (_seconds(values, self.operation.unit) % period + shift) % period
        angle = phase.astype(np.float64) * (2.0 * np.pi / period)
        pairs = np.stack([np.sin(angle), np.cos(angle)], axis=1).astype(np.float32)
        offsets = np.arange(0, 2 * len(values) + 1, 2, dtype=np.int32)
        mask = values.is_null() if values.null_count else None
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(pairs.reshape(-1)), mask=mask)


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
    day_of_year, month, day = _civil(days)
    return {"day_of_year": day_of_year, "month": month, "day": day}[part]


def _civil(days: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Day of the year, month and day of the month, from 0, of days since the epoch."""
    dates = days.astype("datetime64[D]")
    months, years = dates.astype("datetime64[M]"), dates.astype("datetime64[Y]")
    return (
        (dates - years).astype(np.int64),
        months.astype(np.int64) % 12,
        (dates - months).astype(np.int64),
    )
