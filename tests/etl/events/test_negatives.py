"""Drawn negatives: the stated distribution, nothing that the user has met, the same for ever."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from etl.events.sampling import add_negatives, build_alias_table
from etl.sources.source import Source
from tests.etl.logs import frame, log_config


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
