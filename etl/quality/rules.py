"""Rules of the data contract: what each asks of a source, and whether what was found is allowed.

A rule on values is a SQL condition, whose rows ride in the pass that counts the source; `unique`
is a distinct count and `references` a join, in one pass more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from conf.errors import InputDataError
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

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from etl.sources.bad_rows import SourceCounts
    from etl.sources.source import Source

logger = logging.getLogger("sluice.contract")

_HOUR_MS = 3_600_000.0


@dataclass(frozen=True)
class RuleResult:
    """One rule as checked: `rule` is its kind and target, as `range ratings.rating`.

    What no rule declares has `allowed_as`: the key of `contract.allow`, and the name there that
    lets it pass.
    """

    rule: str
    severity: str
    passed: bool
    received: str
    allowed: str
    allowed_as: tuple[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the result as a JSON object."""
        data = asdict(self)
        del data["allowed_as"]
        return data


def settle_results(results: Iterable[RuleResult]) -> tuple[RuleResult, ...]:
    """Logs what is to be warned of, and refuses violated rules of severity `error`."""
    settled = tuple(results)
    violated = [result for result in settled if not result.passed]
    for found in violated:
        if found.severity == "warn":
            logger.warning(
                "data contract: %s: received %s; allowed %s",
                found.rule, found.received, found.allowed,
            )  # fmt: skip
    errors = [result for result in violated if result.severity == "error"]
    if errors:
        raise _refusal(errors)
    return settled


def _refusal(violated: Sequence[RuleResult]) -> InputDataError:
    indent, count = "\n            ", len(violated)
    named = [found.allowed_as for found in violated if found.allowed_as is not None]
    ways = ["correct the input or the config"]
    ways += [f"allow it by name: {_show_allowed(named)}"] if named else []
    if len(named) < count:
        ways.append("change `contract.rules` (`severity: warn` lets a rule pass)")
    return InputDataError(
        f"the data look wrong in {count} way{'s' * (count > 1)}; nothing was published",
        received=indent.join(f"{found.rule}: {found.received}" for found in violated),
        allowed=indent.join(f"{found.rule}: {found.allowed}" for found in violated),
        fix=f"{', or '.join(ways)}; the last version stays current",
    )


def _show_allowed(named: Sequence[tuple[str, str]]) -> str:
    """The part of a config that allows what was refused."""
    names: dict[str, dict[str, None]] = {}
    for key, name in named:
        names.setdefault(key, {})[name] = None
    shown = ", ".join(f"{key}: [{', '.join(found)}]" for key, found in names.items())
    return f"`contract: {{allow: {{{shown}}}}}`"


def build_result(rule: RuleConfig, passed: bool, received: str, allowed: str) -> RuleResult:
    """Returns the result of a rule."""
    return RuleResult(f"{rule.kind} {rule.target}", rule.severity, passed, received, allowed)


def judge_rate(rule: Any, bad: int, total: int, what: str, allowed: str) -> RuleResult:
    """Returns whether no more than `max_rate` of some rows is bad; of no rows none is."""
    rate = bad / total if total else 0.0
    received = f"{bad:,} of {total:,} ({rate:.4%}) {what}"
    bound = allowed if rule.max_rate == 0 else f"{allowed}; at most {rule.max_rate:.4%} others"
    return build_result(rule, rate <= rule.max_rate, received, bound)


def describe_range(rule: RangeRule) -> str:
    """Returns the bounds as people write them."""
    low = "" if rule.minimum is None else f"from {rule.minimum:g}"
    high = "" if rule.maximum is None else f"to {rule.maximum:g}"
    return " ".join(part for part in (low, high) if part)


def describe_domain(rule: DomainRule) -> str:
    """Returns the allowed values, shortened where there are many."""
    shown = ", ".join(repr(value) for value in rule.one_of[:10])
    return shown + (", …" if len(rule.one_of) > 10 else "")


def judge_nulls(rule: NullRateRule, nulls: int, rows: int) -> RuleResult:
    """Returns whether a column has few enough nulls."""
    rate = nulls / rows if rows else 0.0
    received = f"{nulls:,} of {rows:,} ({rate:.4%}) null"
    return build_result(rule, rate <= rule.maximum, received, f"at most {rule.maximum:.4%} null")


