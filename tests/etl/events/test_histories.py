"""Histories and sessions: against plain loops, aligned, bounded, the same for users and events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conf.etl.build import BuildConfig
from etl.events.event_log import kept, prepare_events
from etl.events.histories import add_histories, add_latest_histories
from etl.events.sessions import add_sessions, current_sessions
from tests.etl.events.history_reference import Event, history_of, number_sessions
from tests.etl.logs import behaviour_config, memory_source
from tests.machine import IS_EXHAUSTIVE

CLICKS = {"column": "action", "one_of": ["click"]}
HISTORIES: list[dict[str, Any]] = [
    {"name": "all", "max_len": 3, "columns": ["action", "price"]},
    {
        "name": "clicks",
        "where": {"column": "action", "one_of": ["click", "buy"]},
        "max_len": 2,
        "gaps": {"name": "clicks_age", "unit": "h", "log": True},
        "window_days": 1.5,
    },
    {"name": "runs", "max_len": 3, "distinct": "consecutive", "lookback": 5, "columns": ["price"]},
    {"name": "items", "where": CLICKS, "max_len": 3, "distinct": "item", "columns": ["price"]},
    {"name": "dear", "where": {"column": "price", "at_least": 0.1}, "max_len": 2},
    {"name": "high", "where": {"column": "item", "at_least": 2.5}, "max_len": 2},
    {
        "name": "session",
        "max_len": 4,
        "within_session": True,
        "gaps": {"name": "session_age", "unit": "m"},
    },
]
CONFIG = behaviour_config(
    histories=HISTORIES, history={"max_len": 2}, sessions={"name": "visit", "gap_minutes": 120}
)

EVENTS = st.lists(
    st.builds(
        Event,
        user=st.integers(1, 3),
        item=st.integers(1, 4),
        action=st.sampled_from(["view", "click", "buy"]),
        price=st.sampled_from([0.0625, 0.1, 0.5]),
        ts=st.integers(0, 30).map(lambda hour: hour * 3600),
    ),
    min_size=5,
    max_size=60,
    unique_by=lambda e: (e.user, e.item, e.ts, e.action),
)


def by_user(events: list[Event]) -> dict[int, list[Event]]:
    """Each user's events in the declared order: time, then the place in the input."""
    users = sorted({event.user for event in events})
    return {u: sorted((e for e in events if e.user == u), key=lambda e: e.ts) for u in users}


def prepared(spark: Any, config: BuildConfig, events: list[Event]) -> Any:
    source = memory_source(spark, config, "log", [event.row() for event in events])
    return kept(prepare_events(config, {"log": source}).frame)


def rounded(made: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [round(v, 4) if isinstance(v, float) else v for v in values]
        for name, values in made.items()
    }


