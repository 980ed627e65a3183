"""Numbers: buckets between boundaries, scaling, and marks of missing values."""

from __future__ import annotations

from ctypes import c_float

from conf.encoders.declaration import (
    NUMBERS,
    TEXT,
    Operation,
    OperationOutput,
)
from conf.schema import FIRST_TOKEN_ID

LEAST_NUMBER = 2.0**-126
"""The least normal float32: numbers nearer to 0 count as 0, as it does on most accelerators."""


class Bucketize(Operation):
    """2 + the number of boundaries that are not above the value.

    Attributes:
        boundaries: Rising, float64.
    """

    kind = "bucketize"
    accepts = NUMBERS
    raw_values = "compared"
    boundaries: tuple[float, ...]

    def round_boundaries(self, is_float32: bool) -> tuple[float, ...]:
        """Returns the boundaries as the values are read: 0.7 as float32 is not below 0.7.

        Like values, boundaries nearer to 0 than `LEAST_NUMBER` are 0.

        Args:
            is_float32: Whether the values are; a boundary beyond float32 is above all of them.
        """
        own = (c_float(one).value if is_float32 else one for one in self.boundaries)
        return tuple(0.0 if abs(one) < LEAST_NUMBER else one for one in own)

    @property
    def output(self) -> OperationOutput:
        """Type and shape of the result."""
        return OperationOutput("int64", FIRST_TOKEN_ID + len(self.boundaries) + 1)


class Normalize(Operation):
    """Fill, clip, logarithm, then `(x - center) * factor`, in float64; the result is float32.

    Attributes:
        fill: Value of a missing one; None: the result is 0.
        minimum: Lower bound of the raw value, or None.
        maximum: Upper bound of the raw value, or None.
        log1p: Whether to take `sign(x) * log(1 + |x|)`.
        center: Subtracted.
        factor: Multiplied with the difference.
    """

    kind = "normalize"
    accepts = NUMBERS
    raw_values = "compared"
    output = OperationOutput("float32")
    fill: float | None = None
    minimum: float | None = None
    maximum: float | None = None
    log1p: bool = False
    center: float = 0.0
    factor: float = 1.0


class IsMissing(Operation):
    """1.0 where the value is missing, else 0.0."""

    kind = "is_missing"
    accepts = (*NUMBERS, *TEXT)
    output = OperationOutput("float32", shape=())
