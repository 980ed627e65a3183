"""Bad rows: the reason of each, their counts and budget, their quarantine; columns that drift.

A row's reason is the first one found, in a fixed order.
"""

from __future__ import annotations

import datetime
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from conf.dates import DateRange
from conf.errors import ConfigError, InputDataError
from conf.etl.sources import ColumnConfig, SourceConfig
from etl.sources.source import (
    NEW_COLUMN,
    REASON_COLUMN,
    REPEATED_HEADER,
    Fault,
    ParsedColumn,
    Source,
)
from etl.sources.time_scan import TimeScan, TimeValues, read_spans, time_aggregates, time_groups

if TYPE_CHECKING:
    from pyspark.sql import Column


def first_reason(faults: Iterable[Fault]) -> Column:
    """The reason of the first condition that holds, or null.

    What is not deterministic keeps Spark from moving a filter on the reason down to the text,
    where it would parse each value anew for each of its checks.
    """
    reason = F.when(F.monotonically_increasing_id() < 0, F.lit(""))
    for condition, name in faults:
        reason = reason.when(condition, F.lit(name))
    return reason


def nan_as_missing(column: ColumnConfig, parsed: ParsedColumn) -> ParsedColumn:
    """Takes NaN for missing where a number may be: engines that know no null write it so.

    A list of numbers has no place for a missing one.
    """
    if not (column.is_float and column.nullable) or column.is_list:
        return parsed
    is_nan = F.coalesce(F.isnan(parsed.value), F.lit(False))
    value = F.when(~is_nan, parsed.value)
    return replace(parsed, value=value, present=parsed.present & ~is_nan)


def column_faults(
    column: ColumnConfig, parsed: ParsedColumn, dates: DateRange | None
) -> list[Fault]:
    """What makes a row a bad row by its value of one column.

    Args:
        column: Its declaration.
        parsed: The column as parsed.
        dates: The run's days, for `not_after: run_date`.

    Raises:
        ConfigError: `not_after: run_date`, and the run has no date.
    """
    value, name = parsed.value, column.name
    unparsed = value.isNull() & parsed.present
    if column.is_list:
        unparsed = unparsed | F.exists(value, lambda element: element.isNull())
    faults = [*parsed.faults, (unparsed, f"not_{column.type}:{name}")]
    if not column.nullable:
        faults.append((value.isNull(), f"null:{name}"))
    if column.is_float:
        infinite = _any(column, value, lambda v: F.isnan(v) | (F.abs(v) == float("inf")))
        faults.append((infinite, f"not_finite:{name}"))
    faults += _bound_faults(column, value)
    if column.one_of is not None:
        unknown = value.isNotNull() & ~parsed.text.isin(*column.one_of)
        faults.append((unknown, f"not_allowed:{name}"))
    if column.not_after is not None:
        faults.append((value >= F.lit(_end_ms(column, dates)), f"in_future:{name}"))
    return faults


def _bound_faults(column: ColumnConfig, value: Column) -> list[Fault]:
    # In the column's own precision: 0.1 read as float32 is not above 0.1.
    kind = "float" if column.element_type == "float32" else "double"
    faults = []
    if column.minimum is not None:
        low = F.lit(column.minimum).cast(kind)
        faults.append((_any(column, value, lambda v: v < low), f"below_minimum:{column.name}"))
    if column.maximum is not None:
        high = F.lit(column.maximum).cast(kind)
        faults.append((_any(column, value, lambda v: v > high), f"above_maximum:{column.name}"))
    return faults


def _any(column: ColumnConfig, value: Column, test: object) -> Column:
    return F.exists(value, test) if column.is_list else test(value)  # type: ignore[operator, arg-type]


def _end_ms(column: ColumnConfig, dates: DateRange | None) -> int:
    """First millisecond after the last day that a timestamp may lie in."""
    after = datetime.datetime.combine(
        find_last_day(column, dates), datetime.time(), datetime.UTC
    ) + datetime.timedelta(1)
    return int(after.timestamp()) * 1000


