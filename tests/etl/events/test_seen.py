"""Labels, seen items, and events that are no samples: histories stay whole."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError
from pyspark.sql import functions as F

from conf.errors import InputDataError
from conf.etl.build import BuildConfig
from etl.build import check_config
from etl.encoders.feature_plan import plan_features
from etl.events.columns import kept
from etl.events.event_counts import check_counts, count_events
from etl.events.labels import ConversionCounts, add_labels, add_weights, count_conversions
from etl.events.sampling import before_sampling
from etl.quality.lint import find_unturned_lists
from etl.records.fitted_encoders import fit_encoders
from etl.records.samples import build_samples, build_users
from etl.sources.source import Source
from etl.versions.run_fingerprint import RunRequest
from tests.etl.events.prepared import prepare
from tests.etl.logs import behaviour_config, columns, frame, log_config

BOUGHT = "action = 'buy' and price > 0.1"


def _write_log() -> list[tuple]:
    rng = np.random.default_rng(3)
    log = [
        (user, int(rng.integers(1, 9)), str(rng.choice(["view", "click", "buy"])),
         float(rng.choice([0.0625, 0.5])), t)
        for user in (1, 2, 3) for t in range(14)
    ]  # fmt: skip
    # A click and a purchase at one moment are two events.
    return [*log, (1, 77, "click", 0.5, 12), (1, 77, "buy", 0.5, 12)]


def test_only_events_that_meet_the_condition_make_items_seen(spark):
    config, log = behaviour_config(seen=BOUGHT), _write_log()
    prepared = prepare(spark, config, log).frame
    counts = count_events(prepared, config)
    bought = [row for row in log if row[2] == "buy" and row[3] > 0.1]
    assert (counts.joined, counts.seen) == (len(log), len(bought))
    rows = build_samples(kept(prepared), config).collect()
    assert len(rows) == len(log)
    for user in (1, 2, 3):
        own = sorted((r for r in rows if r["user"] == user), key=lambda r: r["event_number"])
        assert [r["event_number"] for r in own] == list(range(1, len(own) + 1))
        for row in own:
            if row["__split"] == "train":
                assert row["seen"] is None
            else:
                earlier = own[: row["event_number"] - 1]
                met = {r["item"] for r in earlier if r["action"] == "buy" and r["price"] > 0.1}
                assert set(row["seen"]) == met
    for row in build_users(prepared, config, plan_features(config), {}).collect():
        assert set(row["seen"]) == {r[1] for r in bought if r[0] == row["user"]}
    with pytest.raises(InputDataError, match="no event meets the condition"):
        check_counts(replace(counts, seen=0), config, None, replaces_days=False)


def brought_config(*more: dict[str, Any], **options: Any) -> BuildConfig:
    """Rows of a log that bring the user's clicks; `more` are columns before these."""
    return behaviour_config(
        sources={"log": {"path": "log.tsv", "columns": [
            *columns(user="int64", item="int64", ts="int64"), *more,
            {"name": "clicks", "type": "list<int64>", "separator": " ", "nullable": True},
        ]}},
        events={"source": "log", "user": "user", "item": "item", "time": "ts",
                "history": "clicks"},
        features=[
            {"name": "user", "column": "user", "role": "user"},
            {"name": "clicked", "column": "clicks", "role": "user", "max_len": 9,
             "encoding": {"kind": "vocabulary", "name": "item"}},
            {"name": "item", "column": "item", "role": "item"},
        ],
        **options,
    )  # fmt: skip


def test_a_list_that_the_log_brings_is_seen_and_known_of_users(spark):
    """A history by another name than `history`, oldest first in the log."""
    config = brought_config()
    plan = check_config(config, RunRequest())
    assert plan.keys.history == "clicked"
    log = [(1, 5, 1, [50, 51]), (1, 6, 2, [51, 52]), (1, 7, 3, None)]
    log += [(2, 4, 0, None), (2, 5, 1, []), (2, 8, 2, [9])]
    prepared = prepare(spark, config, log).frame
    rows = build_samples(kept(prepared), config).collect()
    seen = {row["item"]: row["seen"] for row in rows if row["__split"] == "test"}
    assert {item: set(items) for item, items in seen.items()} == {7: {5, 6}, 8: {4, 5, 9}}
    users = {row["user"]: row for row in build_users(prepared, config, plan, {}).collect()}
    assert set(users[1]["seen"]) == {5, 6, 7, 51, 52}
    # As it stands behind the latest event that brought a list.
    assert users[1]["clicks"] == [6, 52, 51]
    assert users[2]["clicks"] == [8, 9]
    assert set(users[2]["seen"]) == {4, 5, 8, 9}
    # An item that was shown and not taken is not in front.
    config = brought_config(*columns(taken="int64"), label={"column": "taken", "at_least": 1})
    log = [(1, 5, 1, 0, [50]), (1, 6, 2, 1, [51]), (2, 5, 1, 1, [50]), (2, 8, 2, 0, [9])]
    prepared = prepare(spark, config, log).frame
    plan = check_config(config, RunRequest())
    users = {row["user"]: row for row in build_users(prepared, config, plan, {}).collect()}
    assert {user: row["clicks"] for user, row in users.items()} == {1: [6, 51], 2: [9]}


