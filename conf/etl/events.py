"""The event log: who met what, when."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from conf.etl.base import Strict


class EventsConfig(Strict):
    """The event log: who met what, when.

    Without `user` each row is a sample of its own, with no past: there are no histories made from
    other rows, no seen items and no `users` split. Without `item` there is no catalogue.
    """

    source: str
    user: str | None = None
    item: str | None = None
    time: str | None = Field(None, description="Time column; None: the file's order is the time.")
    history: str | None = Field(
        None, description="List column of the log that holds the items before the event already."
    )
    history_order: Literal["oldest_first", "latest_first"] = Field(
        "oldest_first", description="Order of `history` in the log; records hold latest first."
    )
    time_unit: Literal["s", "ms"] = "s"
    deduplicate: bool = Field(
        True,
        description="Of equal (user, item, time) keep the first. Without a time column repeats "
        "cannot be told from duplicates, and all are kept; so are rows without a user or item.",
    )

    @model_validator(mode="after")
    def _history_of_items(self) -> EventsConfig:
        if self.history is not None and self.item is None:
            raise ValueError("events.history holds items: it needs events.item")
        return self

    @property
    def has_behaviour(self) -> bool:
        """Whether rows belong to users and name items, so that users have histories."""
        return self.user is not None and self.item is not None
