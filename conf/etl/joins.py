"""Dictionaries joined to each event: by key, or as they stood at the event's time."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from conf.etl.base import Strict
from conf.etl.sources import SourceConfig


class AsOfConfig(Strict):
    """A dictionary whose entries change: several rows per key, each valid from a time on.

    The event gets the entry with the newest `valid_from` of those that were valid and known by
    then. That entry ends at its own `valid_to`; an older one does not come back.
    """

    valid_from: str = Field(description="int64 column: time from which the entry is valid.")
    valid_to: str | None = Field(None, description="int64 column: end of validity; null: open.")
    known_at: str | None = Field(
        None, description="int64 column: time at which the entry became known (late corrections)."
    )
    time_unit: Literal["s", "ms"] = "s"
    match: Literal["strictly_before", "at_or_before"] = Field(
        "strictly_before",
        description="Whether an entry counts for events at the very time of its `valid_from` "
        "(and `known_at`).",
    )

    @property
    def columns(self) -> tuple[str, ...]:
        """The time columns that are declared."""
        named = (self.valid_from, self.valid_to, self.known_at)
        return tuple(column for column in named if column is not None)


class JoinConfig(Strict):
    """A dictionary joined to each event by key."""

    source: str
    column: str = Field(description="Column of the event that holds the dictionary's key.")
    unmatched: Literal["drop", "keep", "fail"] = "drop"
    strategy: Literal["auto", "broadcast", "sort_merge", "salted"] = Field(
        "auto",
        description="`auto`: broadcast up to `broadcast_bytes` of files, sort-merge above. "
        "`salted`: sort-merge that spreads frequent keys over several tasks. The rows are the "
        "same whichever is chosen.",
    )
    broadcast_bytes: int = Field(
        32 << 20, ge=0, description="Largest dictionary, in bytes of files, that `auto` broadcasts."
    )
    salts: int | None = Field(
        None,
        ge=2,
        description="Parts into which every key is spread (strategy: salted); None: only the "
        "frequent keys of a sample are, over as many tasks as a shuffle has.",
    )
    as_of: AsOfConfig | None = None

    def added_columns(self, dictionary: SourceConfig) -> dict[str, str]:
        """Returns name and type of the columns that the events get from the dictionary.

        Not its key, and not `valid_to`: an entry is often closed by what came after the event.
        """
        left_out = {dictionary.key, self.as_of.valid_to if self.as_of else None}
        types = dictionary.column_types.items()
        return {name: kind for name, kind in types if name not in left_out}

    @model_validator(mode="after")
    def _consistent(self) -> JoinConfig:
        if self.salts is not None and self.strategy != "salted":
            raise ValueError("`salts` goes with `strategy: salted`, and only with it")
        if self.as_of is not None and self.strategy != "auto":
            raise ValueError(
                "a join as of the event's time sorts events and entries together; it takes no "
                "`strategy`"
            )
        return self