def test_lists_beside_a_history_that_is_turned_round_are_told():
    kinds = {"name": "kinds", "type": "list<int64>", "separator": " "}
    unread = brought_config(kinds)
    assert not find_unturned_lists(unread)
    feature = {"name": "kinds", "column": "kinds", "role": "user"}
    data = unread.model_dump()
    data["features"] = [*data["features"], feature]
    (found,) = find_unturned_lists(BuildConfig.model_validate(data))
    assert found.received.startswith("kinds as in the log; clicks turned round")
    data["events"] |= {"history_order": "latest_first"}
    assert not find_unturned_lists(BuildConfig.model_validate(data))


@pytest.mark.parametrize("label", [None, {"column": "action", "one_of": ["buy"]}])
def test_what_was_taken_at_one_time_is_not_seen_by_its_own_rows(spark, label):
    """A label that `seen` reads would take the row's own request out of what is ranked."""
    config = behaviour_config(
        seen=BOUGHT, label=label,
        split={"strategy": "temporal", "test": 5, "validation": False},
    )  # fmt: skip
    log = [(1, 1, "buy", 1.0, 1), (1, 2, "buy", 1.0, 5), (1, 3, "buy", 1.0, 5)]
    prepared = prepare(spark, config, log).frame
    rows = build_samples(kept(prepared), config).where("__split = 'test'").collect()
    found = {row["item"]: sorted(row["seen"]) for row in rows}
    assert found == ({2: [1], 3: [1, 2]} if label is None else {2: [1], 3: [1]})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"seen": BOUGHT}, "event_number"),
        ({"seen": True}, None),
        ({"seen": False, "split": {"strategy": "temporal"}}, None),
        ({"seen": True, "split": {"strategy": "temporal"}}, "event_number"),
    ],
)
def test_events_have_numbers_where_seen_items_do_not_tell_the_first_record(options, expected):
    plan = plan_features(behaviour_config(**options))
    assert plan.keys.event_number == expected
    assert ("event_number" in plan.column_types) is (expected is not None)


def test_the_first_event_of_days_that_are_built_apart_has_the_lowest_number(spark):
    config = behaviour_config(
        split={"strategy": "temporal", "test": 86_400, "validation": False},
        output={"partition_by": ["date"], "partition_overwrite": "dynamic"},
    )
    log = [(1, item, "view", 0.5, item * 40_000) for item in range(7)]

    def number(rows: list[tuple]) -> dict[int, int]:
        records = build_samples(kept(prepare(spark, config, rows).frame), config).collect()
        return {row["item"]: row["event_number"] for row in records}

    # The run of the second day reads the first, that of the third the second.
    second, third = number(log[:5]), number(log[3:])
    assert second[3] < second[4] < third[5] < third[6]
    assert (second[3], third[5]) == (1_000_000_004, 2_000_000_003)


HOUR = 3600
VIEWS = {"column": "action", "one_of": ["view"]}


def shop_config():
    """Views are samples, purchases are not; an order within ten hours makes a view positive."""
    base = behaviour_config().model_dump()
    orders = {"path": "orders.tsv", "columns": columns(user="int64", item="int64", at="int64")}
    conversion = {"source": "orders", "keys": {"user": "user", "item": "item"}, "time": "at"}
    return behaviour_config(
        sources={**base["sources"], "orders": orders},
        events={**base["events"], "where": "action = 'view'"},
        histories=[{"max_len": 5}, {"name": "viewed", "where": VIEWS, "max_len": 5}],
        seen="action = 'buy'",
        label={"conversion": {**conversion, "within_hours": 10}},
        split={"strategy": "temporal", "validation": False, "test": 40 * HOUR},
        features=[
            {"name": "user", "column": "user", "role": "user"},
            {"name": "item", "column": "item", "role": "item"},
            {"name": "rate", "column": "item", "role": "item",
             "encoding": {"kind": "target"}},
            {"name": "price", "column": "price", "role": "context",
             "encoding": {"kind": "normalize", "method": "min_max"}},
        ],
    )  # fmt: skip


