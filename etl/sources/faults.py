"""What is wrong with a row: the first reason found, in a fixed order."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.dates import DateRange
from conf.errors import ConfigError
from conf.etl.columns import ColumnConfig
from etl.sources.source import Cell

if TYPE_CHECKING:
    from pyspark.sql import Column

Fault = tuple["Column", str]


def first_reason(faults: Iterable[Fault]) -> Column:
    """The reason of the first condition that holds, or null.

    What is not deterministic keeps Spark from moving a filter on the reason down to the text,
    where it would parse each value anew for each of its checks.
    """
    reason = F.when(F.monotonically_increasing_id() < 0, F.lit(""))
    for condition, name in faults:
        reason = reason.when(condition, F.lit(name))
    return reason


def column_faults(column: ColumnConfig, cell: Cell, dates: DateRange | None) -> list[Fault]:
    """What makes the row of a cell a bad row.

    Args:
        column: Its declaration.
        cell: The cell.
        dates: The run's days, for `not_after: run_date`.

    Raises:
        ConfigError: `not_after: run_date`, and the run has no date.
    """
    value, name = cell.value, column.name
    unparsed = value.isNull() & cell.present
    if column.is_list:
        unparsed = unparsed | F.exists(value, lambda element: element.isNull())
    faults = [*cell.faults, (unparsed, f"not_{column.type}:{name}")]
    if not column.nullable:
        faults.append((value.isNull(), f"null:{name}"))
    if column.is_float:
        infinite = _any(column, value, lambda v: F.isnan(v) | (F.abs(v) == float("inf")))
        faults.append((infinite, f"not_finite:{name}"))
    faults += _bound_faults(column, value)
    if column.one_of is not None:
        unknown = value.isNotNull() & ~cell.text.isin(*column.one_of)
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
