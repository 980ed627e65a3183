"""Splits: who goes where, and that it does not hang on how Spark lays the rows out."""

from __future__ import annotations

import pytest

from conf.errors import InputDataError
from etl.sliding import mark_outside_window
from etl.split import add_split
from tests.etl.samples_log import frame, log_config

DAY_MS = 86_400_000
TYPES = {"user": "bigint", "item": "bigint", "ts": "bigint"}


def test_leave_k_out_takes_k_for_test_and_k_before_for_validation(spark):
    rows = [
        {"user": user, "item": p, "ts": p, "__position": p, "__total": total}
        for user, total in ((1, 7), (2, 4))
        for p in range(1, total + 1)
    ]
    config = log_config(split={"leave_out": 2})
    split = add_split(frame(spark, TYPES, rows).drop("__split"), config).collect()
    of_user = {r["item"]: r["__split"] for r in split if r["user"] == 1}
    assert [of_user[i] for i in range(1, 8)] == ["train"] * 3 + ["validation"] * 2 + ["test"] * 2
    # Four events leave nothing to train on once twice two are taken out.
    assert {r["__split"] for r in split if r["user"] == 2} == {"train"}


def test_hash_split_keeps_keys_together_however_rows_are_laid_out(spark):
    rows = [{"user": i % 3000, "item": i, "ts": i} for i in range(6000)]
    config = log_config(split={"strategy": "hash", "seed": 5})
    events = frame(spark, TYPES, rows).drop("__split")
    once, again = (
        {(r["user"], r["__split"]) for r in add_split(f, config).collect()}
        for f in (events, events.repartition(5, "item"))
    )
    assert once == again
    assert len(once) == 3000
    shares = [sum(s == split for _, s in once) / 3000 for split in ("test", "validation")]
    assert shares == pytest.approx([0.1, 0.1], abs=4 * (0.09 / 3000) ** 0.5)
    other = log_config(split={"strategy": "hash", "seed": 6})
    assert {(r["user"], r["__split"]) for r in add_split(events, other).collect()} != once


def sliding_days(spark, window: int, **changes: object) -> dict[str, list[int]]:
    events = frame(
        spark,
        TYPES,
        [{"user": 1, "item": d, "__event_ts_ms": 19_000 * DAY_MS + d * DAY_MS} for d in range(12)],
    ).drop("__split")
    days = {"train_days": 4, "validation_days": 1, "test_days": 2, "step_days": 3}
    config = log_config(split={"strategy": "sliding", "window": window, **days, **changes})
    marked = add_split(mark_outside_window(events, config.split), config)
    found: dict[str, list[int]] = {}
    for row in marked.orderBy("item").collect():
        found.setdefault(row["__drop"] or row["__split"], []).append(row["item"])
    return found


def test_windows_of_a_backtest_slide_and_leave_out_past_and_future(spark):
    assert sliding_days(spark, 0) == {
        "train": [0, 1, 2, 3],
        "validation": [4],
        "test": [5, 6],
        "outside_window": [7, 8, 9, 10, 11],
    }
    assert sliding_days(spark, 1, validation_days=None) == {
        "outside_window": [0, 1, 2, 9, 10, 11],
        "train": [3, 4, 5, 6],
        "test": [7, 8],
    }


def test_windows_start_on_the_declared_day(spark):
    days = sliding_days(spark, 0, start_date="2022-01-10")  # day 19002
    assert days["train"] == [2, 3, 4, 5]


def test_window_after_the_log_is_refused_with_those_there_are(spark):
    with pytest.raises(InputDataError, match="after the log has ended") as refused:
        sliding_days(spark, 5)
    assert "split.window 0 to 2" in str(refused.value)
