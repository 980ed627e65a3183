"""Histories, sessions, rolling counts and rates: against plain loops, aligned, bounded."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from conf.etl.build import BuildConfig
from conf.etl.events import EventsConfig
from conf.etl.labels import LabelConfig
from etl.events.columns import kept
from etl.events.conditions import find_position
from etl.events.counted_features import add_latest_windowed_features, add_windowed_features
from etl.events.event_counts import count_events
from etl.events.histories import add_histories, add_latest_histories, add_sessions
from tests.etl.events.history_reference import Event, history_of, number_sessions, rolling_of
from tests.etl.events.prepared import prepare
from tests.etl.logs import behaviour_config, columns
from tests.machine import IS_EXHAUSTIVE

CLICKS = {"column": "action", "one_of": ["click"]}
HISTORIES: list[dict[str, Any]] = [
    {"name": "history", "max_len": 2},
    {"name": "all", "max_len": 3, "columns": ["action", "price"]},
    {
        "name": "clicks",
        "where": {"column": "action", "one_of": ["click", "buy"]},
        "max_len": 2,
        "gaps": "h",
        "window_days": 1.5,
    },
    {"name": "runs", "max_len": 3, "distinct": "consecutive", "columns": ["price"]},
    {"name": "items", "where": CLICKS, "max_len": 3, "distinct": "item", "columns": ["price"]},
    {"name": "dear", "where": {"column": "price", "at_least": 0.1}, "max_len": 2},
    {"name": "high", "where": {"column": "item", "at_least": 2.5}, "max_len": 2},
    {
        "name": "session",
        "max_len": 4,
        "within_session": True,
        "gaps": "m",
    },
]
CONFIG = behaviour_config(histories=HISTORIES, session_gap_minutes=120)

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
    return kept(prepare(spark, config, [event.row() for event in events]).frame)


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
@given(events=EVENTS, is_labelled=st.booleans())
@example(
    events=[Event(1, i % 3, "click" if i % 4 else "buy", 0.5, i // 4 * 3600) for i in range(40)],
    is_labelled=True,
)
def test_every_history_is_what_plain_loops_find(spark, events, is_labelled):
    label = {"column": "action", "one_of": ["buy"]} if is_labelled else None
    config = CONFIG.model_copy(update={"label": label and LabelConfig.model_validate(label)})
    frame = prepared(spark, config, events)
    columns = [name for history in config.histories for name in history.made]
    samples = add_histories(frame, config).collect()
    assert len(samples) == len(events)
    found = {(r["user"], r["__position"]): rounded({c: r[c] for c in columns}) for r in samples}
    plain = {(r["user"], r["__position"]): r["history"] for r in samples}
    users = add_latest_histories(frame.select("user").distinct(), frame, config).collect()
    latest = {row["user"]: rounded({c: row[c] for c in columns}) for row in users}
    end = max(event.ts for event in events)
    for user, mine in by_user(events).items():
        numbers = number_sessions(mine, 120)
        for i, event in enumerate(mine):
            expected: dict[str, Any] = {}
            for history in config.histories:
                # What tells the label of an event tells nothing to others of its time.
                is_told = is_labelled and "action" in history.reads
                end_of = next(k for k, e in enumerate(mine) if e.ts == event.ts) if is_told else i
                expected |= history_of(
                    mine[:end_of], history, event.ts, numbers[:end_of], numbers[i]
                )
            assert found[user, i + 1] == rounded(expected)
            assert plain[user, i + 1] == [e.item for e in mine[:i]][::-1][:2]
        goes_on = end - mine[-1].ts <= 7200
        expected = {}
        for history in config.histories:
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
    starts = {int(frame.split(",")[1]) for frame in frames}
    assert starts <= {-2, -3, -4, -12, -11, -1}


def test_a_session_ends_after_a_gap_and_has_the_same_name_in_days_that_are_built_apart(spark):
    config = behaviour_config(session_gap_minutes=10)
    # Exactly the gap is still the same session; a duplicate opens nothing and counts nowhere.
    times = [(1, 1, 0), (1, 2, 600), (1, 2, 600), (1, 3, 1201), (2, 1, 700)]
    events = [Event(user, item, "view", 1.0, ts) for user, item, ts in times]
    whole = {(1, 0): ("1-0", 1), (1, 600): ("1-0", 2), (1, 1201): ("1-1201000", 1)}
    whole[2, 700] = ("2-700000", 1)
    later = {key: name for key, name in whole.items() if key[1] > 600}
    for read, expected in ((events, whole), (events[3:], later)):
        rows = prepared(spark, config, read).collect()
        names = {(r["user"], r["ts"]): (r["session_id"], r["session_position"]) for r in rows}
        assert names == expected


def test_windows_and_gaps_end_at_their_very_millisecond(spark):
    # As floats 0.7 days and 4.1 minutes are a little less than 60,480 and 246 seconds.
    config = behaviour_config(
        histories=[{"name": "recent", "window_days": 0.7}],
        session_gap_minutes=4.1,
    )
    events = [Event(1, item, "view", 1.0, ts) for item, ts in ((1, 0), (2, 246), (3, 60_480))]
    rows = add_histories(prepared(spark, config, events), config).orderBy("ts").collect()
    assert [list(row["recent"]) for row in rows] == [[], [1], [2, 1]]
    assert [row["session_id"] for row in rows] == ["1-0", "1-0", "1-60480000"]


LABEL = {"column": "action", "one_of": ["click"]}


def test_a_purchase_that_the_log_holds_too_is_not_in_the_history_of_the_view_it_came_with(spark):
    keys = {"user": "user", "item": "item"}
    conversion = {"source": "orders", "keys": keys, "time": "ts", "within_hours": 1}
    log = behaviour_config().model_dump()["sources"]["log"]
    config = behaviour_config(
        sources={"log": log, "orders": log},
        events={**behaviour_config().events.model_dump(), "where": "action = 'view'"},
        histories=[{"name": "bought", "where": {"column": "action", "one_of": ["buy"]}}],
        label={"conversion": {**conversion, "immature": "keep"}},
    )
    log = [(1, 4, "buy", 0.5, 10), (1, 4, "view", 0.5, 10), (1, 7, "view", 0.5, 20)]
    frame = kept(prepare(spark, config, log, orders=log[:1]).frame)
    rows = add_histories(frame, config).where("action = 'view'").collect()
    found = {row["item"]: (row["label"], row["bought"]) for row in rows}
    assert found == {4: (1.0, []), 7: (0.0, [4])}


def test_ties_in_time_are_counted_and_plain_histories_keep_the_order_of_the_file(spark):
    config = behaviour_config(histories=[{"max_len": 9}], label=LABEL)
    log = [(1, item, "view", 1.0, item // 3) for item in range(7)]
    log += [(1, 6, "view", 1.0, 2), (2, 6, "view", 1.0, 2)]  # A duplicate is no event.
    frame = prepare(spark, config, log).frame
    assert count_events(frame, config).ties == 4
    rows = add_histories(kept(frame), config).where("user = 1").collect()
    assert {row["item"]: row["history"] for row in rows} == {
        item: list(range(item))[::-1] for item in range(7)
    }


CONVERSION = {
    "source": "orders", "keys": {"order": "number"}, "time": "at", "within_hours": 1,
}  # fmt: skip
ACTIONS = {"path": "a", "key": "action", "columns": columns(action="string", kind="int64")}
ORDERS = {"path": "o", "key": "number", "columns": columns(number="int64", at="int64")}


LOG = columns(user="int64", item="int64", action="string", order="int64", ts="int64")


@pytest.mark.parametrize(
    ("label", "reads", "is_told"),
    [
        (LABEL, ["action"], True),
        (LABEL, ["order"], False),
        (LABEL, ["order", "action"], True),
        (LABEL, [], False),
        (LABEL, ["kind"], True),  # A dictionary says it of the label's column.
        (LABEL, ["written"], True),  # Another column of the same field.
        ({"column": "liked", "at_least": 1}, ["entry"], True),  # The other half of an entry.
        ({"column": "liked", "at_least": 1}, ["action"], False),
        ({"conversion": CONVERSION}, ["at"], True),
        ({"conversion": CONVERSION}, ["action"], True),  # The log may hold the conversion too.
        ({"conversion": CONVERSION}, [], False),
        (None, ["action"], False),
    ],
)
def test_what_tells_a_label_is_its_column_or_what_that_is_made_of(label, reads, is_told):
    entry = {"name": "entry", "type": "int64", "pair": "liked", "pair_default": 0}
    written = {"name": "written", "type": "string", "field": "action"}
    config = behaviour_config(
        sources={
            "log": {"path": "log", "format": "json", "columns": [*LOG, written, entry]},
            "actions": ACTIONS,
            "orders": ORDERS,
        },
        joins=[{"source": "actions", "column": "action"}, {"source": "orders", "column": "order"}],
        label=label,
    )
    assert find_position(config, reads) == ("__moment" if is_told else "__position")
    second = {**(label or {}), "name": "second"}
    labels = [{"column": "item"}, *([second] if label else [])]
    several = config.model_copy(update={"label": tuple(map(LabelConfig.model_validate, labels))})
    assert find_position(several, reads) == find_position(config, reads)
    without_time = {**config.events.model_dump(), "time": None}
    untimed = config.model_copy(update={"events": EventsConfig.model_validate(without_time)})
    assert find_position(untimed, reads) == "__position"


def test_given_test_events_without_a_time_come_after_the_log_and_do_not_see_one_another(spark):
    names = columns(user="int64", item="int64", action="string", price="float32")
    sources = behaviour_config().model_dump()["sources"]
    config = behaviour_config(
        sources={**sources, "test": {"path": "t", "columns": names}},
        histories=[{"name": "clicks", "where": CLICKS, "max_len": 5}],
        label=LABEL,
        split={"strategy": "given", "test": "test", "validation": False},
    )
    log = [(1, 1, "click", 1.0, 10), (1, 2, "click", 1.0, 20), (1, 3, "view", 1.0, 20)]
    test = [(1, 4, "click", 1.0), (1, 5, "view", 1.0)]
    rows = add_histories(kept(prepare(spark, config, log, test=test).frame), config).collect()
    found = {row["item"]: row["clicks"] for row in rows}
    assert found == {1: [], 2: [1], 3: [1], 4: [2, 1], 5: [2, 1]}


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
ROLLING_CONFIG = behaviour_config(rolling=ROLLING)


@settings(
    max_examples=3 if IS_EXHAUSTIVE else 1,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(events=EVENTS)
def test_every_feature_is_what_plain_loops_count(spark, events):
    frame = kept(prepare(spark, ROLLING_CONFIG, [event.row() for event in events]).frame)
    rows = {
        Event(*(r[c] for c in ("user", "item", "action")), 0, r["ts"]): r for r in frame.collect()
    }
    assert len(rows) == len(events)
    for event in events:
        row = rows[Event(event.user, event.item, event.action, 0, event.ts)]
        for rolling in ROLLING_CONFIG.rolling:
            key = tuple(getattr(event, k) for k in rolling.keys)
            expected = rolling_of(events, rolling, key, event.ts)
            assert row[rolling.name] == pytest.approx(expected, rel=1e-6), rolling.name
    end = max(event.ts for event in events)
    items = spark.createDataFrame([(1,), (99,)], "item bigint")
    for row in add_latest_windowed_features(items, frame, ROLLING_CONFIG, "item").collect():
        for rolling in ROLLING_CONFIG.rolling[2:4]:
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
