"""`events.where`: which events are samples; the others stay in histories, but have no record.

The condition is Spark's SQL. Its form, columns and type are checked before Spark is started.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from conf.errors import ConfigError, did_you_mean
from conf.etl.build import BuildConfig
from conf.etl.sources import SPARK_TYPES

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from sqlglot import exp

NOT_SAMPLED_COLUMN = "__skip"
"""Null, or the reason why a kept event is no sample."""
WHERE_NOT_MET = "where_not_met"
WITHOUT_ITEM = "without_item"
_EVENTS = "events"


def check_where(config: BuildConfig) -> None:
    """Checks the condition against the columns of the events, without Spark.

    Raises:
        ConfigError: It is no condition, names a column that events do not have, or looks at
            more than the event itself.
    """
    if config.events.where is None:
        return
    from sqlglot import exp

    types = config.event_column_types
    condition = _parse(config.events.where)
    beyond = next(condition.find_all(exp.AggFunc, exp.Window, exp.Query, exp.Rand), None)
    if beyond is not None:
        raise _refuse(config.events.where, "a condition on the columns of one event",
                      f"take {beyond.sql('spark')} out")  # fmt: skip
    for column in condition.find_all(exp.Column):
        _check_column(column, types)
    kind = _find_type(condition, types)
    if kind not in ("BOOLEAN", "UNKNOWN"):
        raise _refuse(config.events.where, "a condition, true or false",
                      f"its type is {kind}; compare it with something")  # fmt: skip


def _parse(where: str) -> exp.Expr:
    import sqlglot
    from sqlglot import exp
    from sqlglot.errors import SqlglotError

    try:
        parsed = sqlglot.parse_one(where, dialect="spark")
    except SqlglotError as error:
        found = getattr(error, "errors", None) or [{"description": str(error)}]
        raise _refuse(where, "a condition in Spark's SQL", found[0]["description"]) from error
    if not isinstance(parsed, exp.Condition):
        raise _refuse(where, "one condition in Spark's SQL", "write what follows WHERE")
    return parsed


def _check_column(column: exp.Column, types: Mapping[str, str]) -> None:
    # Spark compares names without their case.
    if column.table or column.name.lower() not in {name.lower() for name in types}:
        raise ConfigError(
            "events.where names a column that the events do not have",
            received=column.sql("spark"),
            allowed=", ".join(types),
            fix=did_you_mean(column.name, types),
        )


def _find_type(condition: exp.Expr, types: Mapping[str, str]) -> str:
    """Name of the condition's type; UNKNOWN where only Spark can tell."""
    from sqlglot import exp
    from sqlglot.optimizer.annotate_types import annotate_types

    schema: dict[str, object] = {
        _EVENTS: {name.lower(): SPARK_TYPES[kind] for name, kind in types.items()}
    }
    query = exp.select(condition.copy()).from_(_EVENTS)
    for column in query.find_all(exp.Column):
        column.replace(exp.column(column.name.lower(), table=_EVENTS))
    found = annotate_types(query, schema=schema, dialect="spark").expressions[0].type
    return "UNKNOWN" if found is None else str(found.this.name)


def _refuse(where: str, allowed: str, fix: str) -> ConfigError:
    return ConfigError("events.where is no condition on an event", received=where, allowed=allowed,
                       fix=fix)  # fmt: skip


def mark_filtered(events: DataFrame, config: BuildConfig) -> DataFrame:
    """Adds `__skip`: null, or why a kept event does not meet the config's condition.

    Args:
        events: Events with the columns of their dictionaries.
        config: The build's config.

    Raises:
        ConfigError: Spark does not know a function of the condition, or takes it for no condition.
    """
    from pyspark.errors import AnalysisException, ParseException
    from pyspark.sql import functions as F

    where = config.events.where
    if where is None:
        return events.withColumn(NOT_SAMPLED_COLUMN, F.lit(None).cast("string"))
    met = F.coalesce(F.expr(where), F.lit(False))
    reason = F.when(~met, WHERE_NOT_MET)
    if config.events.item is not None:
        reason = reason.when(F.col(config.events.item).isNull(), WITHOUT_ITEM)
    try:
        return events.withColumn(NOT_SAMPLED_COLUMN, reason)
    except (AnalysisException, ParseException) as error:
        raise _refuse(where, "a condition in Spark's SQL", str(error).splitlines()[0]) from error
