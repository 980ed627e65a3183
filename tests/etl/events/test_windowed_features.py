"""Rolling counts and rates: against plain loops, blind for events of the same time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from etl.events.columns import kept
from etl.events.counted_features import add_latest_windowed_features, add_windowed_features
from tests.etl.events.history_reference import Event, rolling_of
from tests.etl.events.prepared import prepare
from tests.etl.events.test_histories import CLICKS, EVENTS
from tests.etl.logs import behaviour_config
from tests.machine import IS_EXHAUSTIVE

VIEWS = {"column": "action", "one_of": ["view"]}
ROLLING: list[dict[str, Any]] = [
    {"name": "user_events", "keys": ["user"]},
    {"name": "user_clicks_1d", "keys": ["user"], "where": CLICKS, "window_days": 1},
    {"name": "item_ctr", "keys": ["item"], "where": CLICKS, "rate": [1, 9]},
    {
        "name": "item_ctr_12h",
        "keys": ["item"],
        "where": CLICKS,
        "window_days": 0.5,
        "delay_s": 7200,
        "rate": [0.5, 2],
        "out_of": VIEWS,
    },
    {"name": "pair_dear", "keys": ["user", "item"], "where": {"column": "price", "at_least": 0.1}},
]
CONFIG = behaviour_config(rolling=ROLLING)


@settings(
    max_examples=3 if IS_EXHAUSTIVE else 1,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(events=EVENTS)
def test_every_feature_is_what_plain_loops_count(spark, events):
    frame = kept(prepare(spark, CONFIG, [event.row() for event in events]).frame)
    rows = {
        Event(*(r[c] for c in ("user", "item", "action")), 0, r["ts"]): r for r in frame.collect()
    }
    assert len(rows) == len(events)
    for event in events:
        row = rows[Event(event.user, event.item, event.action, 0, event.ts)]
        for rolling in CONFIG.rolling:
            key = tuple(getattr(event, k) for k in rolling.keys)
            expected = rolling_of(events, rolling, key, event.ts)
            assert row[rolling.name] == pytest.approx(expected, rel=1e-6), rolling.name
    end = max(event.ts for event in events)
    items = spark.createDataFrame([(1,), (99,)], "item bigint")
    for row in add_latest_windowed_features(items, frame, CONFIG, "item").collect():
        for rolling in CONFIG.rolling[2:4]:
            expected = rolling_of(events, rolling, (row["item"],), end, own=0)
            assert row[rolling.name] == pytest.approx(expected, rel=1e-6), rolling.name


def test_null_keys_and_left_out_events_do_not_count_and_windows_begin_at_their_millisecond(spark):
    schema = "item bigint, action string, __event_ts_ms bigint, __drop string"
    rows = [
        (None, "click", 1000, None),
        (None, "click", 2000, None),
        (5, "click", 1000, "duplicate"),
        (5, "click", 1500, None),
        (5, "click", 3000, None),
        # 0.7 days are 60,480,000 ms, and 0.7 * 86,400,000 a little less.
        (6, "view", 0, None),
        (6, "view", 60_480_000, None),
        (6, "view", 60_480_001, None),
    ]
    config = behaviour_config(
        rolling=[
            {"name": "n", "keys": ["item"], "window_days": 0.7},
            {"name": "rate", "keys": ["item"], "where": CLICKS, "rate": [1, 3]},
        ]
    )
    log = spark.createDataFrame(rows, schema)
    found = add_windowed_features(log, config).collect()
    values = {(r["item"], r["__event_ts_ms"]): (r["n"], r["rate"]) for r in found}
    assert values[None, 2000] == (0, 0.25)
    assert values[5, 1500] == (0, 0.25)
    assert values[5, 3000] == (1, pytest.approx(0.4))
    assert [values[6, ts][0] for ts in (0, 60_480_000, 60_480_001)] == [0, 1, 1]
    items, end = spark.createDataFrame([(6,)], "item bigint"), "__event_ts_ms <= 60480000"
    [item] = add_latest_windowed_features(items, log.where(end), config, "item").collect()
    assert item["n"] == 2