def judge_type(rule: TypeRule, found: str, refused: int, rows: int) -> RuleResult:
    """Returns whether a column has its type, and few enough values failed to parse as it."""
    if found != rule.type:
        return build_result(rule, False, found, rule.type)
    return judge_rate(rule, refused, rows, f"do not parse as {found}", rule.type)


def judge_volume(rule: VolumeRule, rows: int, previous: int | None) -> RuleResult:
    """Returns whether there are as many rows as there should be."""
    passed, received, allowed = True, f"{rows:,} rows", []
    if rule.min_rows is not None:
        passed &= rows >= rule.min_rows
        allowed.append(f"at least {rule.min_rows:,}")
    if rule.max_rows is not None:
        passed &= rows <= rule.max_rows
        allowed.append(f"at most {rule.max_rows:,}")
    if rule.max_change_percent is not None:
        allowed.append(f"a change of at most {rule.max_change_percent:g} %")
        if previous is None:
            received += ", no version to compare with"
        else:
            change = 100.0 * (rows - previous) / previous if previous else float("inf") * rows
            change = change if rows != previous else 0.0
            received += f", {previous:,} before ({change:+.1f} %)"
            passed &= abs(change) <= rule.max_change_percent
    return build_result(rule, passed, received, ", ".join(allowed))


def shown(value: Any) -> str:
    """Returns a value for a message, shortened where it is long."""
    text = f"{value:.9g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _find_bad(rule: Any, rows: DataFrame) -> Column:
    """Whether the value of a row, or one of its list, breaks a rule on values."""
    column, data_type = F.col(rule.column), rows.schema[rule.column].dataType
    element: Any = getattr(data_type, "elementType", data_type)
    # In the column's own precision: 4.1 read as float32 is not above 4.1.
    kind = "float" if element.typeName() == "float" else "double"

    def breaks(value: Column) -> Column:
        if isinstance(rule, DomainRule):
            return ~value.isin(*rule.one_of)
        bad = F.isnan(value.cast("double"))
        if rule.minimum is not None:
            bad = bad | (value < F.lit(rule.minimum).cast(kind))
        if rule.maximum is not None:
            bad = bad | (value > F.lit(rule.maximum).cast(kind))
        return bad

    if isinstance(rule, NullRateRule):
        return column.isNull()
    return breaks(column) if element is data_type else F.exists(column, breaks)


def _ask(rule: Any, rows: DataFrame) -> dict[str, Column]:
    column = F.col(rule.column)
    if isinstance(rule, FreshnessRule):
        return {"latest": F.max(column)}
    # No example yet: an aggregate of texts by groups would sort all rows.
    known = F.count("*") if isinstance(rule, NullRateRule) else F.count(column)
    asked = {"bad": F.count_if(_find_bad(rule, rows)), "known": known}
    if isinstance(rule, RangeRule):
        is_list = rows.schema[str(rule.column)].dataType.typeName() == "array"
        asked["low"] = F.min(F.array_min(column) if is_list else column)
        asked["high"] = F.max(F.array_max(column) if is_list else column)
    return asked


def _list_source_rules(config: BuildConfig) -> list[tuple[str, Any]]:
    """The rules on sources, each with the name of what it asks."""
    rules = enumerate(config.contract.rules)
    return [(f"rule {n}", rule) for n, rule in rules if getattr(rule, "source", None) is not None]


def ask_rules(config: BuildConfig, sources: Mapping[str, Source]) -> dict[str, Source]:
    """Returns the sources with what rules ask of their good rows, for the pass that counts them."""
    asked = dict(sources)
    for name, rule in _list_source_rules(config):
        if isinstance(rule, RangeRule | DomainRule | NullRateRule | FreshnessRule):
            source = asked[str(rule.source)]
            found = F.struct(*(c.alias(what) for what, c in _ask(rule, source.rows).items()))
            asked[source.name] = replace(source, asked={**source.asked, name: found})
    return asked


