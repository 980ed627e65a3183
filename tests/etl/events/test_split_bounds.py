"""Bounds of a temporal split: dates, durations and fractions, and what is refused before a read."""

from __future__ import annotations

from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from conf.dates import DateRange
from conf.errors import ConfigError
from conf.etl.build import BuildConfig
from etl.build import check_config
from etl.events.splits import SplitBounds, end_of_log, find_bounds, plan_spans, show_span
from etl.versions.run_fingerprint import RunRequest
from tests.etl.logs import build_config

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
