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


def in_ms(times: Sequence[int]) -> list[int]:
    return [1000 * time for time in times]


def make(**changes: Any) -> BuildConfig:
    """A log with a dictionary that changes, conversions, a date feature and a freshness rule."""
    kind = changes.pop("type", "int64")
    said = {key: changes.pop(key, None) for key in ("timestamp_format", "unit")}
    times = [
        {**column, "type": kind, **said}
        if column["name"] in ("ts", "since", "until", "at")
        else column
        for column in columns(ts="int64", since="int64", until="int64?", at="int64")
    ]
    ts, since, until, at = times
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
            {
                "source": "prices",
                "column": "item",
                "valid_from": "since",
                "valid_to": "until",
            }
        ],
        "histories": [{"name": "clicked", "columns": ["ts"]}],
        "label": {
            "conversion": {
                "source": "orders",
                "keys": {"user": "buyer"},
                "time": "at",
                "within_hours": 1,
            }
        },
        "features": [
            {"name": "user", "column": "user", "role": "user"},
            {"name": "item", "column": "item", "role": "item"},
            {"name": "hour", "column": "ts", "role": "context",
             "encoding": {"kind": "date_part", "part": "hour"}},
            {"name": "age", "column": "since", "role": "item",
             "encoding": {"kind": "cyclical", "period": "year"}},
            {"name": "hours", "column": "clicked_ts", "role": "user", "max_len": 9,
             "encoding": {"kind": "date_part", "part": "hour"}},
            {"name": "pair", "column": "item", "role": "context",
             "encoding": {"kind": "cross", "crossed_with": ["ts"], "buckets": 9,
                          "prepared": {"ts": {"kind": "date_part", "part": "weekday"}}}},
        ],
        "contract": {"rules": [{"kind": "freshness", "source": "orders", "column": "at",
                                "maximum": 9, "date": "now"}]},
    }  # fmt: skip
    return BuildConfig.model_validate({**data, **changes})


def measure(time: TimeColumn, values: Sequence[float]) -> dict[str, float]:
    told, tomorrow = [v for v in values if v >= 2], (NOW_S + DAY_S) * PER_SECOND[time.unit]
    dates = {
        unit: sum(FIRST_DATE_S * n <= v < LAST_DATE_S * n for v in values)
        for unit, n in PER_SECOND.items()
    }
    return {
        **dates,
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
        values = times.get(time.column, in_ms(DATES_S) if time.unit == "ms" else DATES_S)
        columns[time] = measure(time, values)
        counts.setdefault(time.source, SourceCounts(len(values), {}))
    check_units(config, columns)
    return [f"{result.rule}: {result.received}" for result in judge_times(config, columns, counts)]


def units_of(config: BuildConfig) -> set[str]:
    return {time.unit for time in find_time_columns(config)}


def test_every_reader_goes_by_the_unit_of_the_column():
    config = make(type="timestamp")
    # Events, entry, end, conversion, four features, a rule.
    assert len(find_time_columns(config)) == 9
    assert units_of(config) == {"ms"}
    assert units_of(make()) == {"s"}
    config = make(unit="ms")
    assert units_of(config) == {"ms"}
    found = BuildConfig.model_validate(make().resolved())
    assert found.sources["prices"].column("until").unit == "s"
    assert units_of(found) == {"s"}


HOUR = {"name": "hour", "column": "ts", "role": "context"}


def features(encoding: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"name": "user", "column": "user", "role": "user"},
        {"name": "item", "column": "item", "role": "item"},
        {**HOUR, "encoding": {"kind": "date_part", "part": "hour", **encoding}},
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"type": "timestamp", "unit": "ms"},
        {"type": "timestamp", "features": features({"unit": "us"})},
        {"unit": "ms", "features": features({"unit": "s"})},
        {"unit": "ms", "split": {"strategy": "given", "test": "given"}},
    ],
)
def test_a_time_has_one_unit(changes):
    if "split" in changes:
        data = make().model_dump(mode="json")
        given = {**data["sources"]["log"], "path": "given.tsv"}
        changes = {**changes, "sources": {**make(unit="ms").model_dump()["sources"],
                                          "given": given}}  # fmt: skip
    with pytest.raises(ValidationError, match=r"cannot have a `unit`|here, and in"):
        make(**changes)


