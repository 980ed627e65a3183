"""Rules on features and splits, checked on the statistics of the one pass that wrote them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from conf.etl import BuildConfig
from conf.etl.contract import (
    DomainRule,
    DriftRule,
    NullRateRule,
    RangeRule,
    TypeRule,
    ValueRule,
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
from etl.quality.distribution import measure_drift
from etl.quality.leakage import find_leaks
from etl.quality.result import RuleResult
from etl.quality.versions import VersionView

TRAIN = "train"


def check_feature_rules(
    config: BuildConfig, version: VersionView, previous: VersionView | None
) -> list[RuleResult]:
    """Checks every rule on a feature or split, and looks for leaks.

    Args:
        config: The build's config.
        version: What is about to be published.
        previous: The current version, or None where there is none.
    """
    results = []
    for rule in config.contract.rules:
        if isinstance(rule, VolumeRule) and rule.split is not None:
            before = None if previous is None else previous.split_rows.get(rule.split)
            results.append(judge_volume(rule, version.split_rows.get(rule.split, 0), before))
        elif isinstance(rule, DriftRule):
            results.append(_judge_drift(rule, version, previous))
        elif isinstance(rule, ValueRule) and rule.feature is not None:
            results.append(_judge_feature(rule, version))
    if config.contract.leakage is not None:
        train = version.statistics.get(TRAIN, {})
        results += find_leaks(config.contract.leakage, version.schema, train)
    return results


def _judge_feature(rule: ValueRule, version: VersionView) -> RuleResult:
    name = str(rule.feature)
    found = version.feature(rule.split, name)
    if found is None or name not in version.schema:
        wanted = "records with the feature"
        return build_result(cast(TypeRule, rule), False, "no such records", wanted)
    if isinstance(rule, TypeRule):
        return judge_type(rule, version.schema[name].dtype, 0, found["rows"])
    if isinstance(rule, NullRateRule):
        return _judge_nulls(rule, version, found)
    if isinstance(rule, DomainRule):
        return _judge_domain(rule, version, found)
    return _judge_range(cast(RangeRule, rule), found)


def _judge_nulls(rule: NullRateRule, version: VersionView, found: Mapping[str, Any]) -> RuleResult:
    if version.is_vocabulary(str(rule.feature)):
        # A vocabulary gives null the id of what it does not know.
        absent = found["missing"] + found["oov"]
        return judge_nulls(rule, absent, found["missing"] + found["values"])
    return judge_nulls(rule, found["missing"], found["rows"])


def _judge_range(rule: RangeRule, found: Mapping[str, Any]) -> RuleResult:
    low, high = found.get("min"), found.get("max")
    unfinite = found.get("nan", 0) + found.get("infinite", 0)
    passed = not unfinite
    if low is not None and rule.minimum is not None:
        passed &= low >= rule.minimum
    if high is not None and rule.maximum is not None:
        passed &= high <= rule.maximum
    received = "no values" if low is None else f"{shown(low)} to {shown(high)}"
    if unfinite:
        received += f", and {unfinite:,} not finite"
    return build_result(rule, passed, received, describe_range(rule))


def _judge_domain(rule: DomainRule, version: VersionView, found: Mapping[str, Any]) -> RuleResult:
    distribution = version.distribution(rule.split, str(rule.feature))
    if distribution is None:
        return judge_rate(rule, rule.max_rate, 0, 0, "others", describe_domain(rule))
    allowed = {shown(float(v)) if isinstance(v, int | float) else v for v in rule.one_of}
    foreign = {v: n for v, n in distribution.counts.items() if v not in allowed}
    inside = sum(n for value, n in distribution.counts.items() if value in allowed)
    what = f"others, such as {next(iter(foreign))!r}" if foreign else "others"
    bad = max(distribution.total - round(inside), 0)
    return judge_rate(rule, rule.max_rate, bad, distribution.total, what, describe_domain(rule))


def _judge_drift(rule: DriftRule, version: VersionView, previous: VersionView | None) -> RuleResult:
    allowed = f"at most {rule.maximum:g}"
    after = version.distribution(rule.split, rule.feature)
    before = None if previous is None else previous.distribution(rule.split, rule.feature)
    if before is None:
        return build_result(rule, True, "no version to compare with", allowed)
    if after is None:
        return build_result(rule, False, "no values any more", allowed)
    distance = measure_drift(rule.metric, before, after)
    if distance is None:
        return build_result(rule, False, "values without an order", "numbers, for ks")
    return build_result(rule, distance <= rule.maximum, f"{distance:.4f}", allowed)
