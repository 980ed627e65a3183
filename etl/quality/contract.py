"""The contract of a version: checked on the sources as read, and on the version to be published.

Rules on features and splits need no data: they are checked on the statistics of the one pass
that wrote the records. A feature that gives the label away is a leak.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from conf.etl.build import BuildConfig
from conf.etl.contract import (
    ContractValueRule,
    DomainRule,
    DriftRule,
    FreshnessRule,
    LeakageConfig,
    NullRateRule,
    RangeRule,
    TypeRule,
    VolumeRule,
)
from conf.schema import FeatureSchema
from conf.splits import TRAIN
from etl.quality.drift import measure_drift
from etl.quality.figures import (
    READ_BY_MODELS,
    Figure,
    Share,
    VersionFigures,
    count_unknown,
    find_nulls,
    list_figures,
)
from etl.quality.label_statistics import summarize_comparison
from etl.quality.mistakes import (
    find_constants,
    find_empty_vocabularies,
    find_one_class,
    find_unknown,
    find_unmatched,
    list_nothing_matched,
    refuse_negative_weights,
)
from etl.quality.rules import (
    RuleResult,
    build_result,
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
from etl.quality.statistics import summarize_statistics
from etl.quality.version_view import VersionView, compare_feature

if TYPE_CHECKING:
    from datetime import date

    from etl.sources.bad_rows import SourceCounts
    from etl.sources.source import Source


def find_leaks(
    config: LeakageConfig, schema: FeatureSchema, statistics: Mapping[str, Mapping[str, Any]]
) -> list[RuleResult]:
    """Returns one result per feature that tells too much; none where all is well.

    Args:
        config: What is too much.
        schema: The features; those that no model reads are left out.
        statistics: Unabridged statistics of the train split.
    """
    leaks = []
    for spec in schema.by_role(*READ_BY_MODELS):
        comparison = statistics.get(spec.name, {}).get("by_label")
        if comparison is None:
            continue
        summary = summarize_comparison(comparison)
        if summary["rows"] < config.min_rows:
            continue
        measures = {
            "correlation": abs(summary["correlation"] or 0.0),
            "correlation ratio": summary["correlation_ratio"] or 0.0,
        }
        worst = max(measures, key=lambda name: measures[name])
        if measures[worst] > config.maximum:
            leaks.append(
                RuleResult(
                    f"leakage feature {spec.name}",
                    config.severity,
                    False,
                    f"{worst} with the label {measures[worst]:.4f} over {summary['rows']:,} rows",
                    f"at most {config.maximum:g}; leave the feature out, or give it the role id",
                )
            )
    return leaks


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
        elif isinstance(rule, ContractValueRule) and rule.feature is not None:
            results.append(_judge_feature(rule, version))
    if config.contract.leakage is not None:
        train = version.statistics.get(TRAIN, {})
        results += find_leaks(config.contract.leakage, version.schema, train)
    return results


def _judge_feature(rule: ContractValueRule, version: VersionView) -> RuleResult:
    name = str(rule.feature)
    feature = version.feature(rule.split, name)
    if feature is None or name not in version.schema:
        expected = "records with the feature"
        return build_result(cast(TypeRule, rule), False, "no such records", expected)
    if isinstance(rule, TypeRule):
        return judge_type(rule, version.schema[name].dtype, 0, feature["rows"])
    if isinstance(rule, NullRateRule):
        return _judge_nulls(rule, version, feature)
    if isinstance(rule, DomainRule):
        return _judge_domain(rule, version, feature)
    return _judge_range(cast(RangeRule, rule), feature)


def _judge_nulls(rule: NullRateRule, version: VersionView, found: Mapping[str, Any]) -> RuleResult:
    name = str(rule.feature)
    if version.is_vocabulary(name):
        # A vocabulary gives null the id of what it does not know, whose buckets hold the rest.
        absent = found["missing"] + count_unknown(found)
        return judge_nulls(rule, absent, found["missing"] + found["values"])
    # Most encoders give a missing value an id or a number: what was raw tells.
    nulls = find_nulls(version.schema[name], summarize_statistics({name: found})[name])
    nulls = nulls or Share(found["missing"], found["rows"])
    return judge_nulls(rule, nulls.part, nulls.whole)


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
    if previous is None:
        return build_result(rule, True, "no version to compare with", allowed)
    drift = compare_feature(previous, version, rule.split, rule.feature)
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
    return build_result(rule, distance <= rule.maximum, f"{distance:.4f}", allowed)


def check_wall_clock(config: BuildConfig, sources: Mapping[str, Source]) -> None:
    """Checks the rules that may be violated although nothing has changed: ages up to now.

    Args:
        config: The build's config.
        sources: The sources as read.

    Raises:
        InputDataError: A rule of severity `error` is violated.
    """
    from etl.quality.source_rules import SourcesAsRead, check_source_rules

    rules = [r for r in config.contract.rules if isinstance(r, FreshnessRule) and r.clock == "wall"]
    contract = config.contract.model_copy(update={"rules": tuple(rules)})
    ages = config.model_copy(update={"contract": contract})
    settle_results(check_source_rules(ages, SourcesAsRead(sources, {}, {})))


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

    @property
    def _figures_before(self) -> VersionFigures | None:
        return None if self.previous is None else self.previous.figures

    def check_sources(
        self,
        sources: Mapping[str, Source],
        counts: Mapping[str, SourceCounts],
        run_date: date | None = None,
    ) -> None:
        """Checks the rules on sources: one Spark aggregate per source that has any.

        Args:
            sources: The sources as read.
            counts: Their rows.
            run_date: The last day that the run is for, or None.

        Raises:
            InputDataError: A rule of severity `error` is violated; the message names all of them.
            ConfigError: A freshness rule has no day to compare with.
        """
        from etl.quality.source_rules import SourcesAsRead, check_source_rules

        rows = {} if self.previous is None else self.previous.source_rows
        self.results += settle_results(
            check_source_rules(self.config, SourcesAsRead(sources, counts, rows, run_date))
        )

    def warn(self, warnings: Iterable[RuleResult]) -> None:
        """Logs and records what others warn of.

        Args:
            warnings: Results of severity `warn`.
        """
        self.results += settle_results(warnings)

    def check_matches(
        self,
        matches: Mapping[str, Mapping[str, int]],
        conversions: Mapping[str, Mapping[str, int]],
        hints: Sequence[str] = (),
    ) -> None:
        """Checks that each join, and each label by conversions, has matched something.

        Args:
            matches: Events by dictionary and outcome of the join.
            conversions: By label all `rows` of its conversions, and by reason those that make no
                sample positive.
            hints: What is known of why events have no entry.

        Raises:
            InputDataError: One has not, and is not allowed to; the message names all of them.
        """
        before = self._figures_before
        known = {} if before is None else {**before.joined, **before.converted}
        results = settle_results(find_unmatched(self.config, matches, conversions, known), hints)
        self._nothing_matched = list_nothing_matched(results)
        self.results += results

    def check_vocabularies(self, tokens: Mapping[str, int]) -> None:
        """Checks that no vocabulary is empty.

        Args:
            tokens: Tokens by vocabulary.

        Raises:
            InputDataError: One is, and is not allowed to be; the message names all of them.
        """
        self.results += settle_results(
            find_empty_vocabularies(self.config, tokens, self._nothing_matched)
        )

    def check_version(self, version: VersionView) -> None:
        """Checks the rules on features and splits, and what is likely a mistake: statistics alone.

        Args:
            version: What is about to be published, statistics and encoders written.

        Raises:
            InputDataError: A rule of severity `error` is violated, or a feature or a label is the
                same in every row; the message names all of them. Or a weight is below 0.
        """
        refuse_negative_weights(version.schema, version.statistics)
        if version.figures is not None:
            self.figures = list_figures(version.figures, self._figures_before)
        train = version.statistics.get(TRAIN, {})
        self.results += settle_results(
            (
                *check_feature_rules(self.config, version, self.previous),
                *find_constants(self.config, version.schema, train, self._nothing_matched),
                *find_one_class(self.config, version.statistics, self._nothing_matched),
                *find_unknown(self.config, version.schema, version.statistics),
                *(figure.to_warning() for figure in self.figures if figure.is_far),
            )
        )

    def to_json(self) -> tuple[dict[str, Any], ...]:
        """Returns the results as the manifest holds them."""
        return tuple(result.to_json() for result in self.results)
