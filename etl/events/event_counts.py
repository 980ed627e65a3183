"""What became of the rows of the log: counted in one scan, and refused where nothing is left."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from conf.dates import DateRange, show_span
from conf.errors import InputDataError
from conf.etl.build import BuildConfig
from conf.splits import EVENT_SPLITS, TEST, VALIDATION
from etl.events.columns import (
    DROP_COLUMN,
    EVENT_TS_COLUMN,
    NOT_SAMPLED_COLUMN,
    SEEN_COLUMN,
    SHORT_USER_COLUMN,
    SPLIT_COLUMN,
    TIE_COLUMN,
    is_sample,
)
from etl.events.joins import MATCHED, OUTCOMES, outcome_column
from etl.events.labels import ConversionCounts, is_immature
from etl.events.splits import AFTER_DATES, OUTSIDE_DATES, name_outside
from etl.sources.read import read_source

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

logger = logging.getLogger("sluice.build")
_OUTSIDE, _UNKNOWN = "__outside", "unknown_"


@dataclass(frozen=True)
class EventCounts:
    """Counts of the annotated frame, from one scan of it.

    Attributes:
        joined: Events after parsing, de-duplication and joins.
        splits: Of these, per split, those that are samples of the run's days.
        dropped: Events left out, by reason, those that are no samples, and those of other days.
        event_ts_ms_range: First and last event time, None without a time column.
        matches: Events by dictionary and outcome of its join, dropped or not.
        seen: Kept events that meet the condition of `seen`; None: there is no such condition.
        delivered: All rows under the run's days, of which `late` are of earlier ones.

    The others are those of the manifest (`conf.manifest.RowCounts`).
    """

    joined: int
    splits: Mapping[str, int]
    dropped: Mapping[str, int]
    event_ts_ms_range: tuple[int, int] | None
    matches: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    lost_conversions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    seen: int | None = None
    maturity: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    short_users: int = 0
    test_in_log: int = 0
    late: int = 0
    delivered: int = 0
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
    counted = _conditions(config, conversions)
    rows = _count_groups(events, config, counted, dates)
    good = [row for row in rows if row[DROP_COLUMN] is None]
    samples = [row for row in good if row[NOT_SAMPLED_COLUMN] is None]
    inside = [row for row in samples if row[_OUTSIDE] is None]
    reasons = [_sum_by(DROP_COLUMN, rows), _sum_by(NOT_SAMPLED_COLUMN, good)]
    dropped = sum([*reasons, _sum_by(_OUTSIDE, samples)], Counter())
    splits = _sum_by(SPLIT_COLUMN, inside)
    times = [row[bound] for row in good for bound in ("low", "high") if row[bound] is not None]
    return EventCounts(
        joined=_total("n", good),
        splits={split: splits[split] for split in EVENT_SPLITS if split in splits},
        dropped=dict(sorted(dropped.items())),
        event_ts_ms_range=(min(times), max(times)) if times else None,
        matches={name: count_outcomes(name, rows) for name in _list_dictionaries(config)},
        seen=None if config.seen_where is None else _total("seen", good),
        maturity={
            name: _describe_end(found) | _count_unknown(name, counted, inside)
            for name, found in conversions.items()
        },
        lost_conversions={
            name: {"rows": found.rows, **found.lost} for name, found in conversions.items()
        },
        short_users=_total("short_users", samples),
        test_in_log=_count_test_in_log(events, config),
        ties=_total("ties", good),
    )


Group = Mapping[str, Any]


def _count_groups(
    events: DataFrame,
    config: BuildConfig,
    counted: Mapping[str, Column],
    dates: DateRange | None,
) -> list[Group]:
    """Counts the events that share their reasons, their split, and the outcomes of their joins."""
    outside = F.lit(None).cast("string") if dates is None else name_outside(dates)
    outcomes = map(outcome_column, _list_dictionaries(config))
    groups = events.withColumn(_OUTSIDE, outside).groupBy(
        DROP_COLUMN, NOT_SAMPLED_COLUMN, _OUTSIDE, SPLIT_COLUMN, *outcomes
    )
    time = F.col(EVENT_TS_COLUMN)
    bounds = [F.min(time).alias("low"), F.max(time).alias("high")]
    numbers = [F.count_if(met).alias(name) for name, met in counted.items()]
    return [
        row.asDict() for row in groups.agg(F.count("*").alias("n"), *bounds, *numbers).collect()
    ]


def _list_dictionaries(config: BuildConfig) -> list[str]:
    return [join.source for join in config.joins]


def count_outcomes(name: str, groups: Iterable[Group]) -> dict[str, int]:
    """Counts the outcomes of a dictionary's join: `matched`, and the reasons that occur."""
    found = _sum_by(outcome_column(name), groups)
    return {why: found[why] for why in OUTCOMES if found[why] or why == MATCHED}


