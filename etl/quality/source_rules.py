"""Rules on sources, checked before anything is built on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

from conf.errors import ConfigError
from conf.etl import BuildConfig
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
from etl.quality.bounds import (
    build_result,
    describe_domain,
    describe_range,
    judge_nulls,
    judge_rate,
    judge_type,
    judge_volume,
    shown,
)
from etl.quality.result import RuleResult
from etl.quality.source_aggregates import aggregate_source

if TYPE_CHECKING:
    from etl.sources import Source, SourceCounts

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
        places = [i for i, (_, source) in enumerate(rules) if source == name]
        chosen = [rules[i][0] for i in places]
        counted = aggregate_source(config, read.sources, name, chosen)
        for i, rule, values in zip(places, chosen, counted, strict=True):
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
    latest_ms = float(latest) * (1000 if rule.unit == "s" else 1)
    age = (deadline - latest_ms) / _HOUR_MS
    passed = -rule.max_ahead_hours <= age <= rule.max_age_hours
    when = "old" if age >= 0 else "ahead"
    return build_result(
        rule, passed, f"latest {_moment(latest_ms)}, {abs(age):,.1f} h {when}", allowed
    )


def _deadline_ms(rule: FreshnessRule, run_date: date | None) -> float:
    """The moment that ages are counted from: the end of the declared day, or now."""
    day = find_day(rule, run_date)
    if day is None:
        return datetime.now(UTC).timestamp() * 1000
    midnight = datetime(day.year, day.month, day.day, tzinfo=UTC) + timedelta(days=1)
    return midnight.timestamp() * 1000


def find_day(rule: FreshnessRule, run_date: date | None) -> date | None:
    """Returns the day at whose end ages are counted; None: now.

    Raises:
        ConfigError: Neither the run nor the rule names a day, and the clock is not asked for.
    """
    if rule.clock == "wall":
        return None
    day = rule.date or run_date
    if day is None:
        raise ConfigError(
            f"contract rule freshness {rule.target} has no day to compare with",
            received="neither the run nor the rule has a date",
            allowed="a run by date, `date: YYYY-MM-DD` in the rule, or `clock: wall`",
            fix="run with --date, or set the rule's `date` or `clock`",
        )
    return day


def _moment(time_ms: float) -> str:
    try:
        return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return f"{time_ms:.0f} ms"  # beyond the calendar: the wrong unit, most likely
