"""The event log, the dictionaries joined to it, and histories."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from conf.etl.base import Name, Strict


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
