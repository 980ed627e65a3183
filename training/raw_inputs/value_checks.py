"""Values that no model can read: numbers that are not finite, times in another unit.

Like `training.raw_inputs.raw_columns` it is shipped to executors without TensorFlow and Sluice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from conf.dates import UNIT_WORDS, UNITS_PER_SECOND, find_date_unit, show_time
from training.raw_inputs.input_columns import InputColumn

FINITE = "finite numbers up to 3.4e38, the largest float32"
"""What a model takes of numbers, in words."""
SECONDS_PER_DAY = 86_400


def find_bad_number(values: np.ndarray) -> int | None:
    """Returns where the first number stands that no model can read; None: there is none.

    Refused are NaN, infinities, and what overflows float32, the type that models compute in.

    Args:
        values: Floats of any shape.

    Returns:
        Its position in the flattened array.
    """
    with np.errstate(over="ignore"):
        is_finite = np.isfinite(values.astype(np.float32, copy=False))
    return None if is_finite.all() else int(is_finite.argmin())


@dataclass(frozen=True)
class WrongTimes:
    """What is wrong with some times, in words."""

    problem: str
    received: str
    allowed: str


def find_wrong_times(item: InputColumn, values: np.ndarray) -> WrongTimes | None:
    """Returns what is wrong with the times that a date is made of; None: nothing is.

    Dates of one unit are no dates in another one, as 1980 to 2100 is another range of numbers in
    each. Times of a log that holds dates are dates in its unit, each of them. Of other times of
    such a log none is a small number such as an hour of the day; 0 may mean that there is none. All
    of some times are dates in another unit only where the unit is wrong.

    Args:
        item: The input.
        values: Of any shape, missing ones and padding as tokens.
    """
    unit = item.time_unit
    if unit is None or values.dtype.kind not in "iuf":
        return None
    is_time = np.isfinite(values)
    for token in (item.null_token, item.pad_token):
        if isinstance(token, int | float):
            is_time &= values != values.dtype.type(token)
    times = values[is_time]
    if not times.size:
        return None
    low, high = times.min().item(), times.max().item()
    likely = find_date_unit(low)
    has_one = likely == find_date_unit(high)
    if likely == unit and has_one:
        return None
    if has_one and likely is not None:
        # One early date in milliseconds may be a date of January 1970 indeed, if not of the log.
        if item.time_kind != "event" and likely == "s" and low == high:
            return None
        return WrongTimes(
            f"holds times in {UNIT_WORDS[likely]}, and the model reads {UNIT_WORDS[unit]}",
            f"{low} to {high}: in {UNIT_WORDS[unit]} {show_time(low, unit)} to "
            f"{show_time(high, unit)}, in {UNIT_WORDS[likely]} {show_time(low, likely)} to "
            f"{show_time(high, likely)}",
            f"{UNIT_WORDS[unit]} since 1970, as the build had them",
        )
    bad = _find_no_time(times, unit, item.time_kind)
    if bad is None:
        return None
    return WrongTimes(
        f"holds what is no time in {UNIT_WORDS[unit]}: the model reads the times of "
        f"{item.column!r}, as the build had them, not a part of them such as the hour",
        f"{bad}: in {UNIT_WORDS[unit]} {show_time(bad, unit)}",
        f"dates from 1980 to 2100 in {UNIT_WORDS[unit]} since 1970"
        if item.time_kind == "event"
        else f"dates in {UNIT_WORDS[unit]} since 1970",
    )


def _find_no_time(times: np.ndarray, unit: str, kind: str | None) -> int | float | None:
    """Returns the first number that is no time of a log with dates; None: there is none."""
    is_bad: np.ndarray
    if kind == "event":
        is_bad = np.fromiter((find_date_unit(t) != unit for t in times.tolist()), bool, times.size)
    elif kind == "date":
        is_bad = (np.abs(times) < SECONDS_PER_DAY * UNITS_PER_SECOND[unit]) & (times != 0)
    else:
        return None
    time: int | float = times[is_bad.argmax()].item()
    return time if is_bad.any() else None
