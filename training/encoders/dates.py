"""Encoders of times on tensors: integers all the way, as on Arrow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import tensorflow as tf

from conf.dates import MONDAY_SECONDS, PERIOD_SECONDS, UNITS_PER_SECOND
from conf.encoders.dates import Cyclical, DatePart
from conf.schema import FIRST_TOKEN_ID, OOV_ID
from training.encoders.execution import RawValues, Resources, executions

_DAY = 86_400
_ERA_DAYS = 146_097  # 400 years


@executions.declare(DatePart)
def _date_part(operation: DatePart, inputs: Sequence[RawValues], _: Resources) -> tf.Tensor:
    (raw,) = inputs
    seconds = _seconds(raw, operation.unit)
    local = tf.math.floormod(seconds, _DAY) + 60 * operation.utc_offset_minutes
    days = tf.math.floordiv(seconds, _DAY) + tf.math.floordiv(local, _DAY)
    part = pick_date_part(operation.part, days, tf.math.floormod(local, _DAY))
    return raw.finish(part + FIRST_TOKEN_ID, OOV_ID)


@executions.declare(Cyclical)
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

    Args:
        part: `hour`, `minute`, `weekday`, `is_weekend`, `day_of_year`, `month` or `day`.
        days: Days since 1970-01-01, int64, any shape.
        second_of_day: Seconds since midnight, int64 of the same shape, in `[0, 86400)`.

    Returns:
        int64 of the same shape.
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
