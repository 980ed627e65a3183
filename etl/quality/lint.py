"""Findings of a build, and its lint: configurations and data that train nothing.

A join or a conversion that matches nothing, a vocabulary without tokens, a feature or a label that
is the same in every row are refused, unless `contract.allow` names them; what follows from
something allowed is allowed with it. What is only odd is warned of.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from conf.errors import InputDataError
from conf.etl.build import BuildConfig
from conf.etl.encodings import DatePartConfig, FeatureConfig
from conf.schema import FeatureSchema
from conf.splits import EVENT_SPLITS, TEST, TRAIN
from etl.quality.figures import (
    READ_BY_MODELS,
    Figure,
    Figures,
    Outcomes,
    Share,
    allowed_change,
    count_unknown,
    share_matched,
)

if TYPE_CHECKING:
    from conf.dates import DateRange
    from etl.encoders.vocabulary import OddTokens
    from etl.events.event_counts import EventCounts
    from etl.events.labels import ConversionCounts

logger = logging.getLogger("sluice.contract")

Statistics = Mapping[str, Mapping[str, Any]]
"""Statistics by split and feature."""


@dataclass(frozen=True)
class Finding:
    """What a check found: `rule` is its kind and target, as `range ratings.rating`.

    What no rule declares has `allowed_as`: the name in `contract.allow` that lets it pass.
    """

    rule: str
    severity: str
    passed: bool
    received: str
    allowed: str
    allowed_as: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "allowed_as"}


def warning(rule: str, received: str, allowed: str) -> Finding:
    return Finding(rule, "warn", False, received, allowed)


def settle(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Logs what is to be warned of, and refuses errors."""
    settled = tuple(findings)
    errors = [found for found in settled if not found.passed and found.severity == "error"]
    for found in settled:
        if not found.passed and found.severity == "warn":
            said = "data contract: %s: received %s; allowed %s"
            logger.warning(said, found.rule, found.received, found.allowed)
    if errors:
        raise _refusal(errors)
    return settled


def _refusal(errors: Sequence[Finding]) -> InputDataError:
    indent, count = "\n            ", len(errors)
    named = [found.allowed_as for found in errors if found.allowed_as is not None]
    fix = "correct the input or the config"
    if named:
        fix += f", or allow it by name: `contract: {{allow: [{', '.join(dict.fromkeys(named))}]}}`"
    if len(named) < count:
        fix += ", or change `contract.rules` (`severity: warn` lets a rule pass)"
    return InputDataError(
        f"the data look wrong in {count} way{'s' * (count > 1)}; nothing was published",
        received=indent.join(f"{found.rule}: {found.received}" for found in errors),
        allowed=indent.join(f"{found.rule}: {found.allowed}" for found in errors),
        fix=f"{fix}; the last version stays current",
    )


MIN_ROWS = 10
"""In fewer rows than that a value may be the same by chance."""
_MOST_IN_LOG = 0.01
_WITHIN_A_DAY = ("minute", "hour")
_HOUR_MS = 3_600_000
_CHANCE = 1e-3
"""Probability below which no match at all is not taken for chance."""
_TWO = "two values or more"


def _refuse(config: BuildConfig, rule: str, name: str, received: str, allowed: str) -> Finding:
    is_allowed = name in config.contract.allow
    received += "; allowed by contract.allow" if is_allowed else ""
    return Finding(rule, "error", is_allowed, received, allowed, name)


def find_unmatched(
    config: BuildConfig, matches: Outcomes, conversions: Outcomes, before: Figures
) -> Iterator[Finding]:
    """Finds joins that matched no event, and labels whose conversions make no sample positive."""
    labels = {label.name: label.conversion for label in config.all_labels if label.conversion}
    for (kind, name, split), now in share_matched(matches, conversions).items():
        earlier = before.get((kind, name, split))
        rate = earlier.value if isinstance(earlier, Share) else 0.0
        is_chance = rate and (1 - rate) ** now.whole >= _CHANCE
        if not now.whole or now.part or is_chance:
            continue
        if kind == "joined":
            rule, source, what = f"join {name}", name, "events has an entry"
        else:
            rule, source = f"conversions of label {name}", labels[name].source
            what = "makes a sample positive"
        outcomes = (matches if kind == "joined" else conversions)[name].items()
        reasons = ", ".join(f"{why} {n:,}" for why, n in outcomes if n and why != "rows")
        received = f"none of {now.whole:,} {what}" + (f" ({reasons})" if reasons else "")
        yield _refuse(config, rule, source, received, "at least one match")


