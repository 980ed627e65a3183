"""Rows by day, where the day is a column of the input and not a part of its path."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pyspark.sql import functions as F
from pyspark.sql import types as T

from conf.dates import DateRange
from conf.etl import ColumnConfig, DaysConfig
from etl.sources.days import check_empty_days, run_days
from etl.sources.source import REASON_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_EPOCH = datetime.date(1970, 1, 1)


def rows_of_days(
    frame: DataFrame,
    column: ColumnConfig,
    config: DaysConfig,
    dates: DateRange,
    raw: Column,
    found: T.DataType,
) -> DataFrame:
    """Keeps rows of a run's days, in terms that a table can prune its partitions by.

    A row whose day is null or cannot be told stays, to be counted as a bad row.
    """
    days = run_days(config, dates)
    after = days.last + datetime.timedelta(days=1)
    if isinstance(found, T.DateType):
        inside = raw.between(F.lit(days.first), F.lit(days.last))
    elif isinstance(found, T.TimestampType | T.TimestampNTZType):
        low, high = (F.lit(str(day)).cast(found) for day in (days.first, after))
        inside = (raw >= low) & (raw < high)
    elif column.type in ("string", "int64") and isinstance(found, T.StringType | T.LongType):
        inside = raw.isin(*_written(column, config, days.days()))
    else:
        return frame
    return frame.where(raw.isNull() | inside)


def value_in_days(
    column: ColumnConfig, config: DaysConfig, dates: DateRange, value: Column
) -> Column:
    """Whether a value as read lies in a run's days; null where there is no value."""
    days = run_days(config, dates)
    if column.type != "timestamp":
        return value.isin(*_written(column, config, days.days()))
    after = days.last + datetime.timedelta(days=1)
    return (value >= F.lit(_millis(days.first))) & (value < F.lit(_millis(after)))


def check_days_of_rows(
    name: str, config: DaysConfig, column: ColumnConfig, rows: DataFrame, dates: DateRange
) -> None:
    """Refuses a source that lacks rows of a day; scans its column of days once.

    Raises:
        InputDataError: A day has no good row, and it may not be empty.
    """
    if config.allow_empty_days:
        return
    value = F.col(column.name)
    if column.type == "timestamp":
        value = F.unix_date(F.timestamp_millis(value).cast("date"))
    good = rows.where(F.col(REASON_COLUMN).isNull())
    # No more rows than days come back.
    found = {row[0] for row in good.select(value).distinct().collect()}
    days = run_days(config, dates).days()
    keys: Iterable[object] = (
        [(day - _EPOCH).days for day in days]
        if column.type == "timestamp"
        else _written(column, config, days)
    )
    empty = [day for day, key in zip(days, keys, strict=True) if key not in found]
    check_empty_days(name, config, empty)


def _written(
    column: ColumnConfig, config: DaysConfig, days: Iterable[datetime.date]
) -> list[str] | list[int]:
    texts = [day.strftime(config.format) for day in days]
    return [int(text) for text in texts] if column.type == "int64" else texts


def _millis(day: datetime.date) -> int:
    return int(datetime.datetime.combine(day, datetime.time(), datetime.UTC).timestamp()) * 1000
