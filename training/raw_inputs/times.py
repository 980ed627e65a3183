"""Times as a source writes them: ISO 8601 or epochs, in the unit that the build was given."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from decimal import Decimal
from math import floor

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.dates import (
    FIRST_DATE_S,
    LAST_DATE_S,
    UNIT_WORDS,
    UNITS_PER_SECOND,
    find_date_unit,
    show_time,
)
from conf.number_text import SPACES, bare_real
from training.raw_inputs.inputs import InputColumn

_ISO = re.compile(
    r"(?P<year>\d{4})-(?P<month>\d{1,2})-(?P<day>\d{1,2})"
    r"(?:[T ](?P<hour>\d{1,2}):(?P<minute>\d{1,2})(?::(?P<second>\d{1,2})(?:\.(?P<part>\d{1,9}))?"
    r"\s*(?P<zone>Z|UTC|[+-]\d{1,2}(?::\d{2})?|[+-]\d{4})?)?)?",
    re.ASCII,
)
_PARTS = ("year", "month", "day", "hour", "minute", "second")
_WHOLE = re.compile(r"([+-]?[0-9]+)(?:\.0*)?")
_EPOCH = datetime.datetime(1970, 1, 1)
_MOST_OFFSET = 1800  # hours and minutes
_SECONDS_PER_DAY = 86_400


def read_times(item: InputColumn, values: pa.Array) -> pa.Array:
    """Returns text, times and epochs as whole numbers of the unit that the model reads.

    Without a zone, times are UTC; numbers of a source that writes no epochs stay as they are.
    """
    unit, own = item.read_unit or "ms", item.epoch_unit
    if pa.types.is_temporal(values.type):
        return _convert_timestamps(values, unit)
    if own is not None and pa.types.is_integer(values.type):
        return _scale_epochs(values.cast(pa.int64()), own)
    if own is not None and not pa.types.is_null(values.type):
        values = values.cast(pa.string())  # A fraction is read to the digit.
    if not pa.types.is_string(values.type):
        return values
    encoded = values.dictionary_encode()
    times = [parse_time(text, own, unit) for text in encoded.dictionary.to_pylist()]
    return pa.array(times, pa.int64()).take(encoded.indices)


def _convert_timestamps(values: pa.Array, unit: str) -> pa.Array:
    zone = getattr(values.type, "tz", None)
    micros = values.cast(pa.timestamp("us", zone), safe=False).cast(pa.int64())
    divisor = 1_000_000 // UNITS_PER_SECOND[unit]
    whole = np.floor_divide(micros.fill_null(0).to_numpy(zero_copy_only=False), divisor)
    return pa.array(whole, pa.int64(), mask=values.is_null().to_numpy(zero_copy_only=False))


def parse_time(text: str, epoch_unit: str | None, unit: str) -> int:
    """Reads ISO 8601, or a whole number of `unit`, in which the time is returned.

    Where the source writes epochs a number, rounded down: of their unit if it is a date there.
    """
    bare = text.strip(SPACES)
    if epoch_unit is not None:
        number, per = Decimal(bare_real(bare)), UNITS_PER_SECOND[epoch_unit]
        if number.copy_abs() < 1 << 63:
            is_date = FIRST_DATE_S * per <= number < LAST_DATE_S * per
            return floor(number * UNITS_PER_SECOND[unit] / per if is_date else number)
    elif (match := _ISO.fullmatch(bare)) is not None:
        return _count_micros(match.groupdict("0")) // (1_000_000 // UNITS_PER_SECOND[unit])
    elif (match := _WHOLE.fullmatch(bare)) is not None:
        return int(match[1])
    raise ValueError(f"{text!r} is no time")


def _count_micros(parts: Mapping[str, str]) -> int:
    year, month, day, hour, minute, second = (int(parts[name]) for name in _PARTS)
    micros, zone = int(parts["part"].ljust(6, "0")[:6]), parts["zone"].replace(":", "")
    offset = 0 if zone in ("0", "Z", "UTC") else int(zone) * (1 if len(zone) > 3 else 100)
    hours, minutes = divmod(abs(offset), 100)
    if minutes > 59 or abs(offset) > _MOST_OFFSET:
        raise ValueError(f"{zone} is no zone")
    shift = datetime.timedelta(hours=hours, minutes=minutes) * (-1 if offset < 0 else 1)
    moment = datetime.datetime(year, month, day, hour, minute, second, micros) - shift
    return (moment - _EPOCH) // datetime.timedelta(microseconds=1)


def _scale_epochs(values: pa.Array, own: str) -> pa.Array:
    """Turns whole numbers that are dates in the unit of the source's epochs into milliseconds."""
    if own == "ms":
        return values
    per = UNITS_PER_SECOND[own]
    is_date = pc.and_(
        pc.greater_equal(values, FIRST_DATE_S * per), pc.less(values, LAST_DATE_S * per)
    )
    turned = pc.multiply(values, 1000) if own == "s" else pc.divide(values, 1000)
    return pc.if_else(is_date, turned, values)


def describe_time(item: InputColumn) -> str:
    unit = UNIT_WORDS[item.epoch_unit or item.read_unit or "ms"]
    if item.epoch_unit is not None:
        return f"a number of {unit} since 1970"
    iso = "ISO 8601, such as 2026-01-31 or 2026-01-31T10:00:00Z, in UTC unless a zone is written"
    return f"{iso}; or a whole number of {unit} since 1970"


def find_wrong_times(item: InputColumn, values: np.ndarray) -> str | None:
    """Returns what is wrong with the times that a date is made of; None: nothing is.

    Dates of one unit are no dates in another one, as 1980 to 2100 is another range of numbers in
    each. Values have any shape; missing ones and padding are tokens.
    """
    if (unit := item.time_unit) is None or values.dtype == object:
        return None
    tokens = [t for t in (item.null_token, item.pad_token) if isinstance(t, int | float)]
    times = values[np.isfinite(values) & ~np.isin(values, np.array(tokens, values.dtype))]
    if not times.size:
        return None
    low, high = times.min().item(), times.max().item()
    likely, own = find_date_unit(low), UNIT_WORDS[unit]
    if likely is None or likely != find_date_unit(high):
        is_bad = _find_no_times(times, item.time_kind, UNITS_PER_SECOND[unit])
        bad = times[is_bad.argmax()].item()
        said = f"holds what is no time in {own}; received {bad}, {show_time(bad, unit)}"
        said = f"{said}: the model reads times, not a part of them such as the hour"
        return said if is_bad.any() else None
    # One early date in milliseconds may be a date of January 1970 indeed, if not of the log.
    if likely == unit or (likely == "s" and low == high and item.time_kind != "event"):
        return None
    days = f"{show_time(low, likely)} to {show_time(high, likely)}"
    said = f"holds times in {UNIT_WORDS[likely]}, and the model reads {own}"
    return f"{said}; received {low} to {high}, {days}"


def _find_no_times(times: np.ndarray, kind: str | None, per: int) -> np.ndarray:
    """Returns which times cannot be: those of events are dates; small ones are hours, but for 0."""
    if kind == "event":
        return (times < FIRST_DATE_S * per) | (times >= LAST_DATE_S * per)
    return (np.abs(times) < _SECONDS_PER_DAY * per) & (times != 0) & (kind == "date")
