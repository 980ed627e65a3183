"""Events that are no samples: histories stay whole, and no label or number is fitted on them."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
from pyspark.sql import functions as F

from etl.encoders.feature_plan import plan_features
from etl.events.columns import kept
from etl.events.event_counts import count_events
from etl.events.sampling import before_sampling
from etl.records.fitted_encoders import fit_encoders
from etl.records.samples import build_samples, build_users
from tests.etl.events.prepared import prepare
from tests.etl.logs import behaviour_config, columns

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