@settings(
    max_examples=3 if IS_EXHAUSTIVE else 1,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(events=EVENTS)
def test_every_history_is_what_plain_loops_find(spark, events):
    frame = prepared(spark, CONFIG, events)
    columns = [name for history in CONFIG.histories for name in history.made]
    samples = add_histories(frame, CONFIG).collect()
    assert len(samples) == len(events)
    found = {(r["user"], r["__position"]): rounded({c: r[c] for c in columns}) for r in samples}
    plain = {(r["user"], r["__position"]): r["history"] for r in samples}
    users = add_latest_histories(frame.select("user").distinct(), frame, CONFIG).collect()
    latest = {row["user"]: rounded({c: row[c] for c in columns}) for row in users}
    end = max(event.ts for event in events)
    for user, mine in by_user(events).items():
        numbers = number_sessions(mine, 120)
        for i, event in enumerate(mine):
            expected: dict[str, Any] = {}
            for history in CONFIG.histories:
                expected |= history_of(mine[:i], history, event.ts, numbers[:i], numbers[i])
            assert found[user, i + 1] == rounded(expected)
            assert plain[user, i + 1] == [e.item for e in mine[:i]][::-1][:2]
        goes_on = end - mine[-1].ts <= 7200
        expected = {}
        for history in CONFIG.histories:
            current = numbers[-1] if goes_on else None
            expected |= history_of(mine, history, end, numbers, current)
        assert latest[user] == rounded(expected)


def test_no_frame_holds_more_than_the_declared_lookback(spark):
    """A giant user costs no more memory than others: every collecting frame is bounded."""
    frame = prepared(spark, CONFIG, [Event(1, 1, "click", 1.0, 0)])
    samples = add_sessions(add_histories(frame, CONFIG), CONFIG)
    plan = samples._jdf.queryExecution().optimizedPlan().toString()
    collecting = plan.split("collect_list")[1:]
    assert len(collecting) >= len(CONFIG.histories)
    assert not any("unboundedpreceding" in part.split("AS")[0] for part in collecting)
    frames = [part.split("specifiedwindowframe(")[1].split(")")[0] for part in collecting]
    assert {frame.split(",")[1].strip() for frame in frames} <= {
        "-2",
        "-3",
        "-4",
        "-5",
        "-11",
        "-1",
    }


def test_a_history_of_one_user_with_most_events_is_the_same(spark):
    events = [Event(1, i % 7, "click" if i % 50 == 0 else "view", 1.0, i) for i in range(2000)]
    config = behaviour_config(
        histories=[{"name": "clicks", "where": CLICKS, "max_len": 3, "columns": ["price"]}]
    )
    rows = add_histories(prepared(spark, config, events), config).collect()
    by_ts = {row["ts"]: row["clicks"] for row in rows}
    assert by_ts[0] == []
    assert by_ts[1] == [0]
    # The latest clicks lie up to 150 events back.
    assert by_ts[1999] == [e.item for e in events if e.action == "click"][::-1][:3]
    assert by_ts[100] == [50 % 7, 0]


@pytest.mark.parametrize("distinct", ["consecutive", "item"])
def test_repeats_are_looked_for_in_the_lookback_only(spark, distinct):
    items = [1, 2, 2, 2, 2, 2, 2, 2]
    events = [Event(1, item, "view", 1.0, ts) for ts, item in enumerate(items)]
    history = {"name": "h", "max_len": 2, "distinct": distinct}
    wide, narrow = ({**history, "lookback": n} for n in (7, 6))
    for declared, expected in ((wide, [2, 1]), (narrow, [2])):
        config = behaviour_config(histories=[declared])
        rows = add_histories(prepared(spark, config, events), config).collect()
        assert max(rows, key=lambda row: row["ts"])["h"] == expected


SESSIONS_CONFIG = behaviour_config(sessions={"name": "visit", "gap_minutes": 10})
SESSIONS_EVENTS = [
    Event(1, 1, "view", 1.0, 0),
    Event(1, 2, "view", 1.0, 600),  # exactly the gap: still the same session
    Event(1, 2, "view", 1.0, 600),  # a duplicate opens nothing and counts nowhere
    Event(1, 3, "view", 1.0, 1201),
    Event(2, 1, "view", 1.0, 700),
]


def test_a_session_ends_after_a_gap_that_is_too_long(spark):
    source = memory_source(
        spark, SESSIONS_CONFIG, "log", [event.row() for event in SESSIONS_EVENTS]
    )
    frame = kept(prepare_events(SESSIONS_CONFIG, {"log": source}).frame)
    rows = {(r["user"], r["ts"]): (r["visit_id"], r["visit_position"]) for r in frame.collect()}
    assert rows == {
        (1, 0): ("1-1", 1),
        (1, 600): ("1-1", 2),
        (1, 1201): ("1-2", 1),
        (2, 700): ("2-1", 1),
    }
    # The log ends at 1201: user 2's session may go on until 1300.
    current = {
        row["user"]: row["__session"] for row in current_sessions(frame, SESSIONS_CONFIG).collect()
    }
    assert current == {1: 2, 2: 1}
