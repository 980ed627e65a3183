"""Units of times: what the config leaves out, and what the values say of what it states."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from conf.dates import FIRST_DATE_S, LAST_DATE_S, PER_SECOND
from conf.errors import ConfigError, InputDataError
from conf.etl.build import BuildConfig
from conf.etl.time_columns import TimeColumn, find_time_columns
from etl.events.event_log import prepare_events
from etl.quality.time_units import check_units, count_sources, judge_times
from etl.sources.bad_rows import SourceCounts
from etl.sources.read import read_source
from tests.etl.logs import columns

NOW_S = int(datetime(2026, 6, 1, tzinfo=UTC).timestamp())
Y2020_S = 1_577_836_800
DAY_S = 86_400
DATES_S = [Y2020_S + day * DAY_S for day in range(100)]
DATES_MS = [1000 * time for time in DATES_S]
CONVERSION = {"source": "orders", "keys": {"user": "buyer"}, "time": "at", "within_hours": 1}
FRESH = {"kind": "freshness", "source": "orders", "column": "at", "maximum": 9, "date": "now"}
KEYS = [
    {"name": "user", "column": "user", "role": "user"},
    {"name": "item", "column": "item", "role": "item"},
]


def hour(name: str = "hour", column: str = "ts", **encoding: Any) -> dict[str, Any]:
    encoding = {"kind": "date_part", "part": "hour", **encoding}
    return {"name": name, "column": column, "role": "context", "encoding": encoding}


def make(kind: str = "int64", **changes: Any) -> BuildConfig:
    """A log with a dictionary that changes, conversions, a date feature and a freshness rule."""
    said = {"type": kind, **{k: changes.pop(k, None) for k in ("timestamp_format", "unit")}}
    ts, since, until, at = (
        {**column, **said} for column in columns(ts=kind, since=kind, until=f"{kind}?", at=kind)
    )
    part = {"kind": "date_part", "part": "weekday"}
    cross = {"kind": "cross", "crossed_with": ["ts"], "buckets": 9, "prepared": {"ts": part}}
    data: dict[str, Any] = {
        "name": "timed",
        "sources": {
            "log": {"path": "log.tsv", "columns": [*columns(user="int64", item="int64"), ts]},
            "prices": {
                "path": "prices.tsv",
                "key": "product",
                "columns": [*columns(product="int64", price="float32"), since, until],
            },
            "orders": {"path": "orders.tsv", "columns": [*columns(buyer="int64"), at]},
        },
        "events": {"source": "log", "user": "user", "item": "item", "time": "ts"},
        "joins": [
            {"source": "prices", "column": "item", "valid_from": "since", "valid_to": "until"}
        ],
        "histories": [{"name": "clicked", "columns": ["ts"]}],
        "label": {"conversion": CONVERSION},
        "features": [
            *KEYS,
            hour(),
            {**hour("age", "since"), "encoding": {"kind": "cyclical", "period": "year"}},
            {**hour("hours", "clicked_ts"), "max_len": 9},
            {"name": "pair", "column": "item", "role": "context", "encoding": cross},
        ],
        "contract": {"rules": [FRESH]},
    }
    return BuildConfig.model_validate({**data, **changes})


def measure(time: TimeColumn, values: Sequence[float]) -> dict[str, float]:
    told, tomorrow = [v for v in values if v >= 2], (NOW_S + DAY_S) * PER_SECOND[time.unit]
    return {
        **{
            unit: sum(FIRST_DATE_S * n <= v < LAST_DATE_S * n for v in values)
            for unit, n in PER_SECOND.items()
        },
        "small": sum(v < FIRST_DATE_S for v in told),
        "too_large": sum(v >= 2**63 // 1000 for v in values),
        "told": len(told),
        "low": min(told, default=0),
        "high": max(told, default=0),
        "future": sum(v >= tomorrow for v in values),
    }


def judge(config: BuildConfig, **times: Sequence[float]) -> list[str]:
    """Checks values that are given by column; others are dates that fit."""
    columns, counts = {}, {}
    for time in find_time_columns(config):
        values = times.get(time.column, DATES_MS if time.unit == "ms" else DATES_S)
        columns[time] = measure(time, values)
        counts.setdefault(time.source, SourceCounts(len(values), {}))
    check_units(config, columns)
    return [f"{result.rule}: {result.received}" for result in judge_times(config, columns, counts)]


def test_every_reader_goes_by_the_unit_of_the_column():
    read_again = BuildConfig.model_validate(make().resolved())
    for config, unit in (
        (make("timestamp"), "ms"), (make(), "s"), (make(unit="ms"), "ms"), (read_again, "s"),
    ):  # fmt: skip
        # Events, entry, end, conversion, four features, a rule.
        assert [time.unit for time in find_time_columns(config)] == [unit] * 9


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("timestamp", {"unit": "ms"}),
        ("timestamp", {"features": [*KEYS, hour(unit="us")]}),
        ("int64", {"unit": "ms", "features": [*KEYS, hour(unit="s")]}),
        ("int64", {"unit": "ms", "split": {"strategy": "given", "test": "given"}}),
    ],
)
def test_a_time_has_one_unit(kind, changes):
    if "split" in changes:  # the given events are in seconds
        sources = make(unit="ms").model_dump()["sources"]
        changes = {
            **changes,
            "sources": {**sources, "given": make().model_dump()["sources"]["log"]},
        }
    with pytest.raises(ValidationError, match=r"cannot have a `unit`|here, and in"):
        make(kind, **changes)


def alone(**changes: Any) -> BuildConfig:
    return make(label=None, **changes)


OF_A_FEATURE = {"joins": [], "features": [*KEYS, hour(unit="us")]}
REFUSED = [
    # config, values by column, parts of the message
    *[
        (make(unit=unit), {column: DATES_MS if unit == "s" else DATES_S},
         [f"{column} are no dates in", "say in which unit they are (sources.",
          "2020-01-01 to 2020-04-09", "the year 51,97" if unit == "s" else "1970-01-19"])
        for column in ("ts", "since", "until", "at") for unit in ("s", "ms")
    ],
    (alone(**OF_A_FEATURE), {}, ["log.ts are no dates in microsec", "(features.hour.encoding)"]),
    (alone(), {"at": DATES_MS}, ["orders.at are no dates"]),
    # What is read of a format is in milliseconds of the unit that the format names.
    *[
        (make("timestamp", timestamp_format=written), {"ts": [1000 * time for time in DATES_MS]},
         ["`timestamp_format: epoch_s`"])
        for written in ("epoch_s", "epoch_ms")
    ],
    (make(), {"ts": [20_260_101, 20_260_131]}, ["log.ts are written as dates", "yyyyMMdd`"]),
    (make(), {"ts": [20_260_101_000_000, 20_260_228_000_000]}, ["written as", "yyyyMMddHHmmss`"]),
    (make(), {"ts": [*DATES_S, NOW_S + 2 * DAY_S, NOW_S + 900 * DAY_S]},
     ["log.ts lie in the future", "2 of 102 times, up to 2028-11-17"]),
]  # fmt: skip


@pytest.mark.parametrize(("config", "times", "parts"), REFUSED)
def test_times_that_mean_something_else_are_refused(config, times, parts):
    with pytest.raises(InputDataError) as refused:
        judge(config, **times)
    text = refused.value.render()
    assert [part for part in parts if part not in text] == []
    assert refused.value.exit_code == 3


STEPS = list(range(1000))
HOURS_MS = [n * 3_600_000 for n in range(24 * 60)]  # 60 days from 0: most could be seconds
LATER = [NOW_S + 2 * DAY_S, NOW_S + 900 * DAY_S]


@pytest.mark.parametrize(
    ("unit", "times"),
    [
        *[("s", dict.fromkeys(("ts", "since", "until", "at"), times))
          for times in (STEPS, [0, 1], [0], [n * 977 for n in STEPS], [2**37 + n for n in STEPS])],
        ("ms", dict.fromkeys(("ts", "since", "until", "at"), HOURS_MS)),
        # Entries that count always, and never end.
        ("s", {"since": [0] * 100, "until": [253_402_300_799] * 100}),
        ("s", {"since": [0, 1] * 50, "until": [2**62] * 100}),
        # Dates before 1970 and in the 1970s; no month 00; another zone's clock; planned prices.
        ("s", {"since": [-Y2020_S, -DAY_S, 200_000_000]}),
        ("s", {"ts": [19_800_000, 20_260_131]}),
        ("s", {"ts": [*DATES_S, NOW_S + 3600]}),
        ("s", {"since": LATER, "until": LATER}),
    ],
)  # fmt: skip
def test_numbers_that_count_from_anywhere_stay_possible(unit, times):
    assert judge(make(unit=unit), **times) == []


def test_few_times_in_the_future_are_warned_of():
    (warning,) = judge(make(), ts=[*DATES_S * 3, NOW_S + 900 * DAY_S])
    assert warning == "future log.ts: 1 of 301 times, up to 2028-11-17"


@pytest.mark.parametrize(
    ("unit", "wrong", "right"),
    [("s", Y2020_S * 1000, Y2020_S), ("ms", Y2020_S, Y2020_S * 1000)],
)
def test_times_of_the_config_are_in_the_unit_of_what_they_bound(unit, wrong, right):
    def bound(test: int | str, validation: int | str, until: int) -> BuildConfig:
        split = {"strategy": "temporal", "test": test, "validation": validation}
        return make(unit=unit, split=split, label={"conversion": {**CONVERSION, "until_ts": until}})

    for key, times in (
        (r"split\.test", (wrong, right, right)),
        (r"split\.validation", (right, wrong, right)),
        ("`until_ts`", (right, right, wrong)),
    ):
        with pytest.raises(ConfigError, match=f"{key}.* of another unit") as refused:
            judge(bound(*times))
        assert f"set it to {right}" in refused.value.render()
    assert judge(bound(right, right, right)) == []
    assert judge(bound("2020-01-02", "2020-01-01", right)) == []
    assert judge(bound(wrong, wrong, right), ts=[3, 4, 5]) == []  # counts from elsewhere


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    """A log of 200 rows with two times in milliseconds, and one too large for any unit."""
    folder = tmp_path_factory.mktemp("mixed")
    times = [Y2020_S + 60 * n for n in range(197)] + [1000 * Y2020_S, 1000 * Y2020_S + 5, 2**63 - 1]
    lines = [f"{n % 5}\t{n % 7}\t{time}" for n, time in enumerate(times)]
    (folder / "log.tsv").write_text("\n".join(lines) + "\nx\t1\t1\n")
    return folder


def count(spark, folder: Path, **log: Any):
    config = alone(joins=[], contract={}, histories=[], features=KEYS)
    source = config.sources["log"].model_copy(update=log)
    config = config.model_copy(update={"sources": {"log": source}})
    read = {"log": read_source(spark, "log", source, str(folder))}
    return count_sources(config, read)


def test_times_of_another_unit_than_the_others_are_bad_rows(spark, mixed):
    found = count(spark, mixed, max_bad_rows=0.05)
    assert found.counts["log"].read == 201
    assert found.counts["log"].bad == {"not_int64:user": 1, "other_unit:ts": 3}
    lines = [row["line"] for row in found.sources["log"].bad.where("reason like 'o%'").collect()]
    assert sorted(int(line.split("\t")[2]) for line in lines)[0] == 1000 * Y2020_S
    assert found.sources["log"].good.count() == 197
    with pytest.raises(InputDataError, match=r"log\.ts are of several units") as refused:
        count(spark, mixed, max_bad_rows=0.01)
    assert "197 are dates in seconds; 3 are not" in refused.value.render()


def test_timestamps_meet_without_a_word_of_units(spark, tmp_path):
    """An entry, an event an hour later, its conversion another half hour later."""
    clock = "2020-01-02 {}:00"
    files = {
        "log": [(user, item, clock.format("12:00")) for user in (1, 2) for item in (10, 11)],
        "prices": [(item, 1.5, clock.format("11:00"), "") for item in (10, 11)],
        "orders": [(1, clock.format("12:30"))],
    }
    for name, lines in files.items():
        text = "\n".join("\t".join(map(str, line)) for line in lines)
        (tmp_path / f"{name}.tsv").write_text(text + "\n")
    config = make("timestamp")
    read = {n: read_source(spark, n, s, str(tmp_path)) for n, s in config.sources.items()}
    prepared = prepare_events(config, count_sources(config, read).sources)
    found = prepared.frame.select("user", "price", "label", "__event_ts_ms").collect()
    prepared.release()
    assert {row["price"] for row in found} == {1.5}
    assert {(row["user"], row["label"]) for row in found} == {(1, 1.0), (2, 0.0)}
    assert min(row["__event_ts_ms"] for row in found) == 1_577_966_400_000
    assert prepared.conversions["label"].lost == {}
