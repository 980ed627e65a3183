"""No feature knows its event's own time or later: whatever happens then, it stays the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etl.encoders.feature_plan import made_history_columns
from etl.events.columns import kept
from etl.records.samples import build_samples
from tests.etl.events.history_reference import Event
from tests.etl.events.prepared import prepare
from tests.etl.events.test_histories import HISTORIES, ROLLING
from tests.etl.logs import behaviour_config, columns
from tests.machine import IS_EXHAUSTIVE

NOW = 20 * 3600
TARGET = Event(1, 1, "click", 0.5, NOW)
STATE = columns(
    product="int64", valid_from="int64", valid_to="int64?", known_at="int64", state="int64"
)
# Items stand for their world here, so none may decide what is in a list.
OTHERS = [history for history in HISTORIES if history["name"] not in ("high", "history")]
_BASE = behaviour_config().model_dump()
CONFIG = behaviour_config(
    sources={**_BASE["sources"], "state": {"path": "state", "columns": STATE, "key": "product"}},
    joins=[
        {
            "source": "state",
            "column": "item",
            "unmatched": "keep",
            "valid_from": "valid_from",
            "valid_to": "valid_to",
            "known_at": "known_at",
        }
    ],
    histories=[{"max_len": 3}, *OTHERS, {"name": "states", "max_len": 3, "columns": ["state"]}],
    session_gap_minutes=120,
    rolling=ROLLING,
    seen=False,
)
FEATURES = [*made_history_columns(CONFIG), "state", "valid_from"]


def events_at(hours: st.SearchStrategy[int], most: int) -> st.SearchStrategy[list[Event]]:
    return st.lists(
        st.builds(
            Event,
            user=st.integers(1, 2),
            item=st.integers(1, 3),
            action=st.sampled_from(["view", "click", "buy"]),
            price=st.sampled_from([0.0625, 0.5]),
            ts=hours.map(lambda hour: hour * 3600),
        ),
        max_size=most,
        unique_by=lambda e: (e.user, e.item, e.ts, e.action),
    )


def entries_at(
    valid: st.SearchStrategy[int], known: st.SearchStrategy[int]
) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    hours = st.tuples(st.integers(1, 3), valid, st.none(), known, st.integers(0, 99))
    return st.lists(
        hours.map(lambda e: (e[0], e[1] * 3600, None, e[3] * 3600, e[4])),
        max_size=6,
        unique_by=lambda e: (e[0], e[1], e[3]),
    )


LATER = st.integers(20, 40)


@dataclass(frozen=True)
class World:
    """One course of things from the event's time on."""

    events: list[Event]
    entries: list[tuple[Any, ...]]
    closed_at: int | None


WORLDS = st.builds(
    World,
    events=events_at(LATER, 12),
    # Valid in the future; or of the past, but known in the future.
    entries=st.builds(
        lambda a, b: [*a, *b],
        entries_at(LATER, LATER),
        entries_at(st.integers(0, 19), LATER),
    ),
    closed_at=st.none() | LATER.map(lambda hour: hour * 3600),
)
CASES = st.lists(
    st.tuples(
        events_at(st.integers(0, 19), 25),
        entries_at(st.integers(0, 19), st.integers(0, 19)),
        WORLDS,
        WORLDS,
    ),
    min_size=4,
    max_size=8,
)


@settings(
    max_examples=3 if IS_EXHAUSTIVE else 2,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(cases=CASES)
def test_changing_the_future_changes_no_feature_of_the_past(spark, cases):
    """Both worlds of every case go through one build, as users and items of their own."""
    log: list[Event] = []
    entries: list[tuple[Any, ...]] = []
    for number, (past, known, *worlds) in enumerate(cases):
        for side, world in enumerate(worlds):
            shift = 1000 * (2 * number + side)
            late = [e for e in world.events if e.ts > NOW]
            tied = [e for e in world.events if e.ts == NOW and e.row()[:3] != TARGET.row()[:3]]
            # The future stands first in the file; of one time, what came first counts as before.
            log += [_move(e, shift) for e in (*late, *past, TARGET, *tied)]
            closed = [(*e[:2], world.closed_at, *e[3:]) for e in known]
            entries += [(e[0] + shift, *e[1:]) for e in _unique([*closed, *world.entries])]
    prepared = prepare(spark, CONFIG, [event.row() for event in log], state=entries)
    samples = build_samples(kept(prepared.frame), CONFIG)
    rows = {(r["user"], r["item"], r["action"], r["ts"]): r for r in samples.collect()}
    assert len(rows) == len(log)
    for number, (past, *_) in enumerate(cases):
        for event in (*past, TARGET):
            first, second = (
                _features(rows, _move(event, 1000 * (2 * number + side))) for side in (0, 1)
            )
            assert first == second


def _move(event: Event, shift: int) -> Event:
    return replace(event, user=event.user + shift, item=event.item + shift)


def _unique(entries: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return list({(e[0], e[1], e[3]): e for e in reversed(entries)}.values())


def _features(rows: dict[tuple[Any, ...], Any], event: Event) -> dict[str, Any]:
    row = rows[event.user, event.item, event.action, event.ts]
    found = {name: row[name] for name in FEATURES}
    # Items are told apart by world; users stand in the name of the session.
    for name in ("history", *(history["name"] for history in OTHERS), "states"):
        found[name] = [item % 1000 for item in found[name]]
    found["session_id"] = found["session_id"].split("-")[1]
    return found
