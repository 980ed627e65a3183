"""Times: parts of the date, and the position within a period."""

from __future__ import annotations

from conf.dates import PART_SIZES, Part, Period, TimeUnit
from conf.encoders.declaration import Operation, OperationOutput
from conf.schema import FIRST_TOKEN_ID


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


class Cyclical(Operation):
    """Sine and cosine of the position within a period, to the second; a week starts on Monday."""

    kind = "cyclical"
    accepts = ("int64",)
    raw_values = "kept"
    output = OperationOutput("float32", shape=(2,))
    period: Period
    unit: TimeUnit = "ms"
    utc_offset_minutes: int = 0
