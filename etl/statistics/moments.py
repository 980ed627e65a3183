"""Count, mean, spread and range of numbers, merged without loss of precision."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Moments:
    """Moments of finite numbers.

    Attributes:
        count: How many.
        mean: Their mean; 0 where there are none.
        squares: Sum of squared distances from the mean.
        minimum: The least, or None where there are none.
        maximum: The greatest, or None where there are none.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    minimum: float | None = None
    maximum: float | None = None

    def merge(self, other: Moments) -> Moments:
        """Returns the moments of both sets of numbers together.

        Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
        variances" (1979), equation 2.1.
        """
        if not other.count or not self.count:
            return self if self.count else other
        count = self.count + other.count
        distance = other.mean - self.mean
        return Moments(
            count=count,
            mean=self.mean + distance * (other.count / count),
            squares=self.squares
            + other.squares
            + distance * distance * (self.count * (other.count / count)),
            minimum=min(_numbers(self.minimum, other.minimum)),
            maximum=max(_numbers(self.maximum, other.maximum)),
        )

    def to_json(self) -> dict[str, Any]:
        """Returns `min`, `max`, `mean` and `std` (of the population); None where unknown."""
        if not self.count:
            return {"min": None, "max": None, "mean": None, "std": None}
        return {
            "min": self.minimum,
            "max": self.maximum,
            "mean": self.mean,
            "std": math.sqrt(self.squares / self.count),
        }

    @classmethod
    def from_json(cls, count: int, data: Mapping[str, Any]) -> Moments:
        """Builds the moments of `count` numbers from what `to_json` returned."""
        if not count:
            return cls()
        return cls(count, data["mean"], data["std"] ** 2 * count, data["min"], data["max"])


def _numbers(*values: float | None) -> list[float]:
    return [value for value in values if value is not None]