def find_odd_events(
    config: BuildConfig,
    counts: EventCounts,
    conversions: Mapping[str, ConversionCounts],
    dates: DateRange | None,
) -> Iterator[Finding]:
    """Finds what is odd of joined events: nothing of it is refused."""
    yield from _find_early_ends(config, conversions)
    yield from find_unturned_lists(config)
    yield from find_short_lookback(config, dates)
    source = config.events.source
    if (seen := counts.test_in_log) > _MOST_IN_LOG * (tested := counts.splits.get(TEST, 0)):
        yield warning(
            "test events that the log holds",
            f"{seen:,} of {tested:,} events of {config.split.test_source!r} are in {source!r} too",
            f"at most {_MOST_IN_LOG:.0%}; take them out of the log, or give both times",
        )
    if counts.late > (most := config.sources[source].max_bad_rows) * counts.delivered:
        yield warning(
            "late rows of the log",
            f"{counts.late:,} of {counts.delivered:,} rows read for the run's days are of earlier "
            "days, and no run reads them",
            f"at most {most:.2%} (sources.{source}.max_bad_rows); cut the log by UTC day, or build "
            "ranges of days",
        )


def _find_early_ends(
    config: BuildConfig, conversions: Mapping[str, ConversionCounts]
) -> Iterator[Finding]:
    """Finds labels whose conversions end long before the events, and were not said to."""
    for label in config.all_labels:
        rule = label.conversion
        if rule is None or rule.until_ts is not None or not conversions[label.name].ends_early:
            continue
        hours = conversions[label.name].early_ms / _HOUR_MS
        yield warning(
            f"end of the conversions of label {label.name}",
            f"the last conversion of {rule.source!r} comes {hours:.1f} hours before the last "
            "event: labels count as known up to it alone",
            "a day, or what chance gives; declare `until_ts` where conversions are complete later",
        )


def find_unturned_lists(config: BuildConfig) -> list[Finding]:
    """Finds lists of the log that may stand beside its history, which is turned round alone."""
    if config.events.history is None or config.events.history_order != "oldest_first":
        return []
    log, turned = config.sources[config.events.source].column_types, config.brought_history
    read = {column for feature in config.features for column in feature.columns} - {*turned}
    left = [name for name, kind in log.items() if kind.startswith("list<") and name in read]
    found = warning(
        "order of lists beside events.history",
        f"{', '.join(left)} as in the log; {', '.join(turned)} turned round, the latest first",
        "a `pair` of the history, or history_order: latest_first with all lists written so",
    )
    return [found] if left else []


def find_short_lookback(config: BuildConfig, dates: DateRange | None) -> Iterator[Finding]:
    """Finds windows that reach further back than a run of few days reads."""
    source = config.events.source
    days = config.sources[source].days
    if dates is None or days is None:
        return
    windows = {rolling.name: rolling.window_days for rolling in config.rolling}
    windows |= {h.name: h.window_days for h in config.histories if h.window_days is not None}
    longer = [
        f"{name} ({'all of the log' if window is None else f'{window:g} days'})"
        for name, window in windows.items()
        if window is None or window > days.lookback_days
    ]
    if longer:
        yield warning(
            "windows of rolling features and histories",
            f"{', '.join(longer)}; a run reads {days.lookback_days} days before its own: days that "
            "are built one by one hold less than a range of days",
            f"window_days of at most sources.{source}.days.lookback_days",
        )


def find_empty_vocabularies(
    config: BuildConfig, tokens: Mapping[str, int], nothing_matched: Collection[str]
) -> list[Finding]:
    excused, received = _columns_of(config, nothing_matched), "no token in the train split"
    filled = {f.vocabulary for f in config.features if not {*f.columns} <= excused}
    return [
        _refuse(config, f"vocabulary {name}", name, received, "at least one token")
        for name, count in tokens.items()
        if not count and name in filled
    ]


def _columns_of(config: BuildConfig, sources: Collection[str]) -> set[str]:
    """Columns that the events get from some dictionaries."""
    joins = [join for join in config.joins if join.source in sources]
    return {column for j in joins for column in j.added_columns(config.sources[j.source])}


def find_odd_values(odd: Mapping[str, OddTokens]) -> Iterator[Finding]:
    """Finds vocabularies with tokens that are likely quotes or a header line of a file."""
    for name, tokens in odd.items():
        if tokens.quoted:
            received = f"{tokens.quoted:,} in quotes, such as {tokens.example}: they are part of it"
            allowed = "values without quotes; format: csv of the source takes them off"
            yield warning(f"vocabulary {name}", received, allowed)
        if tokens.headers:
            received = f"{', '.join(tokens.headers)}, as its column is named: is it a header line?"
            allowed = "rows alone; header: true of the source leaves the first line out"
            yield warning(f"vocabulary {name}", received, allowed)


def find_constants(
    config: BuildConfig,
    schema: FeatureSchema,
    statistics: Mapping[str, Any],
    nothing_matched: Collection[str],
) -> Iterator[Finding]:
    """Finds the features that are the same in every row of the train split."""
    excused = _columns_of(config, nothing_matched)
    declared = {feature.name: feature for feature in config.features}
    for spec in schema.by_role(*READ_BY_MODELS):
        name, what = spec.name, describe_constant(statistics.get(spec.name, {}))
        # Weights go with the ids of their list, which are what varies.
        if what is None or spec.encoding.startswith("weights:"):
            continue
        if name not in declared or not _is_excused(config, declared[name], excused):
            yield _refuse(config, f"constant feature {name}", name, what, _TWO)