# User, item, action, price, hour. The purchase in the moment of its view is another event.
LOG = [
    (1, 1, "view", 2.0, 0), (1, 1, "buy", 9.0, 0),
    (1, 2, "view", 4.0, 2), (1, 2, "buy", 9.0, 5),
    (2, 1, "view", 3.0, 4), (2, 3, "view", 3.0, 6), (2, 3, "view", 3.0, 6),
    (1, 3, "view", 3.0, 45), (2, 2, "view", 3.0, 46),
    # Not known yet when the orders end, 60 hours after the start.
    (1, 4, "view", 3.0, 51), (1, 4, "buy", 9.0, 52), (2, 4, "view", 3.0, 58),
    (3, 4, "buy", 9.0, 59),
]  # fmt: skip
ORDERS = [(1, 1, 0), (1, 2, 5), (1, 3, 50), (1, 4, 52), (3, 4, 59), (9, 9, 60)]


@pytest.fixture(scope="module")
def prepared(spark):
    config = shop_config()
    log = [(*row[:4], row[4] * HOUR) for row in LOG]
    found = prepare(spark, config, log, orders=[(*order[:2], order[2] * HOUR) for order in ORDERS])
    yield config, found
    found.release()


def test_what_waits_for_its_label_leaves_the_samples_alone(prepared):
    config, events = prepared
    counts = count_events(events.frame, config, events.conversions)
    # Purchases never were samples: they do not count as immature.
    assert counts.dropped == {"duplicate": 1, "immature": 2, "where_not_met": 4}
    assert counts.splits == {"train": 4, "test": 2}
    assert counts.joined == len(LOG) - 1
    rows = build_users(events.frame, config, plan_features(config), {}).collect()
    users = {row["user"]: row for row in rows}
    assert {user: row["seen"] for user, row in users.items()} == {1: [1, 2, 4], 2: [], 3: [4]}
    viewed = {user: row["viewed"] for user, row in users.items()}
    assert viewed == {1: [4, 3, 2, 1], 2: [4, 2, 3, 1], 3: []}
    assert users[1]["history"] == [4, 4, 3, 2, 2]
    samples = build_samples(kept(events.frame), config).collect()
    labels = {(row["user"], row["item"]): row["label"] for row in samples}
    assert labels == {
        (1, 1): 1,
        (1, 2): 1,
        (2, 1): 0,
        (2, 3): 0,
        (1, 3): 1,
        (2, 2): 0,
    }  # An order of an event that is no sample is lost.
    found = events.conversions["label"]
    assert (found.rows, found.lost) == (6, {"no_event": 1, "no_sample": 1})


def test_numbers_and_targets_are_fitted_on_samples_alone(prepared, tmp_path):
    config, events = prepared
    fitted = fit_encoders(kept(events.frame), config, plan_features(config), tmp_path)
    rates = pq.read_table(tmp_path / "encoders" / "rate.table.parquet")["all"].to_pylist()
    tokens = pq.read_table(tmp_path / "encoders" / "rate.parquet").to_pydict()
    # Purchases are label 1 of their own orders: counted, item 1 would have 2 of 3.
    mean = 2 / 4
    wanted = {1: (1 + 20 * mean) / 22, 2: (1 + 20 * mean) / 21, 3: 20 * mean / 21}
    assert {t: rates[i] for t, i in zip(tokens["token"], tokens["id"], strict=True)} == (
        pytest.approx(wanted)
    )
    # Their prices do not stretch the range, but their items are in the vocabulary.
    plan = json.loads((tmp_path / "encoders" / "encoders.json").read_text())
    (price,) = [c["operation"] for c in plan["columns"] if c["feature"] == "price"]
    assert (price["center"], price["factor"]) == (2.0, 0.5)
    assert fitted.tokens["item"] == 3


