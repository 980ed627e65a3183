"""Splits: bounds, who goes where, days of a run; conditions; events that are no samples."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from conf.dates import DateRange
from conf.errors import ConfigError, InputDataError
from conf.etl.build import BuildConfig
from conf.etl.encodings import FeatureConfig
from etl.build import check_config
from etl.encoders.feature_plan import plan_features
from etl.events.columns import kept
from etl.events.conditions import check_where
from etl.events.counted_features import add_most_frequent, fit_most_frequent
from etl.events.event_counts import EventCounts, check_counts, count_events
from etl.events.labels import add_weights
from etl.events.sampling import mark_not_sampled
from etl.events.splits import (
    SplitBounds,
    add_split,
    check_dates,
    end_of_log,
    find_bounds,
    plan_spans,
    show_span,
    split_by_window,
)
from etl.records.samples import build_samples, build_users
from etl.versions.run_fingerprint import RunRequest
from tests.etl.events.prepared import prepare
from tests.etl.logs import behaviour_config, build_config, columns, ctr_config, frame, log_config

DAY_MS = 86_400_000
TYPES = {"user": "bigint", "item": "bigint", "ts": "bigint"}


def test_hash_split_keeps_keys_together_however_rows_are_laid_out(spark):
    rows = [{"user": i % 3000, "item": i, "ts": i} for i in range(6000)]
    config = log_config(split={"strategy": "hash"})
    events = frame(spark, TYPES, rows).drop("__split")
    once, again = (
        {(r["user"], r["__split"]) for r in add_split(f, config).collect()}
        for f in (events, events.repartition(5, "item"))
    )
    assert once == again
    assert len(once) == 3000
    shares = [sum(s == split for _, s in once) / 3000 for split in ("test", "validation")]
    assert shares == pytest.approx([0.1, 0.1], abs=4 * (0.09 / 3000) ** 0.5)
    other = log_config(split={"strategy": "hash"}, output={"seed": 6})
    assert {(r["user"], r["__split"]) for r in add_split(events, other).collect()} != once


def sliding_days(spark, window: int, **changes: object) -> dict[str, list[int]]:
    first = 19_000 * DAY_MS
    rows = [{"user": 1, "item": d, "__event_ts_ms": first + d * DAY_MS} for d in range(12)]
    events = frame(spark, TYPES, rows).drop("__split")
    days = {"train": "4 days", "validation": "1 day", "test": "2 days", "step_days": 3}
    config = log_config(split={"strategy": "sliding", "window": window, **days, **changes})
    found: dict[str, list[int]] = {}
    for row in split_by_window(events, config.split).orderBy("item").collect():
        found.setdefault(row["__drop"] or row["__split"], []).append(row["item"])
    return found


def test_windows_of_a_backtest_slide_and_leave_out_past_and_future(spark):
    assert sliding_days(spark, 0) == {
        "train": [0, 1, 2, 3],
        "validation": [4],
        "test": [5, 6],
        "outside_window": [7, 8, 9, 10, 11],
    }
    assert sliding_days(spark, 1, validation=False) == {
        "outside_window": [0, 1, 2, 9, 10, 11],
        "train": [3, 4, 5, 6],
        "test": [7, 8],
    }
    assert sliding_days(spark, 0, start_date="2022-01-10")["train"] == [2, 3, 4, 5]  # day 19002
    with pytest.raises(InputDataError, match="after the log has ended"):
        sliding_days(spark, 5)


def test_given_validation_and_test_events_leave_their_future_out(spark):
    source = behaviour_config().model_dump()["sources"]["log"]
    config = behaviour_config(
        sources=dict.fromkeys(("log", "valid", "test"), source),
        split={"strategy": "given", "test": "test", "validation": "valid"},
    )

    def rows(*events: tuple[int, int, int]) -> list[tuple]:
        return [(user, item, "view", 0.5, ts) for user, item, ts in events]

    prepared = prepare(
        spark,
        config,
        rows((1, 10, 100), (1, 11, 200), (1, 12, 300), (1, 13, 400), (2, 10, 500)),
        valid=rows((1, 14, 200), (1, 15, 310)),
        test=rows((1, 16, 300), (2, 17, 600)),
    ).frame
    found = {row["item"]: row for row in prepared.where("user = 1").collect()}
    found_splits = {item: row["__split"] for item, row in found.items() if row["__drop"] is None}
    assert found_splits == {10: "train", 14: "validation", 16: "test"}
    # In the order of what is known: the log, validation, test.
    assert [found[item]["__position"] for item in (10, 14, 16)] == [1, 2, 3]
    counts = count_events(prepared, config)
    # 12 and 13 come with or after the test event, as does 15; 11 with the validation event.
    assert counts.dropped == {"after_test": 3, "after_validation": 1}
    assert counts.splits == {"train": 2, "validation": 1, "test": 2}


@pytest.mark.parametrize(
    ("splits", "empty"),
    [({"train": 120}, "the validation and the test split"), ({}, "the train and")],
)
def test_a_log_that_leaves_a_split_empty_is_refused(splits, empty):
    counts = EventCounts(120, splits, {"unmatched:items": 119}, (0, 10 * DAY_MS))
    with pytest.raises(InputDataError, match=empty):
        check_counts(counts, log_config(), None, replaces_days=False)


def test_a_log_of_one_user_has_every_split_but_by_hash(spark):
    rows = [(7, item, "view", 1.0, 100 * item) for item in range(12)]

    def split(**changes: object) -> dict[str, int]:
        config = behaviour_config(split=changes)
        counts = count_events(prepare(spark, config, rows).frame, config)
        check_counts(counts, config, None, replaces_days=False)
        return dict(counts.splits)

    assert split() == {"train": 10, "validation": 1, "test": 1}
    assert split(strategy="temporal") == {"train": 9, "validation": 1, "test": 2}
    with pytest.raises(InputDataError, match="split would be empty"):
        split(strategy="hash")


def test_events_after_the_days_of_a_run_are_told_from_earlier_ones(spark, caplog):
    rows = [
        {"user": 1, "item": d, "__event_ts_ms": 19_000 * DAY_MS + d * DAY_MS, "__split": split}
        for d in range(10)
        for split in ("train", "test")
    ]
    rows.append({**rows[0], "__drop": "duplicate"})
    config = log_config(split={"strategy": "temporal", "validation": False})
    days = DateRange(date(2022, 1, 10), date(2022, 1, 12))  # days 19002 to 19004
    events = frame(spark, TYPES, rows)
    counts = count_events(events, config.model_copy(update={"joins": ()}), dates=days)
    assert (counts.joined, counts.splits) == (20, {"train": 3, "test": 3})
    assert counts.dropped == {"after_dates": 10, "duplicate": 1, "outside_dates": 4}
    check_counts(counts, config, days, replaces_days=False)
    assert "10 events lie after the run's last day, 2022-01-12" in caplog.text
    check_counts(replace(counts, splits={"test": 1}), config, days, replaces_days=True)
    with pytest.raises(InputDataError, match="no sample lies in the run's days"):
        check_counts(replace(counts, splits={}), config, days, replaces_days=True)


def test_durations_split_the_days_of_a_run_or_the_end_of_the_log(spark):
    """An event every six hours from day 19000 to the morning of day 19003."""
    rows = [(7, item, "view", 1.0, 19_000 * 86_400 + 21_600 * item) for item in range(14)]
    rows.append((7, 99, "view", 1.0, 18_999 * 86_400))

    def count(dates: DateRange | None, **split: object) -> dict[str, int]:
        config = behaviour_config(split={"strategy": "temporal", **split})
        prepared = prepare(spark, config, rows, dates)
        return dict(count_events(prepared.frame, config, dates=dates).splits)

    first, last = date(2022, 1, 8), date(2022, 1, 10)  # days 19000 to 19002
    by_day = {"validation": "1 day", "test": "1 day"}
    assert count(DateRange(first, last), **by_day) == {"train": 4, "validation": 4, "test": 4}
    assert count(None, **by_day) == {"train": 9, "validation": 4, "test": 2}
    by_hour = {"validation": "6 hours", "test": "12 hours"}
    assert count(DateRange(last, last), **by_hour) == {"train": 1, "validation": 1, "test": 2}
    # The log ends at 06:00: in hours, the last one that has begun is the end.
    assert count(None, validation="6 hours", test="6 hours")["test"] == 1
    fractions = {"validation": 0.25, "test": 0.25}
    assert count(DateRange(last, last), **fractions) == {"train": 2, "validation": 1, "test": 1}


DAY = DateRange(date(2026, 1, 31), date(2026, 1, 31))


def daily_config(**changes):
    kinds = {"click": "int64", "site": "string", "device": "string", "at": "timestamp"}
    log = {"path": "log.tsv", "columns": columns(**kinds), **changes}
    return ctr_config(Path("."), sources={"log": log})


def test_a_day_that_nothing_depends_on_is_refused():
    config = daily_config()
    with pytest.raises(ConfigError, match="nothing of this build depends on days") as refused:
        check_config(config, RunRequest(DAY))
    assert refused.value.exit_code == 2
    check_config(config, RunRequest())
    # Days of an input, a bound by the run's day and times of events count.
    bounded = columns(click="int64", site="string", device="string", at="timestamp")
    bounded[3]["not_after"] = "run_date"
    for changes in ({"path": "{date}.tsv"}, {"days": {"column": "at"}}, {"columns": bounded}):
        check_dates(daily_config(**changes), DAY)
    check_dates(build_config(Path("."), Path(".")), DAY)


SKIPS_TYPES = {"user": "bigint", "item": "bigint", "dwell": "float"}
LABEL = {"column": "dwell", "at_least": 1}


def test_down_sampling_keeps_a_share_and_weights_make_up_for_it(spark):
    rows = [
        {"user": i, "item": i % 7, "__position": 1, "label": float(i % 5 == 0), "__split": split}
        for split, n in (("train", 5000), ("test", 100))
        for i in range(n)
    ]
    config = log_config(label=LABEL, down_sampling=0.25)
    marked = mark_not_sampled(frame(spark, SKIPS_TYPES, rows), config)
    weighted = add_weights(marked, config, None).collect()
    kept = [r for r in weighted if r["__skip"] is None]
    negatives = [r for r in kept if r["label"] == 0 and r["__split"] == "train"]
    assert len(negatives) == pytest.approx(1000, abs=4 * (4000 * 0.25 * 0.75) ** 0.5)
    assert {r["weight"] for r in negatives} == {4.0}
    assert {r["keep_rate"] for r in negatives} == {0.25}
    others = [r for r in kept if r["label"] == 1 or r["__split"] == "test"]
    assert len(others) == 1000 + 100
    assert {(r["weight"], r["keep_rate"]) for r in others} == {(1.0, 1.0)}
    again = mark_not_sampled(frame(spark, SKIPS_TYPES, rows).repartition(3, "item"), config)
    same = {(r["user"], r["__split"]) for r in again.collect() if r["__skip"] is None}
    assert same == {(r["user"], r["__split"]) for r in kept}


@pytest.mark.parametrize(
    ("asked", "train"), [("last", {(1, 5), (2, 3)}), (2, {(1, 1), (1, 3), (1, 5), (2, 1), (2, 3)})]
)
def test_the_ends_of_sequences_are_the_samples_of_train(spark, asked, train):
    splits = {1: ["train"] * 5 + ["validation", "test"], 2: ["train"] * 3 + ["test"]}
    rows = [
        {"user": user, "item": i, "__position": i, "__split": split}
        for user, of_user in splits.items()
        for i, split in enumerate(of_user, 1)
    ]
    duplicate = {"user": 1, "item": 9, "__position": 5, "__drop": "duplicate"}
    log = frame(spark, SKIPS_TYPES, [*rows, duplicate])
    marked = mark_not_sampled(log, log_config(train_samples=asked)).where("__drop is null")
    kept = {(r["user"], r["__position"]) for r in marked.collect() if r["__skip"] is None}
    assert kept == train | {(1, 6), (1, 7), (2, 4)}
    assert {r["__skip"] for r in marked.collect()} == {None, "inside_sequence"}


def test_exposures_are_kept_per_positive_of_their_group(spark):
    shown = {1: (2, 10), 2: (1, 2), 3: (0, 5)}  # user: positives, exposures
    rows = [
        {"user": user, "item": i, "__position": i, "label": float(i < positives)}
        for user, (positives, exposures) in shown.items()
        for i in range(positives + exposures)
    ]
    rows.append({"user": 1, "item": 99, "__position": 99, "label": 0.0, "__drop": "duplicate"})
    config = log_config(label=LABEL, negatives={"strategy": "exposure", "per_positive": 3})
    marked = mark_not_sampled(frame(spark, SKIPS_TYPES, rows), config).collect()
    kept = [r for r in marked if r["__skip"] is None and r["__drop"] is None]
    counts = {u: sum(r["user"] == u and r["label"] == 0 for r in kept) for u in shown}
    assert counts == {1: 6, 2: 2, 3: 0}
    assert sum(r["label"] for r in kept) == 3
    chances = {r["user"]: r["sampling_probability"] for r in kept if r["label"] == 0}
    assert chances == pytest.approx({1: 0.6, 2: 1.0})
    assert {r["sampling_probability"] for r in kept if r["label"] == 1} == {1.0}


VIDEO_COLUMNS = columns(user="int64", video="int64", column="int64?", ts="int64")


def columns_config(**events: object) -> BuildConfig:
    log = {"source": "log", "user": "user", "item": "column", "time": "ts", **events}
    return behaviour_config(
        sources={"log": {"path": "log.tsv", "columns": VIDEO_COLUMNS}},
        events={"where": "column is not null", **log},
        histories=[{"max_len": 3}, {"name": "clicked", "columns": ["video"], "max_len": 5}],
        most_frequent=[{"name": "column_videos", "column": "video", "max_len": 2}],
        label={"column": "column", "at_least": 2},  # Clicks without a column need none.
        split={"strategy": "leave_one_out"},
        features=[
            {"name": "user", "column": "user", "role": "user"},
            {"name": "column", "column": "column", "role": "item"},
        ],
    )


def test_where_chooses_samples_and_histories_still_see_the_others(spark, tmp_path):
    rng = np.random.default_rng(3)
    log = [
        (user, int(rng.integers(1, 9)), None if rng.random() < 0.5 else int(rng.integers(1, 4)), t)
        for user in (1, 2, 3)
        for t in range(14)
    ]
    # At one moment two clicks outside of all columns are two; a repeated click on one is not.
    log += [(1, 3, None, 14), (1, 4, None, 14), (1, 5, 2, 15), (1, 6, 2, 15), (4, 7, None, 1)]
    log += [(5, 8, 2, 1), (5, 8, None, 2)]  # One sample: too few to hold one out.
    config = columns_config()
    prepared = prepare(spark, config, log).frame
    counts = count_events(prepared, config)
    hits = [row for row in log if row[2] is not None]
    assert counts.dropped == {"duplicate": 1, "where_not_met": len(log) - len(hits)}
    assert sum(counts.splits.values()) == len(hits) - 1
    assert counts.short_users == 1
    found = build_samples(kept(prepared), config).collect()
    for user in (1, 2, 3):
        own = sorted((r for r in found if r["user"] == user), key=lambda r: r["ts"])
        # The last samples are held out, whatever was clicked after them.
        splits = ["train"] * (len(own) - 2) + ["validation", "test"]
        assert [r["__split"] for r in own] == splits
        for row in own:
            past = [r[1] for r in log if r[0] == user and r[3] < row["ts"]]
            assert row["clicked_video"] == past[::-1][:5]
            items = [r[2] for r in log if r[0] == user and r[3] < row["ts"] and r[2]]
            assert row["history"] == items[::-1][:3]
            seen = {r[2] for r in log if r[0] == user and r[3] < row["ts"]} - {None}
            assert row["seen"] is None if row["__split"] == "train" else set(row["seen"]) == seen
    fit_most_frequent(kept(prepared), config, tmp_path)
    items = spark.createDataFrame([(1,), (2,), (3,), (77,)], "column bigint")
    pools = add_most_frequent(items, config, tmp_path).collect()
    pairs = Counter((r["column"], r["video"]) for r in found if r["__split"] == "train")
    for row in pools:
        own = [(-n, video) for (column, video), n in pairs.items() if column == row["column"]]
        assert row["column_videos"] == [video for _, video in sorted(own)[:2]]
    assert {row["column"]: row["column_videos"] for row in pools}[77] == []
    users = build_users(prepared, config, plan_features(config), {}).collect()
    for user in (1, 2, 3):
        (row,) = [row for row in users if row["user"] == user]
        own = sorted((r for r in log if r[0] == user), key=lambda r: r[3])
        assert set(row["seen"]) == {r[2] for r in own} - {None}
        assert row["clicked_video"] == [r[1] for r in own if r != (1, 6, 2, 15)][::-1][:5]


def test_conditions_are_those_of_sparks_sql(spark):
    config = columns_config(where="no_such_function(column)")
    check_config(config, RunRequest())
    with pytest.raises(ConfigError, match="UNRESOLVED_ROUTINE"):
        prepare(spark, config, [(1, 1, 1, 1)])
    with pytest.raises(ValidationError, match="'column' of 'log' must not be nullable"):
        columns_config(where=None)


def test_a_list_made_for_items_is_no_feature_of_users():
    config = columns_config()
    wrong = FeatureConfig(name="videos", column="column_videos", role="user")
    changed = config.model_copy(update={"features": (*config.features, wrong)})
    with pytest.raises(ConfigError, match="role item"):
        check_config(changed, RunRequest())


JAN_29_S, HOUR_S, DAY_S = 1_769_644_800, 3_600, 86_400
WEEK = DateRange(date(2026, 1, 25), date(2026, 1, 31))


def config(unit: str = "s", **split: Any) -> BuildConfig:
    sources = build_config(Path(), Path()).model_dump(mode="json")["sources"]
    sources["ratings"]["columns"][3]["unit"] = unit
    return build_config(Path(), Path(), sources=sources, split={"strategy": "temporal", **split})


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (date(2026, 1, 29), JAN_29_S),
        ("2026-01-29", JAN_29_S),
        ("2026-01-29T06:00", JAN_29_S + 6 * HOUR_S),
        ("2026-01-29T06:00:00+02:00", JAN_29_S + 4 * HOUR_S),
        (datetime(2026, 1, 29, 6), JAN_29_S + 6 * HOUR_S),
        (JAN_29_S, JAN_29_S),
    ],
)
def test_bounds_are_dates_timestamps_or_numbers(written, seconds):
    made = config(test=written, validation=False)
    assert made.split.test_from_ts == seconds
    assert BuildConfig.model_validate(made.resolved()) == made
    if not isinstance(written, int):
        ms = config("ms", test=written, validation=False).split.test_from_ts
        assert ms == seconds * 1000


def test_a_bound_between_two_numbers_of_the_log_begins_with_the_later_one():
    bound = "2026-01-29T00:00:00.0015"
    assert config("ms", test=bound).split.test_from_ts == JAN_29_S * 1000 + 2
    assert config(test=bound).split.test_from_ts == JAN_29_S + 1


def test_durations_count_back_from_the_end_of_the_days():
    spans = plan_spans(config(validation="1 day", test="2 days"), WEEK)
    assert {name: show_span(span) for name, span in spans.items()} == {
        "train": [None, "2026-01-29T00:00"],
        "validation": ["2026-01-29T00:00", "2026-01-30T00:00"],
        "test": ["2026-01-30T00:00", None],
    }
    # Of a log without days: from the end of the day, or hour, of its last sample.
    newest_ms = (JAN_29_S + 6 * HOUR_S + 1) * 1000
    for test, first in (("1 day", JAN_29_S), ("2 hours", JAN_29_S + 5 * HOUR_S)):
        made = config(validation=False, test=test)
        assert plan_spans(made, None) == {}
        assert find_bounds(made, end_of_log(made.split, newest_ms)).test == first * 1000
    before = find_bounds(config(validation="6 hours", test="2026-01-29"))
    assert before == SplitBounds((JAN_29_S - 6 * HOUR_S) * 1000, JAN_29_S * 1000)


@pytest.mark.parametrize(
    ("split", "text"),
    [
        ({"validation": "0 days", "test": "1 day"}, "'0 days' is no duration"),
        ({"test": "1 day"}, "leaves open how long validation is"),
        ({"test": "1 day", "strategy": "hash"}, "`test` of `strategy: hash` is a fraction"),
        ({"validation": "1 day", "strategy": "hash"}, "`validation` of `strategy: hash`"),
        ({"test": "in March", "validation": False}, "'in March' is no duration"),
        ({"test": 1.5}, "between 0 and 1"),
        ({"test": "6 hours", "train": "1 day", "strategy": "sliding"}, "whole days"),
    ],
)
def test_what_is_no_bound_or_says_it_twice_is_refused(split, text):
    with pytest.raises(ValidationError, match=text):
        config(**split)


SLIDING = {"strategy": "sliding", "train": "4 days", "validation": "1 day", "test": "1 day"}
LAST_DAYS = DateRange(date(2026, 1, 30), date(2026, 1, 31))


@pytest.mark.parametrize(
    ("split", "dates", "empty", "text"),
    [
        ({"validation": "1 day", "test": "1 day"}, DateRange(WEEK.last, WEEK.last),
         "the train and the validation split", "--date-to"),
        ({"test": "2026-02-01", "validation": False}, WEEK, "the test split",
         "move the bounds"),
        ({"test": "2026-01-20", "validation": "2026-01-19"}, WEEK,
         "the train and the validation split", "the run is of 2026-01-25 to 2026-01-31"),
        ({"test": "2026-01-20", "validation": "2026-01-20"}, None,
         "the validation split", "validation 2026-01-20T00:00 to 2026-01-20T00:00"),
        ({**SLIDING, "start_date": "2026-01-20"}, WEEK, "the train and the validation split",
         "test 2026-01-25T00:00 to 2026-01-26T00:00"),
        (SLIDING, LAST_DAYS, "the test split", "a window of train, validation, test"),
        ({"validation": "1 day", "test": "1 day"}, WEEK, None, None),
        ({"validation": "3 hours", "test": "3 hours"}, LAST_DAYS, None, None),
        ({"test": "2026-01-30", "validation": "2026-01-29"}, WEEK, None, None),
        ({"test": 0.2}, WEEK, None, None),
        ({**SLIDING, "start_date": "2026-01-25"}, WEEK, None, None),
        ({**SLIDING, "validation": False}, LAST_DAYS, None, None),
        ({"strategy": "leave_one_out"}, WEEK, None, None),
    ],
)  # fmt: skip
def test_a_plan_that_leaves_a_split_empty_is_refused_without_spark(split, dates, empty, text):
    made, request = config(**split), RunRequest(dates)
    if empty is None:
        check_config(made, request)
        return
    with pytest.raises(ConfigError, match=f"{empty} would be empty") as refused:
        check_config(made, request)
    assert (refused.value.exit_code, text in refused.value.render()) == (2, True)


def replacing(**changes: Any) -> BuildConfig:
    made = config(test="2026-01-20", validation=False).model_dump(exclude_unset=True)
    made["output"] |= {"partition_by": ["date"], "partition_overwrite": "dynamic"}
    return BuildConfig.model_validate(made | changes)


def given_events(*, has_time: bool) -> dict[str, Any]:
    """Test events of a source of their own, and a log with a column `date`."""
    sources = replacing().model_dump(exclude_unset=True)["sources"]
    log = sources["ratings"]
    names = [column for column in log["columns"] if has_time or column["name"] != "ts"]
    sources["held_out"] = {**log, "path": "held_out", "columns": names}
    split = {"strategy": "given", "test": "held_out", "validation": False}
    return {"sources": sources, "split": split}


def dated() -> dict[str, Any]:
    changes = given_events(has_time=True)
    log = changes["sources"]["ratings"]
    log["columns"] = [*log["columns"], {"name": "date", "type": "string"}]
    return {"sources": changes["sources"]}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"split": {"strategy": "temporal", "test": "1 day", "validation": False}}, "test: 1 day"),
        ({"split": {"strategy": "leave_one_out"}}, "leave_one_out"),
        ({"split": SLIDING}, "without start_date"),
        ({"train_samples": "last"}, "train_samples: last"),
        ({"weights": {"half_life_days": 2}}, "half_life_days: 2"),
        (given_events(has_time=False), "events of 'held_out' that have no time"),
        (dated(), "a column 'date' of the log"),
    ],
)
def test_days_that_replace_those_of_a_dataset_must_not_move_others(changes, says):
    with pytest.raises(ConfigError, match="keeps records of other days") as refused:
        check_config(replacing(**changes), RunRequest(WEEK))
    assert says in refused.value.render()


def test_days_whose_records_stay_the_same_may_be_replaced():
    check_config(replacing(), RunRequest(WEEK))
    check_config(replacing(**given_events(has_time=True)), RunRequest(WEEK))


def check(text: str) -> None:
    events = {"source": "log", "user": "user", "item": "item", "time": "ts"}
    check_where(behaviour_config(events={**events, "where": text}))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("price / item > 0.5", "price / item fails at a divisor of 0; write try_divide"),
        ("abs(user / (item + 1)) > 1 or action = 'buy'", "try_divide"),
        ("user div item = 2", "try_divide"),
        ("user % 10 < 3", "try_mod"),
        ("pmod(user, item) = 1", "try_mod"),
        ("'yes'", "its type is "),
        ("item + 1", "its type is BIGINT"),
        ("itm is not null", "did you mean 'item'"),
        ("item > (", "is no condition"),
        ("count(*) > 1", "take COUNT"),
        ("row_number() over (order by ts) > 1", "take ROW_NUMBER"),
        ("rand() < 0.5", "take RAND"),
        ("action > 5", "action > 5 compares text with a number"),
        ("upper(action) = item", "try_cast"),
        ("item = '5'", "try_cast"),
        ("'2024-01-01' < ts", "try_cast"),
        ("action in ('view', 3)", "try_cast"),
        ("action between 1 and 3", "try_cast"),
        ("price > 1 and nullif(action, 0) is null", "try_cast"),
        ("case action when 1 then true else false end", "try_cast"),
        ("action rlike '('", "do not allow '('"),
        ("not regexp_like(action, '(?P<a>x)')", "a named group is (?<name>…)"),
        ("regexp_extract(action, r'[a', 1) = 'x' and item > 1", "do not allow '[a'"),
        ("split(action, '*')[0] = 'x'", "do not allow '*'"),
    ],
)
def test_what_is_no_condition_or_fails_at_some_values_is_refused_with_what_does_not(text, says):
    with pytest.raises(ConfigError) as refused:
        check(text)
    assert says in refused.value.render()


@pytest.mark.parametrize(
    "text",
    [
        "action = 'buy' or action in ('view', 'click')",
        "action <> 'buy' and price >= 0.7F and item in (1, 2) and user between 1 and 9",
        "try_divide(price, item) > 0.5 and try_mod(user, 10) = 1",
        "try_cast(action as int) > 3 and cast(item as string) = '5'",
        "length(action) > 3 and action like '%a/b%' and action is not null",
        "case when item > 3 then action = 'buy' else false end",
        "coalesce(action, 'x') = 'x' and nullif(item, 0) is null and 'a' < action",
        r"action rlike '^\\(\\d+\\)$' or action regexp r'\[x' or action rlike concat('(', action)",
        "split(action, '[|]')[0] = 'x' and regexp_replace(action, '(?i)a', 'b') = 'b'",
    ],
)
def test_other_conditions_pass(text):
    check(text)
