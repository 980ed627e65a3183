"""Labels: each rule, and delayed conversions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError
from pyspark.sql import functions as F

from etl.events.event_counts import count_events
from etl.events.labels import ConversionCounts, add_labels, add_weights, count_conversions
from etl.sources.source import Source
from tests.etl.logs import frame, log_config

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

HOUR = 3600
HOUR_MS = HOUR * 1000
TYPES = {"user": "bigint", "item": "bigint", "action": "string", "dwell": "float", "ts": "bigint"}


CONVERSION = {
    "source": "orders",
    "keys": {"user": "buyer", "item": "product"},
    "time": "at",
    "within_hours": 10,
}


def of_orders(spark, rows: list[tuple[int | None, int, int]]) -> dict[str, Source]:
    orders = [(u, i, hour * HOUR, None, None) for u, i, hour in rows]
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
    conversion = {**CONVERSION, "until_ts": 100 * HOUR}
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
        {"name": "ordered", "conversion": {**CONVERSION, "until_ts": 100 * HOUR}},
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
