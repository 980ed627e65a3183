"""Rules of the data contract: what each asks of a source, and whether what was found is allowed.

Most rules on sources are SQL expressions, which ride in the pass that counts the rows; `unique`
is a distinct count and `references` a join, in one pass more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from conf.errors import InputDataError
from conf.etl.build import BuildConfig
from conf.etl.contract import RuleConfig

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from etl.sources.bad_rows import SourceCounts
    from etl.sources.source import Source

logger = logging.getLogger("sluice.contract")

_HOUR_MS = 3_600_000.0


@dataclass(frozen=True)
class RuleResult:
    """One rule as checked.

    Attributes:
        rule: Kind and target, as `range ratings.rating`.
        severity: `error` or `warn`.
        passed: Whether it holds.
        received: What was found.
        allowed: What the rule allows.
        allowed_as: Name in `contract.allow` that lets it pass, of what no rule declares.
    """

    rule: str
    severity: str
    passed: bool
    received: str
    allowed: str
    allowed_as: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the result as a JSON object."""
        data = asdict(self)
        del data["allowed_as"]
        return data


def settle_results(
    results: Iterable[RuleResult], hints: Sequence[str] = ()
) -> tuple[RuleResult, ...]:
    """Logs what is to be warned of, and refuses what is an error.

    Args:
        results: What was found.
        hints: What is known of the causes, for the refusal.

    Returns:
        The results, where no rule of severity `error` is violated.

    Raises:
        InputDataError: Names every violated rule of severity `error`.
    """
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
        raise _refusal(errors, "".join(f"{hint}; " for hint in hints))
    return settled


def _refusal(violated: Sequence[RuleResult], hints: str) -> InputDataError:
    indent, count = "\n            ", len(violated)
    named = [found.allowed_as for found in violated if found.allowed_as is not None]
    names = ", ".join(dict.fromkeys(named))
    ways = [f"allow it by name: `contract: {{allow: [{names}]}}`"] if named else []
    if len(named) == count:
        what = f"the data look wrong in {count} way{'s' * (count > 1)}"
        ways = ["correct the input or the config, or " + ways[0]]
    else:
        what = f"the data contract is violated ({count} rule{'s' * (count > 1)})"
        change = "change `contract.rules` (`severity: warn` lets a rule pass)"
        ways = [f"correct the input, or {change}", *ways]
    return InputDataError(
        f"{what}; nothing was published",
        received=indent.join(f"{found.rule}: {found.received}" for found in violated),
        allowed=indent.join(f"{found.rule}: {found.allowed}" for found in violated),
        fix=f"{hints}{'; '.join(ways)}; the last version stays current",
    )


def build_result(rule: RuleConfig, passed: bool, received: str, allowed: str) -> RuleResult:
    """Returns the result of a rule."""
    return RuleResult(f"{rule.kind} {rule.target}", rule.severity, passed, received, allowed)


def judge_rate(rule: RuleConfig, bad: int, total: int, what: str, allowed: str) -> RuleResult:
    """Returns whether no more than `max_rate` of some rows is bad; of no rows none is."""
    rate = bad / total if total else 0.0
    received = f"{bad:,} of {total:,} ({rate:.4%}) {what}"
    bound = allowed if rule.max_rate == 0 else f"{allowed}; at most {rule.max_rate:.4%} others"
    return build_result(rule, rate <= rule.max_rate, received, bound)


def describe_range(rule: RuleConfig) -> str:
    """Returns the bounds as people write them."""
    low = "" if rule.minimum is None else f"from {rule.minimum:g}"
    high = "" if rule.maximum is None else f"to {rule.maximum:g}"
    return " ".join(part for part in (low, high) if part)


def describe_domain(rule: RuleConfig) -> str:
    """Returns the allowed values, shortened where there are many."""
    values = rule.one_of or ()
    shown = ", ".join(map(repr, values[:10]))
    return shown + (", …" if len(values) > 10 else "")


def judge_nulls(rule: RuleConfig, nulls: int, rows: int) -> RuleResult:
    """Returns whether a column has few enough nulls."""
    rate = nulls / rows if rows else 0.0
    received = f"{nulls:,} of {rows:,} ({rate:.4%}) null"
    return build_result(rule, rate <= rule.max_rate, received, f"at most {rule.max_rate:.4%} null")


