"""The behaviour log and its labels."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

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


class LabelConfig(Strict):
    """A binary label from a numeric column of the event."""

    column: str
    at_least: float
    name: Name = "label"
