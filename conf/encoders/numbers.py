"""Numbers: buckets between boundaries, scaling, and marks of missing values."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import c_float
from typing import Any, Literal

from conf.encoders.declaration import (
    NUMBERS,
    TEXT,
    Encoding,
    Operation,
    OperationOutput,
    Options,
    key,
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


class BucketizeConfig(Encoding):
    """Intervals between given boundaries: `(-inf, b0)`, `[b0, b1)`, …"""

    kind: Literal["bucketize"] = "bucketize"
    operation = Bucketize
    is_stated = True
    boundaries: tuple[float, ...] = key(
        min_length=1, description="Rising boundaries between the intervals."
    )

    def check(self) -> None:
        """Refuses boundaries that do not rise."""
        finite = all(abs(boundary) < float("inf") for boundary in self.boundaries)
        if not finite or list(self.boundaries) != sorted(set(self.boundaries)):
            raise ValueError("`boundaries` must be finite and rise")


class QuantileConfig(Encoding):
    """Intervals that hold equally many values of the train split."""

    kind: Literal["quantile"] = "quantile"
    operation = Bucketize
    fits_numbers = True
    buckets: int = key(ge=2, le=10_000, description="Intervals.")


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


class ClipConfig(Options):
    """Bounds of a raw value."""

    minimum: float | None = key(None, description="Smaller values become this one; None: no bound.")
    maximum: float | None = key(None, description="Larger values become this one; None: no bound.")

    def check(self) -> None:
        """Refuses bounds that leave nothing, or everything."""
        if self.minimum is None and self.maximum is None:
            raise ValueError("`clip` needs `minimum` or `maximum`")
        if None not in (self.minimum, self.maximum) and self.minimum > self.maximum:  # type: ignore[operator]
            raise ValueError("`clip.minimum` is above `clip.maximum`")


class ScalingConfig(Options):
    """A scaling by given numbers: `(x - center) / scale`."""

    center: float = key(0.0, allow_inf_nan=False, description="What is taken off.")
    scale: float = key(1.0, gt=0, allow_inf_nan=False, description="What the rest is divided by.")


class NormalizeConfig(Encoding):
    """Fill, clip, logarithm, scale: in this order, each where it is asked for."""

    kind: Literal["normalize"] = "normalize"
    operation = Normalize
    method: Literal["standard", "min_max", "robust"] | None = key(
        "standard",
        description="(x - mean) / std (of the population: divided by n, not by n - 1), "
        "(x - min) / (max - min), (x - median) / IQR; null: none.",
    )
    constants: ScalingConfig | None = key(
        None, description="Numbers to scale by, in the place of `method`; nothing is fitted."
    )
    fill_missing: float | None = key(None, description="Null: a missing value becomes 0.")
    clip: ClipConfig | None = None
    log1p: bool = key(False, description="sign(x) * log(1 + |x|), before scaling.")

    @classmethod
    def complete(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Takes constants for the scaling: they leave nothing to fit."""
        if given.get("constants") is None:
            return given
        if given.get("method") is not None:
            raise ValueError("`constants` are the scaling: leave `method` out")
        return {**given, "method": None}

    @property
    def fits_numbers(self) -> bool:
        """Whether the scaling is fitted."""
        return self.method is not None

    @property
    def preparation(self) -> Normalize:
        """All that is done before scaling."""
        return Normalize(
            fill=self.fill_missing,
            minimum=self.clip.minimum if self.clip else None,
            maximum=self.clip.maximum if self.clip else None,
            log1p=self.log1p,
        )


class IsMissing(Operation):
    """1.0 where the value is missing, else 0.0."""

    kind = "is_missing"
    accepts = (*NUMBERS, *TEXT)
    output = OperationOutput("float32", shape=())


class IsMissingConfig(Encoding):
    """1.0 where the column has no value, else 0.0: beside an encoding that fills it in."""

    kind: Literal["is_missing"] = "is_missing"
    operation = IsMissing
    is_stated = True
    takes = "values"
