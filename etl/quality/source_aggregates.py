"""What each kind of rule counts on a source: columns of the one aggregate that all rules share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from conf.etl import BuildConfig
from conf.etl.contract import (
    DomainRule,
    FreshnessRule,
    NullRateRule,
    RangeRule,
    ReferencesRule,
    RuleConfig,
    UniqueRule,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

    from etl.sources import Source


def aggregate_source(
    config: BuildConfig, sources: Mapping[str, Source], name: str, rules: Sequence[RuleConfig]
) -> list[dict[str, Any]]:
    """Counts what the rules of a source ask for, in one pass over it.

    Args:
        config: The build's config.
        sources: All sources as read.
        name: The source.
        rules: Its rules.

    Returns:
        What was counted, by rule: `bad`, `known` and the like, and `rows` of the source.
    """
    rows = sources[name].good
    columns: list[Column] = []
    for place, rule in enumerate(rules):
        mark = f"__rule_{place}"
        if isinstance(rule, ReferencesRule):
            key = str(config.sources[rule.dictionary].key)
            keys = sources[rule.dictionary].good.select(F.col(key).alias(f"{mark}_key"))
            rows = _mark_unknown(rows, rule.column, keys.distinct(), mark)
        build = _AGGREGATES.get(type(rule))
        for what, column in (build(rule, rows, mark) if build else {}).items():
            columns.append(column.alias(f"{place} {what}"))
    if not columns:
        return [{} for _ in rules]
    found = rows.agg(F.count(F.lit(1)).alias("rows"), *columns).collect()[0].asDict()
    return [
        {
            "rows": found["rows"],
            **{k.partition(" ")[2]: v for k, v in found.items() if k.startswith(f"{place} ")},
        }
        for place in range(len(rules))
    ]


def _mark_unknown(rows: DataFrame, column: str, keys: DataFrame, mark: str) -> DataFrame:
    """Marks the rows that have no entry; the keys are distinct, so no row is multiplied."""
    key = F.col(keys.columns[0])
    joined = rows.join(keys, F.col(column) == key, "left")
    return joined.withColumn(mark, key.isNull() & F.col(column).isNotNull()).drop(keys.columns[0])


def _type_of(rows: DataFrame, column: str) -> tuple[bool, DataType]:
    """Whether a column holds lists, and the type of its values."""
    data_type = rows.schema[column].dataType
    is_list = data_type.typeName() == "array"
    return is_list, data_type.elementType if is_list else data_type  # type: ignore[attr-defined]


def _anywhere(value: Column, is_list: bool, test: Callable[[Column], Column]) -> Column:
    """Whether a value, or any of a list's, is what the test says."""
    return F.exists(value, test) if is_list else test(value)


def _aggregate_range(rule: RangeRule, rows: DataFrame, mark: str) -> dict[str, Column]:
    value = F.col(rule.column or "")
    is_list, data_type = _type_of(rows, rule.column or "")

    def outside(element: Column) -> Column:
        # In the column's own precision: 4.1 read as float32 is not above 4.1.
        kind = "float" if data_type.typeName() == "float" else "double"
        bad = F.isnan(element.cast("double"))
        if rule.minimum is not None:
            bad = bad | (element < F.lit(rule.minimum).cast(kind))
        if rule.maximum is not None:
            bad = bad | (element > F.lit(rule.maximum).cast(kind))
        return bad

    return {
        "bad": F.count_if(_anywhere(value, is_list, outside)),
        "known": F.count(value),
        "low": F.min(F.array_min(value) if is_list else value),
        "high": F.max(F.array_max(value) if is_list else value),
    }


def _aggregate_domain(rule: DomainRule, rows: DataFrame, mark: str) -> dict[str, Column]:
    value = F.col(rule.column or "")
    is_list, _ = _type_of(rows, rule.column or "")
    foreign = _anywhere(value, is_list, lambda element: ~element.isin(*rule.one_of))
    return {
        "bad": F.count_if(foreign),
        "known": F.count(value),
        "example": F.min(F.when(foreign, value.cast("string"))),
    }


def _aggregate_nulls(rule: NullRateRule, rows: DataFrame, mark: str) -> dict[str, Column]:
    return {"bad": F.count_if(F.col(rule.column or "").isNull())}


def _aggregate_unique(rule: UniqueRule, rows: DataFrame, mark: str) -> dict[str, Column]:
    columns = [F.col(name) for name in rule.columns]
    complete = columns[0].isNotNull()
    for column in columns[1:]:
        complete = complete & column.isNotNull()
    return {
        "known": F.count_if(complete),
        "distinct": F.count_distinct(F.when(complete, F.struct(*columns))),
    }


def _aggregate_references(rule: ReferencesRule, rows: DataFrame, mark: str) -> dict[str, Column]:
    value = F.col(rule.column)
    return {
        "bad": F.count_if(F.col(mark)),
        "known": F.count(value),
        "example": F.min(F.when(F.col(mark), value)),
    }


def _aggregate_latest(rule: FreshnessRule, rows: DataFrame, mark: str) -> dict[str, Column]:
    return {"latest": F.max(rule.column)}


_AGGREGATES: Mapping[type, Callable[[Any, DataFrame, str], dict[str, Column]]] = {
    RangeRule: _aggregate_range,
    DomainRule: _aggregate_domain,
    NullRateRule: _aggregate_nulls,
    UniqueRule: _aggregate_unique,
    ReferencesRule: _aggregate_references,
    FreshnessRule: _aggregate_latest,
}
