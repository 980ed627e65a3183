"""Labels and weights of events: the config's rule, delayed conversions, factors of the loss."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_, mul, or_
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from conf.etl.build import BuildConfig
from conf.etl.events import EventConditionConfig
from conf.etl.labels import KEEP_RATE, ConversionConfig, LabelConfig
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

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.window import WindowSpec

logger = logging.getLogger("sluice.labels")

IMMATURE = "immature"
UNLABELLED = "unlabelled"
_UNKNOWN = (IMMATURE, UNLABELLED)
LOST = ("null_key", "no_event", "outside_time", "no_sample")
"""Why a conversion makes no sample positive: a null among its keys, no event of these keys, none
in the attribution window before, or there only events that are no samples."""
_CONVERTED, _IS_SAMPLE = "__converted_ts_ms", "__is_sample"
_HOUR_MS, _DAY_MS = 3_600_000, 86_400_000
_CHANCE_PAUSES = 7
"""Among conversions that come at random one pause in a thousand is that many times the mean."""


@dataclass(frozen=True)
class ConversionCounts:
    """The conversions of a label: whether a sample may have led to them, and when they end.

    Attributes:
        rows: All conversions that have a time.
        lost: Those that make no sample positive, by reason (`LOST`). A sample whose window is not
            over yet is one.
        span_ms: Times of the first and the last conversion; None: there is none.
        last_event_ms: Time of the last event; None: there is none.
        until_ms: Up to when labels can be known, by default the time of the last conversion: of
            what happened after it a feed that is late says nothing; None: none can.
    """

    rows: int
    lost: Mapping[str, int]
    span_ms: tuple[int, int] | None
    last_event_ms: int | None
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
        if (rule := label.conversion) is not None:
            rows = _read_conversions(rule, config, sources)
            counts = _count(events, rule, rows, _ms_per_unit(rule, config))
            found[label.name] = counts
            if counts.lost:
                logger.warning("label %r: %s", label.name, _describe_lost(rule, counts))
    return found


def _describe_lost(rule: ConversionConfig, counts: ConversionCounts) -> str:
    reasons = ", ".join(f"{reason} {n:,}" for reason, n in counts.lost.items())
    share = f"{sum(counts.lost.values()):,} of {counts.rows:,} conversions"
    return f"{share} of {rule.source!r}: {reasons} make no sample positive"


def _ms_per_unit(conversion: ConversionConfig, config: BuildConfig) -> int:
    return config.sources[conversion.source].ms_per_unit(conversion.time)


def _count(
    events: DataFrame, conversion: ConversionConfig, conversions: DataFrame, ms: int
) -> ConversionCounts:
    # As it was before the label.
    skipped = F.col(NOT_SAMPLED_COLUMN)
    may_be = F.col(DROP_COLUMN).isNull() & F.coalesce(skipped.isin(*_UNKNOWN), F.lit(True))
    timed = events.select(*conversion.keys, EVENT_TS_COLUMN, may_be.alias(_IS_SAMPLE))
    both = _merge(timed, conversions.withColumn(_IS_SAMPLE, F.lit(False)))
    until, whole = running_and_whole(_in_time(conversion))
    event_ms = F.when(F.col(_CONVERTED).isNull(), F.col(EVENT_TS_COLUMN))
    dated = both.withColumns({
        "__first_ms": F.min(event_ms).over(whole),
        "__last_ms": F.max(event_ms).over(until),
        "__last_sample_ms": F.max(F.when(F.col(_IS_SAMPLE), event_ms)).over(until),
    })  # fmt: skip
    is_conversion, reason = F.col(_CONVERTED).isNotNull(), _name_loss(conversion)
    row = dated.agg(
        F.count_if(is_conversion).alias("rows"),
        F.min(_CONVERTED).alias("first"),
        F.max(_CONVERTED).alias("last"),
        F.max(event_ms).alias("last_event"),
        *[F.count_if(is_conversion & (reason == name)).alias(name) for name in LOST],
    ).collect()[0]
    lost = {name: row[name] for name in LOST if row[name]}
    span = None if row["last"] is None else (row["first"], row["last"])
    until_ms = row["last"] if conversion.until_ts is None else conversion.until_ts * ms
    return ConversionCounts(row["rows"], lost, span, row["last_event"], until_ms)


def _name_loss(conversion: ConversionConfig) -> Column:
    """Why a conversion makes no sample positive; null where it makes one."""

    def is_late(last_ms: str) -> Column:
        age = F.col(_CONVERTED) - F.col(last_ms)
        return ~F.coalesce(age <= _window_ms(conversion), F.lit(False))

    is_lost = (
        _lacks_key(conversion.keys),
        F.col("__first_ms").isNull(),
        is_late("__last_ms"),
        is_late("__last_sample_ms"),
    )
    return F.coalesce(*[F.when(met, name) for name, met in zip(LOST, is_lost, strict=True)])


def _read_conversions(
    conversion: ConversionConfig, config: BuildConfig, sources: Mapping[str, Source]
) -> DataFrame:
    """Time, in milliseconds, and keys of the conversions, named as the events name them."""
    time = F.col(conversion.time) * F.lit(_ms_per_unit(conversion, config))
    keys = [F.col(other).alias(column) for column, other in conversion.keys.items()]
    rows = sources[conversion.source].good.select(*keys, time.alias(_CONVERTED))
    return rows.where(F.col(_CONVERTED).isNotNull())


def _merge(events: DataFrame, conversions: DataFrame) -> DataFrame:
    """Events and conversions in one frame: an event stays one row however many it has."""
    return events.withColumn(_CONVERTED, F.lit(None).cast("bigint")).unionByName(
        conversions.withColumn(EVENT_TS_COLUMN, F.col(_CONVERTED)), allowMissingColumns=True
    )


def _in_time(conversion: ConversionConfig, *, newest_first: bool = False) -> WindowSpec:
    """Rows of the same keys in order: at one moment the event precedes a conversion."""
    same = Window.partitionBy(*conversion.keys, spread_lone(_lacks_key(conversion.keys)))
    time, converted = F.col(EVENT_TS_COLUMN), F.col(_CONVERTED)
    if newest_first:
        return same.orderBy(time.desc_nulls_last(), converted.desc_nulls_last())
    return same.orderBy(time.asc_nulls_first(), converted.asc_nulls_first())


def _window_ms(conversion: ConversionConfig) -> int:
    return round(conversion.within_hours * _HOUR_MS)


def _lacks_key(keys: Iterable[str]) -> Column:
    return reduce(or_, [F.col(key).isNull() for key in keys])


def _add_conversion_label(
    events: DataFrame, name: str, conversion: ConversionConfig, conversions: DataFrame
) -> DataFrame:
    """Adds the label: 1 if a conversion of the same keys came in [event, event + window]."""
    # A null is no key: conversions that lack one are no event's.
    conversions = conversions.where(~_lacks_key(conversion.keys))
    # Newest first: a frame that ends with the partition is gone through anew for each row.
    following, _ = running_and_whole(_in_time(conversion, newest_first=True))
    in_time = F.col("__next_ms") - F.col(EVENT_TS_COLUMN) <= _window_ms(conversion)
    # A given event without a time has no window, hence no label.
    timed = F.col(EVENT_TS_COLUMN).isNotNull()
    return (
        _merge(events, conversions)
        .withColumn("__next_ms", F.min(_CONVERTED).over(following))
        .where(F.col(_CONVERTED).isNull())
        .withColumn(name, F.when(timed, F.coalesce(in_time, F.lit(False))).cast("float"))
        .drop("__next_ms", _CONVERTED)
    )


def is_immature(conversion: ConversionConfig, until_ms: int | None) -> Column:
    """Returns whether the attribution window of an event ends after `until_ms`; null: no time."""
    end_ms = F.col(EVENT_TS_COLUMN) + F.lit(_window_ms(conversion))
    return end_ms.isNotNull() if until_ms is None else end_ms > F.lit(until_ms)


def add_labels(events: DataFrame, config: BuildConfig, sources: Mapping[str, Source]) -> DataFrame:
    """Adds the labels, float32. A given event may lack all; another without any is no sample.

    Of several labels one that is not known yet is null: positives too, as leaving out only the
    others would make the latest events look better.
    """
    if config.first_label is None and config.label_name is not None:
        # Drawn negatives get 0: what happened is a positive.
        return events.withColumn(config.label_name, F.lit(1.0).cast("float"))
    for label in config.all_labels:
        if label.conversion is None:
            events = _add_label(events, label)
            continue
        rows = _read_conversions(label.conversion, config, sources)
        events = _add_conversion_label(events, label.name, label.conversion, rows)
    late = {label.name: _is_late(label, config, sources) for label in config.all_labels}
    return _leave_out_unlabelled(events, config.all_labels, late) if late else events


def _add_label(events: DataFrame, label: LabelConfig) -> DataFrame:
    value = F.col(label.column or "")
    rule = _apply_rule(events, label, value).cast("float")
    return events.withColumn(label.name, F.when(value.isNotNull(), rule))


def _leave_out_unlabelled(
    events: DataFrame, labels: Sequence[LabelConfig], is_late: Mapping[str, Column]
) -> DataFrame:
    given = F.col(GIVEN_TEST_COLUMN) | F.col(GIVEN_VALIDATION_COLUMN)
    lacking, reasons, known = [], [], {}
    for label in labels:
        late, value = is_late[label.name], F.col(label.name)
        lacking.append(value.isNull() | late)
        reasons.append(F.when(late, IMMATURE).when(value.isNull() & ~given, UNLABELLED))
        known[label.name] = F.when(~late, value)
    reason = F.when(reduce(and_, lacking), F.coalesce(*reasons))
    events = leave_out_samples(events, reason)
    return events.withColumns(known) if len(labels) > 1 else events


def _is_late(label: LabelConfig, config: BuildConfig, sources: Mapping[str, Source]) -> Column:
    rule = label.conversion
    if rule is None or rule.immature == "keep":
        return F.lit(False)
    if rule.until_ts is not None:
        until_ms = rule.until_ts * _ms_per_unit(rule, config)
    else:
        rows = _read_conversions(rule, config, sources)
        until_ms = rows.agg(F.max(_CONVERTED)).collect()[0][0]
    return F.coalesce(is_immature(rule, until_ms), F.lit(False))


def _apply_rule(events: DataFrame, label: LabelConfig, value: Column) -> Column:
    if label.graded:
        return value
    if label.at_least is not None:
        condition = EventConditionConfig(column=label.column or "", at_least=label.at_least)
        return matches(events, condition)
    # Values in the column's own precision: 4.1 read as float32 is 4.1.
    kind = events.schema[label.column or ""].dataType
    return value.isin([F.lit(allowed).cast(kind) for allowed in label.values])


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
