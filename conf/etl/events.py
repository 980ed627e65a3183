"""The event log and the columns added to it: joins, histories, sessions, windowed features."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, model_validator

from conf.config_base import Name, Named, Strict, StrictFinite
from conf.etl.sources import SourceConfig


class EventsConfig(Strict):
    """The event log: who met what, when.

    Without `user` each row is a sample of its own, with no past: there are no histories made from
    other rows, no seen items and no `users` split. Without `item` there is no catalogue.
    """

    source: str = Field(description="Source that is the log.")
    user: str | None = Field(None, description="Column of the user; None: rows belong to nobody.")
    item: str | None = Field(
        None, description="Column of the log, or of a dictionary that is joined to it."
    )
    where: str | None = Field(
        None,
        min_length=1,
        description="Condition in Spark's SQL over the columns of the events: those that meet it "
        "are samples. The others stay in histories, seen items and rolling counts.",
    )
    time: str | None = Field(None, description="Time column; None: the file's order is the time.")
    history: str | None = Field(
        None,
        description="List column of the log that holds what came before the event already: items, "
        "or what stands in them, such as the videos of columns.",
    )
    history_order: Literal["oldest_first", "latest_first"] = Field(
        "oldest_first", description="Order of `history` in the log; records hold latest first."
    )
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
    def has_user_histories(self) -> bool:
        """Whether rows belong to users and name items, so that users have histories."""
        return self.user is not None and self.item is not None


Positive = Annotated[float, Field(gt=0)]


class AsOf(NamedTuple):
    """What tells which of several entries of a key an event gets; see `JoinConfig`."""

    valid_from: str
    valid_to: str | None
    known_at: str | None
    match: str

    @property
    def columns(self) -> tuple[str, ...]:
        """The time columns that are declared."""
        named = (self.valid_from, self.valid_to, self.known_at)
        return tuple(column for column in named if column is not None)


class JoinConfig(Strict):
    """A dictionary joined to each event by key.

    With `valid_from` its entries change: several rows per key, each valid from a time on. The event
    gets the entry with the newest `valid_from` of those that were valid and known by then. That
    entry ends at its own `valid_to`; an older one does not come back.
    """

    source: str = Field(description="Source that is the dictionary.")
    column: str = Field(description="Column of the event that holds the dictionary's key.")
    unmatched: Literal["drop", "keep", "fail"] = Field(
        "drop",
        description="Events without an entry: dropped and counted, kept with nulls, or the "
        "end of the build.",
    )
    valid_from: str | None = Field(
        None, description="Time column: from when on an entry is valid; None: always."
    )
    valid_to: str | None = Field(None, description="Time column: end of validity; null: open.")
    known_at: str | None = Field(
        None, description="Time column: when the entry became known (late corrections)."
    )
    match: Literal["strictly_before", "at_or_before"] = Field(
        "strictly_before",
        description="Whether an entry counts for events at the very time of its `valid_from` "
        "(and `known_at`).",
    )

    @model_validator(mode="after")
    def _valid_from_a_time(self) -> JoinConfig:
        if self.valid_from is None and (self.valid_to or self.known_at):
            raise ValueError("`valid_to` and `known_at` go with `valid_from`")
        return self

    @property
    def as_of(self) -> AsOf | None:
        """How entries that change are told apart; None: there is one of each key."""
        if self.valid_from is None:
            return None
        return AsOf(self.valid_from, self.valid_to, self.known_at, self.match)

    def added_columns(self, dictionary: SourceConfig) -> dict[str, str]:
        """Returns name and type of the columns that the events get from the dictionary.

        Not its key, and not `valid_to`: an entry is often closed by what came after the event.
        """
        left_out = {dictionary.key, self.valid_to}
        types = dictionary.column_types.items()
        return {name: kind for name, kind in types if name not in left_out}


DISTINCT_LOOKBACK = 4
"""Behaviours looked at per item kept, where repeats are left out."""


class EventConditionConfig(StrictFinite):
    """Which events count: those whose column has one of some values, or is large enough."""

    column: str = Field(description="Column of the event.")
    one_of: tuple[int | float | str, ...] | None = Field(
        None, min_length=1, description="Values that count; of a label, those that make a 1."
    )
    at_least: float | None = Field(
        None, description="Least value that counts; of a label, that makes a 1."
    )

    @model_validator(mode="after")
    def _one_condition(self) -> EventConditionConfig:
        if (self.one_of is None) == (self.at_least is None):
            raise ValueError("`where` needs either `one_of` or `at_least`")
        return self


class PastConfig(Named):
    """Events of the past that a column is made of."""

    where: EventConditionConfig | None = Field(
        None, description="Which events count, or are hits; None: all."
    )
    window_days: float | None = Field(
        None, gt=0, description="Older events are left out; None: since the log begins."
    )


class ListConfig(Named):
    """A list of bounded length."""

    max_len: int = Field(
        50, ge=1, description="Values kept: of a history the latest, else the most frequent."
    )


class UserHistoryConfig(PastConfig, ListConfig):
    """One history: the user's items of some behaviours strictly before the event, latest first.

    Ties in time are ordered by the place in the input; where `where` or `columns` read a label, or
    what it is made of, events of one time do not see one another. Beside a label by conversions
    any column may. The items stand in column `name`, each of `columns` in `<name>_<column>`, the
    time from each item to the event in `<name>_age`: lists of one length, aligned.
    """

    name: Name = Field("history", description="Name of the column or feature.")
    columns: tuple[Name, ...] = Field((), description="Event columns carried along the items.")
    gaps: Literal["s", "m", "h", "d"] | None = Field(
        None, description="Unit of the times to the event; None: there is no such list."
    )
    distinct: Literal["consecutive", "item"] | None = Field(
        None,
        description="`consecutive`: the latest of each run of one item; `item`: the latest of "
        "each item, among the latest four times `max_len`.",
    )
    within_session: bool = Field(False, description="Only of the event's own session, so far.")

    @model_validator(mode="after")
    def _consistent(self) -> UserHistoryConfig:
        names = [name.lower() for name in self.made]
        if len(set(names)) != len(names):
            raise ValueError(f"history {self.name!r} makes two columns of one name")
        return self

    @property
    def scanned(self) -> int:
        """Number of latest behaviours that are looked at, repeats included."""
        return self.max_len * (DISTINCT_LOOKBACK if self.distinct else 1)

    @property
    def is_whole(self) -> bool:
        """Whether it holds the latest events as they were, none of them left out."""
        return not (self.where or self.window_days or self.distinct or self.within_session)

    @property
    def needs_time(self) -> bool:
        """Whether the history reads event times."""
        return bool(self.gaps or self.window_days or self.within_session)

    @property
    def reads(self) -> tuple[str, ...]:
        """The event columns that it reads beside the item."""
        return (*self.columns, *((self.where.column,) if self.where else ()))

    def carried(self, column: str) -> str:
        """Name of the list that carries an event column along."""
        return f"{self.name}_{column}"

    @property
    def made(self) -> tuple[str, ...]:
        """Names of the columns that the history makes."""
        gaps = (self.carried("age"),) if self.gaps else ()
        return (self.name, *map(self.carried, self.columns), *gaps)


SESSION_ID = "session_id"
"""Column that names an event's session: the user, and the session's first time in milliseconds."""
SESSION_POSITION = "session_position"
"""Column with the event's place in its session, from 1."""


