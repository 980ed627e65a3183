"""What became of the rows of the log: counted in one scan, and refused where nothing is left."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from conf.dates import DateRange, show_span
from conf.errors import InputDataError
from conf.etl.build import BuildConfig
from conf.etl.labels import ConversionConfig, LabelConfig
from conf.etl.split import LEAST_EVENTS
from conf.splits import EVENT_SPLITS, TEST, VALIDATION
from etl.events.columns import (
    DROP_COLUMN,
    EVENT_TS_COLUMN,
    NOT_SAMPLED_COLUMN,
    SAMPLES_COLUMN,
    SAMPLES_LEFT_COLUMN,
    SEEN_COLUMN,
    SPLIT_COLUMN,
    TIE_COLUMN,
    is_sample,
)
from etl.events.joins import MATCHED, OUTCOMES, outcome_column
from etl.events.labels import ConversionCounts, is_immature
from etl.events.splits import AFTER_DATES, OUTSIDE_DATES, name_outside
from etl.sources.read import read_source

logger = logging.getLogger("sluice.build")
_WHY, _UNKNOWN = "__why", "unknown_"
Group = Mapping[str, Any]


@dataclass(frozen=True)
class EventCounts:
    """Counts of the annotated frame, from one scan of it; see also `conf.manifest.RowCounts`."""

    joined: int  # after parsing, de-duplication and joins
    splits: Mapping[str, int]  # of these, the samples of the run's days
    dropped: Mapping[str, int]
    event_ts_ms_range: tuple[int, int] | None
    # By dictionary and outcome of its join, dropped or not.
    matches: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    lost_conversions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    seen: int | None = None  # kept events that meet the condition of `seen`, if there is one
    maturity: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    short_users: int = 0
    test_in_log: int = 0
    late: int = 0
    delivered: int = 0  # all rows under the run's days, `late` ones too
    ties: int = 0

    @property
    def unmatched(self) -> dict[str, dict[str, int]]:
        """Events without an entry, by dictionary and reason; only those that occur."""
        reasons = {
            name: {why: n for why, n in counts.items() if why != MATCHED}
            for name, counts in self.matches.items()
        }
        return {name: counts for name, counts in reasons.items() if counts}

    @property
    def newest_ts_ms(self) -> int | None:
        """Time of the last event."""
        return None if self.event_ts_ms_range is None else self.event_ts_ms_range[1]


def count_events(
    events: DataFrame,
    config: BuildConfig,
    conversions: Mapping[str, ConversionCounts] | None = None,
    dates: DateRange | None = None,
) -> EventCounts:
    """Counts samples of the run's days per split, all others per reason, and what joins matched."""
    conversions = conversions or {}
    groups = _count_groups(events, config, conversions, dates)
    splits = _sum_by(SPLIT_COLUMN, [group for group in groups if group[_WHY] is None])
    times = [group[end] for group in groups for end in ("low", "high") if group[end] is not None]
    numbers = ("joined", "seen", "short_users", "ties", *(_UNKNOWN + name for name in conversions))
    sums = {name: sum(group.get(name, 0) for group in groups) for name in numbers}
    return EventCounts(
        joined=sums["joined"],
        splits={split: splits[split] for split in EVENT_SPLITS if split in splits},
        dropped=dict(sorted(_sum_by(_WHY, groups).items())),
        event_ts_ms_range=(min(times), max(times)) if times else None,
        matches={join.source: count_outcomes(join.source, groups) for join in config.joins},
        seen=None if config.seen_where is None else sums["seen"],
        maturity={
            label.name: _describe_end(label, conversions[label.name], sums[_UNKNOWN + label.name])
            for label in config.all_labels
            if label.name in conversions
        },
        lost_conversions={
            name: {"rows": found.rows, **found.lost} for name, found in conversions.items()
        },
        short_users=sums["short_users"],
        test_in_log=_count_test_in_log(events, config),
        ties=sums["ties"],
    )


def _count_groups(
    events: DataFrame,
    config: BuildConfig,
    conversions: Mapping[str, ConversionCounts],
    dates: DateRange | None,
) -> list[Group]:
    """Counts the events that share why they have no record, their split, and what joins found."""
    why = F.coalesce(DROP_COLUMN, NOT_SAMPLED_COLUMN, *([name_outside(dates)] if dates else []))
    is_kept = F.col(DROP_COLUMN).isNull()
    counted = {"n": F.lit(True), "joined": is_kept}
    if config.seen_where is not None:
        counted["seen"] = is_kept & F.col(SEEN_COLUMN)
    if config.split.strategy == "leave_one_out":
        is_short = (F.col(SAMPLES_COLUMN) < LEAST_EVENTS) & (F.col(SAMPLES_LEFT_COLUMN) == 0)
        counted["short_users"] = is_sample() & is_short
    if config.events.user is not None and config.events.time is not None:
        counted["ties"] = F.col(TIE_COLUMN)
    for label in config.all_labels:
        if (rule := _open_rule(label)) and label.name in conversions:
            is_open = is_immature(rule, conversions[label.name].until_ms)
            is_unknown = is_open & (F.col(label.name) == 0)
            counted[_UNKNOWN + label.name] = F.col(_WHY).isNull() & is_unknown
    outcomes = [outcome_column(join.source) for join in config.joins]
    time = F.when(is_kept, F.col(EVENT_TS_COLUMN))
    groups = events.withColumn(_WHY, why).groupBy(_WHY, SPLIT_COLUMN, *outcomes)
    rows = groups.agg(
        F.min(time).alias("low"),
        F.max(time).alias("high"),
        *[F.count_if(met).alias(name) for name, met in counted.items()],
    )
    return [row.asDict() for row in rows.collect()]


