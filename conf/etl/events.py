"""The behaviour log, the dictionaries joined to it, histories and labels."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from conf.etl.base import Name, Strict


class EventsConfig(Strict):
    """The behaviour log: who met what, when."""

    source: str
    user: str
    item: str
    time: str | None = Field(None, description="Time column; None: the file's order is the time.")
    time_unit: Literal["s", "ms"] = "s"
    deduplicate: bool = Field(
        True,
        description="Of equal (user, item, time) keep the first. Without a time column repeats "
        "cannot be told from duplicates, and all are kept.",
    )


class JoinConfig(Strict):
    """A dictionary joined to each event by key."""

    source: str
    column: str = Field(description="Column of the event that holds the dictionary's key.")
    unmatched: Literal["drop", "keep", "fail"] = "drop"


class HistoryConfig(Strict):
    """The user's items strictly before the event (ties in time: file order), latest first."""

    name: Name = "history"
    max_len: int = Field(50, ge=1)
    min_len: int | None = Field(None, ge=1, description="Samples with fewer are dropped.")

    @model_validator(mode="after")
    def _reachable(self) -> HistoryConfig:
        if self.min_len is not None and self.min_len > self.max_len:
            raise ValueError("`min_len` above `max_len` drops every sample")
        return self


class LabelConfig(Strict):
    """A binary label from a numeric column of the event."""

    column: str
    at_least: float
    name: Name = "label"