def check_source_rules(
    config: BuildConfig,
    sources: Mapping[str, Source],
    counts: Mapping[str, SourceCounts],
    previous_rows: Mapping[str, int],
    run_date: date | None = None,
) -> list[RuleResult]:
    """Checks every rule on a source, in the order of the contract.

    Args:
        config: The build's config.
        sources: The sources, as `ask_rules` returned them.
        counts: Their rows, good and bad, and what rules have asked of them.
        previous_rows: Rows that parsed in the current version, by source; empty without one.
        run_date: The last day that the run is for, or None.
    """
    results = []
    for name, rule in _list_source_rules(config):
        source, count = sources[rule.source], counts[rule.source]
        if isinstance(rule, VolumeRule):
            rows = count.read - count.bad_rows
            results.append(judge_volume(rule, rows, previous_rows.get(source.name)))
        elif isinstance(rule, TypeRule):
            declared = config.sources[source.name].column_types[str(rule.column)]
            refused = count.bad.get(f"not_{declared}:{rule.column}", 0)
            results.append(judge_type(rule, declared, refused, count.read))
        elif isinstance(rule, UniqueRule):
            results.append(_check_unique(rule, source.good))
        elif isinstance(rule, ReferencesRule):
            key = str(config.sources[rule.dictionary].key)
            keys = sources[rule.dictionary].good.select(F.col(key).alias("key"))
            results.append(_check_references(rule, source.good, keys))
        else:
            asked = count.asked.get(name)
            found = asked.asDict() if asked else {}
            if isinstance(rule, FreshnessRule):
                ms = config.sources[source.name].ms_per_unit(rule.column)
                results.append(judge_freshness(rule, found.get("latest"), ms, run_date))
            else:
                results.append(_judge_values(rule, found, source))
    return results


def _judge_values(rule: Any, found: Mapping[str, Any], source: Source) -> RuleResult:
    bad, known = found.get("bad", 0), found.get("known", 0)
    if isinstance(rule, NullRateRule):
        return judge_nulls(rule, bad, known)
    if isinstance(rule, RangeRule):
        seen = f"outside; {shown(found.get('low'))} to {shown(found.get('high'))}"
        return judge_rate(rule, bad, known, seen, describe_range(rule))
    what = "others"
    if bad:
        rows = source.good
        others = F.when(_find_bad(rule, rows), F.col(str(rule.column)).cast("string"))
        what += f", such as {shown(rows.agg(F.min(others)).collect()[0][0])!r}"
    return judge_rate(rule, bad, known, what, describe_domain(rule))


def _check_unique(rule: UniqueRule, rows: DataFrame) -> RuleResult:
    complete = rows.select(*rule.columns).dropna()
    known, distinct = complete.agg(F.count("*"), F.count_distinct(*rule.columns)).collect()[0]
    return judge_rate(rule, known - distinct, known, "repeat another", "no row twice")


def _check_references(rule: ReferencesRule, rows: DataFrame, keys: DataFrame) -> RuleResult:
    values = rows.select(F.col(rule.column).alias("key")).dropna()
    joined = values.join(keys.distinct().withColumn("entry", F.lit(1)), "key", "left")
    unknown = F.when(F.col("entry").isNull(), F.col("key"))
    known, bad, example = joined.agg(F.count("*"), F.count(unknown), F.min(unknown)).collect()[0]
    what = f"without an entry, such as {shown(example)!r}" if bad else "without an entry"
    return judge_rate(rule, bad, known, what, f"keys of {rule.dictionary}")


def judge_freshness(
    rule: FreshnessRule, latest: Any, ms_per_unit: int, run_date: date | None
) -> RuleResult:
    """Returns whether the latest time of a column is neither too old nor too far ahead."""
    deadline = _deadline_ms(rule, run_date)
    allowed = f"at most {rule.max_age_hours:g} h old, {rule.max_ahead_hours:g} h ahead"
    if latest is None:
        return build_result(rule, False, "no time at all", allowed)
    latest_ms = float(latest) * ms_per_unit
    age = (deadline - latest_ms) / _HOUR_MS
    passed = -rule.max_ahead_hours <= age <= rule.max_age_hours
    when = "old" if age >= 0 else "ahead"
    received = f"latest {_moment(latest_ms)}, {abs(age):,.1f} h {when}"
    return build_result(rule, passed, received, allowed)


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


def check_wall_clock(config: BuildConfig, sources: Mapping[str, Source]) -> None:
    """Checks the rules that may be violated although nothing has changed: ages up to now."""
    results = []
    for rule in config.contract.rules:
        if isinstance(rule, FreshnessRule) and rule.clock == "wall":
            latest = sources[rule.source].good.agg(F.max(rule.column)).collect()[0][0]
            ms = config.sources[rule.source].ms_per_unit(rule.column)
            results.append(judge_freshness(rule, latest, ms, None))
    settle_results(results)