def test_what_a_sampling_leaves_out_is_fitted_on(spark):
    reasons = [None, "down_sampled", "exposure_not_sampled", "inside_sequence", "immature",
               "unlabelled", "where_not_met", "without_item"]  # fmt: skip
    events = spark.createDataFrame([(reason,) for reason in reasons], "__skip string")
    found = before_sampling(events).select(F.col("__skip")).collect()
    assert [row[0] for row in found] == reasons[:4]


if TYPE_CHECKING:
    from pyspark.sql import DataFrame

HOUR_S = 3600
HOUR_MS = HOUR_S * 1000
TYPES = {"user": "bigint", "item": "bigint", "action": "string", "dwell": "float", "ts": "bigint"}


CONVERSION = {
    "source": "orders",
    "keys": {"user": "buyer", "item": "product"},
    "time": "at",
    "within_hours": 10,
}


def of_orders(spark, rows: list[tuple[int | None, int, int]]) -> dict[str, Source]:
    orders = [(u, i, hour * HOUR_S, None, None) for u, i, hour in rows]
    schema = "buyer bigint, product bigint, at bigint, __order string, __reason string"
    return {"orders": Source("orders", spark.createDataFrame(orders, schema), ())}


def rows_of(spark, names: str, rows: list[tuple[Any, ...]]) -> DataFrame:
    """Events without a label yet; `hour` stands for the time."""
    named = [dict(zip(names.split(), row, strict=True)) for row in rows]
    for row in named:
        hour = row.pop("hour", None)
        row["__event_ts_ms"] = None if hour is None else hour * HOUR_MS
    return frame(spark, TYPES, named).drop("label")


def clicks(spark, rows: list[tuple[int | None, int, int]]) -> DataFrame:
    return rows_of(spark, "user item hour", rows)


def test_each_rule_tells_positives_by_its_column(spark):
    rows = [
        (1, "buy", 4.1, False), (2, "view", 3.0, False), (3, "cart", 0.5, False),
        (4, None, None, False), (5, None, None, True),
    ]  # fmt: skip
    events = rows_of(spark, "item action dwell __given_test", rows)
    rules = {
        "at_least": {"column": "dwell", "at_least": 4.1},
        "one_of": {"column": "action", "one_of": ["buy", "cart"]},
        "graded": {"column": "dwell"},
        "number": {"column": "dwell", "one_of": [3, 4.1]},
        # A bound between two whole numbers is not rounded.
        "between": {"column": "item", "at_least": 2.5},
    }
    for name, rule in rules.items():
        events = add_labels(events, log_config(label={**rule, "name": name}), {})
    found = {row["item"]: row for row in events.collect()}
    assert [found[i]["at_least"] for i in (1, 2, 3)] == [1, 0, 0]
    assert [found[i]["one_of"] for i in (1, 2, 3)] == [1, 0, 1]
    assert [found[i]["graded"] for i in (1, 2, 3)] == pytest.approx([4.1, 3, 0.5])
    assert [found[i]["number"] for i in (1, 2, 3)] == [1, 1, 0]
    assert [found[i]["between"] for i in (1, 2, 3)] == [0, 0, 1]
    # A row of the log without a value is left out; a given test event may lack it.
    assert [found[i]["__skip"] for i in (3, 4, 5)] == [None, "unlabelled", None]
    # It happened all the same: histories and what is seen hold it.
    assert {row["__drop"] for row in found.values()} == {None}
    assert found[5]["graded"] is None
    # A label may take its column's place, as a grade or by a bound.
    for rule, expected in (({}, [4.1, 3.0, 0.5]), ({"at_least": 3}, [1.0, 1.0, 0.0])):
        config = log_config(label={"column": "dwell", "name": "dwell", **rule})
        dwells = [(item, dwell) for item, _, dwell, _ in rows[:4]]
        labelled = add_labels(rows_of(spark, "item dwell", dwells), config, {})
        assert labelled.columns.count("dwell") == 1
        own = {row["item"]: row for row in labelled.collect()}
        assert [own[i]["dwell"] for i in (1, 2, 3)] == pytest.approx(expected)
        assert (own[4]["dwell"], own[4]["__skip"]) == (None, "unlabelled")


LONG = {"column": "dwell", "at_least": 2}


