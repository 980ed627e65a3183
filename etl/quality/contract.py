"""The contract of a version: checked on the sources as read, and on the version to be published.

A rule on the values of a source is a SQL condition, which rides in the pass that counts the rows;
`unique` is a distinct count and `references` a join, in one pass more. Rules on features and
splits need no data: they are checked on the statistics of the pass that wrote the records. A
feature that gives the label away is a leak.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from conf.dates import DateRange, show_time
from conf.etl.build import BuildConfig
from conf.etl.contract import RuleConfig, Severity
from conf.schema import FeatureSchema
from conf.splits import TRAIN
from etl.quality import lint
from etl.quality.drift import measure_drift
from etl.quality.figures import (
    READ_BY_MODELS,
    Figure,
    Figures,
    Outcomes,
    count_unknown,
    find_nulls,
    list_figures,
)
from etl.quality.label_statistics import summarize_comparison
from etl.quality.lint import Finding
from etl.quality.statistics import summarize_statistics
from etl.quality.version_view import VersionView, compare_feature

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from etl.sources.bad_rows import SourceCounts
    from etl.sources.source import Source

MOST_ALIKE = 0.98
"""Correlation, or correlation ratio, with the label from which on a feature gives it away."""
LEAST_ROWS = 100
"""Rows that have a value, below which a feature is not looked at for leaks."""
_HOUR_MS = 3_600_000.0


def _conclude(rule: RuleConfig, passed: bool, received: str) -> Finding:
    return Finding(f"{rule.kind} {rule.target}", rule.severity, passed, received, _allow(rule))


def _allow(rule: RuleConfig) -> str:
    low, high, change = rule.minimum, rule.maximum, rule.max_change_percent
    bounds = [] if low is None else [f"at least {low:,.12g}"]
    bounds += [] if high is None else [f"at most {high:,.12g}"]
    bounds += [] if change is None else [f"a change of at most {change:g} %"]
    values = [repr(value) for value in rule.one_of or ()]
    others = {
        "type": rule.type,
        "domain": ", ".join(values[:10]) + (", …" if len(values) > 10 else ""),
        "null_rate": "values",
        "unique": "no row twice",
        "references": f"keys of {rule.dictionary}",
        "freshness": f"at most {high or 0:g} h old, {abs(low or 0):g} h ahead",
    }
    rate = f"; at most {rule.max_rate:.4%} others" if rule.max_rate else ""
    return f"{others.get(rule.kind, ', '.join(bounds))}{rate}"


def _is_within(rule: RuleConfig, low: float, high: float) -> bool:
    return (rule.minimum is None or low >= rule.minimum) and (
        rule.maximum is None or high <= rule.maximum
    )


def _judge_rate(rule: RuleConfig, bad: int, total: int, what: str) -> Finding:
    """Returns whether few enough of some rows are bad; of no rows none is."""
    rate = bad / total if total else 0.0
    return _conclude(rule, rate <= rule.max_rate, f"{bad:,} of {total:,} ({rate:.4%}) {what}")


def _judge_volume(rule: RuleConfig, rows: int, previous: int | None) -> Finding:
    passed, received = _is_within(rule, rows, rows), f"{rows:,} rows"
    if rule.max_change_percent is None:
        return _conclude(rule, passed, received)
    if previous is None:
        received += ", no version to compare with"
    else:
        grown = rows - previous
        change = 100.0 * grown / previous if previous else math.inf if grown else 0.0
        received += f", {previous:,} before ({change:+.1f} %)"
        passed &= abs(change) <= rule.max_change_percent
    return _conclude(rule, passed, received)


def _shown(value: Any) -> str:
    """Returns a value for a message, shortened where it is long."""
    text = f"{value:.9g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _find_bad(rule: RuleConfig, rows: DataFrame) -> Column:
    """Whether the value of a row, or one of its list, breaks a rule on values."""
    column, data_type = F.col(rule.columns[0]), rows.schema[rule.columns[0]].dataType
    element: Any = getattr(data_type, "elementType", data_type)
    # In the column's own precision: 4.1 read as float32 is not above 4.1.
    kind = "float" if element.typeName() == "float" else "double"

    def breaks(value: Column) -> Column:
        if rule.kind == "domain":
            return ~value.isin(*rule.one_of or ())
        bad = F.isnan(value.cast("double"))
        if rule.minimum is not None:
            bad = bad | (value < F.lit(rule.minimum).cast(kind))
        if rule.maximum is not None:
            bad = bad | (value > F.lit(rule.maximum).cast(kind))
        return bad

    if rule.kind == "null_rate":
        return column.isNull()
    return breaks(column) if element is data_type else F.exists(column, breaks)


def _ask(rule: RuleConfig, rows: DataFrame) -> Column:
    column = F.col(rule.columns[0])
    if rule.kind == "freshness":
        return F.struct(F.max(column).alias("latest"))
    # No example yet: an aggregate of texts by groups would sort all rows.
    known = F.count("*") if rule.kind == "null_rate" else F.count(column)
    asked = [F.count_if(_find_bad(rule, rows)).alias("bad"), known.alias("known")]
    if rule.kind == "range":
        is_list = rows.schema[rule.columns[0]].dataType.typeName() == "array"
        asked.append(F.min(F.array_min(column) if is_list else column).alias("low"))
        asked.append(F.max(F.array_max(column) if is_list else column).alias("high"))
    return F.struct(*asked)


def _list_source_rules(config: BuildConfig) -> list[tuple[str, str, RuleConfig]]:
    """The rules on sources: the name of what each asks, its source, and the rule."""
    listed = enumerate(config.contract.rules)
    return [(f"rule {n}", rule.source, rule) for n, rule in listed if rule.source is not None]


def ask_rules(config: BuildConfig, sources: Mapping[str, Source]) -> dict[str, Source]:
    """Returns the sources with what rules ask of their good rows, for the pass that counts them."""
    asked = dict(sources)
    for name, source, rule in _list_source_rules(config):
        if rule.kind in ("range", "domain", "null_rate", "freshness"):
            found = {**asked[source].asked, name: _ask(rule, sources[source].rows)}
            asked[source] = replace(asked[source], asked=found)
    return asked


def check_source_rules(
    config: BuildConfig,
    sources: Mapping[str, Source],
    counts: Mapping[str, SourceCounts],
    previous_rows: Mapping[str, int],
    run_date: date | None = None,
) -> list[Finding]:
    """Checks every rule on a source, in the order of the contract.

    The sources are as `ask_rules` returned them; each has a good row. `previous_rows` parsed in
    the current version.
    """
    found = []
    for name, source, rule in _list_source_rules(config):
        count, good = counts[source], sources[source].good
        if rule.kind == "volume":
            rows = count.read - count.bad_rows
            found.append(_judge_volume(rule, rows, previous_rows.get(source)))
        elif rule.kind == "type":
            refused = count.bad.get(f"not_{rule.type}:{rule.columns[0]}", 0)
            what = f"do not parse as {rule.type}"
            found.append(_judge_rate(rule, refused, count.read, what))
        elif rule.kind == "unique":
            found.append(_check_unique(rule, good))
        elif rule.kind == "references":
            key = F.col(str(config.sources[str(rule.dictionary)].key)).alias("key")
            keys = sources[str(rule.dictionary)].good.select(key)
            found.append(_check_references(rule, good, keys))
        elif rule.kind == "freshness":
            found.append(_judge_freshness(config, rule, count.asked[name].latest, run_date))
        else:
            found.append(_judge_values(rule, count.asked[name], good))
    return found


def _judge_values(rule: RuleConfig, found: Any, rows: DataFrame) -> Finding:
    what = {"null_rate": "null", "domain": "others"}.get(rule.kind, "outside")
    if rule.kind == "range":
        what += f"; {_shown(found.low)} to {_shown(found.high)}"
    elif rule.kind == "domain" and found.bad:
        others = F.when(_find_bad(rule, rows), F.col(rule.columns[0]).cast("string"))
        what += f", such as {_shown(rows.agg(F.min(others)).collect()[0][0])!r}"
    return _judge_rate(rule, found.bad, found.known, what)


def _check_unique(rule: RuleConfig, rows: DataFrame) -> Finding:
    complete = rows.select(*rule.columns).dropna()
    known, distinct = complete.agg(F.count("*"), F.count_distinct(*rule.columns)).collect()[0]
    return _judge_rate(rule, known - distinct, known, "repeat another")


def _check_references(rule: RuleConfig, rows: DataFrame, keys: DataFrame) -> Finding:
    values = rows.select(F.col(rule.columns[0]).alias("key")).dropna()
    joined = values.join(keys.distinct().withColumn("entry", F.lit(1)), "key", "left")
    unknown = F.when(F.col("entry").isNull(), F.col("key"))
    known, bad, example = joined.agg(F.count("*"), F.count(unknown), F.min(unknown)).collect()[0]
    what = f"without an entry, such as {_shown(example)!r}" if bad else "without an entry"
    return _judge_rate(rule, bad, known, what)


def _judge_freshness(
    config: BuildConfig, rule: RuleConfig, latest: Any, run_date: date | None
) -> Finding:
    """Returns whether the latest time of a column is neither too old nor too far ahead.

    Its age is counted from the end of the declared day, or now.
    """
    day = rule.find_day(run_date)
    until_ms = 1000 * time.time() if day is None else DateRange(day, day).span_ms[1]
    if latest is None:
        return _conclude(rule, False, "no time at all")
    latest_ms = float(latest) * config.sources[str(rule.source)].ms_per_unit(rule.columns[0])
    age = (until_ms - latest_ms) / _HOUR_MS
    passed = (rule.minimum or 0.0) <= age <= (rule.maximum or 0.0)
    when = f"{abs(age):,.1f} h {'old' if age >= 0 else 'ahead'}"
    return _conclude(rule, passed, f"latest {show_time(latest_ms, 'ms')}, {when}")


def check_wall_clock(config: BuildConfig, sources: Mapping[str, Source]) -> None:
    """Checks the rules that may be violated although nothing has changed: ages up to now."""
    results = []
    for _, source, rule in _list_source_rules(config):
        if rule.kind == "freshness" and rule.date == "now":
            latest = sources[source].good.agg(F.max(rule.columns[0])).collect()[0][0]
            results.append(_judge_freshness(config, rule, latest, None))
    lint.settle(results)


def check_feature_rules(
    config: BuildConfig, version: VersionView, previous: VersionView | None
) -> list[Finding]:
    """Checks every rule on a feature or split, and looks for leaks."""
    rules = [rule for rule in config.contract.rules if rule.source is None]
    results = [_judge_written(rule, version, previous) for rule in rules]
    if config.contract.leakage is not None:
        train = version.statistics.get(TRAIN, {})
        results += find_leaks(config.contract.leakage, version.schema, train)
    return results


def _judge_written(rule: RuleConfig, version: VersionView, previous: VersionView | None) -> Finding:
    name, split = str(rule.feature), str(rule.split)
    if rule.kind == "volume":
        before = None if previous is None else previous.split_rows.get(split)
        return _judge_volume(rule, version.split_rows.get(split, 0), before)
    if rule.kind == "drift":
        return _judge_drift(rule, version, previous)
    found = version.feature(split, name)
    if found is None:
        return _conclude(rule, False, "no such records")
    if rule.kind == "type":
        dtype = version.schema[name].dtype
        return _conclude(rule, dtype == rule.type, dtype)
    if rule.kind == "null_rate":
        return _judge_rate(rule, *_count_nulls(name, version, found), "null")
    return _judge_domain(rule, version) if rule.kind == "domain" else _judge_range(rule, found)


def _count_nulls(name: str, version: VersionView, found: Mapping[str, Any]) -> tuple[int, int]:
    if version.is_vocabulary(name):
        # A vocabulary gives null the id of what it does not know, whose buckets hold the rest.
        return found["missing"] + count_unknown(found), found["missing"] + found["values"]
    # Most encoders give a missing value an id or a number: what was raw tells.
    nulls = find_nulls(version.schema[name], summarize_statistics({name: found})[name])
    return (found["missing"], found["rows"]) if nulls is None else (nulls.part, nulls.whole)


def _judge_range(rule: RuleConfig, found: Mapping[str, Any]) -> Finding:
    low, high = found.get("min"), found.get("max")
    unfinite = found.get("nan", 0) + found.get("infinite", 0)
    is_within = low is None or high is None or _is_within(rule, low, high)
    received = "no values" if low is None else f"{_shown(low)} to {_shown(high)}"
    received += f", and {unfinite:,} not finite" if unfinite else ""
    return _conclude(rule, is_within and not unfinite, received)


def _judge_domain(rule: RuleConfig, version: VersionView) -> Finding:
    distribution = version.distribution(str(rule.split), str(rule.feature))
    if distribution is None:
        return _judge_rate(rule, 0, 0, "others")
    allowed = {_shown(float(v)) if isinstance(v, int | float) else v for v in rule.one_of or ()}
    inside = sum(n for value, n in distribution.counts.items() if value in allowed)
    foreign = next((value for value in distribution.counts if value not in allowed), None)
    what = "others" if foreign is None else f"others, such as {foreign!r}"
    bad = max(distribution.total - round(inside), 0)
    return _judge_rate(rule, bad, distribution.total, what)


def _judge_drift(rule: RuleConfig, version: VersionView, previous: VersionView | None) -> Finding:
    compared = compare_feature(previous, version, str(rule.split), str(rule.feature))
    if compared.before is None:
        return _conclude(rule, True, "no version to compare with")
    if compared.after is None:
        return _conclude(rule, False, "no values any more")
    if compared.gap is not None:
        said = "data contract: drift of %s is not measured: %s"
        lint.logger.warning(said, rule.target, compared.gap)
        return _conclude(rule, True, f"not measured: {compared.gap}")
    distance = measure_drift(rule.metric, compared.before, compared.after)
    if distance is None:
        return _conclude(rule, False, "values without an order, which ks needs")
    return _conclude(rule, distance <= (rule.maximum or 0.0), f"{distance:.4f}")


def find_leaks(
    severity: Severity, schema: FeatureSchema, statistics: Mapping[str, Mapping[str, Any]]
) -> list[Finding]:
    """Returns one result per feature that tells too much of the label."""
    leaks = []
    for spec in schema.by_role(*READ_BY_MODELS):
        if (by_label := statistics.get(spec.name, {}).get("by_label")) is None:
            continue
        found = summarize_comparison(by_label)
        # Of equal ones the first.
        measure = max(("correlation", "correlation_ratio"), key=lambda name: abs(found[name] or 0))
        worst, said = abs(found[measure] or 0), measure.replace("_", " ")
        if found["rows"] >= LEAST_ROWS and worst > MOST_ALIKE:
            received = f"{said} with the label {worst:.4f} over {found['rows']:,} rows"
            allowed = f"at most {MOST_ALIKE:g}; leave the feature out, or give it the role id"
            rule = f"leakage feature {spec.name}"
            leaks.append(Finding(rule, severity, False, received, allowed))
    return leaks


@dataclass
class BuildChecks:
    """The checks of one build, each as early as it can be made, and what came of them.

    `previous` is the current version, if there is one; `figures` are those of the version that is
    built, once it is written.
    """

    config: BuildConfig
    previous: VersionView | None
    results: list[Finding] = field(default_factory=list)
    figures: tuple[Figure, ...] = ()
    _nothing_matched: set[str] = field(default_factory=set)

    @property
    def _figures_before(self) -> Figures:
        return {} if self.previous is None else self.previous.figures

    def warn(self, results: Iterable[Finding]) -> None:
        """Logs and records what was found, and refuses what is an error."""
        self.results += lint.settle(results)

    def check_sources(
        self,
        sources: Mapping[str, Source],
        counts: Mapping[str, SourceCounts],
        run_date: date | None = None,
    ) -> None:
        rows = {} if self.previous is None else self.previous.source_rows
        self.warn(check_source_rules(self.config, sources, counts, rows, run_date))

    def check_matches(self, matches: Outcomes, conversions: Outcomes) -> None:
        """Checks that each join, and each label by conversions, has matched something."""
        before = self._figures_before
        found = list(lint.find_unmatched(self.config, matches, conversions, before))
        self.warn(found)
        self._nothing_matched = {r.allowed_as for r in found if r.allowed_as is not None}

    def check_vocabularies(self, tokens: Mapping[str, int]) -> None:
        self.warn(lint.find_empty_vocabularies(self.config, tokens, self._nothing_matched))

    def check_version(self, version: VersionView) -> None:
        config, schema, statistics = self.config, version.schema, version.statistics
        excused, train = self._nothing_matched, statistics.get(TRAIN, {})
        lint.refuse_negative_weights(schema, statistics)
        self.figures = list_figures(version.figures, self._figures_before)
        found = check_feature_rules(config, version, self.previous)
        found += lint.find_constants(config, schema, train, excused)
        found += lint.find_one_class(config, statistics, excused)
        found += lint.find_unknown(config, schema, statistics)
        found += [lint.warn_of_figure(figure) for figure in self.figures if figure.is_far]
        self.warn(found)

    def to_json(self) -> tuple[dict[str, Any], ...]:
        return tuple(result.to_json() for result in self.results)
