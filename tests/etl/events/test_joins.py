"""Joins as a brute-force search finds them, drawn negatives by their stated distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
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
from etl.events.sampling import add_negatives, build_alias_table
from etl.sources.source import Source
from tests.etl.logs import behaviour_config, columns, frame, log_config, memory_source, rows_frame
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


def outcome_probabilities(thresholds, aliases, groups: np.ndarray) -> np.ndarray:
    """What a draw gives: each row is taken alike in its group, then itself or its alias."""
    chance = 1 / np.bincount(groups)[groups]
    other = np.bincount(aliases, chance * (1 - thresholds), minlength=len(groups))
    return chance * thresholds + other


weights = st.lists(
    st.one_of(st.floats(1e-6, 1e6), st.just(1.0), st.integers(1, 100).map(float)),
    min_size=1,
    max_size=40,
)


@given(st.lists(weights, min_size=1, max_size=8))
def test_every_group_keeps_its_own_distribution(parts):
    groups = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    values = np.concatenate([np.asarray(part) for part in parts])
    thresholds, aliases, probabilities = build_alias_table(values, groups)
    expected = np.concatenate([np.asarray(part) / sum(part) for part in parts])
    assert_allclose(probabilities, expected, rtol=1e-12)
    drawn = outcome_probabilities(thresholds, aliases, groups)
    assert_allclose(drawn, expected, rtol=1e-6, atol=1e-12)
    assert (groups[aliases] == groups).all()
    assert ((thresholds >= 0) & (thresholds <= 1)).all()


TYPES = {"user": "bigint", "item": "bigint", "action": "string", "genre": "string"}
ITEMS = range(1, 25)


def genre(item: int) -> str:
    return "abc"[item % 3]


def log_rows() -> list[dict]:
    """User 1 has met items 1 to 8, 60 times each; users 10 on made the popularity of the others."""
    pairs = [(1, 1 + i % 8) for i in range(480)]
    pairs += [(10 + copy, item) for item in ITEMS for copy in range(item)]
    return [
        {"user": u, "item": i, "action": "buy", "genre": genre(i), "__position": p, "label": 1.0}
        for p, (u, i) in enumerate(pairs)
    ]


def sample(spark, rows=None, partitions=2, config=None, **negatives):
    config = config or sampling_config(negatives)
    dictionary = spark.createDataFrame(
        [(i, genre(i), None, None) for i in [*ITEMS, 25]],
        "item bigint, genre string, __order string, __reason string",
    )
    types = TYPES | dict.fromkeys((rolling.name for rolling in config.rolling), "bigint")
    log = frame(spark, types, rows or log_rows()).repartition(partitions, "__position")
    sources = {"items": Source("items", dictionary, ()), "log": Source("log", log, ())}
    samples = log.where("__drop is null and __skip is null")
    made = add_negatives(samples, log, config, sources)
    try:
        return made.samples.collect(), made.drawn
    finally:
        made.release()


def sampling_config(negatives, **changes):
    return log_config(
        label={"column": "action", "one_of": ["buy"]},
        negatives={"strategy": "popularity", "per_positive": 10, **negatives},
        **changes,
    )


def popularity(items, counts: Counter) -> dict[int, float]:
    weights = {item: counts[item] ** 0.75 for item in items}
    total = sum(weights.values())
    return {item: weight / total for item, weight in weights.items()}


def check_distribution(drawn: list[int], expected: dict[int, float]) -> None:
    """Pearson's chi-square stays within five standard deviations of its mean."""
    counts = Counter(drawn)
    assert set(counts) <= set(expected)
    wanted = np.array([expected[i] * len(drawn) for i in expected])
    got = np.array([counts[i] for i in expected])
    freedom = len(expected) - 1
    assert np.sum((got - wanted) ** 2 / wanted) < freedom + 5 * np.sqrt(2 * freedom)


