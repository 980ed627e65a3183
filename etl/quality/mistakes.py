"""What is refused because it is likely a mistake: it would be published, and nothing learned of it.

A join or a conversion that matches nothing, a vocabulary without tokens, a feature or a label that
is the same in every row. Each is allowed where `contract.allow` names it; what follows from
something allowed is allowed with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from conf.encoders import IDENTITY
from conf.encoders.dates import DatePartConfig
from conf.errors import InputDataError
from conf.etl.build import BuildConfig
from conf.etl.encodings import FeatureConfig
from conf.schema import FeatureSchema
from conf.splits import TEST
from etl.quality.figures import READ_BY_MODELS, Share, count_unknown, share_kept, share_matched
from etl.quality.rules import RuleResult

if TYPE_CHECKING:
    from conf.dates import DateRange
    from etl.encoders.vocabulary import OddTokens
    from etl.events.event_counts import EventCounts
    from etl.events.labels import ConversionCounts

MIN_ROWS = 10
"""In fewer rows than that a value may be the same by chance."""
UNSCALED = 10
"""Mean or deviation beyond which a number is far from 1, where weights are drawn for."""
_MOST_IN_LOG = 0.01
_WITHIN_A_DAY = ("minute", "hour")
_HOUR_MS = 3_600_000
_CHANCE = 1e-3
"""Probability below which no match at all is not taken for chance."""


def find_unmatched(
    config: BuildConfig,
    matches: Mapping[str, Mapping[str, int]],
    conversions: Mapping[str, Mapping[str, int]],
    before: Mapping[str, Share],
) -> list[RuleResult]:
    """Finds the joins that matched no event, and the labels whose conversions make no sample
    positive.

    Args:
        config: The build's config.
        matches: Events by dictionary and outcome of the join.
        conversions: By label all `rows` of its conversions, and by reason those that make no sample
            positive.
        before: Share matched in the version before, by dictionary and by label: where it is small
            and rows are few, none at all may be chance.
    """
    found = []
    for name, share in share_matched(matches).items():
        if _is_nothing(share, before.get(name)):
            received = f"none of {share.whole:,} events has an entry{_reasons(matches[name])}"
            found.append(_judge(config, "unmatched", f"join {name}", name, received))
    sources = {
        label.name: label.conversion.source
        for label in config.all_labels
        if label.conversion is not None
    }
    for name, share in share_kept(conversions).items():
        if _is_nothing(share, before.get(name)):
            reasons = {why: n for why, n in conversions[name].items() if why != "rows"}
            received = f"none of {share.whole:,} makes a sample positive{_reasons(reasons)}"
            rule = f"conversions of label {name}"
            found.append(_judge(config, "unmatched", rule, sources[name], received))
    return found


def find_early_ends(
    config: BuildConfig, conversions: Mapping[str, ConversionCounts]
) -> list[RuleResult]:
    """Finds the labels whose conversions end long before the events, and were not said to.

    Args:
        config: The build's config.
        conversions: What was counted of the conversions of each label that has some.
    """
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
            found.append(RuleResult(rule, "warn", False, received, "a day, or what chance gives"))
    return found


def find_unturned_lists(config: BuildConfig) -> list[RuleResult]:
    """Finds lists of the log that may stand beside its history, which is turned round alone."""
    if config.events.history is None or config.events.history_order != "oldest_first":
        return []
    log = config.sources[config.events.source].column_types
    read = {column for feature in config.features for column in feature.columns}
    left = [
        name
        for name, kind in log.items()
        if kind.startswith("list<") and name in read and name not in config.brought_history
    ]
    if not left:
        return []
    received = (
        f"{', '.join(left)} as in the log; {', '.join(config.brought_history)} turned round, the "
        "latest first: where they stand beside each other, values would belong to other items"
    )
    allowed = "a `pair` of the history, or history_order: latest_first with all lists written so"
    return [RuleResult("order of lists beside events.history", "warn", False, received, allowed)]


def find_short_lookback(config: BuildConfig, dates: DateRange | None) -> list[RuleResult]:
    """Finds windows that reach further back than a run of few days reads.

    Args:
        config: The build's config.
        dates: The run's days; None: the log is read whole.
    """
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
    return [
        RuleResult("windows of rolling features and histories", "warn", False, received, allowed)
    ]


def find_late(config: BuildConfig, counts: EventCounts) -> list[RuleResult]:
    """Finds that rows come under later days than their own: they are lost, day by day.

    Args:
        config: The build's config.
        counts: Counts of the events.
    """
    source = config.events.source
    most = config.sources[source].bad_rows.max_fraction
    share = Share(counts.late, counts.delivered)
    if share.part <= most * share.whole:
        return []
    received = (
        f"{share.part:,} of {share.whole:,} rows read for the run's days are of earlier days: "
        "they are no samples, and a run of these days does not read them"
    )
    allowed = (
        f"at most {most:.2%} (sources.{source}.bad_rows.max_fraction); cut the log by the UTC day "
        "of the event's time, or build ranges of days"
    )
    return [RuleResult("late rows of the log", "warn", False, received, allowed)]


def find_test_in_log(config: BuildConfig, counts: EventCounts) -> list[RuleResult]:
    """Finds that the log holds what the given test events without times are to tell.

    Args:
        config: The build's config.
        counts: Counts of the events.
    """
    share = Share(counts.test_in_log, counts.splits.get(TEST, 0))
    if share.part <= _MOST_IN_LOG * share.whole:
        return []
    received = (
        f"{share.part:,} of {share.whole:,} events of {config.split.test_source!r} are in "
        f"{config.events.source!r} too: a model may have learned them"
    )
    allowed = (
        f"at most {_MOST_IN_LOG:.0%}; take them out of the log, or give both sources times: "
        "then what comes at or after a test event is left out"
    )
    return [RuleResult("test events that the log holds", "warn", False, received, allowed)]


def _is_nothing(now: Share, before: Share | None) -> bool:
    if not now.whole or now.part:
        return False
    return before is None or not before.part or (1 - before.value) ** now.whole < _CHANCE


def _reasons(outcomes: Mapping[str, int]) -> str:
    reasons = [f"{why} {n:,}" for why, n in outcomes.items() if n]
    return f" ({', '.join(reasons)})" if reasons else ""


def find_empty_vocabularies(
    config: BuildConfig, tokens: Mapping[str, int], nothing_matched: Collection[str]
) -> list[RuleResult]:
    """Finds the vocabularies that hold no token.

    Args:
        config: The build's config.
        tokens: Tokens by vocabulary.
        nothing_matched: Sources that were allowed to match nothing, and did.
    """
    empty = [name for name, count in tokens.items() if not count]
    excused = _columns_of(config, nothing_matched)
    return [
        _judge(
            config, "empty_vocabulary", f"vocabulary {name}", name, "no token in the train split"
        )
        for name in empty
        if not _columns_of_vocabulary(config, name) <= excused
    ]


def find_odd_values(odd: Mapping[str, OddTokens]) -> list[RuleResult]:
    """Finds the vocabularies with tokens that are likely quotes or a header line of a file.

    Args:
        odd: By vocabulary, such tokens.
    """
    found = []
    for name, tokens in odd.items():
        if tokens.quoted:
            received = f"{tokens.quoted:,} in quotes, such as {tokens.example}: they are part of it"
            allowed = "values without quotes; format: csv of the source takes them off"
            found.append(RuleResult(f"vocabulary {name}", "warn", False, received, allowed))
        if tokens.headers:
            received = f"{', '.join(tokens.headers)}, as its column is named: is it a header line?"
            allowed = "rows alone; header: true of the source leaves the first line out"
            found.append(RuleResult(f"vocabulary {name}", "warn", False, received, allowed))
    return found


def find_constants(
    config: BuildConfig,
    schema: FeatureSchema,
    statistics: Mapping[str, Any],
    nothing_matched: Collection[str],
) -> list[RuleResult]:
    """Finds the features and labels that are the same in every row of the train split.

    Args:
        config: The build's config.
        schema: The features; of those that no model reads the labels alone count.
        statistics: Unabridged statistics of the train split.
        nothing_matched: Sources that were allowed to match nothing, and did.
    """
    excused = _columns_of(config, nothing_matched)
    declared = {feature.name: feature for feature in config.features}
    found = []
    for spec in schema.by_role(*READ_BY_MODELS):
        # Weights go with the ids of their list, which are what varies.
        if spec.encoding.startswith("weights:") or spec.name not in statistics:
            continue
        what = describe_constant(statistics[spec.name])
        if what is not None and not _is_excused(config, declared.get(spec.name), excused):
            rule = f"constant feature {spec.name}"
            found.append(_judge(config, "constant", rule, spec.name, what))
    for name in _list_labels(config, nothing_matched):
        what = describe_constant(_of_labelled(statistics.get(name, {})))
        if what is not None:
            found.append(_judge(config, "one_class", f"label {name} of one class", name, what))
    return found


def find_unknown(
    config: BuildConfig, schema: FeatureSchema, statistics: Mapping[str, Mapping[str, Any]]
) -> list[RuleResult]:
    """Finds features of which a split knows no value: what is measured there is of unknown values.

    Args:
        config: The build's config.
        schema: The features.
        statistics: Unabridged statistics by split.
    """
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
                rule = f"unknown feature {spec.name} ({name})"
                found.append(RuleResult(rule, "warn", False, received, "one that is known"))
    return found


def refuse_negative_weights(
    schema: FeatureSchema, statistics: Mapping[str, Mapping[str, Any]]
) -> None:
    """Refuses weights of samples below 0: a model would learn the opposite of such a row.

    Args:
        schema: The features.
        statistics: Unabridged statistics by split.

    Raises:
        InputDataError: A weight is below 0; names feature and split.
    """
    for split, by_feature in statistics.items():
        for spec in schema.by_role("weight"):
            low = by_feature.get(spec.name, {}).get("min")
            if low is not None and low < 0:
                raise InputDataError(
                    f"weights of samples are below 0: feature {spec.name!r}, split {split}",
                    received=f"{low:g} at least",
                    allowed="0 or more: a row of weight 0 is not learned",
                    fix="correct the column of the weight; its `minimum: 0` makes such rows bad "
                    "rows, which are counted and left out",
                )


def find_not_finite(statistics: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Finds features with values that are no numbers: a model that reads one learns nothing.

    Args:
        statistics: Unabridged statistics by split and feature.

    Returns:
        A line for each feature of a split.
    """
    found = []
    for split, by_feature in statistics.items():
        for feature, values in by_feature.items():
            counts = {kind: values.get(kind, 0) for kind in ("nan", "infinite")}
            if sum(counts.values()):
                found.append(
                    f"feature {feature!r}, split {split}: {counts['nan']:,} values are NaN and "
                    f"{counts['infinite']:,} infinite; training on it ends with exit code 5"
                )
    return found


