"""Labels and weights of events: the config's rule, delayed conversions, factors of the loss."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from conf.etl.build import BuildConfig
from conf.etl.labels import ConversionConfig, LabelConfig
from conf.etl.time_units import ms_per_unit
from etl.events.identity import EVENT_TS_COLUMN, drop_events
from etl.events.sample_filter import NOT_SAMPLED_COLUMN
from etl.events.splits import GIVEN_TEST_COLUMN, GIVEN_VALIDATION_COLUMN
from etl.sources.source import Source

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


logger = logging.getLogger("sluice.labels")

IMMATURE = "immature"
_CONVERTED = "__converted_ts_ms"
_HOUR_MS = 3_600_000
_NULL_KEY_PARTS = 1024


NULL_KEY = "null_key"
NO_EVENT = "no_event"
OUTSIDE_TIME = "outside_time"


@dataclass(frozen=True)
class LostConversions:
    """The conversions of a label, by whether an event of the log may have led to them.

    Attributes:
        rows: All conversions that have a time.
        lost: Those that make no event positive, by reason: a null among the keys, no event of the
            same keys, or none within the attribution window before.
        latest_ms: The latest time of an event or conversion; None: there is none.
    """

    rows: int
    lost: Mapping[str, int]
    latest_ms: int | None


def count_lost_conversions(
    events: DataFrame, config: BuildConfig, sources: Mapping[str, Source]
) -> dict[str, LostConversions]:
    """Counts the conversions of each label that has some, in one scan of times and keys.

    Args:
        events: Event rows with `__event_ts_ms`; those left out count too.
        config: The build's config.
        sources: The sources as read.
    """
    found = {}
    for label in config.all_labels:
        if label.conversion is not None:
            rows = sources[label.conversion.source].good
            found[label.name] = _count_lost(events, label.conversion, rows)
            _report_lost(label.name, label.conversion, found[label.name])
    return found


def _count_lost(
    events: DataFrame, conversion: ConversionConfig, source: DataFrame
) -> LostConversions:
    keys = [*conversion.keys]
    merged = events.select(*keys, EVENT_TS_COLUMN, F.lit(None).cast("bigint").alias(_CONVERTED))
    conversions = _read_conversions(conversion, source)
    both = merged.unionByName(conversions.withColumn(EVENT_TS_COLUMN, F.col(_CONVERTED)))
    same = Window.partitionBy(*keys, _spread(keys))
    event_ms = F.when(F.col(_CONVERTED).isNull(), F.col(EVENT_TS_COLUMN))
    # At the same moment the event comes first, as for the label.
    until = same.orderBy(EVENT_TS_COLUMN, F.col(_CONVERTED).asc_nulls_first())
    dated = both.withColumns({
        "__first_ms": F.min(event_ms).over(same),
        "__last_ms": F.max(event_ms).over(
            until.rowsBetween(Window.unboundedPreceding, Window.currentRow)
        ),
    })  # fmt: skip
    age = F.col(_CONVERTED) - F.col("__last_ms")
    in_time = F.coalesce(age <= _window_ms(conversion), F.lit(False))
    reason = (
        F.when(_lacks_key(keys), F.lit(NULL_KEY))
        .when(F.col("__first_ms").isNull(), F.lit(NO_EVENT))
        .when(~in_time, F.lit(OUTSIDE_TIME))
    )
    is_conversion = F.col(_CONVERTED).isNotNull()
    reasons = (NULL_KEY, NO_EVENT, OUTSIDE_TIME)
    row = dated.agg(
        F.count_if(is_conversion).alias("rows"),
        F.max(EVENT_TS_COLUMN).alias("latest"),
        *[F.count_if(is_conversion & (reason == name)).alias(name) for name in reasons],
    ).collect()[0]
    lost = {name: row[name] for name in reasons if row[name]}
    return LostConversions(row["rows"], lost, row["latest"])


def _report_lost(name: str, conversion: ConversionConfig, counts: LostConversions) -> None:
    lost = sum(counts.lost.values())
    if not lost:
        return
    reasons = ", ".join(f"{reason} {n:,}" for reason, n in counts.lost.items())
    received = f"{lost:,} of {counts.rows:,} conversions of {conversion.source!r}: {reasons}"
    logger.warning("label %r: %s belong to no event", name, received)


def _read_conversions(conversion: ConversionConfig, source: DataFrame) -> DataFrame:
    """Time, in milliseconds, and keys of the conversions, named as the events name them."""
    scale = F.lit(ms_per_unit(conversion.time_unit))
    return source.select(
        *[F.col(other).alias(column) for column, other in conversion.keys.items()],
        (F.col(conversion.time) * scale).alias(_CONVERTED),
    ).where(F.col(_CONVERTED).isNotNull())


def _window_ms(conversion: ConversionConfig) -> int:
    return round(conversion.within_hours * _HOUR_MS)


def _lacks_key(keys: Iterable[str]) -> Column:
    return reduce(or_, [F.col(key).isNull() for key in keys])


def _spread(keys: Iterable[str]) -> Column:
    """Parts of the rows without a key, which match nothing: spread, they keep no task busy."""
    return F.when(_lacks_key(keys), F.pmod(EVENT_TS_COLUMN, F.lit(_NULL_KEY_PARTS)))


def add_conversion_label(
    events: DataFrame,
    name: str,
    conversion: ConversionConfig,
    source: DataFrame,
    latest_ms: int | None = None,
) -> DataFrame:
    """Adds the label: 1 if a conversion of the same keys came in [event, event + window].

    Events and conversions are merged in time by key, rather than joined: an event stays one row
    however many conversions its keys have.

    Args:
        events: Event rows with `__event_ts_ms` and `__drop`.
        name: Column of the label.
        conversion: The rule.
        source: Rows of the conversion source.
        latest_ms: The latest time of an event or conversion; None: it is looked for.

    Returns:
        The events, with those whose window is not over by the cut-off marked as `immature`.
    """
    conversions, window_ms = _read_conversions(conversion, source), _window_ms(conversion)
    if conversion.until_ts is not None:
        until_ms = conversion.until_ts * ms_per_unit(conversion.time_unit)
    else:
        until_ms = _latest_ms(events, conversions) if latest_ms is None else latest_ms
    # A null is no key: conversions that lack one are no event's.
    conversions = conversions.where(~_lacks_key(conversion.keys))
    merged = events.withColumn(_CONVERTED, F.lit(None).cast("bigint")).unionByName(
        conversions.withColumn(EVENT_TS_COLUMN, F.col(_CONVERTED)), allowMissingColumns=True
    )
    following = (
        # At the same moment the event comes first: it then sees that conversion.
        Window.partitionBy(*conversion.keys, _spread(conversion.keys))
        .orderBy(EVENT_TS_COLUMN, F.col(_CONVERTED).asc_nulls_first())
        .rowsBetween(Window.currentRow, Window.unboundedFollowing)
    )
    next_ms = F.min(_CONVERTED).over(following)
    in_time = F.col("__next_ms") - F.col(EVENT_TS_COLUMN) <= window_ms
    # A given event without a time has no window, hence no label.
    timed = F.col(EVENT_TS_COLUMN).isNotNull()
    labelled = (
        merged.withColumn("__next_ms", next_ms)
        .where(F.col(_CONVERTED).isNull())
        .withColumn(name, F.when(timed, F.coalesce(in_time, F.lit(False))).cast("float"))
        .drop("__next_ms", _CONVERTED)
    )
    if conversion.immature == "keep":
        return labelled
    # Positives too: dropping only the others would make the latest events look better.
    late = F.col(EVENT_TS_COLUMN) + F.lit(window_ms) > F.lit(until_ms)
    return drop_events(labelled, F.when(late, F.lit(IMMATURE)))


def _latest_ms(events: DataFrame, conversions: DataFrame) -> int:
    """The latest time of either; both sources hold a row, or the build has stopped before."""
    latest = [
        frame.agg(F.max(column)).collect()[0][0]
        for frame, column in ((events, EVENT_TS_COLUMN), (conversions, _CONVERTED))
    ]
    return max(int(value) for value in latest if value is not None)


UNLABELLED = "unlabelled"
LABEL_REASONS = (UNLABELLED, IMMATURE)
"""Why the label leaves events out: they stay what happened before others."""


def add_labels(
    events: DataFrame,
    config: BuildConfig,
    sources: Mapping[str, Source],
    conversions: Mapping[str, LostConversions] | None = None,
) -> DataFrame:
    """Adds the labels, float32. A given event may lack one, an event of the log may not.

    Args:
        events: Event rows with `__drop`.
        config: The build's config.
        sources: The sources as read; conversions are one of them.
        conversions: What is known of the conversions of each label.
    """
    if config.label is None and config.label_name is not None:
        # Drawn negatives get 0: what happened is a positive.
        return events.withColumn(config.label_name, F.lit(1.0).cast("float"))
    for label in config.all_labels:
        if label.conversion is None:
            events = _add_label(events, label)
            continue
        counts = (conversions or {}).get(label.name)
        source = sources[label.conversion.source].good
        latest_ms = None if counts is None else counts.latest_ms
        events = add_conversion_label(events, label.name, label.conversion, source, latest_ms)
    return events


def _add_label(events: DataFrame, label: LabelConfig) -> DataFrame:
    value = F.col(label.column or "")
    given = F.col(GIVEN_TEST_COLUMN) | F.col(GIVEN_VALIDATION_COLUMN)
    # An event that is no sample needs no label.
    lacking = value.isNull() & ~given & F.col(NOT_SAMPLED_COLUMN).isNull()
    reason = F.when(lacking, F.lit(UNLABELLED))
    rule = _apply_rule(events, label, value).cast("float")
    return drop_events(events.withColumn(label.name, F.when(value.isNotNull(), rule)), reason)


def _apply_rule(events: DataFrame, label: LabelConfig, value: Column) -> Column:
    # Bounds and values in the column's own precision: 4.1 read as float32 is not below 4.1.
    kind = events.schema[label.column or ""].dataType
    if label.graded:
        return value
    if label.at_least is not None:
        return value >= F.lit(label.at_least).cast(kind)
    return value.isin([F.lit(allowed).cast(kind) for allowed in label.values])


_DAY_MS = 86_400_000


def add_weights(samples: DataFrame, config: BuildConfig, newest_ts_ms: int | None) -> DataFrame:
    """Adds the weight, float32: the product of what the config declares.

    Down-sampling by a rate r adds 1/r, so that weighted sums have the expectation of the whole.

    Args:
        samples: Samples, negatives included.
        config: The build's config.
        newest_ts_ms: Time of the latest event, whose decay is 1; None without times.
    """
    name = config.weight_name
    if name is None:
        return samples
    weight = F.lit(1.0)
    for factor in _factors(config, newest_ts_ms):
        weight = weight * F.coalesce(factor.cast("double"), F.lit(1.0))
    return samples.withColumn(name, weight.cast("float"))


def _factors(config: BuildConfig, newest_ts_ms: int | None) -> list[Column]:
    factors: list[Column] = []
    weights, label = config.weights, F.col(config.label_name or "")
    if config.down_sampling is not None:
        factors.append(F.lit(1.0) / F.col(config.down_sampling.name))
    if weights is None:
        return factors
    if weights.column is not None:
        factors.append(F.col(weights.column))
    if weights.positive is not None:
        factors.append(F.when(label > 0, F.lit(weights.positive)))
    if weights.negative is not None:
        factors.append(F.when(label == 0, F.lit(weights.negative)))
    if weights.half_life_days is not None and newest_ts_ms is not None:
        age_days = (F.lit(newest_ts_ms) - F.col(EVENT_TS_COLUMN)) / _DAY_MS
        factors.append(F.pow(F.lit(0.5), age_days / weights.half_life_days))
    return factors
