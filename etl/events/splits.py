"""Splits of the event log, when they begin, and the days of a run."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from conf.dates import DateRange, read_duration
from conf.errors import ConfigError, InputDataError
from conf.etl.build import BuildConfig
from conf.etl.output import DATE_PARTITION
from conf.etl.split import LEAST_EVENTS, SplitConfig
from conf.splits import TEST, TRAIN, VALIDATION
from etl.events.columns import (
    EVENT_TS_COLUMN,
    GIVEN_TEST_COLUMN,
    GIVEN_VALIDATION_COLUMN,
    ROW_COLUMNS,
    SAMPLES_COLUMN,
    SAMPLES_LEFT_COLUMN,
    SPLIT_COLUMN,
    drop_events,
    hash_fraction,
    is_sample,
)

OUTSIDE_DATES = "outside_dates"
AFTER_DATES = "after_dates"
OUTSIDE_WINDOW = "outside_window"
_HOUR_MS, _DAY_MS = 3_600_000, 86_400_000


def name_outside(dates: DateRange) -> Column:
    """Names why an event is none of a run's days; null for those that are, or have no time."""
    (first, end), time = dates.span_ms, F.col(EVENT_TS_COLUMN)
    return F.when(time < first, OUTSIDE_DATES).when(time >= end, AFTER_DATES)


def is_inside(dates: DateRange) -> Column:
    """Whether an event's UTC day is one of the run's; events without a time are."""
    return name_outside(dates).isNull()


def is_not_after(dates: DateRange) -> Column:
    """Whether an event is of the run's last day or before; events without a time are."""
    return F.coalesce(F.col(EVENT_TS_COLUMN) < dates.span_ms[1], F.lit(True))


def check_dates(config: BuildConfig, dates: DateRange | None) -> None:
    """Refuses days where nothing depends on them: each day's version would be the same."""
    sources = config.used_sources.values()
    is_bounded = any(c.not_after == "run_date" for source in sources for c in source.columns)
    is_fresh = any(rule.kind == "freshness" for rule in config.contract.rules)
    has_days = any(source.days is not None for source in sources)
    if dates is None or config.events.time or has_days or is_bounded or is_fresh:
        return
    raise ConfigError(
        "a day was given, but nothing of this build depends on days",
        received=f"--date {dates.first}",
        fix="leave --date out, or declare `events.time` or `sources.<name>.days`",
    )


class SplitBounds(NamedTuple):
    """First times of a temporal split, milliseconds; None: there is none, or not yet."""

    validation: int | None = None
    test: int | None = None


_OPEN = SplitBounds()


def find_bounds(
    config: BuildConfig, end_ms: int | None = None, by_fractions: SplitBounds = _OPEN
) -> SplitBounds:
    """Finds the bounds of a temporal split; durations are counted back from `end_ms`.

    `by_fractions` are those where the config states neither a time nor a duration.
    """
    split, ms = config.split, config.event_ms
    validation, test = by_fractions
    if split.test_from_ts is not None:
        test = cast(int, split.test_from_ts) * ms
    elif split.test_duration is not None and end_ms is not None:
        test = end_ms - _read_ms(split.test_duration)
    if split.validation_duration is not None:
        validation = None if test is None else test - _read_ms(split.validation_duration)
    elif split.validation_from_ts is not None:
        validation = cast(int, split.validation_from_ts) * ms
    elif validation is not None and test is not None:
        validation = min(validation, test)
    return SplitBounds(validation if split.has_validation else None, test)


def _read_ms(duration: str) -> int:
    return read_duration(duration) // datetime.timedelta(milliseconds=1)