def judge_type(rule: RuleConfig, found: str, refused: int, rows: int) -> RuleResult:
    """Returns whether a column has its type, and few enough values failed to parse as it."""
    if found != rule.type:
        return build_result(rule, False, found, str(rule.type))
    return judge_rate(rule, refused, rows, f"do not parse as {found}", found)


def judge_volume(rule: RuleConfig, rows: int, previous: int | None) -> RuleResult:
    """Returns whether there are as many rows as there should be."""
    passed, received, allowed = True, f"{rows:,} rows", []
    if rule.minimum is not None:
        passed &= rows >= rule.minimum
        allowed.append(f"at least {rule.minimum:,.0f}")
    if rule.maximum is not None:
        passed &= rows <= rule.maximum
        allowed.append(f"at most {rule.maximum:,.0f}")
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


class _Value:
    """The values of a column, those of its lists one by one."""

    def __init__(self, rows: DataFrame, name: str) -> None:
        data_type = rows.schema[name].dataType
        self.column, self.is_list = F.col(name), data_type.typeName() == "array"
        element: Any = getattr(data_type, "elementType", data_type)
        # In the column's own precision: 4.1 read as float32 is not above 4.1.
        self.number = "float" if element.typeName() == "float" else "double"

    def any(self, test: Callable[[Column], Column]) -> Column:
        """Whether one of the values is what the test says."""
        return F.exists(self.column, test) if self.is_list else test(self.column)


def _ask_range(rule: RuleConfig, rows: DataFrame) -> dict[str, Column]:
    value = _Value(rows, rule.columns[0])

    def is_outside(element: Column) -> Column:
        bad = F.isnan(element.cast("double"))
        if rule.minimum is not None:
            bad = bad | (element < F.lit(rule.minimum).cast(value.number))
        if rule.maximum is not None:
            bad = bad | (element > F.lit(rule.maximum).cast(value.number))
        return bad

    column = value.column
    return {
        "bad": F.count_if(value.any(is_outside)),
        "known": F.count(column),
        "low": F.min(F.array_min(column) if value.is_list else column),
        "high": F.max(F.array_max(column) if value.is_list else column),
    }


def _is_foreign(rule: RuleConfig, rows: DataFrame) -> Column:
    return _Value(rows, rule.columns[0]).any(lambda element: ~element.isin(*rule.one_of or ()))


def _ask_domain(rule: RuleConfig, rows: DataFrame) -> dict[str, Column]:
    # No example yet: an aggregate of texts by groups would sort all rows.
    return {
        "bad": F.count_if(_is_foreign(rule, rows)),
        "known": F.count(F.col(rule.columns[0])),
    }


def _ask_nulls(rule: RuleConfig, rows: DataFrame) -> dict[str, Column]:
    return {"bad": F.count_if(F.col(rule.columns[0]).isNull()), "rows": F.count("*")}


def _ask_latest(rule: RuleConfig, rows: DataFrame) -> dict[str, Column]:
    return {"latest": F.max(rule.columns[0])}


_ASKED: Mapping[str, Callable[[RuleConfig, DataFrame], dict[str, Column]]] = {
    "range": _ask_range,
    "domain": _ask_domain,
    "null_rate": _ask_nulls,
    "freshness": _ask_latest,
}


def _list_source_rules(config: BuildConfig) -> list[tuple[int, str, RuleConfig]]:
    rules = enumerate(config.contract.rules)
    return [(number, rule.source, rule) for number, rule in rules if rule.source is not None]


def ask_rules(config: BuildConfig, sources: Mapping[str, Source]) -> dict[str, Source]:
    """Returns the sources with what rules ask of their good rows, for the pass that counts them."""
    asked = dict(sources)
    for number, name, rule in _list_source_rules(config):
        if ask := _ASKED.get(rule.kind):
            found = {f"{what} {number}": c for what, c in ask(rule, asked[name].rows).items()}
            asked[name] = replace(asked[name], asked={**asked[name].asked, **found})
    return asked


@dataclass(frozen=True)
class SourcesAsRead:
    """The sources that are to be checked.

    Attributes:
        sources: As read, by name.
        counts: Their rows, good and bad, and what rules have asked of them.
        previous_rows: Rows that parsed in the current version, by source; empty without one.
        run_date: The last day that the run is for, or None.
    """

    sources: Mapping[str, Source]
    counts: Mapping[str, SourceCounts]
    previous_rows: Mapping[str, int]
    run_date: date | None = None


def check_source_rules(config: BuildConfig, read: SourcesAsRead) -> list[RuleResult]:
    """Checks every rule on a source, in the order of the contract."""
    return [_judge(config, read, number, rule) for number, _, rule in _list_source_rules(config)]


