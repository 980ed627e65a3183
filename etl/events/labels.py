"""Labels and weights of events: the config's rule, delayed conversions, factors of the loss."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_, mul, or_

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.window import WindowSpec

from conf.etl.build import BuildConfig
from conf.etl.labels import KEEP_RATE, ConversionConfig
from etl.events.columns import (
    DROP_COLUMN,
    EVENT_TS_COLUMN,
    GIVEN_TEST_COLUMN,
    GIVEN_VALIDATION_COLUMN,
    NOT_SAMPLED_COLUMN,
    leave_out_samples,
    running_and_whole,
    spread_lone,
)
from etl.events.conditions import matches
from etl.sources.source import Source

logger = logging.getLogger("sluice.labels")

IMMATURE = "immature"
UNLABELLED = "unlabelled"
LOST = ("null_key", "no_event", "outside_time", "no_sample")
"""Why a conversion makes no sample positive: a null among its keys, no event of these keys, none
in the attribution window before, or there only events that are no samples."""
_CONVERTED, _IS_SAMPLE, _REASON = "__converted_ts_ms", "__is_sample", "__lost"
_HOUR_MS, _DAY_MS = 3_600_000, 86_400_000
_CHANCE_PAUSES = 7
"""Among conversions that come at random one pause in a thousand is that many times the mean."""


@dataclass(frozen=True)
class ConversionCounts:
    """The conversions of a label: whether a sample may have led to them, and when they end."""

    rows: int  # that have a time
    lost: Mapping[str, int]  # that make no sample positive, by reason (`LOST`)
    span_ms: tuple[int, int] | None  # of the first and the last one
    last_event_ms: int | None
    # Up to when labels can be known: a feed that is late says nothing of what came after it.
    until_ms: int | None = None

    @property
    def early_ms(self) -> int:
        """By how much the conversions end before the events, at least 0."""
        if self.span_ms is None or self.last_event_ms is None:
            return 0
        return max(0, self.last_event_ms - self.span_ms[1])

    @property
    def ends_early(self) -> bool:
        """Whether they end more than a day, and more than chance makes likely, before the events.

        Conversions that come at random pause for longer than `x` times the mean pause with
        probability exp(-x).
        """
        if self.span_ms is None:
            return False
        first, last = self.span_ms
        likely = _CHANCE_PAUSES * (last - first) / max(1, self.rows - 1)
        return self.early_ms > max(_DAY_MS, likely)


def count_conversions(
    events: DataFrame, config: BuildConfig, sources: Mapping[str, Source]
) -> dict[str, ConversionCounts]:
    """Counts the conversions of each label that has some, and says which no event led to."""
    found = {}
    for label in config.all_labels:
        if (rule := label.conversion) is None:
            continue
        found[label.name] = counts = _count(events, rule, config, sources)
        if counts.lost:
            reasons = ", ".join(f"{reason} {n:,}" for reason, n in counts.lost.items())
            logger.warning(
                "label %r: %s of %s conversions of %r: %s make no sample positive",
                label.name, f"{sum(counts.lost.values()):,}", f"{counts.rows:,}", rule.source,
                reasons,
            )  # fmt: skip
    return found


def _count(
    events: DataFrame, rule: ConversionConfig, config: BuildConfig, sources: Mapping[str, Source]
) -> ConversionCounts:
    conversions, until_ms = _read_conversions(rule, config, sources)
    # As it was before the label.
    skipped = F.col(NOT_SAMPLED_COLUMN)
    may_be = F.coalesce(skipped.isin(IMMATURE, UNLABELLED), F.lit(True))
    is_sample = (F.col(DROP_COLUMN).isNull() & may_be).alias(_IS_SAMPLE)
    timed = events.select(*rule.keys, EVENT_TS_COLUMN, is_sample)
    both = _merge(timed, conversions.withColumn(_IS_SAMPLE, F.lit(False)))
    named = both.withColumn(_REASON, F.when(F.col(_CONVERTED).isNotNull(), _name_loss(rule)))
    rows, first, last, last_event, *numbers = named.agg(
        F.count(_CONVERTED), F.min(_CONVERTED), F.max(_CONVERTED), F.max(_event_ms()),
        *[F.count_if(F.col(_REASON) == reason) for reason in LOST],
    ).collect()[0]  # fmt: skip
    lost = {reason: n for reason, n in zip(LOST, numbers, strict=True) if n}
    span = None if last is None else (first, last)
    return ConversionCounts(rows, lost, span, last_event, last if until_ms is None else until_ms)


def _event_ms() -> Column:
    """Time of a row that is an event; null for a conversion."""
    return F.when(F.col(_CONVERTED).isNull(), F.col(EVENT_TS_COLUMN))


def _name_loss(rule: ConversionConfig) -> Column:
    """Why a conversion makes no sample positive; null where it makes one."""
    before, whole = running_and_whole(_in_time(rule))

    def is_late(event_ms: Column) -> Column:
        age = F.col(_CONVERTED) - F.max(event_ms).over(before)
        return ~F.coalesce(age <= _window_ms(rule), F.lit(False))

    is_lost = (
        _lacks_key(rule.keys),
        F.min(_event_ms()).over(whole).isNull(),
        is_late(_event_ms()),
        is_late(F.when(F.col(_IS_SAMPLE), _event_ms())),
    )
    return F.coalesce(*[F.when(met, name) for name, met in zip(LOST, is_lost, strict=True)])


def _read_conversions(
    rule: ConversionConfig, config: BuildConfig, sources: Mapping[str, Source]
) -> tuple[DataFrame, int | None]:
    """Time of the conversions and their keys, named as the events name them; their declared end."""
    ms = config.sources[rule.source].ms_per_unit(rule.time)
    keys = [F.col(other).alias(column) for column, other in rule.keys.items()]
    time = (F.col(rule.time) * F.lit(ms)).alias(_CONVERTED)
    rows = sources[rule.source].good.select(*keys, time).where(F.col(_CONVERTED).isNotNull())
    return rows, None if rule.until_ts is None else rule.until_ts * ms


def _merge(events: DataFrame, conversions: DataFrame) -> DataFrame:
    """Events and conversions in one frame: an event stays one row however many it has."""
    return events.withColumn(_CONVERTED, F.lit(None).cast("bigint")).unionByName(
        conversions.withColumn(EVENT_TS_COLUMN, F.col(_CONVERTED)), allowMissingColumns=True
    )


def _in_time(rule: ConversionConfig, *, newest_first: bool = False) -> WindowSpec:
    """Rows of the same keys in order: at one moment the event precedes a conversion."""
    same = Window.partitionBy(*rule.keys, spread_lone(_lacks_key(rule.keys)))
    order = [F.col(EVENT_TS_COLUMN), F.col(_CONVERTED)]
    return same.orderBy(*[column.desc() if newest_first else column for column in order])


def _window_ms(rule: ConversionConfig) -> int:
    return round(rule.within_hours * _HOUR_MS)


def _lacks_key(keys: Iterable[str]) -> Column:
    return reduce(or_, [F.col(key).isNull() for key in keys])


def is_immature(rule: ConversionConfig, until_ms: int | None) -> Column:
    """Returns whether the attribution window of an event ends after `until_ms`; null: no time."""
    end_ms = F.col(EVENT_TS_COLUMN) + F.lit(_window_ms(rule))
    return end_ms.isNotNull() if until_ms is None else end_ms > F.lit(until_ms)


def add_labels(events: DataFrame, config: BuildConfig, sources: Mapping[str, Source]) -> DataFrame:
    """Adds the labels, float32. A given event may lack all; another without any is no sample.

    Of several labels one that is not known yet is null: positives too, as leaving out only the
    others would make the latest events look better.
    """
    if config.first_label is None and config.label_name is not None:
        # Drawn negatives get 0: what happened is a positive.
        return events.withColumn(config.label_name, F.lit(1.0).cast("float"))
    is_late = dict.fromkeys((label.name for label in config.all_labels), F.lit(False))
    for label in config.all_labels:
        if (rule := label.conversion) is None:
            value = F.col(label.column or "")
            met = value if label.graded else matches(events, label)
            events = events.withColumn(label.name, F.when(value.isNotNull(), met.cast("float")))
            continue
        conversions, until_ms = _read_conversions(rule, config, sources)
        if rule.immature != "keep":
            if until_ms is None:
                until_ms = conversions.agg(F.max(_CONVERTED)).collect()[0][0]
            is_late[label.name] = F.coalesce(is_immature(rule, until_ms), F.lit(False))
        events = _add_conversion_label(events, label.name, rule, conversions)
    return _leave_out_unlabelled(events, is_late) if is_late else events


def _add_conversion_label(
    events: DataFrame, name: str, rule: ConversionConfig, conversions: DataFrame
) -> DataFrame:
    """Adds the label: 1 if a conversion of the same keys came in [event, event + window]."""
    # A null is no key: conversions that lack one are no event's.
    both = _merge(events, conversions.where(~_lacks_key(rule.keys)))
    # Newest first: a frame that ends with the partition is gone through anew for each row.
    following, _ = running_and_whole(_in_time(rule, newest_first=True))
    pause = F.min(_CONVERTED).over(following) - F.col(EVENT_TS_COLUMN)
    in_time = F.coalesce(pause <= _window_ms(rule), F.lit(False)).cast("float")
    # A given event without a time has no window, hence no label.
    labelled = both.withColumn(name, F.when(F.col(EVENT_TS_COLUMN).isNotNull(), in_time))
    return labelled.where(F.col(_CONVERTED).isNull()).drop(_CONVERTED)


def _leave_out_unlabelled(events: DataFrame, is_late: Mapping[str, Column]) -> DataFrame:
    """Marks events without any label as no samples; `is_late` are labels not known yet, by name."""
    given = F.col(GIVEN_TEST_COLUMN) | F.col(GIVEN_VALIDATION_COLUMN)
    lacks = {name: F.col(name).isNull() for name in is_late}
    reasons = [
        F.when(late, IMMATURE).when(lacks[name] & ~given, UNLABELLED)
        for name, late in is_late.items()
    ]
    lacks_all = reduce(and_, [lacks[name] | late for name, late in is_late.items()])
    events = leave_out_samples(events, F.when(lacks_all, F.coalesce(*reasons)))
    if len(is_late) == 1:
        return events
    return events.withColumns({name: F.when(~late, F.col(name)) for name, late in is_late.items()})


def add_weights(samples: DataFrame, config: BuildConfig, newest_ts_ms: int | None) -> DataFrame:
    """Adds the weight, float32: the product of what the config declares.

    Down-sampling by a rate r adds 1/r, so that weighted sums have the expectation of the whole.
    `newest_ts_ms` is the time of the latest event, whose decay is 1; None without times.
    """
    if config.weight_name is None:
        return samples
    factors = [F.coalesce(f.cast("double"), F.lit(1.0)) for f in _factors(config, newest_ts_ms)]
    weight = reduce(mul, factors, F.lit(1.0))
    return samples.withColumn(config.weight_name, weight.cast("float"))


def _factors(config: BuildConfig, newest_ts_ms: int | None) -> Iterator[Column]:
    weights, label = config.weights, F.col(config.label_name or "")
    if config.down_sampling is not None:
        yield F.lit(1.0) / F.col(KEEP_RATE)
    if weights is None:
        return
    if weights.column is not None:
        yield F.col(weights.column)
    if weights.by_class is not None:
        negative, positive = weights.by_class
        yield F.when(label > 0, F.lit(positive)).when(label == 0, F.lit(negative))
    if weights.half_life_days is not None and newest_ts_ms is not None:
        age_days = (F.lit(newest_ts_ms) - F.col(EVENT_TS_COLUMN)) / _DAY_MS
        yield F.pow(F.lit(0.5), age_days / weights.half_life_days)