def _conditions(
    config: BuildConfig, conversions: Mapping[str, ConversionCounts]
) -> dict[str, Column]:
    """What is counted of each group beside its rows, by name."""
    found: dict[str, Column] = {}
    if config.seen_where is not None:
        found["seen"] = F.col(SEEN_COLUMN)
    if config.split.strategy == "leave_one_out":
        found["short_users"] = F.col(SHORT_USER_COLUMN)
    if config.events.user is not None and config.events.time is not None:
        found["ties"] = F.col(TIE_COLUMN)
    for label in config.all_labels:
        rule = label.conversion
        if rule is not None and rule.immature == "keep" and label.name in conversions:
            # The label is 0 although a conversion may yet come.
            is_open = is_immature(rule, conversions[label.name].until_ms)
            found[_UNKNOWN + label.name] = is_open & (F.col(label.name) == 0)
    return found


def _sum_by(column: str, groups: Iterable[Group]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for group in groups:
        if group[column] is not None:
            sums[group[column]] += group["n"]
    return sums


def _total(name: str, groups: Iterable[Group]) -> int:
    return sum(group.get(name, 0) for group in groups)


def _count_test_in_log(events: DataFrame, config: BuildConfig) -> int:
    """Times tell which events of the log come after a given one; without them none are left out."""
    user, item, source = config.events.user, config.events.item, config.split.test_source
    if user is None or item is None or source is None:
        return 0
    if config.sources[source].column(config.events.time or "") is not None:
        return 0
    is_test = F.col(SPLIT_COLUMN) == TEST
    pairs = (
        events.where(is_sample())
        .groupBy(user, item)
        .agg(F.count_if(is_test).alias("test"), F.count_if(~is_test).alias("log"))
    )
    return pairs.where("log > 0").agg(F.sum("test")).collect()[0][0] or 0


def _count_unknown(label: str, counted: Collection[str], groups: Iterable[Group]) -> dict[str, int]:
    key = _UNKNOWN + label
    return {"unknown_as_0": _total(key, groups)} if key in counted else {}


def _describe_end(counts: ConversionCounts) -> dict[str, int]:
    ends = {
        "until_ts_ms": counts.until_ms,
        "last_conversion_ts_ms": None if counts.span_ms is None else counts.span_ms[1],
        "last_event_ts_ms": counts.last_event_ms,
    }
    return {name: time for name, time in ends.items() if time is not None}


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
    own_days = log.days.model_copy(update={"lookback_days": 0})
    own = log.model_copy(update={"days": own_days})
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
    if replaces_days:
        days = config.sources[config.events.source].days
        may_be_empty = counts.splits or (days is not None and days.allow_empty_days)
        empty = [] if may_be_empty else empty
    if empty:
        raise _refuse_empty(empty, counts, config, dates)
    if not replaces_days and counts.seen == 0:
        raise InputDataError(
            "no event meets the condition of seen, so no user would have met any item",
            received=config.seen_where,
            fix="compare its columns with values that the log holds",
        )
    if counts.dropped.get(AFTER_DATES) and not replaces_days and dates is not None:
        logger.warning(
            "%s events lie after the run's last day, %s: they are no samples, but vocabularies and "
            "users' latest histories see them; `not_after: run_date` makes them bad rows",
            f"{counts.dropped[AFTER_DATES]:,}",
            dates.last,
        )


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
    fix = (
        "look at what was dropped: keys of joins, columns of labels, days; else choose another "
        "`split`, move its bounds, or build more days"
    )
    if dates is not None:
        received.append(f"the run's days {dates.first} to {dates.last}")
    told = {"received": "; ".join(received), "fix": fix}
    if dates is not None and not counts.splits:
        return InputDataError("no sample lies in the run's days", **told)
    return InputDataError(f"the {' and the '.join(empty)} split would be empty", **told)
