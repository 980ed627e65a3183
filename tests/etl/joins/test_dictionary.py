"""Dictionary joins: the same rows whatever the strategy, each unmatched event with its reason."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conf.errors import InputDataError
from conf.etl import JoinConfig
from etl.joins.dictionary import choose_strategy, join_dictionary
from etl.joins.plan import DictionaryJoin
from etl.joins.skew import SALT_COLUMN, find_frequent_keys, salt_dictionary, salt_events
from etl.joins.unmatched import refuse_unmatched

KEYS = st.one_of(st.just(7), st.integers(0, 20), st.none())


def build_join(strategy: str = "auto", **changes: Any) -> DictionaryJoin:
    config = JoinConfig.model_validate(
        {"source": "items", "column": "item", "strategy": strategy, **changes}
    )
    return DictionaryJoin("items", "id", config, 100, 1000)


def events_frame(spark: Any, keys: list[int | None]) -> Any:
    rows = [(key, i) for i, key in enumerate(keys)]
    return spark.createDataFrame(rows, "item bigint, n bigint").selectExpr(
        "*", "n AS __order", "CAST(null AS string) AS __drop"
    )


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(keys=st.lists(KEYS, min_size=1, max_size=60), known=st.sets(st.integers(0, 20)))
def test_every_strategy_gives_the_rows_of_a_plain_search(spark, keys, known):
    table = {key: f"item {key}" for key in known}
    dictionary = spark.createDataFrame(list(table.items()), "id bigint, title string")
    dictionary = dictionary.selectExpr("*", "id AS __order")
    expected = sorted(
        (n, key if key is None else int(key), table.get(key), _reason(key, known))
        for n, key in enumerate(keys)
    )
    joins = [build_join(s) for s in ("broadcast", "sort_merge", "salted")]
    for join in (*joins, build_join("salted", salts=3)):
        joined = join_dictionary(events_frame(spark, keys), dictionary, join)
        rows = [(r["n"], r["item"], r["title"], r["__drop"]) for r in joined.collect()]
        assert sorted(rows) == expected


def _reason(key: int | None, known: set[int]) -> str | None:
    if key is None:
        return "unmatched:items:null_key"
    return None if key in known else "unmatched:items"


def test_frequent_keys_are_spread_over_tasks_and_others_are_not(spark):
    keys: list[int | None] = [7] * 300 + [None] * 40 + list(range(100, 300))
    events = events_frame(spark, keys)
    join = build_join("salted")
    assert find_frequent_keys(events, join) == (7,)
    dictionary = spark.createDataFrame([(k, "x") for k in range(300)], "id bigint, title string")
    joined = join_dictionary(events, dictionary.selectExpr("*", "id AS __order"), join)
    plan = joined._jdf.queryExecution().executedPlan().toString()
    assert "SortMergeJoin" in plan
    assert joined.count() == len(keys)
    salted = salt_events(events, "item", 4, (7,)).select("item", SALT_COLUMN).distinct().collect()
    salts = Counter(row["item"] for row in salted)
    assert salts == {7: 4, None: 4, **dict.fromkeys(range(100, 300), 1)}
    repeated = salt_dictionary(dictionary, "id", 4, (7,)).groupBy("id").count().collect()
    assert {row["id"]: row["count"] for row in repeated} == {**dict.fromkeys(range(300), 1), 7: 4}


def test_auto_goes_by_the_size_of_the_files():
    assert choose_strategy(build_join(broadcast_bytes=100)) == "broadcast"
    assert choose_strategy(build_join(broadcast_bytes=99)) == "sort_merge"
    unknown = DictionaryJoin("items", "id", build_join().config)
    assert choose_strategy(unknown) is None


def test_kept_events_are_noted_and_refused_where_all_must_match(spark):
    dictionary = spark.createDataFrame([(1, "x")], "id bigint, title string")
    dictionary = dictionary.selectExpr("*", "id AS __order")
    events = events_frame(spark, [1, 2, None])
    joined = join_dictionary(events, dictionary, build_join(unmatched="keep"))
    assert [row["__drop"] for row in joined.collect()] == [None] * 3
    with pytest.raises(InputDataError, match="no entry in dictionary 'items'") as refused:
        refuse_unmatched(joined, "items", "item")
    assert "item = 2 (unknown_key)" in str(refused.value)
    assert "item = None (null_key)" in str(refused.value)