@pytest.mark.parametrize(
    ("reader", "place"),
    [
        ({"histories": [{"name": "h", "columns": ["dwell"]}]}, "histories.h"),
        ({"histories": [{"name": "h", "where": LONG}]}, "histories.h"),
        ({"seen": "dwell > 2"}, "seen"),
        ({"rolling": [{"name": "r", "keys": ["item"], "where": LONG}]}, "rolling.r"),
        ({"weights": {"column": "dwell"}}, "weights.column"),
    ],
)
def test_nothing_else_reads_a_column_whose_place_the_label_takes(reader, place):
    label = {"column": "dwell", "name": "dwell", "at_least": 3}
    with pytest.raises(ValidationError, match=rf"'dwell' takes the place .*{place}"):
        log_config(label=label, **reader)
    log_config(label={**label, "name": "long"}, **reader)


def test_several_labels_are_a_list():
    several = [
        {"column": "dwell", "at_least": 3},
        {"name": "bought", "column": "action", "one_of": ["buy"]},
    ]
    config = log_config(label=several)
    assert config.label_name == "label"
    assert [label.name for label in config.further_labels] == ["bought"]
    assert type(config).model_validate(config.resolved()).resolved() == config.resolved()
    gone = {"name": "x", "column": "gone", "at_least": 1}
    halves = {"name": "x", "column": "item", "one_of": [2.5, 4.0]}  # Of whole numbers.
    for wrong in (several[1], gone, halves):
        with pytest.raises(ValidationError):
            log_config(label=[*several, wrong])


def test_conversions_count_within_the_window_and_recent_events_wait(spark):
    hours = {  # item: hour of the click
        1: 0,  # bought after 2 hours, twice
        2: 0,  # bought after the window
        3: 10,  # bought before the click
        4: 10,  # bought in the very moment, and at the window's end
        5: 95,  # bought after an hour; the window is not over when the orders end
        6: 90,  # never bought, the window ends with the orders
        7: 91,
    }
    events = clicks(spark, [(1, item, hour) for item, hour in hours.items()])
    orders = [(1, 1, 2), (1, 1, 3), (1, 2, 11), (1, 3, 9), (1, 4, 10), (2, 6, 91), (1, 5, 96)]
    sources = of_orders(spark, orders)
    conversion = {**CONVERSION, "until_ts": 100 * HOUR_S}
    config = log_config(label={"conversion": conversion})
    counts = count_conversions(events, config, sources)
    found = {r["item"]: r for r in add_labels(events, config, sources).collect()}
    assert len(found) == len(hours)
    assert {i: r["label"] for i, r in found.items()} == {1: 1, 2: 0, 3: 0, 4: 1, 5: 1, 6: 0, 7: 0}
    assert {i for i, r in found.items() if r["__skip"] == "immature"} == {5, 7}
    assert {r["__drop"] for r in found.values()} == {None}
    kept = log_config(
        split={"strategy": "hash"}, label={"conversion": {**conversion, "immature": "keep"}}
    )
    labelled = add_labels(events, kept, sources)
    counted = count_events(labelled, kept.model_copy(update={"joins": ()}), counts)
    assert counted.dropped == {}
    # The event without a conversion whose window is not over; that of item 5 is known already.
    assert counted.maturity == {
        "label": {
            "until_ts_ms": 100 * HOUR_MS,
            "last_conversion_ts_ms": 96 * HOUR_MS,
            "last_event_ts_ms": 95 * HOUR_MS,
            "unknown_as_0": 1,
        }
    }


def test_of_several_labels_a_row_needs_one(spark):
    """What is null, or no conversion is known of yet, is no label; a row without any is dropped."""
    # The window of 10 hours is over by hour 100.
    rows = [
        (1, 1, "buy", 4.0, 0, False), (1, 2, "view", None, 0, False), (1, 3, None, 2.0, 95, False),
        (1, 4, None, None, 0, False), (1, 5, None, None, 95, False), (1, 6, "view", 1.0, 95, False),
        (1, 7, None, None, None, True),
    ]  # fmt: skip
    events = rows_of(spark, "user item action dwell hour __given_test", rows)
    labels = [
        {"name": "bought", "column": "action", "one_of": ["buy"]},
        {"name": "dwell", "column": "dwell"},
        {"name": "ordered", "conversion": {**CONVERSION, "until_ts": 100 * HOUR_S}},
    ]
    sources = of_orders(spark, [(1, 1, 2), (1, 6, 96), (1, 5, 96)])
    config = log_config(label=labels)
    found = {row["item"]: row for row in add_labels(events, config, sources).collect()}
    names = [label["name"] for label in labels]
    assert {item: tuple(row[name] for name in names) for item, row in found.items()} == {
        1: (1, 4, 1), 2: (0, None, 0), 3: (None, 2, None), 4: (None, None, 0),
        5: (None, None, None), 6: (0, 1, None), 7: (None, None, None),
    }  # fmt: skip
    # A given event may lack all of them.
    assert {i: row["__skip"] for i, row in found.items() if row["__skip"]} == {5: "unlabelled"}
    two = log_config(label=labels[:2])
    found = {row["item"]: row["__skip"] for row in add_labels(events, two, {}).collect()}
    assert {i for i, why in found.items() if why == "unlabelled"} == {4, 5}
    alone = log_config(label=labels[2])
    rows = add_labels(events, alone, sources).collect()
    assert {r["item"] for r in rows if r["__skip"] == "immature"} == {3, 5, 6}


