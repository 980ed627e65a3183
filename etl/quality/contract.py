"""The contract of a version: checked on the sources as read, and on the version to be published.

A rule on the values of a source is a SQL condition, which rides in the pass that counts the rows;
`unique` is a distinct count and `references` a join, in one pass more. Rules on features and
splits need no data: they are checked on the statistics of the pass that wrote the records. A
feature that gives the label away is a leak.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

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


def _conclude(rule: RuleConfig, passed: bool, received: str, allowed: str) -> Finding:
    """Returns the result of a rule."""
    return Finding(f"{rule.kind} {rule.target}", rule.severity, passed, received, allowed)


def _judge_rate(rule: RuleConfig, bad: int, total: int, what: str, allowed: str) -> Finding:
    """Returns whether few enough of some rows are bad; of no rows none is."""
    rate = bad / total if total else 0.0
    received = f"{bad:,} of {total:,} ({rate:.4%}) {what}"
    bound = allowed if rule.max_rate == 0 else f"{allowed}; at most {rule.max_rate:.4%} others"
    return _conclude(rule, rate <= rule.max_rate, received, bound)


def _describe_range(rule: RuleConfig) -> str:
    """Returns the bounds as people write them."""
    low = "" if rule.minimum is None else f"from {rule.minimum:g}"
    high = "" if rule.maximum is None else f"to {rule.maximum:g}"
    return " ".join(part for part in (low, high) if part)


def _describe_domain(rule: RuleConfig) -> str:
    """Returns the allowed values, shortened where there are many."""
    values = rule.one_of or ()
    return ", ".join(map(repr, values[:10])) + (", …" if len(values) > 10 else "")


def _judge_type(rule: RuleConfig, found: str, refused: int, rows: int) -> Finding:
    """Returns whether a column has its type, and few enough values failed to parse as it."""
    if found != rule.type:
        return _conclude(rule, False, found, str(rule.type))
    return _judge_rate(rule, refused, rows, f"do not parse as {found}", found)


def _judge_volume(rule: RuleConfig, rows: int, previous: int | None) -> Finding:
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
    return _conclude(rule, passed, received, ", ".join(allowed))


def _shown(value: Any) -> str:
    """Returns a value for a message, shortened where it is long."""
    text = f"{value:.9g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _find_bad(rule: RuleConfig, rows: DataFrame) -> Column:
    """Whether the value of a row, or one of its list, breaks a rule on values."""
    name = rule.columns[0]
    column, data_type = F.col(name), rows.schema[name].dataType
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


def _ask(rule: RuleConfig, rows: DataFrame) -> dict[str, Column]:
    name = rule.columns[0]
    column = F.col(name)
    if rule.kind == "freshness":
        return {"latest": F.max(column)}
    # No example yet: an aggregate of texts by groups would sort all rows.
    known = F.count("*") if rule.kind == "null_rate" else F.count(column)
    asked = {"bad": F.count_if(_find_bad(rule, rows)), "known": known}
    if rule.kind == "range":
        is_list = rows.schema[name].dataType.typeName() == "array"
        asked["low"] = F.min(F.array_min(column) if is_list else column)
        asked["high"] = F.max(F.array_max(column) if is_list else column)
    return asked


def _list_source_rules(config: BuildConfig) -> list[tuple[str, RuleConfig]]:
    """The rules on sources, each with the name of what it asks."""
    listed = enumerate(config.contract.rules)
    return [(f"rule {n}", rule) for n, rule in listed if rule.source is not None]


def ask_rules(config: BuildConfig, sources: Mapping[str, Source]) -> dict[str, Source]:
    """Returns the sources with what rules ask of their good rows, for the pass that counts them."""
    asked = dict(sources)
    for name, rule in _list_source_rules(config):
        if rule.kind in ("range", "domain", "null_rate", "freshness"):
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
) -> list[Finding]:
    """Checks every rule on a source, in the order of the contract.

    The sources are as `ask_rules` returned them; `previous_rows` parsed in the current version.
    """
    found = []
    for name, rule in _list_source_rules(config):
        source, count = sources[str(rule.source)], counts[str(rule.source)]
        if rule.kind == "volume":
            before = previous_rows.get(source.name)
            found.append(_judge_volume(rule, count.read - count.bad_rows, before))
        elif rule.kind == "type":
            declared = config.sources[source.name].column_types[rule.columns[0]]
            refused = count.bad.get(f"not_{declared}:{rule.columns[0]}", 0)
            found.append(_judge_type(rule, declared, refused, count.read))
        elif rule.kind == "unique":
            found.append(_check_unique(rule, source.good))
        elif rule.kind == "references":
            dictionary = str(rule.dictionary)
            key = F.col(str(config.sources[dictionary].key)).alias("key")
            keys = sources[dictionary].good.select(key)
            found.append(_check_references(rule, source.good, keys))
        elif rule.kind == "freshness":
            ms = config.sources[source.name].ms_per_unit(rule.columns[0])
            latest = count.asked[name].latest if name in count.asked else None
            found.append(_judge_freshness(rule, latest, ms, run_date))
        else:
            asked = count.asked[name].asDict() if name in count.asked else {}
            found.append(_judge_values(rule, asked, source))
    return found


def _judge_values(rule: RuleConfig, found: Mapping[str, Any], source: Source) -> Finding:
    bad, known = found.get("bad", 0), found.get("known", 0)
    if rule.kind == "null_rate":
        return _judge_rate(rule, bad, known, "null", "values")
    if rule.kind == "range":
        seen = f"outside; {_shown(found.get('low'))} to {_shown(found.get('high'))}"
        return _judge_rate(rule, bad, known, seen, _describe_range(rule))
    what = "others"
    if bad:
        rows = source.good
        others = F.when(_find_bad(rule, rows), F.col(rule.columns[0]).cast("string"))
        what += f", such as {_shown(rows.agg(F.min(others)).collect()[0][0])!r}"
    return _judge_rate(rule, bad, known, what, _describe_domain(rule))


def _check_unique(rule: RuleConfig, rows: DataFrame) -> Finding:
    complete = rows.select(*rule.columns).dropna()
    known, distinct = complete.agg(F.count("*"), F.count_distinct(*rule.columns)).collect()[0]
    return _judge_rate(rule, known - distinct, known, "repeat another", "no row twice")


def _check_references(rule: RuleConfig, rows: DataFrame, keys: DataFrame) -> Finding:
    values = rows.select(F.col(rule.columns[0]).alias("key")).dropna()
    joined = values.join(keys.distinct().withColumn("entry", F.lit(1)), "key", "left")
    unknown = F.when(F.col("entry").isNull(), F.col("key"))
    known, bad, example = joined.agg(F.count("*"), F.count(unknown), F.min(unknown)).collect()[0]
    what = f"without an entry, such as {_shown(example)!r}" if bad else "without an entry"
    return _judge_rate(rule, bad, known, what, f"keys of {rule.dictionary}")


def _judge_freshness(
    rule: RuleConfig, latest: Any, ms_per_unit: int, run_date: date | None
) -> Finding:
    """Returns whether the latest time of a column is neither too old nor too far ahead."""
    deadline = _deadline_ms(rule, run_date)
    least, most = rule.minimum or 0.0, rule.maximum or 0.0
    allowed = f"at most {most:g} h old, {abs(least):g} h ahead"
    if latest is None:
        return _conclude(rule, False, "no time at all", allowed)
    latest_ms = float(latest) * ms_per_unit
    age = (deadline - latest_ms) / _HOUR_MS
    passed = least <= age <= most
    when = "old" if age >= 0 else "ahead"
    received = f"latest {_moment(latest_ms)}, {abs(age):,.1f} h {when}"
    return _conclude(rule, passed, received, allowed)


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
            source, column = str(rule.source), rule.columns[0]
            latest = sources[source].good.agg(F.max(column)).collect()[0][0]
            ms = config.sources[source].ms_per_unit(column)
            results.append(_judge_freshness(rule, latest, ms, None))
    lint.settle(results)


def check_feature_rules(
    config: BuildConfig, version: VersionView, previous: VersionView | None
) -> list[Finding]:
    """Checks every rule on a feature or split, and looks for leaks."""
    results = []
    for rule in config.contract.rules:
        if rule.kind == "volume" and rule.split is not None:
            before = None if previous is None else previous.split_rows.get(rule.split)
            results.append(_judge_volume(rule, version.split_rows.get(rule.split, 0), before))
        elif rule.kind == "drift":
            results.append(_judge_drift(rule, version, previous))
        elif rule.feature is not None:
            results.append(_judge_feature(rule, version))
    if config.contract.leakage is not None:
        train = version.statistics.get(TRAIN, {})
        results += find_leaks(config.contract.leakage, version.schema, train)
    return results


def _judge_feature(rule: RuleConfig, version: VersionView) -> Finding:
    name = str(rule.feature)
    found = version.feature(str(rule.split), name)
    if found is None or name not in version.schema:
        return _conclude(rule, False, "no such records", "records with the feature")
    if rule.kind == "type":
        return _judge_type(rule, version.schema[name].dtype, 0, found["rows"])
    if rule.kind == "null_rate":
        return _judge_rate(rule, *_count_nulls(name, version, found), "null", "values")
    if rule.kind == "domain":
        return _judge_domain(rule, version)
    return _judge_range(rule, found)


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
    passed = not unfinite
    if low is not None and rule.minimum is not None:
        passed &= low >= rule.minimum
    if high is not None and rule.maximum is not None:
        passed &= high <= rule.maximum
    received = "no values" if low is None else f"{_shown(low)} to {_shown(high)}"
    received += f", and {unfinite:,} not finite" if unfinite else ""
    return _conclude(rule, passed, received, _describe_range(rule))


def _judge_domain(rule: RuleConfig, version: VersionView) -> Finding:
    distribution = version.distribution(str(rule.split), str(rule.feature))
    if distribution is None:
        return _judge_rate(rule, 0, 0, "others", _describe_domain(rule))
    allowed = {_shown(float(v)) if isinstance(v, int | float) else v for v in rule.one_of or ()}
    inside = sum(n for value, n in distribution.counts.items() if value in allowed)
    foreign = next((value for value in distribution.counts if value not in allowed), None)
    what = "others" if foreign is None else f"others, such as {foreign!r}"
    bad = max(distribution.total - round(inside), 0)
    return _judge_rate(rule, bad, distribution.total, what, _describe_domain(rule))


def _judge_drift(rule: RuleConfig, version: VersionView, previous: VersionView | None) -> Finding:
    most = rule.maximum or 0.0
    allowed = f"at most {most:g}"
    if previous is None:
        return _conclude(rule, True, "no version to compare with", allowed)
    drift = compare_feature(previous, version, str(rule.split), str(rule.feature))
    if drift.before is None:
        return _conclude(rule, True, "no version to compare with", allowed)
    if drift.after is None:
        return _conclude(rule, False, "no values any more", allowed)
    if drift.gap is not None:
        lint.logger.warning(
            "data contract: drift of %s is not measured: %s", rule.target, drift.gap
        )
        return _conclude(rule, True, f"not measured: {drift.gap}", allowed)
    distance = measure_drift(rule.metric, drift.before, drift.after)
    if distance is None:
        return _conclude(rule, False, "values without an order", "numbers, for ks")
    return _conclude(rule, distance <= most, f"{distance:.4f}", allowed)


def find_leaks(
    severity: Severity, schema: FeatureSchema, statistics: Mapping[str, Mapping[str, Any]]
) -> list[Finding]:
    """Returns one result per feature that tells too much of the label."""
    leaks = []
    for spec in schema.by_role(*READ_BY_MODELS):
        comparison = statistics.get(spec.name, {}).get("by_label")
        if comparison is None:
            continue
        found = summarize_comparison(comparison)
        correlation, ratio = abs(found["correlation"] or 0.0), found["correlation_ratio"] or 0.0
        measures = {"correlation": correlation, "correlation ratio": ratio}
        measure, worst = max(measures.items(), key=lambda item: item[1])
        if found["rows"] >= LEAST_ROWS and worst > MOST_ALIKE:
            received = f"{measure} with the label {worst:.4f} over {found['rows']:,} rows"
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
    def _figures_before(self) -> Figures | None:
        return None if self.previous is None else self.previous.figures

    def warn(self, results: Iterable[Finding]) -> None:
        """Logs and records what was found, and refuses what is an error."""
        self.results += lint.settle(results)

    def check_sources(
        self,
        sources: Mapping[str, Source],
        counts: Mapping[str, SourceCounts],
        run_date: date | None = None,
    ) -> None:
        """Checks the rules on sources."""
        rows = {} if self.previous is None else self.previous.source_rows
        self.warn(check_source_rules(self.config, sources, counts, rows, run_date))

    def check_matches(self, matches: Outcomes, conversions: Outcomes) -> None:
        """Checks that each join, and each label by conversions, has matched something."""
        found = lint.find_unmatched(self.config, matches, conversions, self._figures_before or {})
        self.warn(found)
        self._nothing_matched = {r.allowed_as for r in found if r.allowed_as is not None}

    def check_vocabularies(self, tokens: Mapping[str, int]) -> None:
        """Checks that no vocabulary is empty, by its number of tokens."""
        self.warn(lint.find_empty_vocabularies(self.config, tokens, self._nothing_matched))

    def check_version(self, version: VersionView) -> None:
        """Checks the rules on features and splits, and the lint of statistics."""
        schema, statistics = version.schema, version.statistics
        lint.refuse_negative_weights(schema, statistics)
        self.figures = list_figures(version.figures or {}, self._figures_before)
        excused = self._nothing_matched
        self.warn(
            (
                *check_feature_rules(self.config, version, self.previous),
                *lint.find_constants(self.config, schema, statistics.get(TRAIN, {}), excused),
                *lint.find_one_class(self.config, statistics, excused),
                *lint.find_unknown(self.config, schema, statistics),
                *(lint.warn_of_figure(figure) for figure in self.figures if figure.is_far),
            )
        )

    def to_json(self) -> tuple[dict[str, Any], ...]:
        """Returns the results as the manifest holds them."""
        return tuple(result.to_json() for result in self.results)