@pytest.mark.parametrize("column", ["ts", "since", "until", "at"])
@pytest.mark.parametrize("unit", ["s", "ms"])
def test_dates_in_another_unit_are_refused_with_both_readings(column, unit):
    times = in_ms(DATES_S) if unit == "s" else DATES_S
    with pytest.raises(InputDataError, match=f"{column} are no dates in") as refused:
        judge(make(unit=unit), **{column: times})
    text = refused.value.render()
    assert "say in which unit they are (sources." in text
    assert "2020-01-01 to 2020-04-09" in text
    assert ("the year 51,97" if unit == "s" else "1970-01-19") in text
    assert refused.value.exit_code == 3


def test_dates_of_features_and_rules_are_checked_too():
    alone = make(label=None, joins=[], contract={"rules": [
        {"kind": "freshness", "source": "orders", "column": "at",
         "maximum": 9, "date": "now"}]}, features=features({"unit": "us"}))  # fmt: skip
    with pytest.raises(InputDataError, match=r"log\.ts are no dates in microseconds") as refused:
        judge(alone)
    assert "say in which unit they are (features.hour.encoding)" in refused.value.render()
    alone = make(contract={"rules": [*alone.contract.model_dump()["rules"]]}, label=None)
    with pytest.raises(InputDataError, match=r"orders\.at are no dates"):
        judge(alone, at=in_ms(DATES_S))


@pytest.mark.parametrize(("written", "factor"), [("epoch_s", 1_000), ("epoch_ms", 1_000)])
def test_times_written_in_another_unit_than_their_format_says(written, factor):
    """What is read of a format is in milliseconds of the unit that the format names."""
    with pytest.raises(InputDataError, match="`timestamp_format: epoch_s`"):
        judge(
            make(type="timestamp", timestamp_format=written),
            ts=[factor * value for value in in_ms(DATES_S)],
        )


def test_numbers_that_count_from_anywhere_stay_possible():
    steps = list(range(1000))
    long_ms = [n * 3_600_000 for n in range(24 * 60)]  # 60 days from 0: most could be seconds
    for times in (steps, [0, 1], [0], [n * 977 for n in steps], [2**37 + n for n in steps]):
        assert judge(make(), ts=times, since=times, until=times, at=times) == []
    assert judge(make(unit="ms"), ts=long_ms, since=long_ms, until=long_ms, at=long_ms) == []
    # Entries that count always, and never end.
    assert judge(make(), since=[0] * 100, until=[253_402_300_799] * 100) == []
    assert judge(make(), since=[0, 1] * 50, until=[2**62] * 100) == []
    # Dates before 1970 and in the 1970s.
    assert judge(make(), since=[-Y2020_S, -DAY_S, 200_000_000]) == []


@pytest.mark.parametrize("scale", [1, 1_000_000])
def test_dates_that_are_written_as_numbers_are_refused(scale):
    days = [20_260_101 * scale, 20_260_131 * scale, 20_260_228 * scale]
    with pytest.raises(InputDataError, match=r"log\.ts are written as dates") as refused:
        judge(make(), ts=days)
    assert "timestamp_format: yyyyMMdd" + ("HHmmss" if scale > 1 else "") in refused.value.render()
    assert judge(make(joins=[], label=None), ts=[19_800_000, 20_260_131]) == []  # no 00-00


@pytest.mark.parametrize(
    ("unit", "wrong", "right"),
    [("s", Y2020_S * 1000, Y2020_S), ("ms", Y2020_S, Y2020_S * 1000)],
)
def test_times_of_the_config_are_in_the_unit_of_what_they_bound(unit, wrong, right):
    conversion = {"source": "orders", "keys": {"user": "buyer"}, "time": "at", "within_hours": 1}

    def bound(test: int | str, validation: int | str, until: int) -> BuildConfig:
        split = {"strategy": "temporal", "test": test, "validation": validation}
        label = {"conversion": {**conversion, "until_ts": until}}
        return make(unit=unit, split=split, label=label)

    for key, times in (
        (r"split\.test", (wrong, right, right)),
        (r"split\.validation", (right, wrong, right)),
        ("`until_ts`", (right, right, wrong)),
    ):
        with pytest.raises(ConfigError, match=f"{key}.* of another unit") as refused:
            judge(bound(*times))
        assert f"set it to {right}" in refused.value.render()
    assert (
        judge(bound(right, right, right)) == judge(bound("2020-01-02", "2020-01-01", right)) == []
    )
    assert judge(bound(wrong, wrong, right), ts=[3, 4, 5]) == []  # counts from elsewhere