def find_last_day(column: ColumnConfig, dates: DateRange | None) -> datetime.date:
    """Returns the last day that a timestamp with `not_after` may lie in.

    Raises:
        ConfigError: It is that of the run, which has none.
    """
    last = column.not_after
    if last == "run_date":
        if dates is None:
            raise ConfigError(
                f"column {column.name!r} may not lie after the run's date, and the run has none",
                received="not_after: run_date",
                fix="give the run a date (--date), or set `not_after` to a day",
            )
        last = dates.last
    elif last == "now":
        last = datetime.datetime.now(datetime.UTC).date()
    assert isinstance(last, datetime.date)  # noqa: S101
    return last


@dataclass(frozen=True)
class SourceCounts:
    """Rows of a source: all, and the bad ones by reason.

    Attributes:
        read: All rows, bad ones included.
        bad: Bad rows by reason.
        values: Good rows that have a value, by nullable column.
        new: Keys of one of the rows that are not declared.
        times: Values of the good rows by magnitude, by time column.
        asked: What `Source.asked` gives; empty where no row is good.
    """

    read: int
    bad: dict[str, int]
    values: Mapping[str, int] = field(default_factory=dict)
    new: tuple[str, ...] = ()
    times: Mapping[str, TimeValues] = field(default_factory=dict)
    asked: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bad_rows(self) -> int:
        """Number of bad rows."""
        return sum(self.bad.values())


def count_rows(source: Source, scan: TimeScan | None = None) -> SourceCounts:
    """Scans a source once and counts its rows by what is wrong with them.

    Args:
        source: The source.
        scan: Time columns whose values are counted by magnitude; None: there are none.
    """
    asked = [F.count(name).alias(name) for name in source.nullable]
    asked += [column.alias(name) for name, column in source.asked.items()]
    groups = [] if scan is None else time_groups(scan, source)
    asked += [] if scan is None else time_aggregates(scan, source)
    if NEW_COLUMN in source.rows.columns:
        # The greatest of the lists of new keys: one example, whatever their number.
        asked.append(F.max(NEW_COLUMN).alias(NEW_COLUMN))
    grouped = source.rows.groupBy(REASON_COLUMN, *groups)
    rows = grouped.agg(F.count("*").alias("__n"), *asked).collect()
    counts: Counter[str | None] = Counter()
    for row in rows:
        counts[row[REASON_COLUMN]] += row["__n"]
    if source.headers:
        repeated = counts.pop(REPEATED_HEADER, 0) - source.headers
        counts.update({REPEATED_HEADER: repeated} if repeated > 0 else {})
    bad = {reason: n for reason, n in sorted(counts.items(), key=str) if reason is not None}
    good = [row for row in rows if row[REASON_COLUMN] is None]
    values = {name: sum(row[name] for row in good) for name in source.nullable} if good else {}
    new = [row[NEW_COLUMN] for row in good] if NEW_COLUMN in source.rows.columns else []
    return SourceCounts(
        sum(counts.values()),
        bad,
        values,
        tuple(max((keys for keys in new if keys), default=())),
        {name: read_spans(scan, name, good) for name in scan.columns} if scan is not None else {},
        {name: _combine(name, [row[name] for row in good]) for name in source.asked if good},
    )


_COMBINED: Mapping[str, Callable[[Sequence[Any]], Any]] = {"sum": sum, "min": min, "max": max}


def _combine(name: str, values: Sequence[Any]) -> Any:
    known = [value for value in values if value is not None]
    return _COMBINED[name.split(" ")[0]](known) if known else None


def check_bad_rows(source: Source, counts: SourceCounts, config: SourceConfig) -> None:
    """Refuses a source with more bad rows than its budget.

    Raises:
        InputDataError: No row is good, the policy is `fail` and a row is bad, or the share of
            bad rows is above `max_fraction`.
    """
    bad, policy = counts.bad_rows, config.bad_rows
    fraction = bad / counts.read if counts.read else 1.0
    over = fraction > policy.max_fraction
    if not (over or (policy.policy == "fail" and bad) or bad == counts.read):
        return
    by_reason = source.bad.groupBy("reason").agg(
        F.min("line").alias("line"), F.count("*").alias("n")
    )
    examples = by_reason.orderBy(F.desc("n"), "reason").limit(3).collect()
    shown = "; ".join(f"{row['reason']}: {row['line'][:120]!r}" for row in examples)
    reasons = ", ".join(f"{reason} {n}" for reason, n in counts.bad.items())
    budget = 0.0 if policy.policy == "fail" else policy.max_fraction
    raise InputDataError(
        f"source {source.name!r} has {bad:,} bad rows of {counts.read:,} ({fraction:.2%})",
        received=f"{reasons or 'no rows'}\n            {shown}",
        allowed=f"at most {budget:.2%} (sources.{source.name}.bad_rows)",
        fix=_advise(counts, config),
    )


