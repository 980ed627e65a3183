"""Bad rows: the reason of each, their counts and budget, their quarantine; columns that drift.

A row's reason is the first one found, in a fixed order.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

if TYPE_CHECKING:
    from pyspark.sql import Column


def first_reason(faults: Iterable[Fault]) -> Column:
    """The reason of the first condition that holds, or null."""
    # What is not deterministic keeps Spark from moving a filter on the reason down to the text,
    # where it would parse each value anew for each of its checks.
    reason = F.when(F.monotonically_increasing_id() < 0, F.lit(""))
    for condition, name in faults:
        reason = reason.when(condition, F.lit(name))
    return reason


def nan_as_missing(column: ColumnConfig, parsed: ParsedColumn) -> ParsedColumn:
    """Takes NaN for missing where a number may be: engines that know no null write it so."""
    if not (column.is_float and column.nullable) or column.is_list:
        return parsed
    is_nan = F.coalesce(F.isnan(parsed.value), F.lit(False))
    value = F.when(~is_nan, parsed.value)
    return replace(parsed, value=value, present=parsed.present & ~is_nan)


def column_faults(column: ColumnConfig, parsed: ParsedColumn) -> Iterator[Fault]:
    """What makes a row a bad row by its value of one column."""
    value, name = parsed.value, column.name

    def holds(test: Callable[[Column], Column]) -> Column:
        return F.exists(value, test) if column.is_list else test(value)

    yield from parsed.faults
    unparsed = value.isNull() & parsed.present
    if column.is_list:
        unparsed = unparsed | F.exists(value, lambda element: element.isNull())
    yield unparsed, f"not_{column.type}:{name}"
    if not column.nullable:
        yield value.isNull(), f"null:{name}"
    if column.is_float:
        yield holds(lambda v: F.isnan(v) | (F.abs(v) == float("inf"))), f"not_finite:{name}"
    # In the column's own precision: 0.1 read as float32 is not above 0.1.
    kind = "float" if column.element_type == "float32" else "double"
    if column.minimum is not None:
        low = F.lit(column.minimum).cast(kind)
        yield holds(lambda v: v < low), f"below_minimum:{name}"
    if column.maximum is not None:
        high = F.lit(column.maximum).cast(kind)
        yield holds(lambda v: v > high), f"above_maximum:{name}"
    if column.one_of is not None:
        yield value.isNotNull() & ~parsed.text.isin(*column.one_of), f"not_allowed:{name}"
    if isinstance(last := column.not_after, datetime.date):
        yield value >= F.lit(DateRange(last, last).span_ms[1]), f"in_future:{name}"


def find_last_day(column: ColumnConfig, dates: DateRange | None) -> datetime.date:
    """Returns the last day that a timestamp with `not_after` may lie in."""
    if isinstance(column.not_after, datetime.date):
        return column.not_after
    if column.not_after == "now":
        return datetime.datetime.now(datetime.UTC).date()
    if dates is None:
        raise ConfigError(
            f"column {column.name!r} may not lie after the run's date, and the run has none",
            fix="give the run a date (--date), or set `not_after` to a day",
        )
    return dates.last


@dataclass(frozen=True)
class SourceCounts:
    """Rows of a source: all, and the bad ones by reason."""

    read: int
    bad: dict[str, int]
    empty: tuple[str, ...] = ()
    """Nullable columns that no good row has a value of."""
    new: tuple[str, ...] = ()
    """Keys of one of the rows that are not declared."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """What `Source.asked` gives; empty where no row is good."""

    @property
    def bad_rows(self) -> int:
        """Number of bad rows."""
        return sum(self.bad.values())


def count_rows(source: Source) -> SourceCounts:
    """Scans a source once and counts its rows by what is wrong with them."""
    counted = {"__n": F.count("*"), **{f"__n_{name}": F.count(name) for name in source.nullable}}
    if NEW_COLUMN in source.rows.columns:
        # The greatest of the lists of new keys: one example, whatever their number.
        counted[NEW_COLUMN] = F.max(NEW_COLUMN)
    columns = [value.alias(name) for name, value in {**counted, **source.asked}.items()]
    rows = source.rows.groupBy(REASON_COLUMN).agg(*columns).collect()
    found = {row[REASON_COLUMN]: row.asDict() for row in rows}
    good = found.pop(None, {})
    bad = {reason: row["__n"] for reason, row in sorted(found.items())}
    if REPEATED_HEADER in bad:
        bad[REPEATED_HEADER] -= source.headers
    bad = {reason: n for reason, n in bad.items() if n > 0}
    return SourceCounts(
        sum(bad.values()) + good.get("__n", 0),
        bad,
        empty=tuple(name for name in source.nullable if good.get(f"__n_{name}") == 0),
        new=tuple(good.get(NEW_COLUMN) or ()),
        asked={name: good[name] for name in source.asked if good},
    )


def check_bad_rows(source: Source, counts: SourceCounts, config: SourceConfig) -> None:
    """Refuses a source with more bad rows than its budget."""
    bad, budget = counts.bad_rows, config.max_bad_rows
    fraction = bad / counts.read if counts.read else 1.0
    if fraction <= budget and bad < counts.read:
        return
    examples = source.bad.groupBy("reason").agg(F.min("line").alias("line")).collect()
    lines = {row["reason"]: row["line"][:120] for row in examples}
    most = sorted(counts.bad.items(), key=lambda found: -found[1])
    shown = "; ".join(f"{reason} {n}, such as {lines.get(reason)!r}" for reason, n in most[:5])
    raise InputDataError(
        f"source {source.name!r} has {bad:,} bad rows of {counts.read:,} ({fraction:.2%}), and "
        f"may have {budget:.2%}",
        received=shown or "no rows",
        fix="check the separator, encoding, format and columns of the source (of times their "
        f"`timestamp_format`), correct the input, or raise sources.{source.name}.max_bad_rows",
    )


logger = logging.getLogger("sluice.sources")

QUARANTINE_DIR = "quarantine"


def check_columns(
    name: str, config: SourceConfig, new: Sequence[str], empty: Sequence[str] = ()
) -> None:
    """Warns of columns that are not declared, or refuses them; warns of those without a value."""
    if new and config.new_columns == "fail":
        raise InputDataError(
            f"source {name!r} has columns that are not declared",
            received=", ".join(new[:10]),
            fix=f"declare them in sources.{name}.columns, or set new_columns: ignore",
        )
    shown = {"that are not declared": [] if config.new_columns == "ignore" else new}
    for what, columns in {**shown, "without a single value": empty}.items():
        if columns:
            logger.warning("source %r has columns %s: %s", name, what, ", ".join(columns[:10]))


def settle_bad_rows(
    sources: Mapping[str, Source],
    counts: Mapping[str, SourceCounts],
    declared: Mapping[str, SourceConfig],
    staging: Path | None = None,
) -> None:
    """Refuses sources with too many bad rows, and writes the bad rows of the others aside."""
    for name, source in sources.items():
        check_bad_rows(source, counts[name], declared[name])
        check_columns(name, declared[name], counts[name].new, counts[name].empty)
        bad = counts[name].bad_rows
        logger.info("%s: %s rows read, %s bad", name, f"{counts[name].read:,}", f"{bad:,}")
        if bad and staging is not None:
            source.bad.repartition(1).write.json(str(staging / QUARANTINE_DIR / name))