def test_future_times_are_counted_and_beyond_the_budget_refused():
    future = [NOW_S + 2 * DAY_S, NOW_S + 900 * DAY_S]
    (warning,) = judge(make(), ts=[*DATES_S * 3, future[1]])
    assert warning == "future log.ts: 1 of 301 times, up to 2028-11-17"
    assert judge(make(), ts=[*DATES_S, NOW_S + 3600]) == []  # another zone's clock
    with pytest.raises(InputDataError, match=r"log\.ts lie in the future") as refused:
        judge(make(), ts=[*DATES_S, *future])
    assert "2 of 102 times, up to 2028-11-17" in refused.value.render()
    assert judge(make(), since=future, until=future) == []  # prices may be planned


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    """A log of 200 rows with two times in milliseconds, and one too large for any unit."""
    folder = tmp_path_factory.mktemp("mixed")
    times = [Y2020_S + 60 * n for n in range(197)] + [1000 * Y2020_S, 1000 * Y2020_S + 5, 2**63 - 1]
    lines = [f"{n % 5}\t{n % 7}\t{time}" for n, time in enumerate(times)]
    (folder / "log.tsv").write_text("\n".join(lines) + "\nx\t1\t1\n")
    return folder


def count(spark, folder: Path, **log: Any):
    config = make(joins=[], label=None, contract={}, histories=[], features=[
        {"name": "user", "column": "user", "role": "user"},
        {"name": "item", "column": "item", "role": "item"},
    ])  # fmt: skip
    source = config.sources["log"].model_validate({**config.sources["log"].model_dump(), **log})
    config = config.model_copy(update={"sources": {"log": source}})
    read = {"log": read_source(spark, "log", source, str(folder))}
    return count_sources(config, read, NOW_S * 1000)


def test_times_of_another_unit_than_the_others_are_bad_rows(spark, mixed):
    found = count(spark, mixed, max_bad_rows=0.05)
    assert found.counts["log"].read == 201
    assert found.counts["log"].bad == {"not_int64:user": 1, "other_unit:ts": 3}
    lines = [row["line"] for row in found.sources["log"].bad.where("reason like 'o%'").collect()]
    assert sorted(int(line.split("\t")[2]) for line in lines)[0] == 1000 * Y2020_S
    assert found.sources["log"].good.count() == 197


@pytest.mark.parametrize("budget", [0.01, 0])
def test_more_times_of_another_unit_than_bad_rows_may_be_are_refused(spark, mixed, budget):
    with pytest.raises(InputDataError, match=r"log\.ts are of several units") as refused:
        count(spark, mixed, max_bad_rows=budget)
    assert "197 are dates in seconds; 3 are not" in refused.value.render()


def test_timestamps_meet_without_a_word_of_units(spark, tmp_path):
    """An entry, an event an hour later, its conversion another half hour later."""
    day = "2020-01-0{} {:02d}:{:02d}:00"
    rows = [(user, item, n) for n, (user, item) in enumerate([(1, 10), (1, 11), (2, 10), (2, 11)])]
    files = {
        "log": [(user, item, day.format(2, 12, n)) for user, item, n in rows],
        "prices": [(item, 1.5, day.format(2, 11, 0), "") for item in (10, 11)],
        "orders": [(1, day.format(2, 12, 30))],
    }
    for name, lines in files.items():
        text = "\n".join("\t".join(map(str, line)) for line in lines)
        (tmp_path / f"{name}.tsv").write_text(text + "\n")
    config = make(type="timestamp")
    read = {n: read_source(spark, n, s, str(tmp_path)) for n, s in config.sources.items()}
    counted = count_sources(config, read, NOW_S * 1000)
    prepared = prepare_events(config, counted.sources)
    found = prepared.frame.select("user", "price", "label", "__event_ts_ms").collect()
    prepared.release()
    assert {row["price"] for row in found} == {1.5}
    assert {(row["user"], row["label"]) for row in found} == {(1, 1.0), (2, 0.0)}
    assert min(row["__event_ts_ms"] for row in found) == 1_577_966_400_000
    assert prepared.conversions["label"].lost == {}
