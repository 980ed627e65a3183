"""Units of time columns held against the values: dates in another unit, times that do not meet.

A date between 1980 and 2100 is a number of another magnitude in each unit: its seconds since 1970
are 3.2e8 to 4.1e9, its milliseconds 3.2e11 to 4.1e12, and so on. The ranges do not overlap, so a
column of dates tells its own unit. A log whose times count from anywhere (0, 1, 2, … or steps) has
no dates, and is taken as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F
from pyspark.util import inheritable_thread_target

from conf.dates import (
    FIRST_DATE_S,
    LAST_DATE_S,
    PER_SECOND,
    UNIT_WORDS,
    find_date_unit,
    show_span,
    show_time,
)
from conf.errors import ConfigError, InputDataError
from conf.etl.build import BuildConfig
from conf.etl.sources import EPOCH_UNITS
from conf.etl.time_columns import TimeColumn, find_time_columns
from etl.quality.rules import RuleResult
from etl.sources.bad_rows import SourceCounts, count_rows
from etl.sources.source import REASON_COLUMN, Source

if TYPE_CHECKING:
    from pyspark.sql import Column

_MOST = 0.99
"""Share of a column's dates and small numbers from which they tell its unit. Of milliseconds that
count from 0 less than 0.93 look like seconds."""
_LEAST = 2  # 0 and 1 often mean "always"
_TOO_LARGE_S = (2**63 - 1) // 1000  # no int64 holds the milliseconds
_DAY_S = 86_400
_ROW_USES = ("event", "conversion", "entry")
"""Uses of a column whose stray values make a row a bad row."""
_PAST_USES = ("event", "conversion")
"""Uses of a column whose times have happened."""
_SCANS = 4
"""Sources that are scanned at a time."""

Values = Mapping[TimeColumn, "TimeValues"]


@dataclass(frozen=True)
class CountedSources:
    """The sources with their rows counted, and what their times are to be warned of."""

    sources: Mapping[str, Source]
    counts: Mapping[str, SourceCounts]
    warnings: tuple[RuleResult, ...]


@dataclass(frozen=True)
class TimeValues:
    """The values of a time column, by magnitude.

    Attributes:
        unit: Unit of the column.
        dates: Values that are dates between 1980 and 2100, by the unit in which they are.
        small: Values from 2 on that are dates in no unit, as they are below the dates in seconds.
        too_large: Values whose milliseconds no int64 holds, were they seconds.
        told: Values from 2 on; what is below may mean "always".
        low: The least of these.
        high: The greatest of these.
        future: Values more than a day after the present.
    """

    unit: str
    dates: Mapping[str, int]
    small: int
    too_large: int
    told: int
    low: float
    high: float
    future: int

    @property
    def has_dates(self) -> bool:
        """Whether most values are dates in the column's unit."""
        return self.dates[self.unit] * 2 > self.told

    @property
    def strays(self) -> int:
        """Values that `_is_stray` tells from the others."""
        others = _other_units(self.unit, are_dates=self.dates[self.unit] > 0)
        if self.unit != "s":
            return sum(self.dates[other] for other in others)
        # Dates in nanoseconds are among what is too large.
        return self.too_large + sum(self.dates[other] for other in others if other != "ns")

    def show(self, unit: str | None = None) -> str:
        """Returns the range as dates in a unit."""
        return show_span(self.low, self.high, unit or self.unit)


def count_sources(
    config: BuildConfig, sources: Mapping[str, Source], now_ms: int | None = None
) -> CountedSources:
    """Counts the rows of each source, and checks the units of its times in the same pass.

    Rows whose time is of another unit than the others become bad rows, where the policy for bad
    rows allows that many; their source is then counted once more.
    """
    now_ms = round(datetime.now(UTC).timestamp() * 1000) if now_ms is None else now_ms
    columns = [time for time in find_time_columns(config) if time.source in sources]
    sources = dict(sources)
    for time in columns:
        source = sources[time.source]
        asked = {**source.asked, _name(time): _measure(time, source, now_ms)}
        sources[time.source] = replace(source, asked=asked)
    counts = _count_all(sources)
    check_units(config, _read_all(columns, counts))
    for name, strays in find_strays(config, _read_all(columns, counts), counts).items():
        sources[name] = _mark_strays(sources[name], strays)
        counts[name] = count_rows(sources[name])
    warnings = judge_times(config, _read_all(columns, counts), counts)
    return CountedSources(sources, counts, tuple(warnings))


def _count_all(sources: Mapping[str, Source]) -> dict[str, SourceCounts]:
    """Counts all sources at once: the scan of a small one leaves cores idle."""

    def count(name: str) -> SourceCounts:
        return count_rows(sources[name])

    session = next(iter(sources.values())).rows.sparkSession
    count_as_stage = inheritable_thread_target(session)(count)  # Its jobs bear the stage's name.
    with ThreadPoolExecutor(min(len(sources), _SCANS)) as pool:
        return dict(zip(sources, pool.map(count_as_stage, sources), strict=True))


def _name(time: TimeColumn) -> str:
    return f"__{time.column}_{time.unit}"


