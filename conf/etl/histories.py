"""What happened before an event: histories of behaviours, sessions, rolling counts and rates."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from conf.etl.base import Name, Strict

DISTINCT_LOOKBACK = 4
"""Behaviours looked at per item kept, where repeats are left out and nothing else is said."""


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


class WhereConfig(Strict):
    """Which events count: those whose column has one of some values, or is large enough."""

    column: str
    one_of: tuple[int | str, ...] | None = Field(None, min_length=1)
    at_least: float | None = None

    @model_validator(mode="after")
    def _one_condition(self) -> WhereConfig:
        if (self.one_of is None) == (self.at_least is None):
            raise ValueError("`where` needs either `one_of` or `at_least`")
        return self


class GapsConfig(Strict):
    """Time from each item of a history to the event, as a list beside the items."""

    name: Name
    unit: Literal["s", "m", "h", "d"] = "h"
    log: bool = Field(False, description="log(1 + gap) in place of the gap.")


class BehaviourHistoryConfig(Strict):
    """One history: the user's items of some behaviours strictly before the event, latest first.

    Ties in time are ordered by the place in the input. The items stand in column `name`, each of
    `columns` in `<name>_<column>`: lists of one length, aligned.
    """

    name: Name
    where: WhereConfig | None = None
    columns: tuple[Name, ...] = Field((), description="Event columns carried along the items.")
    gaps: GapsConfig | None = None
    max_len: int = Field(50, ge=1)
    window_days: float | None = Field(None, gt=0, description="Older behaviours are left out.")
    distinct: Literal["consecutive", "item"] | None = Field(
        None,
        description="`consecutive`: the latest of each run of one item; `item`: the latest of "
        "each item.",
    )
    lookback: int | None = Field(
        None,
        ge=1,
        description="Latest behaviours looked at, repeats included; it bounds the work per "
        "event. None: `max_len`, or four times that with `distinct`.",
    )
    within_session: bool = Field(False, description="Only of the event's own session, so far.")

    @model_validator(mode="after")
    def _consistent(self) -> BehaviourHistoryConfig:
        if self.lookback is not None and self.lookback < self.max_len:
            raise ValueError(f"history {self.name!r}: `lookback` is below `max_len`")
        names = [name.lower() for name in self.made]
        if len(set(names)) != len(names):
            raise ValueError(f"history {self.name!r} makes two columns of one name")
        return self

    @property
    def scanned(self) -> int:
        """Number of latest behaviours that are looked at."""
        return self.lookback or self.max_len * (DISTINCT_LOOKBACK if self.distinct else 1)

    @property
    def needs_time(self) -> bool:
        """Whether the history reads event times."""
        return bool(self.gaps or self.window_days or self.within_session)

    def carried(self, column: str) -> str:
        """Name of the list that carries an event column along."""
        return f"{self.name}_{column}"

    @property
    def made(self) -> tuple[str, ...]:
        """Names of the columns that the history makes."""
        gaps = (self.gaps.name,) if self.gaps else ()
        return (self.name, *map(self.carried, self.columns), *gaps)


class SessionsConfig(Strict):
    """Sessions: runs of a user's events without a gap longer than `gap_minutes`.

    Columns: `<name>_id` (string, unique in the log), `<name>_position` (int64, from 1). The
    session so far is a history with `within_session`.
    """

    name: Name = "session"
    gap_minutes: float = Field(30, gt=0)

    @property
    def id_column(self) -> str:
        """Column that names the session."""
        return f"{self.name}_id"

    @property
    def position_column(self) -> str:
        """Column with the event's place in its session, from 1."""
        return f"{self.name}_position"


class RateConfig(Strict):
    """A smoothed rate: (hits + a) / (trials + a + b); the prior mean is a / (a + b)."""

    a: float = Field(gt=0)
    b: float = Field(gt=0)
    out_of: WhereConfig | None = Field(None, description="Which events are trials; None: all.")


class RollingConfig(Strict):
    """A count, or a smoothed rate, of the events with the same keys strictly before the event.

    "Before" is by event time: events at one time do not see one another.
    """

    name: Name
    keys: tuple[str, ...] = Field(min_length=1, description="Columns that the events share.")
    where: WhereConfig | None = Field(None, description="Which events are hits; None: all.")
    rate: RateConfig | None = Field(None, description="None: the number of hits.")
    window_days: float | None = Field(None, gt=0, description="None: since the log begins.")
    delay_s: int | None = Field(
        None, ge=1, description="Age at which an event counts: what it led to is known by then."
    )

    @model_validator(mode="after")
    def _reachable(self) -> RollingConfig:
        if self.rate is not None and self.where is None:
            raise ValueError(
                f"rolling {self.name!r}: a rate needs `where`, which says what a hit is"
            )
        if self.delay_s and self.window_days and self.delay_s >= self.window_days * 86400:
            raise ValueError(f"rolling {self.name!r}: `delay_s` leaves nothing of `window_days`")
        return self
