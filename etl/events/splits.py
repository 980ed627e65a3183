"""Splits of the event log: leave-one-out, by time, hash, sliding window or as given."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.dates import DateRange
from conf.errors import InputDataError
from conf.etl.build import BuildConfig
from conf.etl.split import SplitConfig
from conf.splits import TEST, TRAIN, VALIDATION
from etl.events.identity import (
    DROP_COLUMN,
    EVENT_TS_COLUMN,
    POSITION_COLUMN,
    ROW_COLUMNS,
    drop_events,
    hash_fraction,
)
from etl.events.sample_filter import NOT_SAMPLED_COLUMN, may_leave_out_samples
from etl.events.split_bounds import SplitBounds, end_of_days, end_of_log, find_bounds

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


OUTSIDE_WINDOW = "outside_window"
WINDOW_COLUMN = "__window_day"
_DAY_MS = 86_400_000
_EPOCH = datetime.date(1970, 1, 1)


def mark_outside_window(events: DataFrame, split: SplitConfig) -> DataFrame:
    """Marks events outside the backtest's window, and numbers the days of the window from 0.

    Nothing before or after the window reaches a sample: it is built as if on its last day.

    Args:
        events: Event rows with `__event_ts_ms` and `__drop`.
        split: The split; other strategies leave the events as they are.

    Raises:
        InputDataError: The log ends before the window's test days begin.
    """
    if split.strategy != "sliding" or split.train_days is None or split.test_days is None:
        return events
    before_test = split.train_days + (split.validation_days or 0)
    step = split.step_days or split.test_days
    first, last = _log_days(events)
    if split.start_date is not None:
        first = (split.start_date - _EPOCH).days
    start = first + split.window * step
    if start + before_test > last:
        windows = max(0, (last - first - before_test) // step + 1)
        raise InputDataError(
            f"window {split.window} of the backtest begins to test after the log has ended",
            received=f"test from {_EPOCH + datetime.timedelta(start + before_test)}, log until "
            f"{_EPOCH + datetime.timedelta(last)}",
            allowed=f"split.window 0 to {windows - 1}" if windows else "shorter train_days",
            fix="choose an earlier window, or declare fewer days",
        )
    day = F.floor(F.col(EVENT_TS_COLUMN) / _DAY_MS) - F.lit(start)
    outside = (F.col(WINDOW_COLUMN) < 0) | (F.col(WINDOW_COLUMN) >= before_test + split.test_days)
    reason = F.when(outside, F.lit(OUTSIDE_WINDOW))
    return drop_events(events.withColumn(WINDOW_COLUMN, day), reason)


def _log_days(events: DataFrame) -> tuple[int, int]:
    row = events.agg(F.min(EVENT_TS_COLUMN), F.max(EVENT_TS_COLUMN)).collect()[0]
    return int(row[0] // _DAY_MS), int(row[1] // _DAY_MS)


SPLIT_COLUMN = "__split"
SHORT_USER_COLUMN = "__short_user"
TOTAL_COLUMN = "__total"
GIVEN_TEST_COLUMN = "__given_test"
GIVEN_VALIDATION_COLUMN = "__given_validation"
GIVEN_TOTAL_COLUMN = "__given_total"
SAMPLE_POSITION_COLUMN = "__sample_position"
"""Samples of the user up to the event, itself included."""
SAMPLE_TOTAL_COLUMN = "__sample_total"


def is_inside(dates: DateRange) -> Column:
    """Whether an event's UTC day is one of the run's; events without a time are."""
    first, end = dates.span_ms
    time = F.col(EVENT_TS_COLUMN)
    return time.isNull() | ((time >= first) & (time < end))


def is_not_after(dates: DateRange) -> Column:
    """Whether an event is of the run's last day or before; events without a time are."""
    time = F.col(EVENT_TS_COLUMN)
    return time.isNull() | (time < dates.span_ms[1])


def add_split(events: DataFrame, config: BuildConfig, dates: DateRange | None = None) -> DataFrame:
    """Adds `__split` to kept events; with leave_one_out also `__short_user`.

    That is true at the last sample of each user with too few of them: all stay in train.

    Args:
        events: Kept events; with users also their `__position` and `__total` (events of the
            user), where events may be no samples the same of samples, and `__given_test`,
            `__given_validation` and the day of a sliding window.
        config: The build's config; `split` is the strategy.
        dates: The run's days, which fractions and durations of a temporal split go by.
    """
    split, user = config.split, config.events.user
    if split.strategy == "temporal":
        return events.withColumn(SPLIT_COLUMN, _temporal(events, config, dates))
    if split.strategy == "sliding":
        return events.withColumn(SPLIT_COLUMN, _split_by_window(split))
    if split.strategy == "hash":
        return events.withColumn(SPLIT_COLUMN, _hash(config))
    if split.strategy == "given" and (user is None or split.validation_source):
        return events.withColumn(SPLIT_COLUMN, _given(config))
    return _leave_out(events, config, user or "")


