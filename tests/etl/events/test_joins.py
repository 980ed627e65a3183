"""Dictionary and point-in-time joins: a brute-force search agrees, each loss has its reason."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import functions as F

from conf.errors import InputDataError
from conf.etl.build import BuildConfig
from conf.etl.events import JoinConfig
from etl.events.event_counts import count_outcomes
from etl.events.joins import (
    DictionaryJoin,
    check_unique_key,
    join_dictionary,
    outcome_column,
    plan_joins,
    refuse_unmatched,
    select_latest,
)
from tests.etl.logs import behaviour_config, columns, log_config, memory_source, rows_frame
from tests.machine import IS_EXHAUSTIVE


def test_versions_of_a_key_are_told_apart_and_repeats_are_refused(spark):
    rows = [("a", 1, 1), ("a", 1, 2), ("a", 2, 2), ("b", 1, 1)]
    dictionary = spark.createDataFrame(rows, "key string, since bigint, known bigint")
    as_of = {"source": "d", "column": "key", "valid_from": "since", "known_at": "known"}
    check_unique_key(DictionaryJoin(JoinConfig.model_validate(as_of), dictionary, "key"))
    del as_of["known_at"]
    with pytest.raises(InputDataError, match=r"not unique by its key \(key, since\)") as refused:
        check_unique_key(DictionaryJoin(JoinConfig.model_validate(as_of), dictionary, "key"))
    assert "a 1 (2 rows)" in str(refused.value)


KEYS = st.one_of(st.just(7), st.integers(0, 20), st.none())


def build_join(dictionary: Any, is_small: bool = False, **changes: Any) -> DictionaryJoin:
    config = JoinConfig.model_validate({"source": "items", "column": "item", **changes})
    return DictionaryJoin(config, dictionary, "id", is_small)


def events_frame(spark: Any, keys: list[int | None]) -> Any:
    rows = [(key, i) for i, key in enumerate(keys)]
    return spark.createDataFrame(rows, "item bigint, n bigint").selectExpr(
        "*", "n AS __order", "CAST(null AS string) AS __drop"
    )


@settings(
    max_examples=3 if IS_EXHAUSTIVE else 2,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(keys=st.lists(KEYS, min_size=1, max_size=60), known=st.sets(st.integers(0, 20)))
def test_every_strategy_gives_the_rows_of_a_plain_search(spark, keys, known):
    table = {key: f"item {key}" for key in known}
    dictionary = spark.createDataFrame(list(table.items()), "id bigint, title string")
    expected = sorted(
        (n, key if key is None else int(key), table.get(key), _reason(key, known))
        for n, key in enumerate(keys)
    )
    for is_small in (True, False):
        joined = join_dictionary(events_frame(spark, keys), build_join(dictionary, is_small))
        rows = [(r["n"], r["item"], r["title"], r["__drop"]) for r in joined.collect()]
        assert sorted(rows) == expected


def _reason(key: int | None, known: Collection[int]) -> str | None:
    if key is None:
        return "unmatched:items:null_key"
    return None if key in known else "unmatched:items"


def test_kept_events_are_noted_and_refused_where_all_must_match(spark):
    dictionary = spark.createDataFrame([(1, "x")], "id bigint, title string")
    joined = join_dictionary(
        events_frame(spark, [1, 2, None]), build_join(dictionary, unmatched="keep")
    )
    assert [row["__drop"] for row in joined.collect()] == [None] * 3
    config = log_config(joins=[{"source": "items", "column": "item", "unmatched": "fail"}])
    with pytest.raises(InputDataError, match="no entry in dictionary 'items'") as refused:
        refuse_unmatched(joined, config)
    assert "item = 2 (unknown_key)" in str(refused.value)
    assert "item = None (null_key)" in str(refused.value)


PRICES = columns(
    key="string", valid_from="int64", valid_to="int64?", known_at="int64", value="int64"
)
REASONS = ("null_key", "unknown_key", "not_yet_valid", "expired")
TIMES = st.integers(0, 8)
ENTRIES = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]), TIMES, st.none() | TIMES, TIMES, st.integers(0, 999)
    ),
    max_size=25,
    unique_by=lambda entry: (entry[0], entry[1], entry[3]),
)
EVENTS = st.lists(
    st.tuples(st.sampled_from(["a", "b", "c", "d", None]), TIMES), min_size=1, max_size=30
)


def as_of_config(match: str, known: bool, ends: bool) -> BuildConfig:
    log = columns(user="int64", item="int64", product="string?", ts="int64")
    as_of: dict[str, Any] = {"valid_from": "valid_from", "match": match}
    as_of |= {"known_at": "known_at"} if known else {}
    as_of |= {"valid_to": "valid_to"} if ends else {}
    return behaviour_config(
        sources={
            "log": {"path": "log", "columns": log},
            "prices": {"path": "prices", "columns": PRICES, "key": "key"},
        },
        joins=[{"source": "prices", "column": "product", "unmatched": "drop", **as_of}],
    )


def as_of_join(
    spark: Any, config: BuildConfig, entries: list[tuple[Any, ...]], log: list[tuple[Any, ...]]
) -> tuple[DictionaryJoin, Any]:
    """The join, and the events of a log that it has joined."""
    dictionary = memory_source(spark, config, "prices", entries)
    events = rows_frame(spark, config.sources["log"], log).selectExpr(
        "*", "ts * 1000 AS __event_ts_ms", "CAST(null AS string) AS __drop"
    )
    (join,) = plan_joins(config, {"log": dictionary, "prices": dictionary})
    return join, join_dictionary(events, join)


def brute_force(
    entries: list[tuple[Any, ...]], key: str | None, ts: int, config: BuildConfig
) -> tuple[int | None, str | None]:
    """The entry's value, or why there is none."""
    as_of = config.joins[0].as_of
    assert as_of is not None
    if key is None:
        return None, "null_key"
    mine = [entry for entry in entries if entry[0] == key]
    if not mine:
        return None, "unknown_key"

    def counts(moment: int) -> bool:
        return moment <= ts if as_of.match == "at_or_before" else moment < ts

    known = [e for e in mine if counts(e[1]) and (not as_of.known_at or counts(e[3]))]
    if not known:
        return None, "not_yet_valid"
    newest = max(known, key=lambda e: (e[1], e[3] if as_of.known_at else 0))
    if as_of.valid_to and newest[2] is not None and counts(newest[2]):
        return None, "expired"
    return newest[4], None


