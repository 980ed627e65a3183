"""The config of `sluice train --sweep FILE`: which trials it runs."""

from __future__ import annotations

import json
import math
from itertools import islice, product
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from conf.config_base import StrictFinite
from conf.errors import ConfigError
from conf.load import override_config
from conf.training.input import ROWS_OF_TRIALS
from conf.training.refit import FIXED_KEYS, is_within, refuse_fixed
from conf.training.train import METRIC_PATTERN, TrainConfig


class ChoicesConfig(StrictFinite):
    """One of some values, of any kind."""

    choices: tuple[Any, ...] = Field(min_length=1, description="Values to choose from.")

    @property
    def texts(self) -> list[str]:
        """The choices as JSON: Optuna stores plain values only, and a choice may be a list."""
        return [json.dumps(choice) for choice in self.choices]


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
    def ends(self) -> tuple[Any, Any]:
        """Low and high, as int where the range is of whole numbers."""
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
    metric: str | None = Field(
        None, pattern=METRIC_PATTERN, description="None: fit.early_stopping.metric."
    )
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
        refuse_fixed(self.space, FIXED_KEYS)
        return self

    @property
    def trial_count(self) -> int:
        """Trials in all."""
        if self.sampler != "grid":
            return self.trials or 0
        sizes = [len(d.choices) for d in self.space.values() if isinstance(d, ChoicesConfig)]
        whole = math.prod(sizes)
        return whole if self.trials is None else min(whole, self.trials)

    def list_grid(self) -> list[dict[str, str]]:
        """Returns all points of a grid, the last key running fastest, each value as JSON."""
        choices = [found.texts for found in self.space.values() if isinstance(found, ChoicesConfig)]
        points = islice(product(*choices), self.trial_count)
        return [dict(zip(self.space, point, strict=True)) for point in points]

    def check(self, config: TrainConfig) -> None:
        """Refuses keys and values that a config does not take, before anything is trained.

        Each value is checked alone; values that do not go together end their trial.

        Raises:
            ConfigError: A key is unknown, or a value or the end of a range is refused; or trials
                would hold out rows of their own.
        """
        held_out = config.input.validation is not None or "input.validation" in self.space
        stopping = config.fit.early_stopping
        by_steps = stopping is not None and stopping.by == "steps"
        rows = (*(ROWS_OF_TRIALS if held_out else ()), *(("fit.validation",) if by_steps else ()))
        measured = [
            key
            for key in self.space
            if any(is_within(key, row) or is_within(row, key) for row in rows)
        ]
        if measured:
            raise ConfigError(
                f"{measured[0]} decides which rows trials are measured on: metrics of other rows "
                "cannot be compared",
                received=f"a sweep over {measured[0]}",
                fix="set it in the config",
            )
        for key, found in self.space.items():
            for value in found.choices if isinstance(found, ChoicesConfig) else found.ends:
                override_config(config, {key: value}, f"of the sweep, {key}")