def _leave_out(events: DataFrame, config: BuildConfig, user: str) -> DataFrame:
    """The end of each user's samples; what a given split has not said is told in the same way.

    An event that is no sample goes with the sample before it: what a sample of the train split
    has not seen yet, encoders are not fitted on.
    """
    split, (position, total) = config.split, _sample_columns(config)
    remaining = F.col(total) - F.col(position)
    enough = F.col(total) >= split.least_events
    if split.strategy == "given":
        is_test = F.col(GIVEN_TEST_COLUMN)
        remaining = remaining - F.col(GIVEN_TOTAL_COLUMN) + F.lit(1)
    else:
        is_test = enough & (remaining < split.leave_out)
    validation = F.lit(False)
    if split.validation:
        last = (remaining >= split.leave_out) & (remaining < 2 * split.leave_out)
        validation = enough & last & ~is_test
        if split.validation_users is not None:
            chosen = _choose_users(events, user, config)
            events = events.join(F.broadcast(chosen), user, "left")
            validation = validation & F.col("__validation_user").isNotNull()
    chosen_split = F.when(is_test, TEST).when(validation, VALIDATION).otherwise(TRAIN)
    events = events.withColumn(SPLIT_COLUMN, chosen_split).drop("__validation_user")
    if split.strategy == "given":
        return events
    return events.withColumn(SHORT_USER_COLUMN, ~enough & (remaining == 0))


def _given(config: BuildConfig) -> Column:
    split = F.when(F.col(GIVEN_TEST_COLUMN), TEST).when(F.col(GIVEN_VALIDATION_COLUMN), VALIDATION)
    if config.split.validation and config.split.validation_source is None:
        held_out = _key_fraction(config, ROW_COLUMNS) < config.split.validation_fraction
        split = split.when(held_out, VALIDATION)
    return split.otherwise(TRAIN)


def _hash(config: BuildConfig) -> Column:
    """All rows of a key go one way; equal rows do, where the row's content is the key."""
    split, user = config.split, config.events.user
    key = split.key or user
    fraction = _key_fraction(config, (key,) if key else ROW_COLUMNS)
    chosen = F.when(fraction < split.test_fraction, TEST)
    if split.validation:
        chosen = chosen.when(fraction < split.test_fraction + split.validation_fraction, VALIDATION)
    return chosen.otherwise(TRAIN)


def _key_fraction(config: BuildConfig, key: Sequence[str]) -> Column:
    seed = config.output.seed if config.split.seed is None else config.split.seed
    return hash_fraction(F.lit(seed), F.lit("split"), *map(F.col, key))


def _split_by_window(split: SplitConfig) -> Column:
    day, train_days = F.col(WINDOW_COLUMN), split.train_days or 0
    validation = F.when(day < train_days + (split.validation_days or 0), VALIDATION)
    return F.when(day < train_days, TRAIN).otherwise(validation.otherwise(TEST))


def _sample_columns(config: BuildConfig) -> tuple[str, str]:
    """Columns of the rank of an event among its user's samples, and of their number."""
    if not may_leave_out_samples(config):
        return POSITION_COLUMN, TOTAL_COLUMN
    return SAMPLE_POSITION_COLUMN, SAMPLE_TOTAL_COLUMN


def _choose_users(events: DataFrame, user: str, config: BuildConfig) -> DataFrame:
    """The users with the smallest hashes: the same ones however the data is partitioned."""
    total, seed = _sample_columns(config)[1], config.output.seed
    users = events.where(F.col(total) >= config.split.least_events).select(user).distinct()
    return (
        users.orderBy(F.xxhash64(F.lit(seed), F.col(user)), F.col(user))
        .limit(config.split.validation_users or 0)
        .withColumn("__validation_user", F.lit(True))
    )


def _temporal(events: DataFrame, config: BuildConfig, dates: DateRange | None) -> Column:
    time = config.events.time
    if time is None:
        raise InputDataError(
            "a temporal split needs a time column",
            received="events.time: null",
            fix="declare events.time, or use split.strategy: leave_one_out",
        )
    bounds = find_bounds(config, end_of_days(dates))
    if bounds.test is None or (config.split.validation and bounds.validation is None):
        bounds = _measure_bounds(events, config, dates)
    split = F.lit(TRAIN)
    for name, first in ((VALIDATION, bounds.validation), (TEST, bounds.test)):
        if first is not None:
            split = F.when(F.col(time) >= first, name).otherwise(split)
    return split


def _measure_bounds(events: DataFrame, config: BuildConfig, dates: DateRange | None) -> SplitBounds:
    """Finds bounds that go by the times of the samples, in a run with days by those inside."""
    split, time = config.split, config.events.time or ""
    samples = events.where(F.col(DROP_COLUMN).isNull() & F.col(NOT_SAMPLED_COLUMN).isNull())
    if dates is not None:
        samples = samples.where(is_inside(dates))
    late = 1 - split.test_fraction
    # Exact percentiles: the approximate ones depend on how the data is partitioned.
    row = samples.agg(
        F.percentile(time, F.lit(late)),
        F.percentile(time, F.lit(late - split.validation_fraction)),
        F.max(EVENT_TS_COLUMN),
    ).collect()[0]
    if row[2] is None:  # No sample: the counts say so.
        return SplitBounds(None, None)
    end = end_of_days(dates) or end_of_log(split, row[2])
    return find_bounds(config, end, SplitBounds(int(row[1]), int(row[0])))
