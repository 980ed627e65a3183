"""Units of time columns held against the values, in the pass that counts the sources.

A date between 1980 and 2100 is a number of another magnitude in each unit: its seconds since 1970
are 3.2e8 to 4.1e9, its milliseconds 3.2e11 to 4.1e12, and so on. The ranges do not overlap, so a
column of dates tells its own unit. A log whose times count from anywhere (0, 1, 2, … or steps) has
no dates, and is taken as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import reduce
from operator import or_
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
from etl.quality.lint import Finding, warning
from etl.sources.bad_rows import SourceCounts, count_rows
from etl.sources.source import REASON_COLUMN, Source

if TYPE_CHECKING:
    from pyspark.sql import Column

_MOST = 0.99
"""Share of a column's dates and small numbers from which they tell its unit. Of milliseconds that
count from 0 less than 0.93 look like seconds."""
_LEAST = 2  # 0 and 1 often mean "always"
_TOO_LARGE = "too_large"
_DAY_S = 86_400
_PAST_USES = ("event", "conversion")
"""Uses of a column whose times have happened."""
_ROW_USES = (*_PAST_USES, "entry")
"""Uses of a column whose stray values make a row a bad row."""
_WRITTEN = {"yyyyMMdd": "%Y%m%d", "yyyyMMddHHmmss": "%Y%m%d%H%M%S"}
"""Java's patterns of dates that are written without marks, and Python's."""
_SCANS = 4
"""Sources that are scanned at a time."""

Values = Mapping[TimeColumn, Mapping[str, Any]]
"""What `_measure` counted of the values of each column: dates by unit, and the others by what they
are; from 2 on `low` and `high`, and their number `told`."""
Counts = Mapping[str, SourceCounts]


@dataclass(frozen=True)
class CountedSources:
    """The sources with their rows counted, and what their times are to be warned of."""

    sources: Mapping[str, Source]
    counts: Counts
    warnings: tuple[Finding, ...]


def count_sources(config: BuildConfig, sources: Mapping[str, Source]) -> CountedSources:
    """Counts the rows of each source, and checks the units of its times in the same pass.

    Rows of another unit become bad rows, as many as may be; their source is counted once more.
    """
    tomorrow_s = int(datetime.now(UTC).timestamp()) + _DAY_S
    columns = [time for time in find_time_columns(config) if time.source in sources]
    sources = dict(sources)
    for time in columns:
        source = sources[time.source]
        asked = {**source.asked, _name(time): _measure(time, source, tomorrow_s)}
        sources[time.source] = replace(source, asked=asked)
    counts = _count_all(sources)
    values = _read(columns, counts)
    check_units(config, values)
    for name, reason in _find_strays(config, values, counts).items():
        rows = sources[name].rows.withColumn(REASON_COLUMN, reason)
        sources[name] = replace(sources[name], rows=rows)
        counts[name] = count_rows(sources[name])
    warnings = judge_times(config, _read(columns, counts), counts)
    return CountedSources(sources, counts, tuple(warnings))


def _count_all(sources: Mapping[str, Source]) -> dict[str, SourceCounts]:
    """Counts all sources at once: the scan of a small one leaves cores idle."""
    session = next(iter(sources.values())).rows.sparkSession
    count = inheritable_thread_target(session)(count_rows)  # Its jobs bear the stage's name.
    with ThreadPoolExecutor(min(len(sources), _SCANS)) as pool:
        return dict(zip(sources, pool.map(count, sources.values()), strict=True))


def _name(time: TimeColumn) -> str:
    return f"__{time.column}_{time.unit}"


def _measure(time: TimeColumn, source: Source, tomorrow_s: int) -> Column:
    """What is asked of a column's values; of a list its greatest one counts."""
    is_list = source.rows.schema[time.column].dataType.typeName() == "array"
    value = F.array_max(time.column) if is_list else F.col(time.column)
    told = value >= F.lit(_LEAST)
    counted = {
        **{kind: _is(value, kind) for kind in (*PER_SECOND, _TOO_LARGE)},
        "small": told & (value < F.lit(FIRST_DATE_S)),
        "told": told,
        # In whatever zone it was written.
        "future": value >= F.lit(tomorrow_s * PER_SECOND[time.unit]),
    }
    found = {name: F.count_if(condition) for name, condition in counted.items()}
    found["low"], found["high"] = F.min(F.when(told, value)), F.max(F.when(told, value))
    return F.struct(*(value.alias(name) for name, value in found.items()))