@settings(
    max_examples=3 if IS_EXHAUSTIVE else 2,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    entries=ENTRIES,
    keyed=EVENTS,
    match=st.sampled_from(["strictly_before", "at_or_before"]),
    known=st.booleans(),
    ends=st.booleans(),
)
def test_each_event_gets_the_entry_that_a_search_finds(spark, entries, keyed, match, known, ends):
    config = as_of_config(match, known, ends)
    if not known:  # without `known_at` a second entry of one time would be a repeated key
        entries = list({entry[:2]: entry for entry in entries}.values())
    log = [(i, i, key, ts) for i, (key, ts) in enumerate(keyed)]
    _, joined = as_of_join(spark, config, entries, log)
    rows = {row["user"]: row for row in joined.collect()}
    assert len(rows) == joined.count() == len(keyed)
    reasons: dict[str, int] = {}
    for user, _, key, ts in log:
        value, reason = brute_force(entries, key, ts, config)
        assert rows[user]["value"] == value
        dropped = rows[user]["__drop"]
        assert (dropped is None) == (reason is None)
        if reason:
            reasons[reason] = reasons.get(reason, 0) + 1
            short = "" if reason == "unknown_key" else f":{reason}"
            assert dropped == f"unmatched:prices{short}"
    groups = joined.groupBy(outcome_column("prices")).agg(F.count("*").alias("n")).collect()
    matched = {"matched": len(keyed) - sum(reasons.values())}
    counts = count_outcomes("prices", [group.asDict() for group in groups])
    assert counts == matched | reasons


def test_a_late_entry_about_the_past_counts_from_when_it_was_known(spark):
    config = as_of_config("at_or_before", known=True, ends=False)
    entries = [
        ("a", 10, None, 10, 1),
        ("a", 20, None, 20, 2),
        ("a", 10, None, 30, 3),  # a correction of the first, known only after the second
        ("a", 20, None, 40, 4),  # a correction of the second
    ]
    log = [(ts, 1, "a", ts) for ts in (9, 10, 19, 20, 30, 39, 40, 99)]
    join, joined = as_of_join(spark, config, entries, log)
    rows = joined.orderBy("ts").collect()
    assert [row["value"] for row in rows] == [None, 1, 1, 2, 2, 2, 4, 4]
    (latest,) = select_latest(join, spark.createDataFrame([(35_000,)], "ts bigint")).collect()
    assert (latest["product"], latest["value"]) == ("a", 2)


@pytest.mark.parametrize("match", ["strictly_before", "at_or_before"])
def test_the_catalogue_leaves_out_what_has_ended(spark, match):
    config = as_of_config(match, known=False, ends=True)
    entries = [("a", 1, 5, 0, 1), ("b", 1, None, 0, 2), ("b", 9, None, 0, 3), ("c", 1, 2**62, 0, 4)]
    join, _ = as_of_join(spark, config, entries, [(1, 1, "a", 1)])
    end = spark.createDataFrame([(6_000,)], "ts bigint")
    found = {row["product"]: row["value"] for row in select_latest(join, end).collect()}
    # `c` ends so far away that milliseconds cannot hold it: it is open.
    assert found == {"b": 2, "c": 4}
