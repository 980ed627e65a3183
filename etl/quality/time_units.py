"""Units of time columns against their values: dates in another unit, times that do not meet.

What is sure is refused. A log whose times count from anywhere (0, 1, 2, … or steps) has no dates,
and is taken as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.util import inheritable_thread_target

from conf.dates import PER_SECOND, UNIT_WORDS, find_date_unit, show_time
from conf.errors import ConfigError, InputDataError
from conf.etl.build import BuildConfig
from conf.etl.sources import EPOCH_UNITS
from conf.etl.time_columns import (
    SPLIT_BOUNDS,
    TimeColumn,
    find_time_columns,
    has_certain_unit,
    ms_per_unit,
)
from etl.quality.rules import RuleResult
from etl.sources.bad_rows import SourceCounts, count_rows
from etl.sources.time_scan import Span, TimeScan, TimeValues, is_stray, mark_strays

if TYPE_CHECKING:
    from pyspark.sql import Column

    from etl.sources.source import Source

_MOST = 0.99
"""Share of a column's dates and small numbers from which they tell its unit. Of milliseconds that
count from 0 less than 0.93 look like seconds."""
_FIRST_YEAR = 1980
_ROW_USES = ("event", "conversion", "entry")
"""Uses of a column whose stray values make a row a bad row."""
_PAST_USES = ("event", "conversion")
"""Uses of a column whose times have happened."""
_SCANS = 4
"""Sources that are scanned at a time."""
_FACTOR = (300, 3000)
"""Ratios of two ranges of times that are no dates which look like seconds and milliseconds."""


@dataclass(frozen=True)
class CountedSources:
    """The sources with their rows counted, and what their times are to be warned of."""

    sources: Mapping[str, Source]
    counts: Mapping[str, SourceCounts]
    warnings: tuple[RuleResult, ...]


def count_sources(
    config: BuildConfig, sources: Mapping[str, Source], now_ms: int | None = None
) -> CountedSources:
    """Counts the rows of each source, and checks the units of its times in the same pass.

    Rows whose time is of another unit than the others become bad rows, where the policy for bad
    rows allows that many; their source is then counted once more.

    Args:
        config: The build's config.
        sources: The sources as read.
        now_ms: The present, milliseconds since 1970; None: the clock's.

    Raises:
        InputDataError: A column's times are of another unit than the config says or of two,
            those of two sources do not meet, or too many lie in the future.
        ConfigError: A time that the config gives is of another unit than those of the log.
    """
    now_ms = round(datetime.now(UTC).timestamp() * 1000) if now_ms is None else now_ms
    columns = [time for time in find_time_columns(config) if time.source in sources]
    by_source: dict[str, list[str]] = {}
    for time in columns:
        by_source.setdefault(time.source, []).append(time.column)
    scans = {s: TimeScan(tuple(dict.fromkeys(names)), now_ms) for s, names in by_source.items()}
    counts = _count_all(sources, scans)
    check_units(config, columns, counts)
    sources = dict(sources)
    for name in by_source:
        strays = _find_strays(config, [t for t in columns if t.source == name], counts[name])
        if strays:
            stray_times = [_stray(time, counts[name].times[time.column]) for time in strays]
            sources[name] = mark_strays(
                sources[name], {time.column: s for time, s in zip(strays, stray_times, strict=True)}
            )
            counts[name] = count_rows(sources[name], scans[name])
    return CountedSources(sources, counts, tuple(judge_times(config, columns, counts)))


def _count_all(
    sources: Mapping[str, Source], scans: Mapping[str, TimeScan]
) -> dict[str, SourceCounts]:
    """Counts all sources at once: the scan of a small one leaves cores idle."""

    def count(name: str) -> SourceCounts:
        return count_rows(sources[name], scans.get(name))

    session = next(iter(sources.values())).rows.sparkSession
    count_as_stage = inheritable_thread_target(session)(count)  # Its jobs bear the stage's name.
    with ThreadPoolExecutor(min(len(sources), _SCANS)) as pool:
        return dict(zip(sources, pool.map(count_as_stage, sources), strict=True))


def check_units(
    config: BuildConfig, columns: Iterable[TimeColumn], counts: Mapping[str, SourceCounts]
) -> None:
    """Refuses a column whose values are dates, but not in the unit that the config says.

    Raises:
        InputDataError: Names the column, its range as dates in both units, and the key to change;
            or the values are dates as they are written.
    """
    for time in columns:
        values = counts[time.source].times[time.column]
        _check_written(config, time, values)
        other = _find_unit(config, time, values)
        if other is None:
            continue
        span = values.dates(other)
        raise InputDataError(
            f"the times of {time.name} are no dates in {UNIT_WORDS[time.unit]}, but in "
            f"{UNIT_WORDS[other]}",
            received=f"{span.low:,.0f} to {span.high:,.0f}: in {UNIT_WORDS[time.unit]} "
            f"{span.show(time.unit)}, in {UNIT_WORDS[other]} {span.show(other)}",
            allowed="dates between 1980 and 2100, or numbers that count from 0",
            fix=_advise(config, time, other),
        )


def _find_unit(config: BuildConfig, time: TimeColumn, values: TimeValues) -> str | None:
    """The unit in which nearly all values are dates; None: it is the declared one, or none is."""
    counts_by_unit = {unit: values.dates(unit).count for unit in PER_SECOND}
    unit = max(counts_by_unit, key=lambda unit: counts_by_unit[unit])
    if (
        counts_by_unit[unit] < _MOST * (sum(counts_by_unit.values()) + values.small().count)
        or not counts_by_unit[unit]
    ):
        return None
    is_finer = PER_SECOND[unit] > PER_SECOND[time.unit]
    return unit if is_finer or (unit != time.unit and not _is_certain(config, time)) else None


def _check_written(config: BuildConfig, time: TimeColumn, values: TimeValues) -> None:
    """Refuses numbers such as 20260131: dates as people write them, which count nothing."""
    told = values.told
    for digits, pattern in _WRITTEN.items():
        ends = [f"{end:.0f}" for end in (told.low, told.high)]
        if _is_certain(config, time) or not all(_is_written(end, pattern) for end in ends):
            continue
        raise InputDataError(
            f"the times of {time.name} are written as dates, and read as {UNIT_WORDS[time.unit]}",
            received=f"{' to '.join(ends)}: in {UNIT_WORDS[time.unit]} {told.show(time.unit)}",
            allowed="seconds or milliseconds since a moment, or a timestamp column",
            fix=f"declare `type: timestamp, timestamp_format: {digits}` (sources.{time.source}."
            f"columns, {time.column}); where the input is no text, write it as timestamps",
        )


_WRITTEN = {"yyyyMMdd": "%Y%m%d", "yyyyMMddHHmmss": "%Y%m%d%H%M%S"}
"""Java's patterns of dates that are written without marks, and Python's."""


def _is_written(text: str, pattern: str) -> bool:
    if len(text) != len(datetime(2000, 1, 1).strftime(pattern)):
        return False
    try:
        return datetime.strptime(text, pattern).year >= _FIRST_YEAR
    except ValueError:
        return False


def _is_certain(config: BuildConfig, time: TimeColumn) -> bool:
    column = config.sources[time.source].column(time.column)
    return column is not None and has_certain_unit(column)


def _advise(config: BuildConfig, time: TimeColumn, unit: str) -> str:
    column = config.sources[time.source].column(time.column)
    place = f"sources.{time.source}.columns, {time.column}"
    if column is not None and column.element_type == "timestamp":
        declared = EPOCH_UNITS.get(column.timestamp_format or "")
        # What was read is 1000 for each second of the declared unit.
        written = PER_SECOND[unit] * PER_SECOND[declared] // 1000 if declared else 0
        formats = {PER_SECOND[u]: name for name, u in EPOCH_UNITS.items()}
        if written in formats:
            return f"set `timestamp_format: {formats[written]}` ({place})"
        return f"correct the input: it holds these times as they are ({place})"
    if unit in ("s", "ms") or (unit == "us" and time.use == "feature"):
        return f"set `{time.key}: {unit}`"
    if unit == "us":
        return f"declare `type: timestamp, timestamp_format: epoch_us` ({place})"
    return "write the times in microseconds or longer units; nanoseconds are not read"


def _find_strays(
    config: BuildConfig, columns: Iterable[TimeColumn], counts: SourceCounts
) -> list[TimeColumn]:
    """The columns of a source with some times of another unit than the others.

    Raises:
        InputDataError: They are more than the source may have of bad rows.
    """
    found: dict[str, TimeColumn] = {}
    for time in columns:
        values = counts.times[time.column]
        strays = Span() if _is_certain(config, time) else values.strays(time.unit)
        if time.use not in _ROW_USES or not strays.count:
            continue
        policy = config.sources[time.source].bad_rows
        budget = 0.0 if policy.policy == "fail" else policy.max_fraction
        if strays.count > budget * counts.read:
            dates = values.dates(time.unit)
            raise InputDataError(
                f"the times of {time.name} are of several units",
                received=f"{dates.count:,} are dates in {UNIT_WORDS[time.unit]}"
                + (f" ({dates.show(time.unit)}); " if dates.count else "; ")
                + f"{strays.count:,} are not: {strays.low:,.0f} to {strays.high:,.0f}",
                allowed=f"at most {budget:.2%} in other units (sources.{time.source}.bad_rows)",
                fix="write all of the column in one unit; rows within the budget are bad rows",
            )
        found.setdefault(time.column, time)
    return list(found.values())


def _stray(time: TimeColumn, values: TimeValues) -> Column:
    are_dates = values.dates(time.unit).count > 0
    return is_stray(F.col(time.column), time.unit, are_dates=are_dates)


def judge_times(
    config: BuildConfig, columns: Iterable[TimeColumn], counts: Mapping[str, SourceCounts]
) -> list[RuleResult]:
    """Compares times with one another, with the present, and with those that the config gives.

    Returns:
        What is to be warned of.

    Raises:
        InputDataError: Times that are compared are dates in one source and none in another, or
            more lie in the future than the source may have of bad rows.
        ConfigError: A time of the config is of another unit than the column that it bounds.
    """
    columns = list(columns)
    found = [_judge_future(config, time, counts[time.source]) for time in columns]
    found += [_judge_features(time, counts[time.source]) for time in columns]
    events = next((time for time in columns if time.use == "event"), None)
    if events is not None:
        of_events = counts[events.source].times[events.column]
        for time in columns:
            if time != events and time.use in (*_ROW_USES, "end"):
                values = counts[time.source].times[time.column]
                found.append(_compare(events, of_events, time, values))
        _check_bounds(config, columns, counts)
    return [result for result in found if result is not None]


def _judge_future(config: BuildConfig, time: TimeColumn, counts: SourceCounts) -> RuleResult | None:
    values = counts.times[time.column]
    future = values.future(time.unit)
    if time.use not in _PAST_USES or not future.count or not values.has_dates(time.unit):
        return None
    budget, rows = config.sources[time.source].bad_rows.max_fraction, values.all.count
    received = f"{future.count:,} of {rows:,} times, {future.show(time.unit)}"
    allowed = f"at most {budget:.2%} (sources.{time.source}.bad_rows.max_fraction)"
    if future.count > budget * rows:
        raise InputDataError(
            f"the times of {time.name} lie in the future",
            received=f"{received}; now it is {show_time(values.scan.now_ms, 'ms')}",
            allowed=allowed,
            fix="correct the times, or bound them (`not_after` of a timestamp column makes later "
            "ones bad rows); for a simulated log raise the bound",
        )
    return RuleResult(f"future {time.name}", "warn", False, received, allowed)


def _judge_features(time: TimeColumn, counts: SourceCounts) -> RuleResult | None:
    values = counts.times[time.column]
    strays = values.strays(time.unit)
    if time.use != "feature" or not strays.count:
        return None
    received = f"{strays.count:,} of {values.all.count:,} are dates in another unit"
    return RuleResult(f"unit {time.name}", "warn", False, received, f"dates in {time.unit}")


def _compare(
    events: TimeColumn, of_events: TimeValues, time: TimeColumn, values: TimeValues
) -> RuleResult | None:
    """Compares the times of events with those of a source that is joined in time."""
    pairs = ((events, of_events), (time, values))
    have_dates = [v.has_dates(t.unit) for t, v in pairs]
    are_none = [v.counts_from_elsewhere(t.unit) for t, v in pairs]
    received = "; ".join(
        f"{t.name} {v.told.show(t.unit)} ({v.told.low:,.0f} to {v.told.high:,.0f} in "
        f"{UNIT_WORDS[t.unit]})"
        for t, v in pairs
    )
    if have_dates in ([True, False], [False, True]) and any(are_none):
        raise InputDataError(
            f"the times of {events.name} and {time.name} do not meet",
            received=received,
            allowed="times of one clock: dates in both, or numbers that count from the same event",
            fix=f"correct `{events.key}`, `{time.key}` or the column",
        )
    highs = [v.told.high * ms_per_unit(t.unit) for t, v in pairs]
    ratio = max(highs) / min(highs) if all(are_none) and min(highs) else 0.0
    if _FACTOR[0] <= ratio <= _FACTOR[1]:
        name = f"unit {time.name}"
        return RuleResult(name, "warn", False, received, "ranges that do not differ 1000 times")
    return None


def _check_bounds(
    config: BuildConfig, columns: Iterable[TimeColumn], counts: Mapping[str, SourceCounts]
) -> None:
    """Refuses times of the config in another unit than those that they are compared with."""
    bounds: list[tuple[str, int | None, str]] = []
    if config.split.strategy == "temporal":
        for name in SPLIT_BOUNDS:
            bounds.append((f"split.{name}", getattr(config.split, name), "events.time_unit"))
    labels = {f"labels.{label.name}": label for label in config.labels}
    for key, label in {"label": config.label, **labels}.items():
        if label is not None and label.conversion is not None:
            key = f"{key}.conversion"
            bounds.append((f"{key}.until_ts", label.conversion.until_ts, f"{key}.time_unit"))
    by_key = {time.key: time for time in reversed(list(columns))}
    for key, bound, unit_key in bounds:
        time = by_key.get(unit_key)
        if bound is not None and time is not None:
            _check_bound(key, bound, time, counts[time.source].times[time.column])


def _check_bound(key: str, bound: int, time: TimeColumn, values: TimeValues) -> None:
    unit = find_date_unit(bound)
    if unit in (None, time.unit) or not values.has_dates(time.unit):
        return
    dates = values.dates(time.unit)
    raise ConfigError(
        f"{key} is of another unit than {time.name}",
        received=f"{bound}: in {UNIT_WORDS[time.unit]} {show_time(bound, time.unit)}; the times of "
        f"{time.name} are {dates.show(time.unit)}",
        allowed=f"a time in {UNIT_WORDS[time.unit]}, such as {dates.high:.0f}",
        fix=f"set `{key}: {bound * PER_SECOND[time.unit] // PER_SECOND[str(unit)]}`",
    )
