"""Dates and timestamps to integers or ISO 8601 text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.tfrecord.lowering.values import Converted, Refusal, nulls, numbers, refuse_first

_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_DAY_MS = 86_400_000
# 0001-01-01 and 9999-12-31: what ISO 8601 writes with four digits.
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
_ISO_YEARS = "years 1 to 9999"
_AS_NUMBERS = "write them as numbers ({}), or filter the rows"


@dataclass(frozen=True)
class DatesToDays:
    """Dates to days since 1970-01-01."""

    target: pa.DataType = field(default_factory=pa.int32)
    is_identity: bool = False

    def convert(self, values: pa.Array) -> Converted:
        """See `ValueRule`."""
        if pa.types.is_date32(values.type):
            return values.cast(pa.int32()), None
        days = np.floor_divide(numbers(values.cast(pa.int64())), _DAY_MS)
        return pa.array(days.astype(np.int32), mask=nulls(values)), None


@dataclass(frozen=True)
class DatesToText:
    """Dates to text such as `2026-01-02`."""

    target: pa.DataType = field(default_factory=pa.string)
    is_identity: bool = False

    def convert(self, values: pa.Array) -> Converted:
        """See `ValueRule`."""
        days = DatesToDays().convert(values)[0]
        refusal = _refuse_years(numbers(days), _FIRST_DAY, _LAST_DAY, values, "dates=days")
        return days.cast(pa.date32()).cast(pa.string()), refusal


@dataclass(frozen=True)
class TimestampsToIntegers:
    """Timestamps to a number of units since 1970 UTC, rounded down.

    Attributes:
        unit: Unit of the result.
        source_unit: Unit of the timestamps.
    """

    unit: Literal["s", "ms", "us"]
    source_unit: str
    target: pa.DataType = field(default_factory=pa.int64)
    is_identity: bool = False

    def convert(self, values: pa.Array) -> Converted:
        """See `ValueRule`."""
        ticks = values.cast(pa.int64())
        source, wanted = _NANOSECONDS[self.source_unit], _NANOSECONDS[self.unit]
        if source == wanted:
            return ticks, None
        if source < wanted:
            return pa.array(numbers(ticks) // (wanted // source), mask=nulls(values)), None
        counts, factor = numbers(ticks), source // wanted
        limit = np.iinfo(np.int64).max // factor
        refusal = refuse_first(
            (counts > limit) | (counts < -limit),
            values,
            f"a timestamp beyond int64 in {self.unit}",
            f"at most {limit} {self.source_unit} from 1970",
            "policy timestamps with a coarser unit",
        )
        with np.errstate(over="ignore"):
            return pa.array(counts * factor, mask=nulls(values)), refusal


@dataclass(frozen=True)
class TimestampsToText:
    """Timestamps to text such as `2026-01-02T03:04:05.678901Z`, without Z where they have no zone.

    Attributes:
        source: Type of the timestamps.
    """

    source: pa.TimestampType
    target: pa.DataType = field(default_factory=pa.string)
    is_identity: bool = False

    def convert(self, values: pa.Array) -> Converted:
        """See `ValueRule`."""
        ticks = numbers(values.cast(pa.int64()))
        per_day = _NANOSECONDS["s"] * 86_400 // _NANOSECONDS[self.source.unit]
        int64 = np.iinfo(np.int64)
        limits = max(_FIRST_DAY * per_day, int64.min), min((_LAST_DAY + 1) * per_day - 1, int64.max)
        refusal = _refuse_years(ticks, limits[0], limits[1], values, "timestamps=us")
        if refusal is not None:
            return values, refusal
        local = pa.array(ticks, mask=nulls(values)).cast(pa.timestamp(self.source.unit))
        text = pc.replace_substring(local.cast(pa.string()), " ", "T")
        if self.source.tz is None:
            return text, None
        return pc.binary_join_element_wise(text, "Z", ""), None


def _refuse_years(
    ticks: np.ndarray, first: int, last: int, values: pa.Array, option: str
) -> Refusal | None:
    bad = (ticks < first) | (ticks > last)
    return refuse_first(
        bad, values, "a date outside what ISO text holds", _ISO_YEARS, _AS_NUMBERS.format(option)
    )