def test_draws_follow_the_distorted_popularity_and_state_it(spark):
    """That of the positives among the samples: what is shown and not taken makes none popular."""
    shown = [{**log_rows()[0], "__position": 5000 + n} for n in range(200)]
    shown = [row | {"item": 3, "__skip": "where_not_met"} for row in shown[:100]] + [
        row | {"item": 5 + 20 * (n % 2), "label": 0.0} for n, row in enumerate(shown[100:])
    ]
    rows, drawn = sample(spark, log_rows() + shown)
    counts = Counter(row["item"] for row in log_rows()) | Counter({25: 1})
    expected = popularity([*ITEMS, 25], counts)
    negatives = [r for r in rows if r["__draw"] > 0]
    assert drawn == {"train": len(negatives)} == {"train": 10 * len(log_rows())}
    check_distribution([r["item"] for r in negatives], expected)
    for row in negatives:
        assert row["sampling_probability"] == pytest.approx(expected[row["item"]], rel=1e-6)
        assert (row["genre"], row["action"], row["label"]) == (genre(row["item"]), None, 0.0)
    assert {r["sampling_probability"] for r in rows if r["__draw"] == 0} == {1.0}


@pytest.mark.exhaustive
def test_unseen_draws_leave_out_what_the_user_met_whatever_the_layout(spark):
    rows, drawn = sample(spark, not_seen="train")
    met = {(r["user"], r["item"]) for r in log_rows()}
    negatives = [r for r in rows if r["__draw"] > 0]
    assert not [r for r in negatives if (r["user"], r["item"]) in met]
    assert drawn["train"] == len(negatives)
    # User 1's draws follow the popularity of what is left to meet.
    counts = Counter(row["item"] for row in log_rows())
    expected = popularity([i for i in ITEMS if i > 8], counts)
    mine = [r for r in negatives if r["user"] == 1]
    assert len(mine) == 4800
    check_distribution([r["item"] for r in mine], expected)
    for row in mine:
        assert row["sampling_probability"] == pytest.approx(expected[row["item"]], rel=1e-6)
    again, _ = sample(spark, partitions=5, not_seen="train")
    assert sorted(map(str, again)) == sorted(map(str, rows))


def test_categories_and_splits_bound_the_draws(spark):
    rows = log_rows()
    rows += [{**rows[0], "item": 1, "__position": 9999, "__split": "test"}]
    rows += [{**rows[0], "__position": 9998, "label": 0.0}]
    made, drawn = sample(spark, rows, strategy="uniform", within="genre", per_positive=2)
    negatives = [r for r in made if r["__draw"] > 0]
    assert drawn == {"train": len(negatives)} == {"train": 2 * len(log_rows())}
    origin = {r["__position"]: r["genre"] for r in made if r["__draw"] == 0}
    assert all(r["genre"] == origin[r["__position"]] for r in negatives)
    assert {r["sampling_probability"] for r in negatives} == {0.125}


def test_rolling_features_of_a_drawn_item_are_those_before_the_positive(spark):
    bought = {"column": "action", "one_of": ["buy"]}
    rolling = [
        {"name": "of_item", "keys": ["item"]},
        {"name": "bought", "keys": ["item"], "where": bought, "window_days": 1},
        {"name": "of_both", "keys": ["user", "item"]},
        {"name": "of_genre", "keys": ["genre"]},
        {"name": "of_user", "keys": ["user"]},
    ]
    config = sampling_config({"strategy": "uniform", "per_positive": 3}, rolling=rolling)
    day_ms = 86_400_000
    rows = [
        {"user": n % 4, "item": 1 + n * n % 5, "action": "buy" if n % 3 else "view", "label": 1.0}
        | {"genre": genre(1 + n * n % 5), "__position": n, "__event_ts_ms": n // 2 * day_ms // 12}
        | {rule["name"]: 100 + n for rule in rolling}
        for n in range(60)
    ]
    rows[7]["__drop"], rows[20]["__drop"] = "duplicate", "unmatched:items"
    rows[12]["__skip"] = "unlabelled"
    made, _ = sample(spark, rows, config=config)
    negatives = [row for row in made if row["__draw"] > 0]
    assert len(negatives) == 3 * 57
    for row in negatives:
        now = row["__event_ts_ms"]
        past = [other for other in rows if "__drop" not in other and other["__event_ts_ms"] < now]
        of_item = [other for other in past if other["item"] == row["item"]]
        last_day = [other for other in of_item if other["__event_ts_ms"] >= now - day_ms]
        assert row["of_item"] == len(of_item)
        assert row["bought"] == sum(other["action"] == "buy" for other in last_day)
        assert row["of_both"] == sum(other["user"] == row["user"] for other in of_item)
        assert row["of_genre"] == sum(other["genre"] == row["genre"] for other in past)
        assert row["of_user"] == 100 + row["__position"]  # the user is the positive's
    assert {row["of_item"] - row["__position"] for row in made if not row["__draw"]} == {100}
