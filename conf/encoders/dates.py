"""Times: parts of the date, and the position within a period."""

from __future__ import annotations

from typing import Literal

from conf.dates import PART_SIZES, Part, Period, TimeUnit
from conf.encoders.declaration import Encoding, Operation, OperationOutput, key
from conf.schema import FIRST_TOKEN_ID


class TimeConfig(Encoding):
    """How a time is read."""

    unit: TimeUnit | None = key(
        None,
        description="Unit of the raw column; None: that of the events' time or the "
        "dictionary's where it is that column, else ms.",
    )
    utc_offset_minutes: int = key(
        0,
        ge=-24 * 60,
        le=24 * 60,
        description="Minutes east of UTC at which the day and hour are read.",
    )


class DatePart(Operation):
    """A part of the date, from the time since the epoch: 2 + its value, from 0.

    Attributes:
        part: Monday is weekday 0; the first day of a month, the first month, and the first day
            of a year are 0 as well.
        unit: Unit of the raw value.
        utc_offset_minutes: Fixed offset of the local time from UTC.
    """

    kind = "date_part"
    accepts = ("int64",)
    part: Part
    unit: TimeUnit = "ms"
    utc_offset_minutes: int = 0

    @property
    def output(self) -> OperationOutput:
        """Type and shape of the result."""
        return OperationOutput("int64", FIRST_TOKEN_ID + PART_SIZES[self.part])


class DatePartConfig(TimeConfig):
    """A part of the date, as an id."""

    kind: Literal["date_part"] = "date_part"
    operation = DatePart
    is_stated = True
    part: Part = key(description="Which part of the date.")


class Cyclical(Operation):
    """Sine and cosine of the position within a period, to the second; a week starts on Monday."""

    kind = "cyclical"
    accepts = ("int64",)
    raw_values = "kept"
    output = OperationOutput("float32", shape=(2,))
    period: Period
    unit: TimeUnit = "ms"
    utc_offset_minutes: int = 0


class CyclicalConfig(TimeConfig):
    """Sine and cosine of the position in a period: two floats."""

    kind: Literal["cyclical"] = "cyclical"
    operation = Cyclical
    is_stated = True
    takes = "values"
    sets_length = True
    period: Period = key(description="Period in which the position is taken.")