def _measure(time: TimeColumn, source: Source, now_ms: int) -> Column:
    """What is asked of a column's values; of a list its greatest one counts."""
    is_list = source.rows.schema[time.column].dataType.typeName() == "array"
    value = F.array_max(time.column) if is_list else F.col(time.column)
    told = value >= F.lit(_LEAST)
    tomorrow = (now_ms // 1000 + _DAY_S) * PER_SECOND[time.unit]  # in whatever zone it was written
    counted = {
        **{unit: _is_date(value, unit) for unit in PER_SECOND},
        "small": told & (value < F.lit(FIRST_DATE_S)),
        "too_large": value >= F.lit(_TOO_LARGE_S),
        "told": told,
        "future": value >= F.lit(tomorrow),
    }
    found = {name: F.count_if(condition) for name, condition in counted.items()}
    found["low"], found["high"] = F.min(F.when(told, value)), F.max(F.when(told, value))
    return F.struct(*(value.alias(name) for name, value in found.items()))


def _is_date(value: Column, unit: str) -> Column:
    first, end = (bound * PER_SECOND[unit] for bound in (FIRST_DATE_S, LAST_DATE_S))
    return (value >= F.lit(first)) & (value < F.lit(end))


def _read_all(columns: Iterable[TimeColumn], counts: Mapping[str, SourceCounts]) -> Values:
    found = {time: counts[time.source].asked.get(_name(time)) for time in columns}
    return {time: _read(time, row.asDict() if row else {}) for time, row in found.items()}


def _read(time: TimeColumn, found: Mapping[str, Any]) -> TimeValues:
    names = ("small", "too_large", "told", "low", "high", "future")
    dates = {unit: found.get(unit, 0) for unit in PER_SECOND}
    return TimeValues(time.unit, dates, **{name: found.get(name) or 0 for name in names})


def check_units(config: BuildConfig, columns: Values) -> None:
    """Refuses a column whose values are dates, but not in the unit that the config says."""
    for time, values in columns.items():
        is_certain = _is_certain(config, time)
        if not is_certain:
            _check_written(time, values)
        other = _find_unit(values)
        is_finer = other is not None and PER_SECOND[other] > PER_SECOND[time.unit]
        if other is None or other == time.unit or (is_certain and not is_finer):
            continue
        words = UNIT_WORDS[time.unit], UNIT_WORDS[other]
        raise InputDataError(
            f"the times of {time.name} are no dates in {words[0]}, but in {words[1]}",
            received=f"{values.low:,.0f} to {values.high:,.0f}: in {words[0]} {values.show()}, in "
            f"{words[1]} {values.show(other)}",
            allowed="dates between 1980 and 2100, or numbers that count from 0",
            fix=_advise(config, time, other),
        )


def _is_certain(config: BuildConfig, time: TimeColumn) -> bool:
    """Whether the input says what a time means: it is a date, not a number."""
    column = config.sources[time.source].column(time.column)
    is_timestamp = column is not None and column.element_type == "timestamp"
    return column is not None and is_timestamp and column.timestamp_format not in EPOCH_UNITS


def _find_unit(values: TimeValues) -> str | None:
    """The unit in which nearly all values are dates, or None."""
    unit = max(values.dates, key=lambda unit: values.dates[unit])
    dates, all_told = values.dates[unit], sum(values.dates.values()) + values.small
    return unit if dates and dates >= _MOST * all_told else None


_WRITTEN = {"yyyyMMdd": "%Y%m%d", "yyyyMMddHHmmss": "%Y%m%d%H%M%S"}
"""Java's patterns of dates that are written without marks, and Python's."""


def _check_written(time: TimeColumn, values: TimeValues) -> None:
    """Refuses numbers such as 20260131: dates as people write them, which count nothing."""
    ends = [f"{end:.0f}" for end in (values.low, values.high)]
    for digits, pattern in _WRITTEN.items():
        if all(_is_written(end, pattern) for end in ends):
            raise InputDataError(
                f"the times of {time.name} are written as dates, and read as "
                f"{UNIT_WORDS[time.unit]}",
                received=f"{' to '.join(ends)}: in {UNIT_WORDS[time.unit]} {values.show()}",
                allowed="seconds or milliseconds since a moment, or a timestamp column",
                fix=f"declare `type: timestamp, timestamp_format: {digits}` (sources.{time.source}."
                f"columns, {time.column}); where the input is no text, write it as timestamps",
            )


def _is_written(text: str, pattern: str) -> bool:
    try:
        date = datetime.strptime(text, pattern)
    except ValueError:
        return False
    return date.year >= 1980 and date.strftime(pattern) == text


def _advise(config: BuildConfig, time: TimeColumn, unit: str) -> str:
    column = config.sources[time.source].column(time.column)
    place = f"sources.{time.source}.columns, {time.column}"
    if column is not None and column.element_type == "timestamp":
        return f"set `timestamp_format` to epoch_s, epoch_ms or epoch_us, as they are ({place})"
    if unit in ("s", "ms") or (unit == "us" and time.use == "feature"):
        return f"set `unit: {unit}` ({time.key})"
    if unit == "us":
        return f"declare `type: timestamp, timestamp_format: epoch_us` ({place})"
    return "write the times in microseconds or longer units; nanoseconds are not read"


def find_strays(
    config: BuildConfig, columns: Values, counts: Mapping[str, SourceCounts]
) -> dict[str, dict[str, Column]]:
    """Finds the columns with some times of another unit than the others."""
    found: dict[str, dict[str, Column]] = {}
    for time, values in columns.items():
        if time.use not in _ROW_USES or not values.strays or _is_certain(config, time):
            continue
        budget, rows = config.sources[time.source].max_bad_rows, counts[time.source].read
        dates = values.dates
        if values.strays > budget * rows:
            raise InputDataError(
                f"the times of {time.name} are of several units",
                received=f"{dates[time.unit]:,} are dates in {UNIT_WORDS[time.unit]}; "
                f"{values.strays:,} are not; {values.low:,.0f} to {values.high:,.0f}",
                allowed=f"at most {budget:.2%} in other units (sources.{time.source}.max_bad_rows)",
                fix="write all of the column in one unit; rows within the budget are bad rows",
            )
        is_stray = _is_stray(F.col(time.column), time.unit, are_dates=dates[time.unit] > 0)
        found.setdefault(time.source, {}).setdefault(time.column, is_stray)
    return found


def _is_stray(value: Column, unit: str, *, are_dates: bool) -> Column:
    """Whether a time is a date in another unit, or larger than milliseconds can be."""
    stray = value >= F.lit(_TOO_LARGE_S) if unit == "s" else F.lit(False)
    for other in _other_units(unit, are_dates=are_dates):
        stray = stray | _is_date(value, other)
    return stray


def _other_units(unit: str, *, are_dates: bool) -> list[str]:
    """The units in which a date is a stray value.

    Without dates in a column's own unit one in a coarser unit may as well be a number that counts
    from 0.
    """
    own = PER_SECOND[unit]
    return [u for u, n in PER_SECOND.items() if n > own or (are_dates and n < own)]


def _mark_strays(source: Source, strays: Mapping[str, Column]) -> Source:
    """Makes the rows bad rows whose time is of another unit than the others."""
    reason = F.col(REASON_COLUMN)
    for name, stray in strays.items():
        other = F.when(F.coalesce(stray, F.lit(False)), F.lit(f"other_unit:{name}"))
        reason = F.coalesce(reason, other)
    return replace(source, rows=source.rows.withColumn(REASON_COLUMN, reason))


def judge_times(
    config: BuildConfig, columns: Values, counts: Mapping[str, SourceCounts]
) -> Iterator[RuleResult]:
    """Compares times with the present, and with those that the config gives."""
    for time, values in columns.items():
        if time.use in _PAST_USES and values.future and values.has_dates:
            yield _judge_future(config, time, values, counts[time.source])
        if time.use == "feature" and values.strays:
            received = f"{values.strays:,} values are dates in another unit"
            yield RuleResult(f"unit {time.name}", "warn", False, received, f"dates in {time.unit}")
    _check_bounds(config, columns)


def _judge_future(
    config: BuildConfig, time: TimeColumn, values: TimeValues, counts: SourceCounts
) -> RuleResult:
    budget, rows = config.sources[time.source].max_bad_rows, counts.read
    received = f"{values.future:,} of {rows:,} times, up to {show_time(values.high, time.unit)}"
    allowed = f"at most {budget:.2%} (sources.{time.source}.max_bad_rows)"
    if values.future > budget * rows:
        raise InputDataError(
            f"the times of {time.name} lie in the future",
            received=received,
            allowed=allowed,
            fix="correct the times, or bound them (`not_after` of a timestamp column makes later "
            "ones bad rows); for a simulated log raise the bound",
        )
    return RuleResult(f"future {time.name}", "warn", False, received, allowed)


def _check_bounds(config: BuildConfig, columns: Values) -> None:
    """Refuses bounds of the split, and an `until_ts`, in another unit than the times they are of.

    All events would lie on one side of such a bound.
    """
    events, split = config.events, config.split
    place = (events.source, events.time or "")
    bounds = {"validation": split.validation_from_ts, "test": split.test_from_ts}
    given: list[tuple[str, Any, tuple[str, str]]] = [
        (f"split.{key}", bound, place) for key, bound in bounds.items()
    ]
    for label in config.all_labels:
        if rule := label.conversion:
            key = f"`until_ts` of label {label.name!r}"
            given.append((key, rule.until_ts, (rule.source, rule.time)))
    named = {(time.source, time.column): time for time in columns if time.use in _PAST_USES}
    for key, bound, place in given:
        time = named.get(place)
        unit = None if bound is None else find_date_unit(bound)
        if time is not None and unit not in (None, time.unit) and columns[time].has_dates:
            right = bound * PER_SECOND[time.unit] // PER_SECOND[str(unit)]
            raise ConfigError(
                f"{key} is of another unit than {time.name}",
                received=f"{bound}; the times are in {UNIT_WORDS[time.unit]}",
                fix=f"set it to {right}",
            )
