"""Runs with dates: samples of the run's own days only; earlier events serve the histories."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.dates import DateRange
from conf.errors import ConfigError, InputDataError
from conf.etl.build import BuildConfig
from conf.etl.contract import FreshnessRule
from conf.etl.time_columns import ms_per_unit
from etl.events.event_counts import EventCounts
from etl.events.identity import EVENT_TS_COLUMN
from etl.events.labels import IMMATURE, UNLABELLED
from etl.events.sample_filter import NOT_SAMPLED_COLUMN
from etl.events.splits import SPLIT_COLUMN, is_inside
from etl.sources.bad_rows import find_last_day
from etl.sources.read import read_source
from etl.sources.time_scan import Span

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

logger = logging.getLogger("sluice.build")

OUTSIDE_DATES = "outside_dates"
AFTER_DATES = "after_dates"


def check_dates(config: BuildConfig, dates: DateRange | None) -> None:
    """Refuses days where nothing of a build depends on them: each day's version would be the same.

    Raises:
        ConfigError: The run names days, but events have no time, no input is cut by day, and no
            column or rule is bounded by the run's last day; or it names none, and one is.
    """
    sources = config.used_sources.values()
    if dates is None:
        _check_undated(config)
        return
    if config.events.time is not None:
        return
    bounded = any(c.not_after == "run_date" for source in sources for c in source.columns)
    aged = any(isinstance(rule, FreshnessRule) for rule in config.contract.rules)
    if bounded or aged or any(source.days is not None for source in sources):
        return
    raise ConfigError(
        "a day was given, but nothing of this build depends on days",
        received=f"--date {dates.first}",
        allowed="a day where events have a time, or an input is cut by day",
        fix="leave --date out, or declare `events.time`, `sources.<name>.days` or {date} in a path",
    )


def _check_undated(config: BuildConfig) -> None:
    """Asks for the days that the run would have to give."""
    for source in config.used_sources.values():
        for column in source.columns:
            if column.not_after is not None:
                find_last_day(column, None)
    for rule in config.contract.rules:
        if isinstance(rule, FreshnessRule):
            rule.find_day(None)


def name_outside(dates: DateRange) -> Column:
    """Names why an event is none of a run's days; null for those that are."""
    _, end = dates.span_ms
    reason = F.when(F.col(EVENT_TS_COLUMN) >= end, AFTER_DATES).otherwise(OUTSIDE_DATES)
    return F.when(~is_inside(dates), reason)


def keep_inside(samples: DataFrame, dates: DateRange) -> DataFrame:
    """Returns the rows of the days of a run."""
    return samples.where(is_inside(dates))


def count_outside(events: DataFrame, dates: DateRange) -> dict[str, dict[str, int]]:
    """Counts the kept events that would be samples but for the run's days.

    Returns:
        By reason, `outside_dates` (before the days) and `after_dates`, the events of each split.
    """
    rows = (
        events.where(F.col(NOT_SAMPLED_COLUMN).isNull() & ~is_inside(dates))
        .groupBy(SPLIT_COLUMN, name_outside(dates).alias("__why"))
        .count()
        .collect()
    )
    outside: dict[str, dict[str, int]] = {}
    for row in rows:
        outside.setdefault(row["__why"], {})[row[SPLIT_COLUMN]] = row["count"]
    return outside


def count_late(
    spark: SparkSession, config: BuildConfig, dates: DateRange, outside: int, samples: int
) -> tuple[int, int]:
    """Counts what is read for a run's days and is of earlier ones: a run of those does not read it.

    Args:
        spark: Session.
        config: The build's config.
        dates: The run's days.
        outside: Events before the days that would be samples but for that.
        samples: All that would be.

    Returns:
        Such rows, and all rows, of these days. Where other days were read too, these are read
        once more; else only what would be a sample counts.
    """
    name, time = config.events.source, config.events.time
    log = config.sources[name]
    if log.days is None or time is None or log.days.column == time:
        return 0, 0
    if not log.days.lookback_days:
        return outside, samples
    own_days = log.days.model_copy(update={"lookback_days": 0})
    own = log.model_copy(update={"days": own_days})
    rows = read_source(spark, name, own, config.data_dir, dates).good
    time_ms = F.col(time) * F.lit(ms_per_unit(config.events.time_unit))
    is_late = time_ms < F.lit(dates.span_ms[0])
    late, delivered = rows.agg(F.count_if(is_late), F.count("*")).collect()[0]
    return late, delivered


