"""Seen items, and events that are no samples: histories stay whole, nothing is fitted on them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F

from conf.errors import InputDataError
from conf.etl.build import BuildConfig
from etl.build import check_config
from etl.encoders.feature_plan import plan_features
from etl.events.columns import kept
from etl.events.event_counts import check_counts, count_events
from etl.events.sampling import before_sampling
from etl.quality.lint import find_unturned_lists
from etl.records.fitted_encoders import fit_encoders
from etl.records.samples import build_samples, build_users
from etl.versions.run_fingerprint import RunRequest
from tests.etl.events.prepared import prepare
from tests.etl.logs import behaviour_config, columns

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