def find_unscaled(
    schema: FeatureSchema, statistics: Mapping[str, Mapping[str, Any]]
) -> dict[str, str]:
    """Finds numbers far from 1, which models read as they are and learn badly from.

    Args:
        schema: The features.
        statistics: By split and feature.

    Returns:
        Mean and deviation in train of each such feature that models read.
    """
    found = {}
    for spec in schema.by_role("user", "item", "context"):
        values = statistics["train"].get(spec.name, {})
        is_number = spec.dtype != "bytes" and spec.vocabulary_size is None
        mean, std = values.get("mean"), values.get("std")
        if not is_number or spec.encoding != IDENTITY or mean is None or std is None:
            continue
        if max(abs(mean), std) > UNSCALED:
            found[spec.name] = f"mean {mean:.3g}, deviation {std:.3g}"
    return found


def find_one_class(
    config: BuildConfig,
    statistics: Mapping[str, Mapping[str, Any]],
    nothing_matched: Collection[str],
) -> list[RuleResult]:
    """Finds the labels that are the same in every row of a split that measures.

    Args:
        config: The build's config.
        statistics: Unabridged statistics by split.
        nothing_matched: Sources that were allowed to match nothing, and did.
    """
    found = []
    for split in ("validation", "test"):
        for label in _list_labels(config, nothing_matched, split):
            labelled = _of_labelled(statistics.get(split, {}).get(label, {}))
            what = describe_constant(labelled, split)
            if what is not None and label not in config.contract.allow.one_class:
                rule = f"label {label} of one class ({split})"
                found.append(RuleResult(rule, "warn", False, what, _WANTED["one_class"]))
    return found


