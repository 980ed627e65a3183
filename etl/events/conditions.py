"""Conditions on events: SQL of `events.where` and `seen`, and those of histories and counts.

An event that does not meet `events.where` is no sample, but stays in histories. What Spark would
fail at for the values of a row, a division by 0 or a text that is no number, is refused by its
type before Spark is started, and so is a regular expression that Java does not compile.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from conf.errors import ConfigError, did_you_mean
from conf.etl.build import BuildConfig
from conf.etl.events import EventConditionConfig
from conf.etl.java_patterns import count_groups
from conf.etl.sources import SPARK_TYPES
from etl.events.columns import MOMENT_COLUMN, NOT_SAMPLED_COLUMN, POSITION_COLUMN, SEEN_COLUMN

if TYPE_CHECKING:
    from sqlglot import exp

WHERE_NOT_MET = "where_not_met"
WITHOUT_ITEM = "without_item"


def _refuse(key: str, text: str, fix: str) -> ConfigError:
    return ConfigError(f"{key} is no condition on an event", received=text, fix=fix)


def _list_conditions(config: BuildConfig) -> Iterator[tuple[str, str]]:
    for key, text in (("events.where", config.events.where), ("seen", config.seen_where)):
        if text is not None:
            yield key, text


def check_where(config: BuildConfig) -> None:
    """Refuses what is no condition on one event, and what would fail at the values of some."""
    for key, text in _list_conditions(config):
        condition = _parse(key, text)
        _add_types(key, condition, config.event_column_types)
        for fault in chain(
            _find_parts_beyond(condition), _find_divisions(condition),
            _find_mixed(condition), _find_patterns(condition),
        ):  # fmt: skip
            raise _refuse(key, text, fault)


def _add_types(key: str, condition: exp.Expr, types: Mapping[str, str]) -> None:
    """Gives each part its type, but for those that only Spark can tell."""
    from sqlglot import exp
    from sqlglot.optimizer.annotate_types import annotate_types

    # Spark compares names without their case.
    by_name = {name.lower(): SPARK_TYPES[kind] for name, kind in types.items()}
    for column in condition.find_all(exp.Column):
        if column.table or column.name.lower() not in by_name:
            raise ConfigError(
                f"{key} names a column that the events do not have",
                received=column.sql("spark"),
                fix=did_you_mean(column.name, types),
            )
        column.type = exp.DataType.build(by_name[column.name.lower()], dialect="spark")
    annotate_types(condition, dialect="spark", overwrite_types=False)


def _find_parts_beyond(condition: exp.Expr) -> Iterator[str]:
    """What Spark would take, so that other rows or another draw would decide; or no truth value."""
    from sqlglot import exp

    for part in condition.find_all(exp.AggFunc, exp.Window, exp.Query, exp.Rand):
        yield f"take {part.sql('spark')} out"
    if condition.type and not condition.is_type("boolean", "unknown"):
        yield f"its type is {condition.type}; compare it with something"


def _find_divisions(condition: exp.Expr) -> Iterator[str]:
    from sqlglot import exp

    for part in condition.find_all(exp.Div, exp.IntDiv, exp.Mod, exp.Anonymous):
        if not isinstance(part, exp.Anonymous) or part.name.lower() == "pmod":
            yield (
                f"{part.sql('spark')} fails at a divisor of 0; write try_divide(a, b) or "
                "try_mod(a, b), null there"
            )


def _find_mixed(condition: exp.Expr) -> Iterator[str]:
    from sqlglot import exp

    compared = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.NullSafeEQ,
                exp.NullSafeNEQ, exp.Nullif, exp.Between, exp.In, exp.Case)  # fmt: skip
    for part in condition.find_all(*compared):
        sides = list(part.iter_expressions())
        if isinstance(part, exp.Case):  # Without an operand it compares nothing.
            sides = [part.this, *(when.this for when in part.args["ifs"])] if part.this else []
        has_text = any(side.is_type(*exp.DataType.TEXT_TYPES) for side in sides)
        if has_text and any(side.is_type(*exp.DataType.NUMERIC_TYPES) for side in sides):
            yield (
                f"{part.sql('spark')} compares text with a number, and fails at a text that is "
                "none; write try_cast(a AS BIGINT), a number without or a text in quotes"
            )


def _find_patterns(condition: exp.Expr) -> Iterator[str]:
    from sqlglot import exp

    readers = (exp.RegexpLike, exp.RegexpExtract, exp.RegexpExtractAll, exp.RegexpReplace,
               exp.RegexpCount, exp.RegexpSubstr, exp.RegexpInstr, exp.RegexpSplit)  # fmt: skip
    for part in condition.find_all(*readers):
        if isinstance(part.expression, (exp.Literal, exp.RawString)):
            try:
                count_groups(part.expression.name)
            except ValueError as error:
                yield str(error)


def _parse(key: str, text: str) -> exp.Expr:
    import sqlglot
    from sqlglot import exp
    from sqlglot.errors import SqlglotError

    try:
        parsed = sqlglot.parse_one(text, dialect="spark")
    except SqlglotError as error:
        raise _refuse(key, text, str(error).splitlines()[0]) from error
    if not isinstance(parsed, exp.Condition):
        raise _refuse(key, text, "write what follows WHERE")
    return parsed


def find_where_columns(config: BuildConfig, text: str | None) -> list[str]:
    """Returns the columns of the events that a condition names; None names none."""
    from sqlglot import exp

    if text is None:
        return []
    named = {column.name.lower() for column in _parse("where", text).find_all(exp.Column)}
    return [column for column in config.event_column_types if column.lower() in named]


def mark_filtered(events: DataFrame, config: BuildConfig) -> DataFrame:
    """Adds `__skip`: null, or why a kept event is no sample; and `__seen`."""
    if config.seen_where is not None:
        events = _add_met(events, "seen", config.seen_where, SEEN_COLUMN)
    where = config.events.where
    if where is None:
        return events.withColumn(NOT_SAMPLED_COLUMN, F.lit(None).cast("string"))
    events = _add_met(events, "events.where", where, NOT_SAMPLED_COLUMN)
    reason = F.when(~F.col(NOT_SAMPLED_COLUMN), WHERE_NOT_MET)
    if config.events.item is not None:
        reason = reason.when(F.col(config.events.item).isNull(), WITHOUT_ITEM)
    return events.withColumn(NOT_SAMPLED_COLUMN, reason)


def _add_met(events: DataFrame, key: str, text: str, name: str) -> DataFrame:
    try:
        return events.withColumn(name, F.coalesce(F.expr(text), F.lit(False)))
    except (AnalysisException, ParseException) as error:
        raise _refuse(key, text, str(error).splitlines()[0]) from error


def matches(events: DataFrame, where: EventConditionConfig | None) -> Column:
    """Returns whether an event meets a condition, never null; None is met by all."""
    if where is None:
        return F.lit(True)
    value, kind = F.col(where.column), events.schema[where.column].dataType
    # In the column's own precision: 4.1 read as float32 is 4.1, and not below it.
    if where.one_of is not None:
        met = value.isin([F.lit(allowed).cast(kind) for allowed in where.one_of])
    else:  # Beside whole numbers a bound stays a fraction: 3 is below 3.5.
        bound = F.lit(where.at_least)
        met = value >= bound.cast("float" if kind.typeName() == "float" else "double")
    return F.coalesce(met, F.lit(False))


def condition_columns(config: BuildConfig) -> list[str]:
    """Returns the columns of the log that tell kinds of events apart, as a view and a purchase."""
    parts = [past.where for past in (*config.histories, *config.rolling)]
    parts += [rolling.out_of for rolling in config.rolling]
    named = {where.column for where in parts if where and where.one_of}
    named |= {label.column for label in config.all_labels if label.column is not None}
    for _, text in _list_conditions(config):
        named.update(find_where_columns(config, text))
    return [c for c in config.sources[config.events.source].column_types if c in named]


def find_position(config: BuildConfig, columns: Collection[str]) -> str:
    """Returns the column of the position before which events count for what reads columns of them.

    Where these tell a label, events of one time do not see one another.
    """
    is_told = config.events.time is not None and _tell_label(config, columns)
    return MOMENT_COLUMN if is_told else POSITION_COLUMN


def _tell_label(config: BuildConfig, columns: Collection[str]) -> bool:
    """Whether event columns tell a declared label, or what it is made of.

    Any may tell a conversion, which counts from the event's own time on: the log can hold it too.
    """
    if columns and any(label.conversion for label in config.all_labels):
        return True
    read = [label.column for label in config.all_labels if label.column is not None]
    told = set[tuple[str, str]]().union(*(_find_origins(config, column) for column in read))
    return any(not told.isdisjoint(_find_origins(config, column)) for column in columns)


def _find_origins(config: BuildConfig, column: str) -> set[tuple[str, str]]:
    """Source and field that an event column is read from, and those of the key that gives it."""
    for join in config.joins:
        if column in join.added_columns(config.sources[join.source]):
            key = _find_origins(config, join.column)
            return {*key, (join.source, config.sources[join.source].find_field(column))}
    log = config.events.source
    return {(log, config.sources[log].find_field(column))}
