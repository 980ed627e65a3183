"""Events that are no samples: down-sampled negatives, and exposures that were not chosen."""

from __future__ import annotations

import pytest

from etl.skips import mark_skipped
from etl.weights import add_weights
from tests.etl.samples_log import frame, log_config

TYPES = {"user": "bigint", "item": "bigint", "dwell": "float"}
LABEL = {"column": "dwell", "at_least": 1}
DAY_MS = 86_400_000


def test_down_sampling_keeps_a_share_and_weights_make_up_for_it(spark):
    rows = [
        {"user": i, "item": i % 7, "__position": 1, "label": float(i % 5 == 0), "__split": split}
        for split, n in (("train", 5000), ("test", 100))
        for i in range(n)
    ]
    config = log_config(label=LABEL, down_sampling={"rate": 0.25})
    marked = mark_skipped(frame(spark, TYPES, rows).drop("__skip"), config)
    weighted = add_weights(marked, config, None).collect()
    kept = [r for r in weighted if r["__skip"] is None]
    negatives = [r for r in kept if r["label"] == 0 and r["__split"] == "train"]
    assert len(negatives) == pytest.approx(1000, abs=4 * (4000 * 0.25 * 0.75) ** 0.5)
    assert {r["weight"] for r in negatives} == {4.0}
    assert {r["keep_rate"] for r in negatives} == {0.25}
    others = [r for r in kept if r["label"] == 1 or r["__split"] == "test"]
    assert len(others) == 1000 + 100
    assert {(r["weight"], r["keep_rate"]) for r in others} == {(1.0, 1.0)}
    again = mark_skipped(frame(spark, TYPES, rows).drop("__skip").repartition(3, "item"), config)
    same = {(r["user"], r["__split"]) for r in again.collect() if r["__skip"] is None}
    assert same == {(r["user"], r["__split"]) for r in kept}


def test_exposures_are_kept_per_positive_of_their_group(spark):
    shown = {1: (2, 10), 2: (1, 2), 3: (0, 5)}  # user: positives, exposures
    rows = [
        {"user": user, "item": i, "__position": i, "label": float(i < positives)}
        for user, (positives, exposures) in shown.items()
        for i in range(positives + exposures)
    ]
    rows.append({"user": 1, "item": 99, "__position": 99, "label": 0.0, "__drop": "duplicate"})
    config = log_config(label=LABEL, negatives={"strategy": "exposure", "per_positive": 3})
    marked = mark_skipped(frame(spark, TYPES, rows).drop("__skip"), config).collect()
    kept = [r for r in marked if r["__skip"] is None and r["__drop"] is None]
    counts = {u: sum(r["user"] == u and r["label"] == 0 for r in kept) for u in shown}
    assert counts == {1: 6, 2: 2, 3: 0}
    assert sum(r["label"] for r in kept) == 3
    chances = {r["user"]: r["sampling_probability"] for r in kept if r["label"] == 0}
    assert chances == pytest.approx({1: 0.6, 2: 1.0})
    assert {r["sampling_probability"] for r in kept if r["label"] == 1} == {1.0}


def test_weights_multiply_column_class_and_decay(spark):
    rows = [
        {"user": 1, "dwell": 3.0, "label": 1.0, "__event_ts_ms": 0},
        {"user": 2, "dwell": 3.0, "label": 0.0, "__event_ts_ms": 20 * DAY_MS},
        {"user": 3, "dwell": None, "label": 0.0, "__event_ts_ms": 10 * DAY_MS},
    ]
    config = log_config(
        label=LABEL,
        weights={
            "name": "w",
            "column": "dwell",
            "positive": 8,
            "negative": 0.5,
            "half_life_days": 10,
        },
    )
    found = add_weights(frame(spark, TYPES, rows), config, 20 * DAY_MS).collect()
    assert {r["user"]: r["w"] for r in found} == {1: 6.0, 2: 1.5, 3: 0.25}
