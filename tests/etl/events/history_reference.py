"""Histories, sessions and windowed features as plain loops over plain events: the slow truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from conf.etl.events import EventConditionConfig, UserHistoryConfig, WindowedFeatureConfig

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class Event:
    user: int
    item: int
    action: str
    price: float
    ts: int

    def row(self) -> tuple[Any, ...]:
        return (self.user, self.item, self.action, self.price, self.ts)


def meets(event: Event, where: EventConditionConfig | None) -> bool:
    if where is None:
        return True
    value = getattr(event, where.column)
    return value in where.one_of if where.one_of else value >= (where.at_least or 0)


def number_sessions(mine: Sequence[Event], gap_minutes: float) -> list[int]:
    numbers: list[int] = []
    for i, event in enumerate(mine):
        if i == 0:
            numbers.append(1)
        else:
            pause = event.ts - mine[i - 1].ts
            numbers.append(numbers[-1] + (pause > gap_minutes * 60))
    return numbers


def history_of(
    mine: Sequence[Event],
    history: UserHistoryConfig,
    ts: int,
    sessions: Sequence[int],
    session: int | None,
) -> dict[str, list[Any]]:
    """The history of an event at `ts` in `session` that comes right after `mine`."""
    found = [(e, s) for e, s in zip(mine, sessions, strict=True) if meets(e, history.where)]
    found = found[::-1][: history.scanned]
    if history.window_days:
        found = [(e, s) for e, s in found if ts - e.ts <= history.window_days * 86400]
    if history.within_session:
        found = [(e, s) for e, s in found if s == session]
    events: list[Event] = []
    for event, _ in found:
        if history.distinct == "item" and event.item in [e.item for e in events]:
            continue
        if history.distinct == "consecutive" and events and events[-1].item == event.item:
            continue
        events.append(event)
    events = events[: history.max_len]
    made: dict[str, list[Any]] = {history.name: [e.item for e in events]}
    for column in history.columns:
        made[history.carried(column)] = [getattr(e, column) for e in events]
    if history.gaps:
        made[history.carried("age")] = [(ts - e.ts) / _SECONDS[history.gaps] for e in events]
    return made


def rolling_of(
    others: Sequence[Event],
    rolling: WindowedFeatureConfig,
    key: tuple[Any, ...],
    ts: int,
    own: int = 1,
) -> float:
    """The value for an event at `ts` with that key; `own` is the youngest age that counts."""
    age = max(own, rolling.delay_s or 0)
    days = rolling.window_days
    past = [
        e
        for e in others
        if tuple(getattr(e, k) for k in rolling.keys) == key
        and e.ts <= ts - age
        and (days is None or e.ts >= ts - days * 86400)
    ]
    hits = sum(meets(e, rolling.where) for e in past)
    if rolling.rate is None:
        return hits
    trials = sum(meets(e, rolling.out_of) for e in past)
    a, b = rolling.rate
    return (hits + a) / (trials + a + b)
