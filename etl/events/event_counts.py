"""What became of the rows of the log: counted, and refused where nothing is left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.dates import DateRange
from conf.errors import InputDataError
from conf.etl.build import BuildConfig
from conf.etl.time_columns import ms_per_unit
from conf.splits import EVENT_SPLITS, TEST
from etl.events.identity import DROP_COLUMN, EVENT_TS_COLUMN, MOMENT_COLUMN, POSITION_COLUMN
from etl.events.joins import MATCHED, count_matches, read_matches
from etl.events.labels import IMMATURE, UNLABELLED, ConversionCounts, find_until_ms, is_immature
from etl.events.sample_filter import NOT_SAMPLED_COLUMN, SEEN_COLUMN
from etl.events.splits import SHORT_USER_COLUMN, SPLIT_COLUMN, is_inside
from etl.sources.time_scan import Span

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_UNKNOWN = "unknown_"


@dataclass(frozen=True)
class EventCounts:
    """Counts of the annotated frame, from one scan of it.

    Attributes:
        joined: Events after parsing, de-duplication and joins.
        splits: Of these, per split, those that are samples.
        dropped: Events left out, by reason, and those that are no samples.
        event_ts_ms_range: First and last event time, None without a time column.
        matches: Events by dictionary and outcome of its join, dropped or not: `matched`, or why
            there was no entry.
        lost_conversions: Of each label made of conversions, those that make no sample positive, by
            reason, and all `rows`.
        rows: All events of the log that parsed, dropped or not.
        seen: Kept events that meet `seen.where`; None: there is no such condition.
        maturity: By label made of conversions, up to when it is known (`RowCounts.maturity`).
        short_users: Users with too few samples for leave_one_out.
        test_in_log: Given test events without a time whose user and item are a sample of the log.
        late: Rows under the run's days that are of earlier ones.
        delivered: All rows under these days.
        ties: Events at the time of an earlier one of their user.
    """

    joined: int
    splits: Mapping[str, int]
    dropped: Mapping[str, int]
    event_ts_ms_range: tuple[int, int] | None
    matches: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    lost_conversions: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    rows: int = 0
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
    """Counts kept events per split, dropped ones per reason, and what joins have matched.

    Args:
        events: Annotated events.
        config: The build's config.
        conversions: What was counted of the conversions of each label that has some.
        dates: The run's days, where there are any.
    """
    until = _find_cut_offs(config, conversions or {})
    unknown = _find_unknown(config, until, dates)
    leaves_out = config.split.strategy == "leave_one_out"
    has_ties = config.events.user is not None and config.events.time is not None
    is_tie = F.col(MOMENT_COLUMN) < F.col(POSITION_COLUMN)
    dictionaries = [join.source for join in config.joins]
    rows = (
        events.withColumn("__reason", F.coalesce(DROP_COLUMN, NOT_SAMPLED_COLUMN))
        .groupBy(DROP_COLUMN, "__reason", SPLIT_COLUMN)
        .agg(
            F.count("*").alias("n"),
            F.min(EVENT_TS_COLUMN).alias("low"),
            F.max(EVENT_TS_COLUMN).alias("high"),
            *([F.count_if(SEEN_COLUMN).alias("seen")] if config.seen_where is not None else []),
            *([F.count_if(SHORT_USER_COLUMN).alias("short_users")] if leaves_out else []),
            *([F.count_if(is_tie).alias("ties")] if has_ties else []),
            *[F.count_if(met).alias(_UNKNOWN + name) for name, met in unknown.items()],
            *count_matches(dictionaries),
        )
        .collect()
    )
    dropped: dict[str, int] = {}
    for row in rows:
        if row["__reason"] is not None:
            dropped[row["__reason"]] = dropped.get(row["__reason"], 0) + row["n"]
    good = [row for row in rows if row[DROP_COLUMN] is None]
    samples = [row for row in good if row["__reason"] is None]
    splits = {row[SPLIT_COLUMN]: row["n"] for row in samples}
    maturity = {
        name: _describe_end(until[name], counts) for name, counts in (conversions or {}).items()
    }
    for name in unknown:
        maturity[name]["unknown_as_0"] = sum(row[_UNKNOWN + name] for row in samples)
    seen = None if config.seen_where is None else sum(row["seen"] for row in good)
    lows = [row["low"] for row in good if row["low"] is not None]
    highs = [row["high"] for row in good if row["high"] is not None]
    return EventCounts(
        joined=sum(row["n"] for row in good),
        splits={split: splits[split] for split in EVENT_SPLITS if split in splits},
        dropped=dict(sorted(dropped.items())),
        event_ts_ms_range=(min(lows), max(highs)) if lows else None,
        matches=read_matches(dictionaries, [row.asDict() for row in rows]),
        rows=sum(row["n"] for row in rows),
        seen=seen,
        maturity=maturity,
        short_users=sum(row["short_users"] for row in samples) if leaves_out else 0,
        test_in_log=_count_test_in_log(events, config),
        ties=sum(row["ties"] for row in good) if has_ties else 0,
    )


def _count_test_in_log(events: DataFrame, config: BuildConfig) -> int:
    """Times tell which events of the log come after a given one; without them none are left out."""
    user, item, source = config.events.user, config.events.item, config.split.test_source
    if user is None or item is None or source is None:
        return 0
    if config.sources[source].column(config.events.time or "") is not None:
        return 0
    samples = events.where(F.col(DROP_COLUMN).isNull() & F.col(NOT_SAMPLED_COLUMN).isNull())
    is_test = F.col(SPLIT_COLUMN) == TEST
    pairs = samples.groupBy(user, item).agg(
        F.count_if(is_test).alias("test"), F.count_if(~is_test).alias("log")
    )
    return pairs.where("log > 0").agg(F.sum("test")).collect()[0][0] or 0


def _find_cut_offs(
    config: BuildConfig, conversions: Mapping[str, ConversionCounts]
) -> dict[str, int | None]:
    """Up to when each label made of conversions can be known."""
    return {
        label.name: find_until_ms(label.conversion, conversions[label.name])
        for label in config.all_labels
        if label.conversion is not None and label.name in conversions
    }


def _find_unknown(
    config: BuildConfig, until: Mapping[str, int | None], dates: DateRange | None
) -> dict[str, Column]:
    """Conditions of the records whose label is 0 although a conversion may yet come."""
    inside = F.lit(True) if dates is None else is_inside(dates)
    return {
        label.name: is_immature(label.conversion, until[label.name])
        & (F.col(label.name) == 0)
        & inside
        for label in config.all_labels
        if label.conversion is not None
        and label.conversion.immature == "keep"
        and label.name in until
    }


def _describe_end(until_ms: int | None, counts: ConversionCounts) -> dict[str, int]:
    ends = {
        "until_ts_ms": until_ms,
        "last_conversion_ts_ms": None if counts.span_ms is None else counts.span_ms[1],
        "last_event_ts_ms": counts.last_event_ms,
    }
    return {name: time for name, time in ends.items() if time is not None}


def check_not_empty(counts: EventCounts, config: BuildConfig, hints: Sequence[str] = ()) -> None:
    """Refuses a split without a sample.

    Args:
        counts: Counts of the events.
        config: The build's config.
        hints: What is known of why events were dropped.

    Raises:
        InputDataError: One is empty; says what was dropped, and what the split goes by.
    """
    required = [s for s in EVENT_SPLITS if s != "validation" or config.split.has_validation]
    empty = [split for split in required if not counts.splits.get(split)]
    if not empty:
        return
    kept_rows = ", ".join(f"{split} {n:,}" for split, n in counts.splits.items())
    dropped = ", ".join(f"{reason} {n:,}" for reason, n in counts.dropped.items())
    times = counts.event_ts_ms_range
    received = [f"{sum(counts.splits.values()):,} samples: {kept_rows or 'none'}"]
    received += [f"dropped: {dropped or 'none'}"]
    received += [f"events {show_range(times, config)}"] if times else []
    raise InputDataError(
        f"the {' and the '.join(empty)} split would be empty",
        received="; ".join(received),
        allowed="at least one record in each split",
        fix="; ".join(hints) or _advise_on_split(counts, config),
    )


def check_seen(counts: EventCounts, config: BuildConfig) -> None:
    """Refuses a condition of seen items that no event meets.

    Raises:
        InputDataError: None does.
    """
    if counts.seen == 0:
        raise InputDataError(
            "no event meets seen.where, so no user would have met any item",
            received=config.seen_where,
            allowed="a condition that some event meets",
            fix="compare its columns with values that the log holds",
        )


def show_range(range_ms: tuple[int, int], config: BuildConfig) -> str:
    """Returns the first and the last event time, as dates and in the unit of the log."""
    scale = ms_per_unit(config.events.time_unit)
    dates = Span(2, *range_ms).show("ms")
    return f"{dates} ({range_ms[0] // scale} to {range_ms[1] // scale})"


def _advise_on_split(counts: EventCounts, config: BuildConfig) -> str:
    if not counts.splits:
        reason = max(counts.dropped, key=lambda name: counts.dropped[name], default="")
        if reason.startswith("unmatched:"):
            return f"check the keys of the join with {reason.split(':')[1]!r}: hardly any matches"
        if reason == UNLABELLED:
            return "check the label's column: it has no value in the log"
        if reason == IMMATURE:
            return (
                "no label is known yet: deliver later conversions, or declare `until_ts` of the "
                "label's conversions where they are complete up to a later time"
            )
        return "check what was dropped, and the log's size"
    split = config.split
    if split.strategy == "leave_one_out":
        return (
            f"no user has {split.least_events} samples: lower split.min_events, or choose another "
            "split.strategy"
        )
    if split.strategy == "hash":
        return "there are too few different keys: choose another split.key, or larger fractions"
    if split.strategy == "temporal" and split.test_from_ts is not None:
        return "move split.test_from_ts and validation_from_ts into the time of the events"
    if split.strategy == "temporal" and split.test is not None:
        return "shorten split.test and split.validation, or let the log reach further back"
    return "check the log's size, and `split` (strategy, fractions, days)"
