"""The contract of a version: checked on the sources as read, and on the version to be published.

Rules on features and splits need no data: they are checked on the statistics of the one pass
that wrote the records. A feature that gives the label away is a leak.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import TYPE_CHECKING, Any

from conf.etl.build import BuildConfig
from conf.etl.contract import RuleConfig, Severity
from conf.schema import FeatureSchema
from conf.splits import TRAIN
from etl.quality.drift import measure_drift
from etl.quality.figures import (
    READ_BY_MODELS,
    Figure,
    Share,
    count_unknown,
    find_nulls,
    list_figures,
)
from etl.quality.label_statistics import Comparison
from etl.quality.lint import (
    find_constants,
    find_empty_vocabularies,
    find_one_class,
    find_unknown,
    find_unmatched,
    list_nothing_matched,
    warn_of_figure,
)
from etl.quality.rules import (
    RuleResult,
    SourcesAsRead,
    build_result,
    check_source_rules,
    describe_domain,
    describe_range,
    judge_nulls,
    judge_rate,
    judge_type,
    judge_volume,
    logger,
    settle_results,
    shown,
)
from etl.quality.statistics import refuse_negative_weights, summarize_statistics
from etl.quality.version_view import VersionView, compare_feature

if TYPE_CHECKING:
    from etl.sources.bad_rows import SourceCounts
    from etl.sources.source import Source


MOST_ALIKE = 0.98
"""Correlation, or correlation ratio, with the label from which on a feature gives it away."""
LEAST_ROWS = 100
"""Rows that have a value, below which a feature is not looked at for leaks."""


def find_leaks(
    severity: Severity, schema: FeatureSchema, statistics: Mapping[str, Mapping[str, Any]]
) -> list[RuleResult]:
    """Returns one result per feature that tells too much of the label."""
    leaks = []
    for spec in schema.by_role(*READ_BY_MODELS):
        comparison = statistics.get(spec.name, {}).get("by_label")
        if comparison is None:
            continue
        found = Comparison.from_json(comparison).summarize()
        correlation, ratio = abs(found["correlation"] or 0.0), found["correlation_ratio"] or 0.0
        measures = {"correlation": correlation, "correlation ratio": ratio}
        measure, worst = max(measures.items(), key=lambda item: item[1])
        if found["rows"] >= LEAST_ROWS and worst > MOST_ALIKE:
            received = f"{measure} with the label {worst:.4f} over {found['rows']:,} rows"
            allowed = f"at most {MOST_ALIKE:g}; leave the feature out, or give it the role id"
            rule = f"leakage feature {spec.name}"
            leaks.append(RuleResult(rule, severity, False, received, allowed))
    return leaks


def check_feature_rules(
    config: BuildConfig, version: VersionView, previous: VersionView | None
) -> list[RuleResult]:
    """Checks every rule on a feature or split, and looks for leaks."""
    results = []
    for rule in config.contract.rules:
        if rule.kind == "volume" and rule.split is not None:
            before = None if previous is None else previous.split_rows.get(rule.split)
            results.append(judge_volume(rule, version.split_rows.get(rule.split, 0), before))
        elif rule.kind == "drift":
            results.append(_judge_drift(rule, version, previous))
        elif rule.feature is not None:
            results.append(_judge_feature(rule, version))
    if config.contract.leakage is not None:
        train = version.statistics.get(TRAIN, {})
        results += find_leaks(config.contract.leakage, version.schema, train)
    return results


def _judge_feature(rule: RuleConfig, version: VersionView) -> RuleResult:
    name = str(rule.feature)
    found = version.feature(str(rule.split), name)
    if found is None or name not in version.schema:
        return build_result(rule, False, "no such records", "records with the feature")
    if rule.kind == "type":
        return judge_type(rule, version.schema[name].dtype, 0, found["rows"])
    if rule.kind == "null_rate":
        return judge_nulls(rule, *_count_nulls(name, version, found))
    if rule.kind == "domain":
        return _judge_domain(rule, version)
    return _judge_range(rule, found)


def _count_nulls(name: str, version: VersionView, found: Mapping[str, Any]) -> tuple[int, int]:
    if version.is_vocabulary(name):
        # A vocabulary gives null the id of what it does not know, whose buckets hold the rest.
        return found["missing"] + count_unknown(found), found["missing"] + found["values"]
    # Most encoders give a missing value an id or a number: what was raw tells.
    nulls = find_nulls(version.schema[name], summarize_statistics({name: found})[name])
    nulls = nulls or Share(found["missing"], found["rows"])
    return nulls.part, nulls.whole


def _judge_range(rule: RuleConfig, found: Mapping[str, Any]) -> RuleResult:
    low, high = found.get("min"), found.get("max")
    unfinite = found.get("nan", 0) + found.get("infinite", 0)
    passed = not unfinite
    if low is not None and rule.minimum is not None:
        passed &= low >= rule.minimum
    if high is not None and rule.maximum is not None:
        passed &= high <= rule.maximum
    received = "no values" if low is None else f"{shown(low)} to {shown(high)}"
    received += f", and {unfinite:,} not finite" if unfinite else ""
    return build_result(rule, passed, received, describe_range(rule))


def _judge_domain(rule: RuleConfig, version: VersionView) -> RuleResult:
    distribution = version.distribution(str(rule.split), str(rule.feature))
    if distribution is None:
        return judge_rate(rule, 0, 0, "others", describe_domain(rule))
    allowed = {shown(float(v)) if isinstance(v, int | float) else v for v in rule.one_of or ()}
    inside = sum(n for value, n in distribution.counts.items() if value in allowed)
    foreign = next((value for value in distribution.counts if value not in allowed), None)
    what = "others" if foreign is None else f"others, such as {foreign!r}"
    bad = max(distribution.total - round(inside), 0)
    return judge_rate(rule, bad, distribution.total, what, describe_domain(rule))


def _judge_drift(
    rule: RuleConfig, version: VersionView, previous: VersionView | None
) -> RuleResult:
    most = rule.maximum or 0.0
    allowed = f"at most {most:g}"
    if previous is None:
        return build_result(rule, True, "no version to compare with", allowed)
    drift = compare_feature(previous, version, str(rule.split), str(rule.feature))
    if drift.before is None:
        return build_result(rule, True, "no version to compare with", allowed)
    if drift.after is None:
        return build_result(rule, False, "no values any more", allowed)
    if drift.gap is not None:
        logger.warning("data contract: drift of %s is not measured: %s", rule.target, drift.gap)
        return build_result(rule, True, f"not measured: {drift.gap}", allowed)
    distance = measure_drift(rule.metric, drift.before, drift.after)
    if distance is None:
        return build_result(rule, False, "values without an order", "numbers, for ks")
    return build_result(rule, distance <= most, f"{distance:.4f}", allowed)


@dataclass
class BuildChecks:
    """The checks of one build, each as early as it can be made, and what came of them.

    Attributes:
        config: The build's config.
        previous: The current version, or None where there is none.
        results: Outcomes so far.
        figures: Figures of the version that is built, once it is written.
    """

    config: BuildConfig
    previous: VersionView | None
    results: list[RuleResult] = field(default_factory=list)
    figures: tuple[Figure, ...] = ()
    _nothing_matched: set[str] = field(default_factory=set)

    def check_sources(
        self,
        sources: Mapping[str, Source],
        counts: Mapping[str, SourceCounts],
        run_date: date | None = None,
    ) -> None:
        """Checks the rules on sources."""
        rows = {} if self.previous is None else self.previous.source_rows
        self.warn(check_source_rules(self.config, SourcesAsRead(sources, counts, rows, run_date)))

    def warn(self, results: Iterable[RuleResult], hints: Sequence[str] = ()) -> None:
        """Logs and records what was found, and refuses what is an error."""
        self.results += settle_results(results, hints)

    def check_matches(
        self,
        matches: Mapping[str, Mapping[str, int]],
        conversions: Mapping[str, Mapping[str, int]],
        hints: Sequence[str] = (),
    ) -> None:
        """Checks that each join, and each label by conversions, has matched something."""
        before = None if self.previous is None else self.previous.figures
        known = {} if before is None else {**before.joined, **before.converted}
        found = find_unmatched(self.config, matches, conversions, known)
        self.warn(found, hints)
        self._nothing_matched = list_nothing_matched(found)

    def check_vocabularies(self, tokens: Mapping[str, int]) -> None:
        """Checks that no vocabulary is empty, by its number of tokens."""
        self.warn(find_empty_vocabularies(self.config, tokens, self._nothing_matched))

    def check_version(self, version: VersionView) -> None:
        """Checks the rules on features and splits, and the lint of statistics."""
        schema, statistics = version.schema, version.statistics
        refuse_negative_weights(schema, statistics)
        if version.figures is not None:
            before = None if self.previous is None else self.previous.figures
            self.figures = list_figures(version.figures, before)
        train, excused = statistics.get(TRAIN, {}), self._nothing_matched
        self.warn(
            (
                *check_feature_rules(self.config, version, self.previous),
                *find_constants(self.config, schema, train, excused),
                *find_one_class(self.config, statistics, excused),
                *find_unknown(self.config, schema, statistics),
                *(warn_of_figure(figure) for figure in self.figures if figure.is_far),
            )
        )

    def to_json(self) -> tuple[dict[str, Any], ...]:
        """Returns the results as the manifest holds them."""
        return tuple(result.to_json() for result in self.results)
