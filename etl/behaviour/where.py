"""Which events count, as a column."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.etl import BuildConfig, WhereConfig

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def matches(events: DataFrame, where: WhereConfig | None) -> Column:
    """Returns whether an event meets a condition, never null; None is met by all."""
    if where is None:
        return F.lit(True)
    value = F.col(where.column)
    if where.one_of is not None:
        met = value.isin(*where.one_of)
    else:
        # The bound in the column's own precision: 4.1 read as float32 is not below 4.1.
        met = value >= F.lit(where.at_least).cast(events.schema[where.column].dataType)
    return F.coalesce(met, F.lit(False))


def behaviour_columns(config: BuildConfig) -> list[str]:
    """Returns the columns of the log whose values tell behaviours apart (`one_of`)."""
    rates = [rolling.rate.out_of for rolling in config.rolling if rolling.rate]
    parts = [history.where for history in config.histories]
    parts += [rolling.where for rolling in config.rolling]
    log = config.sources[config.events.source].column_types
    named = [where.column for where in (*parts, *rates) if where and where.one_of]
    return [column for column in dict.fromkeys(named) if column in log]