def _is_excused(config: BuildConfig, feature: FeatureConfig, excused: Collection[str]) -> bool:
    if isinstance(feature.encoding, DatePartConfig):
        # A log of one day has one weekday, and one of a fortnight mostly one month.
        return feature.encoding.part not in _WITHIN_A_DAY
    return feature.vocabulary in config.contract.allow or {*feature.columns} <= {*excused}


def find_one_class(
    config: BuildConfig, statistics: Statistics, nothing_matched: Collection[str]
) -> Iterator[Finding]:
    """Finds the labels that are the same in every row of a split: an error in the train split."""
    for split in EVENT_SPLITS:
        for label in _list_labels(config, nothing_matched, split):
            labelled = statistics.get(split, {}).get(label, {})
            if labelled.get("values"):  # Of several labels a row may lack some.
                labelled = {**labelled, "rows": labelled["values"], "missing": 0}
            what, rule = describe_constant(labelled, split), f"label {label} of one class"
            if what is not None and split == TRAIN:
                yield _refuse(config, rule, label, what, _TWO)
            elif what is not None and label not in config.contract.allow:
                yield warning(f"{rule} ({split})", what, _TWO)


def _list_labels(config: BuildConfig, nothing_matched: Collection[str], split: str) -> list[str]:
    """Labels that are to have two classes: declared ones, and those that drawn negatives make."""
    negatives = config.negatives
    is_drawn = negatives is not None and negatives.draws and split in negatives.splits
    if config.first_label is None:
        return [config.label_name] if is_drawn and config.label_name is not None else []
    return [
        label.name
        for label in config.all_labels
        if label.conversion is None or label.conversion.source not in nothing_matched
    ]


def describe_constant(found: Mapping[str, Any], split: str = TRAIN) -> str | None:
    """Names what stands in every row; None where rows differ, or are too few to tell."""
    if not found or found["rows"] < MIN_ROWS:
        return None
    raw = found.get("raw", {}).get("values")
    same = _name_same(found) or (raw and _name_same(raw))
    return f"{same} in all {found['rows']:,} rows of the {split} split" if same else None


def _name_same(found: Mapping[str, Any]) -> str | None:
    missing, length, values = found["missing"], found.get("length"), found["values"]
    if missing == found["rows"]:
        return "null"
    if length is not None:
        if not length["max"]:
            return "an empty list"
        if length["min"] != length["max"] or values != length["total"]:
            return None
    nan, distinct = found.get("nan", 0), found["distinct"]
    if nan == values and not missing:
        return "NaN"
    unequal = missing + nan + found.get("infinite", 0)
    if unequal or distinct["count"] != 1 or not distinct["exact"]:
        return None
    return f"the value {found['top']['values'][0][0]}"


def find_unknown(
    config: BuildConfig, schema: FeatureSchema, statistics: Statistics
) -> Iterator[Finding]:
    """Finds features of which a split knows no value: it measures nothing of them."""
    split = config.split
    # By design: all rows of a key are in one split.
    apart = (split.key or config.events.user) if split.strategy == "hash" else None
    expected = {feature.name for feature in config.features if feature.column == apart}
    read = [s.name for s in schema.by_role(*READ_BY_MODELS) if s.vocabulary_size is not None]
    for held_out in ("validation", "test"):
        for name in (name for name in read if name not in expected):
            train, own = (statistics.get(s, {}).get(name) for s in (TRAIN, held_out))
            if not train or not own or count_unknown(train) == train["values"]:
                continue
            if own["rows"] >= MIN_ROWS and 0 < own["values"] == count_unknown(own):
                received = f"all {own['values']:,} values are unknown to the train split, or null"
                yield warning(f"unknown feature {name} ({held_out})", received, "a known one")


def warn_of_figure(figure: Figure) -> Finding:
    """Returns what is warned of where a figure is far from that of the version before."""
    now, before = figure.now, figure.before
    if isinstance(now, Share) and isinstance(before, Share):
        change = 100 * allowed_change(figure.kind, now, before)
        received = f"{now} of {now.whole:,}, {before} in the version before"
        return warning(figure.title, received, f"a change of at most {change:.2f} points")
    received = f"{now:,}, {before:,} in the version before"
    return warning(figure.title, received, "more than half and less than twice as many")


def refuse_negative_weights(schema: FeatureSchema, statistics: Statistics) -> None:
    """Refuses weights of samples below 0: a model would learn the opposite of such a row."""
    for split, by_feature in statistics.items():
        for spec in schema.by_role("weight"):
            low = by_feature.get(spec.name, {}).get("min")
            if low is not None and low < 0:
                raise InputDataError(
                    f"weights of samples are below 0: feature {spec.name!r}, split {split}",
                    received=f"{low:g} at least",
                    fix="correct the column of the weight, or declare its `minimum: 0`: such rows "
                    "are then bad rows, counted and left out",
                )