def _is(value: Column, kind: str) -> Column:
    """Whether a value is a date in a unit, or too large: no int64 holds its milliseconds."""
    if kind == _TOO_LARGE:
        return value >= F.lit((2**63 - 1) // 1000)
    first, end = (bound * PER_SECOND[kind] for bound in (FIRST_DATE_S, LAST_DATE_S))
    return (value >= F.lit(first)) & (value < F.lit(end))


def _read(columns: list[TimeColumn], counts: Counts) -> Values:
    found = {time: counts[time.source].asked.get(_name(time)) for time in columns}
    return {time: row for time, row in found.items() if row is not None and row.told}


def check_units(config: BuildConfig, columns: Values) -> None:
    """Refuses a column whose values are dates, but not in the unit that the config says."""
    for time, values in columns.items():
        words, unit = UNIT_WORDS[time.unit], _find_unit(values) or time.unit
        low, high = values["low"], values["high"]
        is_certain = _is_certain(config, time)
        if not is_certain and (pattern := _find_pattern(low, high)):
            raise InputDataError(
                f"the times of {time.name} are written as dates, not as {words}",
                received=f"{low:.0f} to {high:.0f}",
                fix=f"declare `type: timestamp, timestamp_format: {pattern}` ({time.key}); where "
                "the input is no text, write timestamps",
            )
        if unit == time.unit or (is_certain and PER_SECOND[unit] < PER_SECOND[time.unit]):
            continue
        shown = [f"in {UNIT_WORDS[u]} {show_span(low, high, u)}" for u in (time.unit, unit)]
        raise InputDataError(
            f"the times of {time.name} are no dates in {words}, but in {UNIT_WORDS[unit]}",
            received=f"{low:,.0f} to {high:,.0f}: {', '.join(shown)}",
            fix=f"say in which unit they are ({time.key}): `unit: s` or `unit: ms` of numbers, "
            "`timestamp_format: epoch_s`, `epoch_ms` or `epoch_us` of timestamps",
        )


def _is_certain(config: BuildConfig, time: TimeColumn) -> bool:
    """Whether the input says what a time means: it is a date, not a number."""
    column = config.sources[time.source].column(time.column)
    if column is None or column.element_type != "timestamp":
        return False
    return column.timestamp_format not in EPOCH_UNITS


def _find_unit(values: Mapping[str, Any]) -> str | None:
    """The unit in which nearly all values are dates, or None."""
    unit = max(PER_SECOND, key=lambda unit: values[unit])
    least = _MOST * (sum(values[unit] for unit in PER_SECOND) + values["small"])
    return unit if values[unit] and values[unit] >= least else None


def _find_pattern(*ends: float) -> str | None:
    """Java's pattern of numbers such as 20260131: dates as people write them count nothing."""
    for java, python in _WRITTEN.items():
        texts = [f"{end:.0f}" for end in ends]
        with suppress(ValueError):
            if all(datetime.strptime(text, python).strftime(python) == text for text in texts):
                return java if min(texts) >= "1980" else None
    return None


def _has_dates(time: TimeColumn, values: Mapping[str, Any]) -> bool:
    """Whether most values are dates in the column's unit."""
    return bool(values[time.unit] * 2 > values["told"])


def _list_strays(time: TimeColumn, values: Mapping[str, Any]) -> list[str]:
    """Units in which values would be dates beside the column's own, and what is too large."""
    if time.unit == "s":  # nanoseconds are among what is too large
        return ["ms", "us", _TOO_LARGE]
    own, are_dates = PER_SECOND[time.unit], values[time.unit] > 0
    return [u for u, n in PER_SECOND.items() if n > own or (are_dates and n < own)]


def _find_strays(config: BuildConfig, columns: Values, counts: Counts) -> dict[str, Column]:
    """The reasons of bad rows, by source, where some times are of another unit than the others."""
    found: dict[str, Column] = {}
    for time, values in columns.items():
        kinds = _list_strays(time, values)
        strays = sum(values[kind] for kind in kinds)
        if time.use not in _ROW_USES or not strays or _is_certain(config, time):
            continue
        budget, rows = config.sources[time.source].max_bad_rows, counts[time.source].read
        if strays > budget * rows:
            raise InputDataError(
                f"the times of {time.name} are of several units",
                received=f"{values[time.unit]:,} are dates in {UNIT_WORDS[time.unit]}; "
                f"{strays:,} are not; {values['low']:,.0f} to {values['high']:,.0f}",
                fix="write all of the column in one unit; at most "
                f"{budget:.2%} may be bad rows (sources.{time.source}.max_bad_rows)",
            )
        is_stray = reduce(or_, (_is(F.col(time.column), kind) for kind in kinds))
        reason = F.when(is_stray, F.lit(f"other_unit:{time.column}"))
        found[time.source] = F.coalesce(found.get(time.source, F.col(REASON_COLUMN)), reason)
    return found


def judge_times(config: BuildConfig, columns: Values, counts: Counts) -> Iterator[Finding]:
    """Compares times with the present, and with those that the config gives."""
    for time, values in columns.items():
        if time.use in _PAST_USES and values["future"] and _has_dates(time, values):
            yield _judge_future(config, time, values, counts[time.source].read)
        strays = sum(values[kind] for kind in _list_strays(time, values))
        if time.use == "feature" and strays:
            received = f"{strays:,} values are dates in another unit"
            yield warning(f"unit {time.name}", received, f"dates in {time.unit}")
    _check_bounds(config, columns)


def _judge_future(
    config: BuildConfig, time: TimeColumn, values: Mapping[str, Any], rows: int
) -> Finding:
    budget, future = config.sources[time.source].max_bad_rows, values["future"]
    received = f"{future:,} of {rows:,} times, up to {show_time(values['high'], time.unit)}"
    allowed = f"at most {budget:.2%} (sources.{time.source}.max_bad_rows)"
    if future <= budget * rows:
        return warning(f"future {time.name}", received, allowed)
    raise InputDataError(
        f"the times of {time.name} lie in the future",
        received=received,
        allowed=allowed,
        fix="correct the times, or bound them by `not_after` of a timestamp column; for a "
        "simulated log raise the share of bad rows",
    )


def _check_bounds(config: BuildConfig, columns: Values) -> None:
    """Refuses bounds of the split, and an `until_ts`, in another unit than the times they are of.

    All events would lie on one side of such a bound.
    """
    split, log = config.split, (config.events.source, config.events.time)
    given: list[tuple[str, Any, tuple[str, str | None]]] = [
        ("split.validation", split.validation_from_ts, log),
        ("split.test", split.test_from_ts, log),
    ]
    given += [
        (f"`until_ts` of label {label.name!r}", rule.until_ts, (rule.source, rule.time))
        for label in config.all_labels
        if (rule := label.conversion)
    ]
    past = [time for time in columns if time.use in _PAST_USES and _has_dates(time, columns[time])]
    for key, bound, place in given:
        unit = None if bound is None else find_date_unit(bound)
        for time in past:
            if place == (time.source, time.column) and unit not in (None, time.unit):
                raise ConfigError(
                    f"{key} is of another unit than {time.name}",
                    received=f"{bound}; the times are in {UNIT_WORDS[time.unit]}",
                    fix=f"set it to {bound * PER_SECOND[time.unit] // PER_SECOND[str(unit)]}",
                )