def test_conversions_that_make_no_sample_positive_are_counted_by_reason(spark, caplog):
    events = clicks(spark, [(1, 1, 0), (1, 1, 40), (2, 2, 20), (None, 3, 0)])
    bought = clicks(spark, [(4, 4, 12), (4, 5, 30)])
    # The purchase itself is in the log, but no sample; of item 5 a sample came 5 hours before.
    events = events.unionByName(bought.withColumn("__skip", F.lit("where_not_met")))
    events = events.unionByName(clicks(spark, [(4, 5, 25)]))
    sources = of_orders(spark, [
        (1, 1, 5), (1, 1, 10), (1, 1, 40), (2, 2, 30),  # in time, to the very end of the window
        (1, 1, 11), (2, 2, 19), (2, 2, 31),  # too late, and before the event
        (1, 2, 5), (9, 1, 5),  # of other keys
        (None, 3, 1),  # a null is no key, on either side
        (4, 4, 12), (4, 5, 30),
    ])  # fmt: skip
    config = log_config(label={"conversion": CONVERSION})
    (found,) = count_conversions(events, config, sources).values()
    assert found.rows == 12
    assert found.lost == {"null_key": 1, "no_event": 2, "outside_time": 3, "no_sample": 1}
    assert found.span_ms == (HOUR_MS, 40 * HOUR_MS)
    assert found.last_event_ms == found.until_ms == 40 * HOUR_MS
    assert "7 of 12 conversions of 'orders'" in caplog.text
    labels = add_labels(events, config, sources).collect()
    assert {(r["user"], r["__event_ts_ms"] // (HOUR_MS)): r["label"] for r in labels} == {
        (1, 0): 1, (1, 40): 1, (2, 20): 1, (None, 0): 0, (4, 12): 1, (4, 30): 1, (4, 25): 1,
    }  # fmt: skip
    assert [r["__skip"] for r in labels if r["__event_ts_ms"] == 40 * HOUR_MS] == ["immature"]


@pytest.mark.parametrize(
    ("rows", "span_hours", "event_hour", "early", "ends_early"),
    [
        (1_000, (0, 100), 160, 60, True),
        (1_000, (0, 150), 160, 10, False),  # less than a day
        (11, (0, 100), 160, 60, False),  # one in ten hours: pauses of 60 are chance
        (1_000, (0, 170), 160, 0, False),  # conversions of the last events
    ],
)
def test_conversions_that_end_early_bound_what_is_known(
    rows, span_hours, event_hour, early, ends_early
):
    first, last = (hour * HOUR_MS for hour in span_hours)
    counts = ConversionCounts(rows, {}, (first, last), event_hour * HOUR_MS)
    assert (counts.early_ms, counts.ends_early) == (early * HOUR_MS, ends_early)


def test_weights_multiply_column_class_and_decay(spark):
    days_ms = 24 * HOUR_MS
    rows = [
        {"user": 1, "dwell": 3.0, "label": 1.0, "__event_ts_ms": 0},
        {"user": 2, "dwell": 3.0, "label": 0.0, "__event_ts_ms": 20 * days_ms},
        {"user": 3, "dwell": None, "label": 0.0, "__event_ts_ms": 10 * days_ms},
    ]
    weights = {"column": "dwell", "by_class": [0.5, 8], "half_life_days": 10}
    config = log_config(label={"column": "dwell", "at_least": 1}, weights=weights)
    found = add_weights(frame(spark, TYPES, rows), config, 20 * days_ms).collect()
    assert {r["user"]: r["weight"] for r in found} == {1: 6.0, 2: 1.5, 3: 0.25}