def _judge(config: BuildConfig, read: SourcesAsRead, number: int, rule: RuleConfig) -> RuleResult:
    source = str(rule.source)
    counts = read.counts[source]
    if rule.kind == "volume":
        rows = counts.read - counts.bad_rows
        return judge_volume(rule, rows, read.previous_rows.get(source))
    if rule.kind == "type":
        declared = config.sources[source].column_types[rule.columns[0]]
        refused = counts.bad.get(f"not_{declared}:{rule.columns[0]}", 0)
        return judge_type(rule, declared, refused, counts.read)
    if rule.kind == "unique":
        return _check_unique(rule, read.sources[source].good)
    if rule.kind == "references":
        key = str(config.sources[str(rule.dictionary)].key)
        return _check_references(rule, read, key)
    ending = f" {number}"
    found = {
        name.split(" ")[0]: value for name, value in counts.asked.items() if name.endswith(ending)
    }
    if rule.kind == "domain" and found.get("bad"):
        good = read.sources[source].good
        others = F.when(_is_foreign(rule, good), F.col(rule.columns[0]).cast("string"))
        found["example"] = good.agg(F.min(others)).collect()[0][0]
    if rule.kind == "freshness":
        ms = config.sources[str(rule.source)].ms_per_unit(rule.columns[0])
        return judge_freshness(rule, found.get("latest"), ms, read.run_date)
    return _judge_values(rule, found)


def _judge_values(rule: RuleConfig, found: Mapping[str, Any]) -> RuleResult:
    if rule.kind == "null_rate":
        return judge_nulls(rule, found.get("bad", 0), found.get("rows", 0))
    bad, known = found.get("bad", 0), found.get("known", 0)
    if rule.kind == "range":
        seen = f"outside; {shown(found.get('low'))} to {shown(found.get('high'))}"
        return judge_rate(rule, bad, known, seen, describe_range(rule))
    what = f"others, such as {shown(found['example'])!r}" if bad else "others"
    return judge_rate(rule, bad, known, what, describe_domain(rule))


def _check_unique(rule: RuleConfig, rows: DataFrame) -> RuleResult:
    complete = rows.select(*rule.columns).dropna()
    known, distinct = complete.agg(F.count("*"), F.count_distinct(*rule.columns)).collect()[0]
    return judge_rate(rule, known - distinct, known, "repeat another", "no row twice")


def _check_references(rule: RuleConfig, read: SourcesAsRead, key: str) -> RuleResult:
    keys = read.sources[str(rule.dictionary)].good.select(F.col(key).alias("key")).distinct()
    values = (
        read.sources[str(rule.source)].good.select(F.col(rule.columns[0]).alias("key")).dropna()
    )
    joined = values.join(keys.withColumn("entry", F.lit(1)), "key", "left")
    unknown = F.when(F.col("entry").isNull(), F.col("key"))
    found = joined.agg(F.count("*"), F.count(unknown), F.min(unknown))
    known, bad, example = found.collect()[0]
    what = f"without an entry, such as {shown(example)!r}" if bad else "without an entry"
    return judge_rate(rule, bad, known, what, f"keys of {rule.dictionary}")


def judge_freshness(
    rule: RuleConfig, latest: Any, ms_per_unit: int, run_date: date | None
) -> RuleResult:
    """Returns whether the latest time of a column is neither too old nor too far ahead."""
    deadline = _deadline_ms(rule, run_date)
    least, most = rule.minimum or 0.0, rule.maximum or 0.0
    allowed = f"at most {most:g} h old, {abs(least):g} h ahead"
    if latest is None:
        return build_result(rule, False, "no time at all", allowed)
    latest_ms = float(latest) * ms_per_unit
    age = (deadline - latest_ms) / _HOUR_MS
    passed = least <= age <= most
    when = "old" if age >= 0 else "ahead"
    received = f"latest {_moment(latest_ms)}, {abs(age):,.1f} h {when}"
    return build_result(rule, passed, received, allowed)


def _deadline_ms(rule: RuleConfig, run_date: date | None) -> float:
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
        if rule.kind == "freshness" and rule.date == "now":
            latest = sources[str(rule.source)].good.agg(F.max(rule.columns[0])).collect()[0][0]
            ms = config.sources[str(rule.source)].ms_per_unit(rule.columns[0])
            results.append(judge_freshness(rule, latest, ms, None))
    settle_results(results)