def check_days_have_samples(
    counts: EventCounts,
    outside: Mapping[str, Mapping[str, int]],
    dates: DateRange,
    *,
    allow_empty: bool = False,
) -> None:
    """Refuses a run none of whose days has a sample, though the log has events.

    Args:
        counts: Counts of all events.
        outside: Events outside the days, by reason and split.
        dates: The run's days.
        allow_empty: Whether the log's days may have no row.

    Raises:
        InputDataError: Every sample lies outside the run's days.
    """
    samples = sum(counts.splits.values())
    left_out = {reason: sum(by_split.values()) for reason, by_split in outside.items()}
    if allow_empty or not samples or sum(left_out.values()) < samples:
        return
    span = counts.event_ts_ms_range
    raise InputDataError(
        f"no sample lies in the run's days, {dates.first} to {dates.last}",
        received="; ".join(f"{reason} {n:,}" for reason, n in left_out.items())
        + (f"; the log is of {Span(2, *span).show('ms')}" if span else ""),
        allowed="samples of the run's days",
        fix=_advise_other_days(counts),
    )


def _advise_other_days(counts: EventCounts) -> str:
    unlabelled = sum(counts.dropped.get(reason, 0) for reason in (UNLABELLED, IMMATURE))
    hint = ""
    if unlabelled:
        hint = (
            f"{unlabelled:,} events have no label yet: where these are the run's, write rows to "
            "score by `sluice build … --rows-to rows.parquet`; else "
        )
    return (
        f"{hint}correct --date or what was delivered for these days; a source whose days may be "
        "empty says so by `days.allow_empty_days: true`"
    )


def leave_out(
    counts: EventCounts,
    outside: Mapping[str, Mapping[str, int]],
    dates: DateRange,
    *,
    allow_empty: bool = False,
) -> EventCounts:
    """Accounts for events outside the run's days as left out, for that reason.

    Args:
        counts: Counts of all events.
        outside: Events outside the days, by reason and split.
        dates: The run's days.
        allow_empty: Whether a split may have none inside.

    Raises:
        InputDataError: A split that has events has none on the run's days.
    """
    totals = {reason: sum(by_split.values()) for reason, by_split in outside.items()}
    if not totals:
        return counts
    splits = {
        split: n - sum(by_split.get(split, 0) for by_split in outside.values())
        for split, n in counts.splits.items()
    }
    empty = [split for split, n in splits.items() if not n]
    if empty and not allow_empty:
        span = counts.event_ts_ms_range
        raise InputDataError(
            f"the {' and the '.join(empty)} split would be empty",
            received=f"{sum(totals.values()):,} events lie outside the run's days "
            f"({dates.first} to {dates.last}), all of these splits' too"
            + (f"; the log is of {Span(2, *span).show('ms')}" if span else ""),
            allowed="at least one record in each split",
            fix="build more days (--date, --date-to), or move the bounds of `split`",
        )
    if totals.get(AFTER_DATES) and not allow_empty:
        logger.warning(
            "%s events lie after the run's last day, %s: they are no samples, but vocabularies and "
            "users' latest histories see them; `not_after: run_date` makes them bad rows",
            f"{totals[AFTER_DATES]:,}",
            dates.last,
        )
    return replace(
        counts,
        splits={split: n for split, n in splits.items() if n},
        dropped=dict(sorted({**counts.dropped, **totals}.items())),
    )