class MostFrequentConfig(ListConfig):
    """A list for each item: what stands most often beside it in the events of the train split.

    The most frequent first, ties by value; an item that the train split has without a value has
    an empty list.
    """

    column: str = Field(description="Column of the events whose values are counted.")


class WindowedFeatureConfig(PastConfig):
    """A count, or a smoothed rate, of the events with the same keys strictly before the event.

    "Before" is by event time: events at one time do not see one another. A rate is
    (hits + a) / (trials + a + b), whose prior mean is a / (a + b).
    """

    keys: tuple[str, ...] = Field(min_length=1, description="Columns that the events share.")
    rate: tuple[Positive, Positive] | None = Field(
        None, description="[a, b], hits and other trials that are added; None: the number of hits."
    )
    out_of: EventConditionConfig | None = Field(
        None, description="Which events are trials of a rate; None: all."
    )
    delay_s: int | None = Field(
        None, ge=1, description="Age at which an event counts: what it led to is known by then."
    )

    @model_validator(mode="after")
    def _reachable(self) -> WindowedFeatureConfig:
        if self.rate is None and self.out_of is not None:
            raise ValueError(f"rolling {self.name!r}: `out_of` goes with `rate`")
        if self.rate is not None and self.where is None:
            raise ValueError(
                f"rolling {self.name!r}: a rate needs `where`, which says what a hit is"
            )
        if self.delay_s and self.window_days and self.delay_s >= self.window_days * 86400:
            raise ValueError(f"rolling {self.name!r}: `delay_s` leaves nothing of `window_days`")
        return self