def _advise(counts: SourceCounts, config: SourceConfig) -> str:
    """Says what to look at: where most bad rows are of times, how these are written."""
    worst = max(counts.bad, key=lambda reason: counts.bad[reason], default="")
    kind, _, column = worst.partition(":")
    if kind == "not_timestamp":
        return (
            f"say how {column} is written by its `timestamp_format` (epoch_s, epoch_ms, or a "
            "pattern such as dd.MM.yyyy HH:mm), correct the input, or raise the budget"
        )
    return (
        f"check the {_how_it_is_read(config)} and columns of the source, correct the input, or "
        "raise the budget"
    )


def _how_it_is_read(config: SourceConfig) -> str:
    if config.format in ("delimited", "csv"):
        return f"separator ({config.field_separator!r}), encoding"
    return f"format ({config.format})"


logger = logging.getLogger("sluice.sources")

_SHOWN = 10
QUARANTINE_DIR = "quarantine"


def check_new_columns(name: str, config: SourceConfig, new: Sequence[str]) -> None:
    """Reports columns of the input that are not declared, or refuses them.

    Raises:
        InputDataError: There is one, and `new_columns` is `fail`.
    """
    _report_columns(
        config.new_columns,
        f"source {name!r} has columns that are not declared",
        new,
        allowed="the columns of the config",
        fix=f"declare them in sources.{name}.columns, or set sources.{name}.new_columns: ignore",
    )


def check_columns(name: str, config: SourceConfig, counts: SourceCounts) -> None:
    """Reports what the count of a source's rows says of its columns, or refuses it.

    Raises:
        InputDataError: A key of JSON lines is new, or a nullable column has no value in any good
            row, and the policy for it is `fail`.
    """
    check_new_columns(name, config, counts.new)
    _report_columns(
        config.all_null_columns,
        f"source {name!r} has columns without a single value",
        [column for column, values in counts.values.items() if not values],
        allowed="a value in at least one row",
        fix="check that the input still fills them, take them out, or set "
        f"sources.{name}.all_null_columns: ignore",
    )


def settle_bad_rows(
    sources: Mapping[str, Source],
    counts: Mapping[str, SourceCounts],
    declared: Mapping[str, SourceConfig],
    staging: Path,
) -> None:
    """Refuses sources with too many bad rows, and writes the bad rows of the others aside.

    Args:
        sources: The sources as read.
        counts: Rows of each source.
        declared: Their declarations.
        staging: Directory of the version: bad rows go to `quarantine/<source>` as JSON lines.

    Raises:
        InputDataError: A source has more bad rows than its budget, or columns that it must not.
    """
    for name, source in sources.items():
        check_bad_rows(source, counts[name], declared[name])
        check_columns(name, declared[name], counts[name])
        bad = counts[name].bad_rows
        logger.info("%s: %s rows read, %s bad", name, f"{counts[name].read:,}", f"{bad:,}")
        if bad and declared[name].bad_rows.policy == "quarantine":
            source.bad.repartition(1).write.json(str(staging / QUARANTINE_DIR / name))


def _report_columns(policy: str, what: str, columns: Sequence[str], allowed: str, fix: str) -> None:
    if not columns or policy == "ignore":
        return
    shown = ", ".join(columns[:_SHOWN]) + (", …" if len(columns) > _SHOWN else "")
    if policy == "fail":
        raise InputDataError(what, received=shown, allowed=allowed, fix=fix)
    logger.warning("%s: %s", what, shown)
