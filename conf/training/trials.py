"""The configs of trials: `fit.refit`, and the file of `sluice train --sweep FILE`."""

from __future__ import annotations

import math
from itertools import islice, product
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from conf.config_base import StrictFinite
from conf.metrics import build_stopping_pattern

_METRIC = Field(
    None,
    pattern=build_stopping_pattern(),
    description="What trials are compared by. None: fit.early_stopping.metric.",
)


class RefitConfig(StrictFinite):
    """Chooses settings and epochs on held-out rows, then trains a fresh model on all rows."""

    space: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = Field(
        {},
        description="Config key -> values to try. Keys are tried one after the other, each with "
        "the best values of those before it. Empty: the config alone; its best epoch is chosen.",
    )
    metric: str | None = _METRIC

    @property
    def most_trials(self) -> int:
        """Trials in all, at most: of the same settings there is one."""
        return sum(map(len, self.space.values())) or 1


class ChoicesConfig(StrictFinite):
    """One of some values, of any kind."""

    choices: tuple[Any, ...] = Field(min_length=1, description="Values to choose from.")

    @property
    def values(self) -> tuple[Any, ...]:
        """The values to check."""
        return self.choices


class RangeConfig(StrictFinite):
    """A number from a range, both ends included."""

    low: float = Field(description="Least value.")
    high: float = Field(description="Greatest value.")
    log: bool = Field(False, description="Drawn evenly by order of magnitude.")
    step: float | None = Field(None, gt=0, description="Distance between values; None: any value.")
    integer: bool = Field(False, description="Whole numbers alone.")

    @model_validator(mode="after")
    def _possible(self) -> RangeConfig:
        if self.low >= self.high:
            raise ValueError("low must be less than high")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError("log needs low > 0 and no step")
        numbers = (self.low, self.high, self.step or 1.0)
        if self.integer and any(number != int(number) for number in numbers):
            raise ValueError("an integer range needs whole numbers")
        return self

    @property
    def values(self) -> tuple[Any, Any]:
        """Low and high, the values to check, as int where the range is of whole numbers."""
        kind = int if self.integer else float
        return kind(self.low), kind(self.high)


def _list_alone(value: Any) -> Any:
    return {"choices": value} if isinstance(value, list | tuple) else value


DimensionConfig = Annotated[ChoicesConfig | RangeConfig, BeforeValidator(_list_alone)]


class SweepConfig(StrictFinite):
    """A space of configs, and how many of them to try."""

    space: dict[str, DimensionConfig] = Field(
        min_length=1, description="Config key -> a list of values, or low and high."
    )
    sampler: Literal["grid", "random", "tpe"] = Field(
        "random",
        description="grid: every combination. random: drawn. tpe: drawn where earlier trials "
        "were good.",
    )
    trials: int | None = Field(None, ge=1, description="None: the whole grid.")
    seed: int = Field(42, ge=0, description="Seed of the draws.")
    metric: str | None = _METRIC
    prune_after_epochs: int | None = Field(
        None, ge=1, description="From this epoch on, end trials below the median of earlier ones."
    )

    @model_validator(mode="after")
    def _countable(self) -> SweepConfig:
        ranges = [key for key, found in self.space.items() if isinstance(found, RangeConfig)]
        if self.sampler == "grid" and ranges:
            raise ValueError(f"a grid needs lists of values, and {', '.join(ranges)} is a range")
        if self.sampler != "grid" and self.trials is None:
            raise ValueError(f"sampler {self.sampler} needs the number of trials")
        return self

    @property
    def trial_count(self) -> int:
        """Trials in all."""
        if self.sampler != "grid":
            return self.trials or 0
        whole = math.prod(len(found.values) for found in self.space.values())
        return whole if self.trials is None else min(whole, self.trials)

    def list_grid(self) -> list[dict[str, Any]]:
        """Returns all points of a grid, the last key running fastest."""
        points = product(*(found.values for found in self.space.values()))
        return [
            dict(zip(self.space, point, strict=True)) for point in islice(points, self.trial_count)
        ]
