"""Conditions on events: `events.where`, which are samples, and `seen.where`, whose items are seen.

Events that are no samples stay in histories, but have no record. A condition is Spark's SQL. Its
form, columns and types are checked before Spark is started: what Spark would fail at for the values
of a row, a division by 0 or a text that is no number, is refused by its type, and so is a regular
expression that Java does not compile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conf.errors import ConfigError, did_you_mean
from conf.etl.build import BuildConfig
from conf.etl.java_patterns import count_groups
from conf.etl.sources import SPARK_TYPES

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from sqlglot import exp

NOT_SAMPLED_COLUMN = "__skip"
"""Null, or the reason why a kept event is no sample."""
SEEN_COLUMN = "__seen"
"""Whether an event meets `seen.where`; there is no such column without it."""
WHERE_NOT_MET = "where_not_met"
WITHOUT_ITEM = "without_item"
_EVENTS = "events"


@dataclass(frozen=True)
class _Where:
    """A condition, and the key of the config that holds it."""

    key: str
    text: str

    def refuse(self, allowed: str, fix: str) -> ConfigError:
        """Returns the error of a condition that is none."""
        what = f"{self.key} is no condition on an event"
        return ConfigError(what, received=self.text, allowed=allowed, fix=fix)


def check_where(config: BuildConfig) -> None:
    """Checks the conditions against the columns of the events, without Spark.

    Raises:
        ConfigError: One is no condition, names a column that events do not have, or looks at
            more than the event itself.
    """
    for where in _list_conditions(config):
        _check(where, config.event_column_types)


def _list_conditions(config: BuildConfig) -> list[_Where]:
    conditions = {"events.where": config.events.where, "seen.where": config.seen_where}
    return [_Where(key, text) for key, text in conditions.items() if text is not None]


def _check(where: _Where, types: Mapping[str, str]) -> None:
    from sqlglot import exp

    condition = _parse(where)
    beyond = next(condition.find_all(exp.AggFunc, exp.Window, exp.Query, exp.Rand), None)
    if beyond is not None:
        raise where.refuse("a condition on the columns of one event",
                           f"take {beyond.sql('spark')} out")  # fmt: skip
    for column in condition.find_all(exp.Column):
        _check_column(where, column, types)
    typed = _add_types(condition, types)
    kind = _find_kind(typed)
    if kind not in ("BOOLEAN", "UNKNOWN"):
        raise where.refuse("a condition, true or false",
                           f"its type is {kind}; compare it with something")  # fmt: skip
    _check_divisions(where, condition)
    _check_comparisons(where, typed)
    _check_patterns(where, condition)


def find_where_columns(config: BuildConfig, text: str | None) -> list[str]:
    """Returns the columns of the events that a condition names, which was checked; None: none."""
    from sqlglot import exp

    if text is None:
        return []
    condition = _parse(_Where("where", text))
    named = {column.name.lower() for column in condition.find_all(exp.Column)}
    return [column for column in config.event_column_types if column.lower() in named]


def find_named_columns(config: BuildConfig) -> set[str]:
    """Returns the columns of the log that `events.where` and `seen.where` name."""
    from sqlglot import exp

    log = config.sources[config.events.source].column_types
    named = {
        column.name.lower()
        for where in _list_conditions(config)
        for column in _parse(where).find_all(exp.Column)
    }
    return {column for column in log if column.lower() in named}


def _parse(where: _Where) -> exp.Expr:
    import sqlglot
    from sqlglot import exp
    from sqlglot.errors import SqlglotError

    try:
        parsed = sqlglot.parse_one(where.text, dialect="spark")
    except SqlglotError as error:
        problems = getattr(error, "errors", None) or [{"description": str(error)}]
        raise where.refuse("a condition in Spark's SQL", problems[0]["description"]) from error
    if not isinstance(parsed, exp.Condition):
        raise where.refuse("one condition in Spark's SQL", "write what follows WHERE")
    return parsed


def _check_column(where: _Where, column: exp.Column, types: Mapping[str, str]) -> None:
    # Spark compares names without their case.
    if column.table or column.name.lower() not in {name.lower() for name in types}:
        raise ConfigError(
            f"{where.key} names a column that the events do not have",
            received=column.sql("spark"),
            allowed=", ".join(types),
            fix=did_you_mean(column.name, types),
        )


def _add_types(condition: exp.Expr, types: Mapping[str, str]) -> exp.Expr:
    """Returns the condition with the type of each of its parts, where it does not hang on Spark."""
    from sqlglot import exp
    from sqlglot.optimizer.annotate_types import annotate_types

    schema: dict[str, object] = {
        _EVENTS: {name.lower(): SPARK_TYPES[kind] for name, kind in types.items()}
    }
    query = exp.select(condition.copy()).from_(_EVENTS)
    for column in query.find_all(exp.Column):
        column.replace(exp.column(column.name.lower(), table=_EVENTS))
    return annotate_types(query, schema=schema, dialect="spark").expressions[0]


def _find_kind(part: exp.Expr) -> str:
    """Name of the type of a part; UNKNOWN where only Spark can tell."""
    return "UNKNOWN" if part.type is None else str(part.type.this.name)


def _check_divisions(where: _Where, condition: exp.Expr) -> None:
    from sqlglot import exp

    instead: dict[type[exp.Expr], str] = {exp.Div: "try_divide({})", exp.Mod: "try_mod({})",
               exp.IntDiv: "CAST(try_divide({}) AS BIGINT)"}  # fmt: skip
    for part in condition.find_all(*instead, exp.Anonymous):
        if isinstance(part, exp.Anonymous) and part.name.lower() != "pmod":
            continue
        sides = part.expressions or [part.args[side].unnest() for side in ("this", "expression")]
        fix = instead.get(type(part), instead[exp.Mod])
        raise ConfigError(
            f"{where.key} divides, which fails at a divisor of 0: {part.sql('spark')}",
            fix=f"write {fix.format(', '.join(side.sql('spark') for side in sides))}, null there",
        )


def _check_comparisons(where: _Where, typed: exp.Expr) -> None:
    from sqlglot import exp

    compared = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.NullSafeEQ,
                exp.NullSafeNEQ, exp.Nullif, exp.Between, exp.In, exp.Case)  # fmt: skip
    for part in typed.find_all(*compared):
        sides = _list_sides(part)
        kinds = [exp.DataType.Type[_find_kind(side)] for side in sides]
        texts = [s for s, k in zip(sides, kinds, strict=True) if k in exp.DataType.TEXT_TYPES]
        numbers = [k for k in kinds if k in exp.DataType.NUMERIC_TYPES]
        if texts and numbers:
            whole = all(kind in exp.DataType.INTEGER_TYPES for kind in numbers)
            cast = f"try_cast({_show(texts[0])} AS {'BIGINT' if whole else 'DOUBLE'})"
            raise ConfigError(
                f"{where.key} compares text with a number, which fails at a text that is none: "
                f"{_show(part)}",
                fix=f"write {cast}, a number without quotes, or a text in quotes",
            )


def _check_patterns(where: _Where, condition: exp.Expr) -> None:
    from sqlglot import exp

    readers = (exp.RegexpLike, exp.RegexpExtract, exp.RegexpExtractAll, exp.RegexpReplace,
               exp.RegexpCount, exp.RegexpSubstr, exp.RegexpInstr, exp.RegexpSplit)  # fmt: skip
    for part in condition.find_all(*readers):
        if isinstance(part.expression, (exp.Literal, exp.RawString)):
            try:
                count_groups(part.expression.name)
            except ValueError as error:
                said = str(error).removeprefix("pattern: ")
                raise ConfigError(
                    f"{where.key} fails at {_show(part)}: {said}",
                    fix="write a regular expression of Java's",
                ) from error


def _list_sides(part: exp.Expr) -> list[exp.Expr]:
    """The parts that a comparison makes one type of; none of a CASE of conditions."""
    from sqlglot import exp

    if isinstance(part, exp.Case):
        return [part.this, *(when.this for when in part.args["ifs"])] if part.this else []
    names = ("this", "expression", "low", "high")
    sides = [part.args[name] for name in names if part.args.get(name) is not None]
    return [*sides, *part.expressions]


def _show(part: exp.Expr) -> str:
    """The text of a part, its columns by their bare names."""
    from sqlglot import exp

    bare = part.copy()
    for column in bare.find_all(exp.Column):
        column.set("table", None)
    return bare.sql("spark")


def mark_filtered(events: DataFrame, config: BuildConfig) -> DataFrame:
    """Adds `__skip`: null, or why a kept event is no sample; and `__seen` with `seen.where`.

    Args:
        events: Events with the columns of their dictionaries.
        config: The build's config.

    Raises:
        ConfigError: Spark does not know a function of the condition, or takes it for no condition.
    """
    from pyspark.sql import functions as F

    if config.seen_where is not None:
        events = _add_met(events, _Where("seen.where", config.seen_where), SEEN_COLUMN)
    where = config.events.where
    if where is None:
        return events.withColumn(NOT_SAMPLED_COLUMN, F.lit(None).cast("string"))
    events = _add_met(events, _Where("events.where", where), NOT_SAMPLED_COLUMN)
    reason = F.when(~F.col(NOT_SAMPLED_COLUMN), WHERE_NOT_MET)
    if config.events.item is not None:
        reason = reason.when(F.col(config.events.item).isNull(), WITHOUT_ITEM)
    return events.withColumn(NOT_SAMPLED_COLUMN, reason)


def leave_out_samples(events: DataFrame, reason: Column) -> DataFrame:
    """Marks events as no samples; one that is none already keeps its first reason.

    Args:
        events: Events with `__skip`.
        reason: Why an event is no sample, or null.
    """
    from pyspark.sql import functions as F

    return events.withColumn(NOT_SAMPLED_COLUMN, F.coalesce(F.col(NOT_SAMPLED_COLUMN), reason))


def may_leave_out_samples(config: BuildConfig) -> bool:
    """Returns whether some kept events may be no samples: by a condition, or without a label."""
    return config.events.where is not None or bool(config.all_labels)


def _add_met(events: DataFrame, where: _Where, name: str) -> DataFrame:
    """Adds whether events meet a condition, never null."""
    from pyspark.errors import AnalysisException, ParseException
    from pyspark.sql import functions as F

    try:
        return events.withColumn(name, F.coalesce(F.expr(where.text), F.lit(False)))
    except (AnalysisException, ParseException) as error:
        raise where.refuse("a condition in Spark's SQL", str(error).splitlines()[0]) from error