def _of_labelled(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the statistics of a label in the rows that have it, if there are any."""
    if not found.get("values"):
        return found
    return {**found, "rows": found["values"], "missing": 0}


def describe_constant(found: Mapping[str, Any], split: str = "train") -> str | None:
    """Returns what stands in every row, in words; None where rows differ, or are too few to tell.

    Args:
        found: Unabridged statistics of a feature; empty where there are none.
        split: Of which they are.
    """
    if not found or found["rows"] < MIN_ROWS:
        return None
    rows = f"all {found['rows']:,} rows"
    whole = _is_same(found)
    raw = found.get("raw", {}).get("values")
    if whole is None and raw is not None:
        whole = _is_same(raw)
    return None if whole is None else f"{whole} in {rows} of the {split} split"


def _is_same(found: Mapping[str, Any]) -> str | None:
    rows, missing = found["rows"], found["missing"]
    if missing == rows:
        return "null"
    if "length" in found:
        length = found["length"]
        if not length["max"]:
            return "an empty list"
        if missing or length["min"] != length["max"] or found["values"] != length["total"]:
            return None
    elif missing:
        return None
    unfinite = found.get("nan", 0) + found.get("infinite", 0)
    if found.get("nan", 0) == found["values"]:
        return "NaN"
    distinct = found["distinct"]
    if unfinite or distinct["count"] != 1 or not distinct["exact"]:
        return None
    return f"the value {found['top']['values'][0][0]}"


def _list_labels(
    config: BuildConfig, nothing_matched: Collection[str], split: str = "train"
) -> list[str]:
    """Labels that are to have two classes: declared ones, and those that drawn negatives make."""
    names = [
        label.name
        for label in config.all_labels
        if label.conversion is None or label.conversion.source not in nothing_matched
    ]
    negatives = config.negatives
    is_drawn = negatives is not None and negatives.draws and split in negatives.splits
    if is_drawn and config.label is None and config.label_name is not None:
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
    if feature.vocabulary in config.contract.allow.empty_vocabulary:
        return True
    return set(feature.columns) <= set(excused)


def _columns_of_vocabulary(config: BuildConfig, name: str) -> set[str]:
    return {
        column
        for feature in config.features
        if feature.vocabulary == name
        for column in feature.columns
    }


def _columns_of(config: BuildConfig, sources: Collection[str]) -> set[str]:
    """Columns that the events get from some dictionaries."""
    return {
        column
        for join in config.joins
        if join.source in sources
        for column in join.added_columns(config.sources[join.source])
    }


_WANTED = {
    "unmatched": "at least one match",
    "empty_vocabulary": "at least one token",
    "constant": "two values or more",
    "one_class": "two values or more",
}


def _judge(config: BuildConfig, key: str, rule: str, name: str, received: str) -> RuleResult:
    is_allowed = name in getattr(config.contract.allow, key)
    if is_allowed:
        received += f"; allowed by contract.allow.{key}"
    return RuleResult(rule, "error", is_allowed, received, _WANTED[key], (key, name))


def list_nothing_matched(results: Iterable[RuleResult]) -> set[str]:
    """Returns the sources of `find_unmatched` that were allowed to match nothing."""
    return {r.allowed_as[1] for r in results if r.allowed_as is not None and r.passed}
