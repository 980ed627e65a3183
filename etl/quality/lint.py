"""Lint of a build: configurations and data that train nothing.

A join or a conversion that matches nothing, a vocabulary without tokens, a feature or a label that
is the same in every row are refused, unless `contract.allow` names them; what follows from
something allowed is allowed with it. What is only odd is warned of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from conf.etl.build import BuildConfig
from conf.etl.encodings import DatePartConfig, FeatureConfig
from conf.schema import FeatureSchema
from conf.splits import TEST
from etl.quality.figures import (
    READ_BY_MODELS,
    Figure,
    Share,
    count_unknown,
    share_kept,
    share_matched,
)
from etl.quality.rules import RuleResult

if TYPE_CHECKING:
    from conf.dates import DateRange
    from etl.encoders.vocabulary import OddTokens
    from etl.events.event_counts import EventCounts
    from etl.events.labels import ConversionCounts

MIN_ROWS = 10
"""In fewer rows than that a value may be the same by chance."""
_MOST_IN_LOG = 0.01
_WITHIN_A_DAY = ("minute", "hour")
_HOUR_MS = 3_600_000
_CHANCE = 1e-3
"""Probability below which no match at all is not taken for chance."""
_WANTED = {
    "unmatched": "at least one match",
    "empty_vocabulary": "at least one token",
    "constant": "two values or more",
    "one_class": "two values or more",
}


def _refuse(config: BuildConfig, key: str, rule: str, name: str, received: str) -> RuleResult:
    is_allowed = name in config.contract.allow
    received += "; allowed by contract.allow" if is_allowed else ""
    return RuleResult(rule, "error", is_allowed, received, _WANTED[key], name)


def _warn(rule: str, received: str, allowed: str) -> RuleResult:
    return RuleResult(rule, "warn", False, received, allowed)


def find_unmatched(
    config: BuildConfig,
    matches: Mapping[str, Mapping[str, int]],
    conversions: Mapping[str, Mapping[str, int]],
    before: Mapping[str, Share],
) -> list[RuleResult]:
    """Finds joins that matched no event, and labels whose conversions make no sample positive."""
    found = []
    for name, share in share_matched(matches).items():
        if _is_nothing(share, before.get(name)):
            received = f"none of {share.whole:,} events has an entry{_reasons(matches[name])}"
            found.append(_refuse(config, "unmatched", f"join {name}", name, received))
    sources = {
        label.name: label.conversion.source for label in config.all_labels if label.conversion
    }
    for name, share in share_kept(conversions).items():
        if _is_nothing(share, before.get(name)):
            reasons = {why: n for why, n in conversions[name].items() if why != "rows"}
            received = f"none of {share.whole:,} makes a sample positive{_reasons(reasons)}"
            rule = f"conversions of label {name}"
            found.append(_refuse(config, "unmatched", rule, sources[name], received))
    return found


def _is_nothing(now: Share, before: Share | None) -> bool:
    if not now.whole or now.part:
        return False
    return before is None or not before.part or (1 - before.value) ** now.whole < _CHANCE


def _reasons(outcomes: Mapping[str, int]) -> str:
    reasons = [f"{why} {n:,}" for why, n in outcomes.items() if n]
    return f" ({', '.join(reasons)})" if reasons else ""


def list_nothing_matched(results: Iterable[RuleResult]) -> set[str]:
    """Returns the sources of `find_unmatched` that were allowed to match nothing."""
    return {r.allowed_as for r in results if r.allowed_as is not None and r.passed}


def find_early_ends(
    config: BuildConfig, conversions: Mapping[str, ConversionCounts]
) -> list[RuleResult]:
    """Finds labels whose conversions end long before the events, and were not said to."""
    found = []
    for label in config.all_labels:
        if label.conversion is None or label.conversion.until_ts is not None:
            continue
        counts = conversions[label.name]
        if counts.ends_early:
            received = (
                f"the last conversion of {label.conversion.source!r} comes "
                f"{counts.early_ms / _HOUR_MS:.1f} hours before the last event: labels count as "
                "known up to it alone; declare `until_ts` where conversions are complete later"
            )
            rule = f"end of the conversions of label {label.name}"
            found.append(_warn(rule, received, "a day, or what chance gives"))
    return found


def find_unturned_lists(config: BuildConfig) -> list[RuleResult]:
    """Finds lists of the log that may stand beside its history, which is turned round alone."""
    if config.events.history is None or config.events.history_order != "oldest_first":
        return []
    log = config.sources[config.events.source].column_types
    read = {column for feature in config.features for column in feature.columns}
    turned = config.brought_history
    lists = [name for name, kind in log.items() if kind.startswith("list<") and name in read]
    left = [name for name in lists if name not in turned]
    if not left:
        return []
    received = (
        f"{', '.join(left)} as in the log; {', '.join(turned)} turned round, the "
        "latest first: where they stand beside each other, values would belong to other items"
    )
    allowed = "a `pair` of the history, or history_order: latest_first with all lists written so"
    return [_warn("order of lists beside events.history", received, allowed)]


def find_short_lookback(config: BuildConfig, dates: DateRange | None) -> list[RuleResult]:
    """Finds windows that reach further back than a run of few days reads."""
    source = config.events.source
    days = config.sources[source].days
    if dates is None or days is None:
        return []
    windows = {rolling.name: rolling.window_days for rolling in config.rolling}
    windows |= {h.name: h.window_days for h in config.histories if h.window_days is not None}
    longer = [
        f"{name} ({'all of the log' if window is None else f'{window:g} days'})"
        for name, window in windows.items()
        if window is None or window > days.lookback_days
    ]
    if not longer:
        return []
    received = (
        f"{', '.join(longer)}; a run reads {days.lookback_days} days before its own "
        f"(sources.{source}.days.lookback_days): days that are built one by one hold less than a "
        "range of days"
    )
    allowed = "window_days of at most lookback_days"
    return [_warn("windows of rolling features and histories", received, allowed)]


def find_late(config: BuildConfig, counts: EventCounts) -> list[RuleResult]:
    """Finds that rows come under later days than their own: they are lost, day by day."""
    source = config.events.source
    most = config.sources[source].max_bad_rows
    if counts.late <= most * counts.delivered:
        return []
    received = (
        f"{counts.late:,} of {counts.delivered:,} rows read for the run's days are of earlier "
        "days: they are no samples, and a run of these days does not read them"
    )
    allowed = (
        f"at most {most:.2%} (sources.{source}.max_bad_rows); cut the log by the UTC day "
        "of the event's time, or build ranges of days"
    )
    return [_warn("late rows of the log", received, allowed)]


def find_test_in_log(config: BuildConfig, counts: EventCounts) -> list[RuleResult]:
    """Finds that the log holds what the given test events without times are to tell."""
    events = counts.splits.get(TEST, 0)
    if counts.test_in_log <= _MOST_IN_LOG * events:
        return []
    received = (
        f"{counts.test_in_log:,} of {events:,} events of {config.split.test_source!r} are in "
        f"{config.events.source!r} too: a model may have learned them"
    )
    allowed = (
        f"at most {_MOST_IN_LOG:.0%}; take them out of the log, or give both sources times: "
        "then what comes at or after a test event is left out"
    )
    return [_warn("test events that the log holds", received, allowed)]


def find_empty_vocabularies(
    config: BuildConfig, tokens: Mapping[str, int], nothing_matched: Collection[str]
) -> list[RuleResult]:
    """Finds the vocabularies that hold no token."""
    read: dict[str | None, set[str]] = {}
    for feature in config.features:
        read.setdefault(feature.vocabulary, set()).update(feature.columns)
    excused, what = _columns_of(config, nothing_matched), "no token in the train split"
    return [
        _refuse(config, "empty_vocabulary", f"vocabulary {name}", name, what)
        for name, count in tokens.items()
        if not count and not read.get(name, set()) <= excused
    ]


def _columns_of(config: BuildConfig, sources: Collection[str]) -> set[str]:
    """Columns that the events get from some dictionaries."""
    return {
        column
        for join in config.joins
        if join.source in sources
        for column in join.added_columns(config.sources[join.source])
    }


def find_odd_values(odd: Mapping[str, OddTokens]) -> list[RuleResult]:
    """Finds vocabularies with tokens that are likely quotes or a header line of a file."""
    found = []
    for name, tokens in odd.items():
        rule = f"vocabulary {name}"
        if tokens.quoted:
            received = f"{tokens.quoted:,} in quotes, such as {tokens.example}: they are part of it"
            allowed = "values without quotes; format: csv of the source takes them off"
            found.append(_warn(rule, received, allowed))
        if tokens.headers:
            received = f"{', '.join(tokens.headers)}, as its column is named: is it a header line?"
            allowed = "rows alone; header: true of the source leaves the first line out"
            found.append(_warn(rule, received, allowed))
    return found


def find_constants(
    config: BuildConfig,
    schema: FeatureSchema,
    statistics: Mapping[str, Any],
    nothing_matched: Collection[str],
) -> list[RuleResult]:
    """Finds the features and labels that are the same in every row of the train split."""
    excused = _columns_of(config, nothing_matched)
    declared = {feature.name: feature for feature in config.features}
    found = []
    for spec in schema.by_role(*READ_BY_MODELS):
        # Weights go with the ids of their list, which are what varies.
        if spec.encoding.startswith("weights:"):
            continue
        what = describe_constant(statistics.get(spec.name, {}))
        if what is not None and not _is_excused(config, declared.get(spec.name), excused):
            rule = f"constant feature {spec.name}"
            found.append(_refuse(config, "constant", rule, spec.name, what))
    for name in _list_labels(config, nothing_matched, "train"):
        what = describe_constant(_of_labelled(statistics.get(name, {})))
        if what is not None:
            found.append(_refuse(config, "one_class", f"label {name} of one class", name, what))
    return found


def find_one_class(
    config: BuildConfig,
    statistics: Mapping[str, Mapping[str, Any]],
    nothing_matched: Collection[str],
) -> list[RuleResult]:
    """Finds the labels that are the same in every row of a split that measures."""
    found = []
    for split in ("validation", "test"):
        for label in _list_labels(config, nothing_matched, split):
            labelled = _of_labelled(statistics.get(split, {}).get(label, {}))
            what = describe_constant(labelled, split)
            if what is not None and label not in config.contract.allow:
                rule = f"label {label} of one class ({split})"
                found.append(_warn(rule, what, _WANTED["one_class"]))
    return found


def _of_labelled(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the statistics of a label in the rows that have it, if there are any."""
    return {**found, "rows": found["values"], "missing": 0} if found.get("values") else found


