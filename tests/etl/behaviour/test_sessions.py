"""Sessions: cut at long gaps, numbered per user, blind for what is left out."""

from __future__ import annotations

from etl.behaviour.sessions import current_sessions
from etl.events import kept, prepare_events
from tests.etl.behaviour.reference import Event
from tests.etl.frames import behaviour_config, memory_source

CONFIG = behaviour_config(sessions={"name": "visit", "gap_minutes": 10})
EVENTS = [
    Event(1, 1, "view", 1.0, 0),
    Event(1, 2, "view", 1.0, 600),  # exactly the gap: still the same session
    Event(1, 2, "view", 1.0, 600),  # a duplicate opens nothing and counts nowhere
    Event(1, 3, "view", 1.0, 1201),
    Event(2, 1, "view", 1.0, 700),
]


def test_a_session_ends_after_a_gap_that_is_too_long(spark):
    source = memory_source(spark, CONFIG, "log", [event.row() for event in EVENTS])
    frame = kept(prepare_events(CONFIG, {"log": source}).frame)
    rows = {(r["user"], r["ts"]): (r["visit_id"], r["visit_position"]) for r in frame.collect()}
    assert rows == {
        (1, 0): ("1-1", 1),
        (1, 600): ("1-1", 2),
        (1, 1201): ("1-2", 1),
        (2, 700): ("2-1", 1),
    }
    # The log ends at 1201: user 2's session may go on until 1300.
    current = {row["user"]: row["__session"] for row in current_sessions(frame, CONFIG).collect()}
    assert current == {1: 2, 2: 1}
