"""Rules on sources, counted in one aggregate per source before anything is built on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

from pyspark.sql import functions as F

from conf.etl.build import BuildConfig
from conf.etl.contract import (
    DomainRule,
    FreshnessRule,
    NullRateRule,
    RangeRule,
    ReferencesRule,
    RuleConfig,
    TypeRule,
    UniqueRule,
    VolumeRule,
)
from conf.etl.time_columns import ms_per_unit
from etl.quality.rules import (
    RuleResult,
    build_result,
    describe_domain,
    describe_range,
    judge_nulls,
    judge_rate,
    judge_type,
    judge_volume,
    shown,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

    from etl.sources.bad_rows import SourceCounts
    from etl.sources.source import Source


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
    for number, rule in enumerate(rules):
        mark = f"__rule_{number}"
        if isinstance(rule, ReferencesRule):
            key = str(config.sources[rule.dictionary].key)
            keys = sources[rule.dictionary].good.select(F.col(key).alias(f"{mark}_key"))
            rows = _mark_unknown(rows, rule.column, keys.distinct(), mark)
        build = _AGGREGATES.get(type(rule))
        for what, column in (build(rule, rows, mark) if build else {}).items():
            columns.append(column.alias(f"{number} {what}"))
    if not columns:
        return [{} for _ in rules]
    values = rows.agg(F.count(F.lit(1)).alias("rows"), *columns).collect()[0].asDict()
    return [
        {
            "rows": values["rows"],
            **{k.partition(" ")[2]: v for k, v in values.items() if k.startswith(f"{number} ")},
        }
        for number in range(len(rules))
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


_HOUR_MS = 3_600_000.0


@dataclass(frozen=True)
class SourcesAsRead:
    """The sources that are to be checked.

    Attributes:
        sources: As read, by name.
        counts: Their rows, good and bad.
        previous_rows: Rows that parsed in the current version, by source; empty without one.
        run_date: The last day that the run is for, or None.
    """

    sources: Mapping[str, Source]
    counts: Mapping[str, SourceCounts]
    previous_rows: Mapping[str, int]
    run_date: date | None = None


def check_source_rules(config: BuildConfig, read: SourcesAsRead) -> list[RuleResult]:
    """Checks every rule on a source, in the order of the contract.

    Raises:
        ConfigError: A freshness rule has no day to compare with.
    """
    rules: list[tuple[RuleConfig, str]] = [
        (rule, source)
        for rule in config.contract.rules
        if (source := getattr(rule, "source", None)) is not None
    ]
    for rule, _ in rules:
        if isinstance(rule, FreshnessRule):
            _deadline_ms(rule, read.run_date)
    found: dict[int, RuleResult] = {}
    for name in dict.fromkeys(source for _, source in rules):
        numbers = [i for i, (_, source) in enumerate(rules) if source == name]
        chosen = [rules[i][0] for i in numbers]
        counted = aggregate_source(config, read.sources, name, chosen)
        for i, rule, values in zip(numbers, chosen, counted, strict=True):
            found[i] = _judge(config, read, rule, values)
    return [found[i] for i in sorted(found)]


def _judge(
    config: BuildConfig, read: SourcesAsRead, rule: RuleConfig, found: Mapping[str, Any]
) -> RuleResult:
    if isinstance(rule, TypeRule):
        return _judge_parsing(config, read, rule)
    if isinstance(rule, VolumeRule):
        source = str(rule.source)
        counts = read.counts[source]
        return judge_volume(rule, counts.read - counts.bad_rows, read.previous_rows.get(source))
    if isinstance(rule, NullRateRule):
        return judge_nulls(rule, found["bad"], found["rows"])
    if isinstance(rule, FreshnessRule):
        return _judge_freshness(rule, found["latest"], read.run_date)
    return _judge_values(rule, found)


def _judge_values(rule: RuleConfig, found: Mapping[str, Any]) -> RuleResult:
    known = found["known"]
    if isinstance(rule, UniqueRule):
        repeated = known - found["distinct"]
        return judge_rate(rule, rule.max_rate, repeated, known, "repeat another", "no row twice")
    bad = found["bad"]
    if isinstance(rule, RangeRule):
        seen = f"outside; {shown(found['low'])} to {shown(found['high'])}"
        return judge_rate(rule, rule.max_rate, bad, known, seen, describe_range(rule))
    example = f", such as {shown(found['example'])!r}" if bad else ""
    if isinstance(rule, DomainRule):
        what = f"others{example}"
        return judge_rate(rule, rule.max_rate, bad, known, what, describe_domain(rule))
    reference = cast(ReferencesRule, rule)
    what, allowed = f"without an entry{example}", f"keys of {reference.dictionary}"
    return judge_rate(rule, reference.max_rate, bad, known, what, allowed)


def _judge_parsing(config: BuildConfig, read: SourcesAsRead, rule: TypeRule) -> RuleResult:
    source, column = str(rule.source), str(rule.column)
    declared, counts = config.sources[source].column_types[column], read.counts[source]
    refused = counts.bad.get(f"not_{declared}:{column}", 0)
    return judge_type(rule, declared, refused, counts.read)


def _judge_freshness(rule: FreshnessRule, latest: Any, run_date: date | None) -> RuleResult:
    deadline = _deadline_ms(rule, run_date)
    allowed = f"at most {rule.max_age_hours:g} h old, {rule.max_ahead_hours:g} h ahead"
    if latest is None:
        return build_result(rule, False, "no time at all", allowed)
    latest_ms = float(latest) * ms_per_unit(rule.unit)
    age = (deadline - latest_ms) / _HOUR_MS
    passed = -rule.max_ahead_hours <= age <= rule.max_age_hours
    when = "old" if age >= 0 else "ahead"
    return build_result(
        rule, passed, f"latest {_moment(latest_ms)}, {abs(age):,.1f} h {when}", allowed
    )


def _deadline_ms(rule: FreshnessRule, run_date: date | None) -> float:
    """The moment that ages are counted from: the end of the declared day, or now."""
    day = rule.find_day(run_date)
    if day is None:
        return datetime.now(UTC).timestamp() * 1000
    midnight = datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(days=1)
    return midnight.timestamp() * 1000


def _moment(time_ms: float) -> str:
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return f"{time_ms:.0f} ms"  # beyond the calendar: the wrong unit, most likely