def _list_labels(config: BuildConfig, nothing_matched: Collection[str], split: str) -> list[str]:
    """Labels that are to have two classes: declared ones, and those that drawn negatives make."""
    names = [
        label.name
        for label in config.all_labels
        if label.conversion is None or label.conversion.source not in nothing_matched
    ]
    negatives = config.negatives
    is_drawn = negatives is not None and negatives.draws and split in negatives.splits
    if is_drawn and config.first_label is None and config.label_name is not None:
        names.append(config.label_name)
    return names


def _is_excused(
    config: BuildConfig, feature: FeatureConfig | None, excused: Collection[str]
) -> bool:
    if feature is None:
        return False
    if isinstance(feature.encoding, DatePartConfig):
        # A log of one day has one weekday, and one of a fortnight mostly one month.
        return feature.encoding.part not in _WITHIN_A_DAY
    if feature.vocabulary in config.contract.allow:
        return True
    return set(feature.columns) <= set(excused)


def describe_constant(found: Mapping[str, Any], split: str = "train") -> str | None:
    """Names what stands in every row; None where rows differ, or are too few to tell."""
    if not found or found["rows"] < MIN_ROWS:
        return None
    whole, raw = _name_same(found), found.get("raw", {}).get("values")
    if whole is None and raw is not None:
        whole = _name_same(raw)
    return whole and f"{whole} in all {found['rows']:,} rows of the {split} split"