def _open_rule(label: LabelConfig) -> ConversionConfig | None:
    """The rule of a label that is 0 although a conversion may yet come."""
    rule = label.conversion
    return rule if rule is not None and rule.immature == "keep" else None


def _describe_end(label: LabelConfig, counts: ConversionCounts, unknown: int) -> dict[str, int]:
    ends = {
        "until_ts_ms": counts.until_ms,
        "last_conversion_ts_ms": None if counts.span_ms is None else counts.span_ms[1],
        "last_event_ts_ms": counts.last_event_ms,
        "unknown_as_0": unknown if _open_rule(label) else None,
    }
    return {name: number for name, number in ends.items() if number is not None}


def count_outcomes(name: str, groups: Iterable[Group]) -> dict[str, int]:
    """Counts the outcomes of a dictionary's join: `matched`, and the reasons that occur."""
    found = _sum_by(outcome_column(name), groups)
    return {why: found[why] for why in OUTCOMES if found[why] or why == MATCHED}


def _sum_by(column: str, groups: Iterable[Group]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for group in groups:
        if group[column] is not None:
            sums[group[column]] += group["n"]
    return sums


def _count_test_in_log(events: DataFrame, config: BuildConfig) -> int:
    """Times tell which events of the log come after a given one; without them none are left out."""
    user, item, source = config.events.user, config.events.item, config.split.test_source
    if user is None or item is None or source is None:
        return 0
    if config.sources[source].column(config.events.time or "") is not None:
        return 0
    is_test, samples = F.col(SPLIT_COLUMN) == TEST, events.where(is_sample())
    test = samples.groupBy(user, item).agg(
        F.when(~F.every(is_test), F.count_if(is_test)).alias("n")
    )
    return test.agg(F.sum("n")).collect()[0][0] or 0


def count_late(
    spark: SparkSession, config: BuildConfig, dates: DateRange, counts: EventCounts
) -> tuple[int, int]:
    """Counts what is read for a run's days and is of earlier ones, and all rows of these days.

    Where other days were read too, these are read once more; else samples alone count.
    """
    name, time = config.events.source, config.events.time
    log = config.sources[name]
    if log.days is None or time is None or log.days.column == time:
        return 0, 0
    if not log.days.lookback_days:
        outside = [counts.dropped.get(reason, 0) for reason in (OUTSIDE_DATES, AFTER_DATES)]
        return outside[0], sum(outside) + sum(counts.splits.values())
    own = log.model_copy(update={"days": log.days.model_copy(update={"lookback_days": 0})})
    rows = read_source(spark, name, own, config.data_dir, dates).good
    time_ms = F.col(time) * F.lit(config.event_ms)
    late, delivered = rows.agg(
        F.count_if(time_ms < F.lit(dates.span_ms[0])), F.count("*")
    ).collect()[0]
    return late, delivered


def check_counts(
    counts: EventCounts, config: BuildConfig, dates: DateRange | None, *, replaces_days: bool
) -> None:
    """Refuses a build that lacks the samples of a split, or in which no user would meet an item.

    A run that replaces days of a dataset needs a sample, but not of each split.
    """
    required = [s for s in EVENT_SPLITS if s != VALIDATION or config.split.has_validation]
    empty = [split for split in required if split not in counts.splits]
    days = config.sources[config.events.source].days
    may_be_empty = counts.splits or (days is not None and days.allow_empty_days)
    if empty and not (replaces_days and may_be_empty):
        raise _refuse_empty(empty, counts, config, dates)
    if replaces_days:
        return
    if counts.seen == 0:
        raise InputDataError(
            "no event meets the condition of seen, so no user would have met any item",
            received=config.seen_where,
            fix="compare its columns with values that the log holds",
        )
    if (late := counts.dropped.get(AFTER_DATES)) and dates is not None:
        logger.warning(
            "%s events lie after the run's last day, %s: they are no samples, but vocabularies and "
            "users' latest histories see them; `not_after: run_date` makes them bad rows",
            f"{late:,}", dates.last,
        )  # fmt: skip


def _refuse_empty(
    empty: list[str], counts: EventCounts, config: BuildConfig, dates: DateRange | None
) -> InputDataError:
    samples, dropped = (
        ", ".join(f"{name} {n:,}" for name, n in found.items()) or "none"
        for found in (counts.splits, counts.dropped)
    )
    received = [f"samples: {samples}", f"dropped: {dropped}"]
    if counts.event_ts_ms_range is not None:
        numbers = " to ".join(str(time // config.event_ms) for time in counts.event_ts_ms_range)
        received.append(f"events {show_span(*counts.event_ts_ms_range, 'ms')} ({numbers})")
    if dates is not None:
        received.append(f"the run's days {dates.first} to {dates.last}")
    told = {
        "received": "; ".join(received),
        "fix": "look at what was dropped; else move the bounds of `split`, or build more days",
    }
    if dates is not None and not counts.splits:
        return InputDataError("no sample lies in the run's days", **told)
    return InputDataError(f"the {' and the '.join(empty)} split would be empty", **told)