def end_of_log(split: SplitConfig, newest_ms: int) -> int:
    """Returns the end of the day, or of the hour where test is in hours, of the newest sample."""
    step = _HOUR_MS if "hour" in (split.test_duration or "") else _DAY_MS
    return (newest_ms // step + 1) * step


Span = tuple[int | None, int | None]
"""First millisecond, and the first one after; None: from the start of the log, to its end."""


def plan_spans(config: BuildConfig, dates: DateRange | None) -> Mapping[str, Span]:
    """Returns the times of each split that the config and the run's days fix, by split."""
    split = config.split
    if split.start_date is not None:
        return _plan_window(split)
    if split.strategy != "temporal" or config.events.time is None:
        return {}
    validation, test = find_bounds(config, dates.span_ms[1] if dates else None)
    train_end = validation if split.has_validation else test
    spans: dict[str, Span] = {
        TRAIN: (None, train_end), VALIDATION: (validation, test), TEST: (test, None),
    }  # fmt: skip
    known = zip(spans.items(), (train_end, validation, test), strict=True)
    return {name: span for (name, span), bound in known if bound is not None}


def check_spans(config: BuildConfig, dates: DateRange | None) -> None:
    """Refuses a run that would leave a split empty whatever the log holds.

    A run that replaces days of a dataset need not have each split.
    """
    days = None if config.output.partition_overwrite == "dynamic" else dates
    spans = plan_spans(config, dates)
    empty = [name for name, span in spans.items() if not _overlap(span, days)]
    received = [f"{name} {' to '.join(b or '…' for b in show_span(spans[name]))}" for name in spans]
    if config.split.strategy == "sliding" and days and not empty:
        parts = list(_plan_window(config.split))  # Each has whole days, wherever the log starts.
        empty = parts[len(days.days()) :]
        received = [f"a window of {', '.join(parts)}, each of a day or more"]
    if empty:
        received += [f"the run is of {days.first} to {days.last}"] if days else []
        raise ConfigError(
            f"the {' and the '.join(empty)} split would be empty",
            received="; ".join(received),
            fix="move the bounds of `split`, hold out less, such as `test: 3 hours`, or build more "
            "days by --date and --date-to",
        )


def _overlap(span: Span, days: DateRange | None) -> bool:
    """Whether a span has a moment of the days."""
    firsts, ends = zip(span, days.span_ms if days else (None, None), strict=True)
    known = [bound for bound in firsts if bound is not None]
    return all(end is None or first < end for first in known for end in ends)


def _plan_window(split: SplitConfig, first_ms: int = 0) -> dict[str, tuple[int, int]]:
    """The times of a sliding window; `first_ms` is the log's first, for one without a start."""
    start = first_ms // _DAY_MS
    if split.start_date is not None:
        start = (split.start_date - datetime.date(1970, 1, 1)).days
    start += split.window * (split.step_days or split.window_days[-1])
    spans = {}
    for name, days in zip((TRAIN, VALIDATION, TEST), split.window_days, strict=True):
        if days:
            spans[name] = (start * _DAY_MS, (start + days) * _DAY_MS)
            start += days
    return spans


def split_by_window(events: DataFrame, split: SplitConfig) -> DataFrame:
    """Adds `__split` by a sliding window and leaves out the events around it; else changes nothing.

    None of those reaches a sample: it is built as if on the window's last day.
    """
    if split.strategy != "sliding":
        return events
    time = F.col(EVENT_TS_COLUMN)
    low, high = events.agg(F.min(time), F.max(time)).collect()[0]
    spans = _plan_window(split, low or 0)
    (first, train_end), (test, end) = spans[TRAIN], spans[TEST]
    if high is not None and test > high:
        raise InputDataError(
            f"window {split.window} of the backtest begins to test after the log has ended",
            received="test from {}, log until {}".format(*show_span((test, high))),
            fix="choose an earlier `split.window`, or declare fewer days",
        )
    chosen = F.when(time < train_end, TRAIN).when(time < test, VALIDATION).otherwise(TEST)
    outside = F.when((time < first) | (time >= end), OUTSIDE_WINDOW)
    return drop_events(events.withColumn(SPLIT_COLUMN, chosen), outside)


def show_span(span: Span) -> list[str | None]:
    """Returns both bounds as ISO timestamps, in minutes where these are whole."""
    return [
        None
        if bound is None
        else str(np.datetime64(bound, "ms").astype(f"datetime64[{'s' if bound % 60_000 else 'm'}]"))
        for bound in span
    ]


def add_split(events: DataFrame, config: BuildConfig, dates: DateRange | None = None) -> DataFrame:
    """Adds `__split`; all events of users with too few of them to hold one out are of train.

    A temporal split goes by the run's days. Of sliding windows see `split_by_window`.
    """
    split, user = config.split, config.events.user
    if split.strategy == "sliding":
        return events
    if split.strategy == "temporal":
        chosen = _temporal(events, config, dates)
    elif split.strategy == "hash":
        chosen = _hash(config)
    elif split.strategy == "given" and (user is None or split.validation_source):
        chosen = _given(config)
    else:
        chosen = _leave_out(events, config, user or "")
    return events.withColumn(SPLIT_COLUMN, chosen)


def _leave_out(events: DataFrame, config: BuildConfig, user: str) -> Column:
    """The end of each user's samples; what a given split has not said is told in the same way.

    An event that is no sample goes with the sample before it: what a sample of the train split
    has not seen yet, encoders are not fitted on.
    """
    split, is_given = config.split, config.split.strategy == "given"
    left, enough = F.col(SAMPLES_LEFT_COLUMN), F.col(SAMPLES_COLUMN) >= LEAST_EVENTS
    chosen = F.when(F.col(GIVEN_TEST_COLUMN) if is_given else enough & (left == 0), TEST)
    if split.has_validation:
        validation = enough & (left == (0 if is_given else 1))
        if split.validation_users is not None:
            validation = validation & _is_chosen(events, user, config)
        chosen = chosen.when(validation, VALIDATION)
    return chosen.otherwise(TRAIN)


def _is_chosen(events: DataFrame, user: str, config: BuildConfig) -> Column:
    """Whether a user has one of the smallest hashes, however the data is partitioned.

    The greatest of these is looked for once: every later pass compares with it, and joins nothing.
    """
    has_enough = (F.col(SAMPLES_LEFT_COLUMN) == 0) & (F.col(SAMPLES_COLUMN) >= LEAST_EVENTS)
    hashed = F.xxhash64(F.lit(config.output.seed), F.col(user))
    keys = F.struct(hashed.alias("hash"), F.col(user).alias("user")).alias("key")
    users = events.where(has_enough).select(user).distinct().select(keys)
    smallest = users.orderBy("key").limit(config.split.validation_users or 0)
    last = smallest.agg(F.max("key")).collect()[0][0]
    if last is None:
        return F.lit(False)
    return (hashed < last["hash"]) | ((hashed == last["hash"]) & (F.col(user) <= last["user"]))


def _given(config: BuildConfig) -> Column:
    split = F.when(F.col(GIVEN_TEST_COLUMN), TEST).when(F.col(GIVEN_VALIDATION_COLUMN), VALIDATION)
    if config.split.has_validation and config.split.validation_source is None:
        held_out = _key_fraction(config, ROW_COLUMNS) < config.split.validation_fraction
        split = split.when(held_out, VALIDATION)
    return split.otherwise(TRAIN)


def _hash(config: BuildConfig) -> Column:
    """All rows of a key go one way; equal rows do, where the row's content is the key."""
    split = config.split
    key = split.key or config.events.user
    fraction = _key_fraction(config, (key,) if key else ROW_COLUMNS)
    chosen = F.when(fraction < split.test_fraction, TEST)
    if split.has_validation:
        chosen = chosen.when(fraction < split.test_fraction + split.validation_fraction, VALIDATION)
    return chosen.otherwise(TRAIN)


def _key_fraction(config: BuildConfig, key: Sequence[str]) -> Column:
    return hash_fraction(F.lit(config.output.seed), F.lit("split"), *map(F.col, key))


def _temporal(events: DataFrame, config: BuildConfig, dates: DateRange | None) -> Column:
    bounds = find_bounds(config, dates.span_ms[1] if dates else None)
    if bounds.test is None or (config.split.has_validation and bounds.validation is None):
        bounds = _measure_bounds(events, config, dates)
    split = F.lit(TRAIN)
    for name, first in ((VALIDATION, bounds.validation), (TEST, bounds.test)):
        if first is not None:
            split = F.when(F.col(EVENT_TS_COLUMN) >= first, name).otherwise(split)
    return split


def _measure_bounds(events: DataFrame, config: BuildConfig, dates: DateRange | None) -> SplitBounds:
    """Finds bounds that go by the times of the samples, in a run with days by those inside."""
    split, time, ms = config.split, config.events.time or "", config.event_ms
    samples = events.where(is_sample() if dates is None else is_sample() & is_inside(dates))
    late = 1 - split.test_fraction
    # Exact percentiles: the approximate ones depend on how the data is partitioned.
    shares = F.array(F.lit(late), F.lit(late - split.validation_fraction))
    found, newest = samples.agg(F.percentile(time, shares), F.max(EVENT_TS_COLUMN)).collect()[0]
    if newest is None:  # No sample: the counts say so.
        return _OPEN
    end = dates.span_ms[1] if dates else end_of_log(split, newest)
    test, validation = (int(bound) * ms for bound in found)
    return find_bounds(config, end, SplitBounds(validation, test))


def check_built_by_day(config: BuildConfig) -> None:
    """Refuses what is true of an event only until the next day is there: its user's last one."""
    moving = _list_moving(config)
    if moving:
        raise ConfigError(
            "output.partition_overwrite: dynamic keeps records of other days, and this makes "
            "other ones of an event with each day that follows it",
            received=moving[0],
            fix="change it, or build all days in each run: --set output.partition_overwrite=static",
        )


def _list_moving(config: BuildConfig) -> list[str]:
    """What of a config moves with the days that are read."""
    split, time, strategy = config.split, config.events.time or "", config.split.strategy
    given = [source for source in (split.test_source, split.validation_source) if source]
    # Events without times come after whatever log is read.
    untimed = [source for source in given if config.sources[source].column(time) is None]
    named = (split.validation_duration, split.validation_from_ts)
    by_fraction = split.has_validation and named == (None, None)
    half_life = config.weights and config.weights.half_life_days
    partitions, types = config.output.partition_by, config.event_column_types
    moves = {
        f"split.strategy: temporal, test: {split.test}, not from fixed times of test and "
        "validation on": strategy == "temporal" and (split.test_from_ts is None or by_fraction),
        "split.strategy: leave_one_out, the last events of each user": strategy == "leave_one_out",
        "split.strategy: sliding without start_date, from the log's first day": (
            strategy == "sliding" and split.start_date is None
        ),
        "split.strategy: given, with validation from the end of the log": (
            strategy == "given" and split.has_validation and split.validation_source is None
        ),
        f"split.strategy: given, with events of {', '.join(untimed)!r} that have no time": bool(
            untimed
        ),
        f"train_samples: {config.train_samples}, counted from each user's last event": (
            config.train_samples != "all"
        ),
        f"weights.half_life_days: {half_life}, counted from the newest event": bool(half_life),
        f"a column {DATE_PARTITION!r} of the log: without it that is the event's UTC day": (
            DATE_PARTITION in partitions and DATE_PARTITION in types
        ),
    }
    return [what for what, is_moving in moves.items() if is_moving]