def _name_same(found: Mapping[str, Any]) -> str | None:
    rows, missing = found["rows"], found["missing"]
    if missing == rows:
        return "null"
    if "length" in found:
        length = found["length"]
        if not length["max"]:
            return "an empty list"
        if length["min"] != length["max"] or found["values"] != length["total"]:
            return None
    if missing:
        return None
    nan, distinct = found.get("nan", 0), found["distinct"]
    if nan == found["values"]:
        return "NaN"
    if nan + found.get("infinite", 0) or distinct["count"] != 1 or not distinct["exact"]:
        return None
    return f"the value {found['top']['values'][0][0]}"


def find_unknown(
    config: BuildConfig, schema: FeatureSchema, statistics: Mapping[str, Mapping[str, Any]]
) -> list[RuleResult]:
    """Finds features of which a split knows no value: it measures nothing of them."""
    split = config.split
    # By design: all rows of a key are in one split.
    apart = (split.key or config.events.user) if split.strategy == "hash" else None
    expected = {feature.name for feature in config.features if feature.column == apart}
    found = []
    for name in ("validation", "test"):
        for spec in schema.by_role(*READ_BY_MODELS):
            train, own = (statistics.get(s, {}).get(spec.name) for s in ("train", name))
            if spec.vocabulary_size is None or spec.name in expected or not (train and own):
                continue
            is_unknown = own["rows"] >= MIN_ROWS and 0 < own["values"] == count_unknown(own)
            if is_unknown and count_unknown(train) != train["values"]:
                received = f"all {own['values']:,} values are unknown to the train split, or null"
                found.append(
                    _warn(f"unknown feature {spec.name} ({name})", received, "a known one")
                )
    return found


def warn_of_figure(figure: Figure) -> RuleResult:
    """Returns what is warned of where a figure is far from that of the version before."""
    if isinstance(figure.now, Share) and isinstance(figure.before, Share):
        received = f"{figure.now} of {figure.now.whole:,}, {figure.before} in the version before"
        change = 100 * figure.bound.allowed(figure.now, figure.before)
        return _warn(figure.title, received, f"a change of at most {change:.2f} points")
    received = f"{figure.now:,}, {figure.before:,} in the version before"
    return _warn(figure.title, received, "more than half and less than twice as many")
