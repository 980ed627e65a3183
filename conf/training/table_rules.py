"""Which keys of a dynamic table get a row, and which ones lose it again."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from conf.config_base import StrictFinite

MOST_SIGHTINGS = (1 << 31) - 1
"""Counts of sightings stop here."""


class AdmissionConfig(StrictFinite):
    """When a key gets a row; until then it reads zeros and is not trained. One of the three."""

    count: int | None = Field(
        None, ge=2, le=MOST_SIGHTINGS, description="With the n-th sighting in training."
    )
    probability: float | None = Field(
        None, gt=0, lt=1, description="Drawn at each sighting, by seed and key."
    )
    allow_list: str | None = Field(
        None, min_length=1, description="File of the keys that get one, a number on each line."
    )

    @model_validator(mode="after")
    def _one_rule(self) -> AdmissionConfig:
        if sum(value is not None for value in (self.count, self.probability, self.allow_list)) != 1:
            raise ValueError("set one of `count`, `probability` and `allow_list`")
        return self


class EvictionConfig(StrictFinite):
    """When a key is forgotten: its row, optimizer state and count. Each rule suffices alone."""

    timestamp: str | None = Field(
        None,
        min_length=1,
        description="Feature that holds a row's time, a whole number; None: time is steps.",
    )
    unused_time: int | None = Field(
        None,
        ge=1,
        description="Not seen for so long, in units of `timestamp`; now is its largest value yet.",
    )
    unused_steps: int | None = Field(None, ge=1, description="Not seen for so many steps.")
    min_count: int | None = Field(
        None, ge=2, le=MOST_SIGHTINGS, description="Seen less often than this, in all."
    )
    every: int | Literal["epoch"] = Field(
        1000,
        description="Steps in which each key is looked at once, a part of them in each step; "
        "epoch: all with the epoch's last step.",
    )
    when_full: Literal["least_recent", "least_frequent"] | None = Field(
        None,
        description="Keys that make room where new ones find `max_rows` taken; None: new ones "
        "read zeros.",
    )
    share: float = Field(
        0.05, gt=0, le=1, description="Share of `max_rows` that is freed at a time when full."
    )

    @model_validator(mode="after")
    def _rules_fit(self) -> EvictionConfig:
        rules = (self.unused_time, self.unused_steps, self.min_count, self.when_full)
        if not any(rules):
            raise ValueError(
                "set `unused_time`, `unused_steps`, `min_count` or `when_full`: without a rule "
                "no key is evicted"
            )
        if self.unused_time is not None and self.timestamp is None:
            raise ValueError("`unused_time` needs `timestamp`, the feature that holds the time")
        if self.unused_steps is not None and self.timestamp is not None:
            raise ValueError(
                "a table has one clock: `unused_steps` without `timestamp`, or `unused_time`"
            )
        if self.timestamp is not None and not (
            self.unused_time or self.when_full == "least_recent"
        ):
            raise ValueError("no rule uses `timestamp`: set `unused_time`, or leave it out")
        if isinstance(self.every, int) and self.every < 1:
            raise ValueError("`every` must be 1 or more, or epoch")
        return self
