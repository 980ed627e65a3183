"""Labels and weights of events: the config's rule, delayed conversions, factors of the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from conf.etl.build import BuildConfig
from conf.etl.labels import ConversionConfig, LabelConfig
from etl.events.identity import EVENT_TS_COLUMN, drop_events
from etl.events.sample_filter import NOT_SAMPLED_COLUMN
from etl.events.splits import GIVEN_TEST_COLUMN, GIVEN_VALIDATION_COLUMN
from etl.sources.source import Source

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


IMMATURE = "immature"
_CONVERTED = "__converted_ts_ms"
_HOUR_MS = 3_600_000


def add_conversion_label(
    events: DataFrame, name: str, conversion: ConversionConfig, source: DataFrame
) -> DataFrame:
    """Adds the label: 1 if a conversion of the same keys came in [event, event + window].

    Events and conversions are merged in time by key, rather than joined: an event stays one row
    however many conversions its keys have.

    Args:
        events: Event rows with `__event_ts_ms` and `__drop`.
        name: Column of the label.
        conversion: The rule.
        source: Rows of the conversion source.

    Returns:
        The events, with those whose window is not over by the cut-off marked as `immature`.
    """
    scale = F.lit(1000 if conversion.time_unit == "s" else 1)
    conversions = source.select(
        *[F.col(other).alias(column) for column, other in conversion.keys.items()],
        (F.col(conversion.time) * scale).alias(_CONVERTED),
    ).where(F.col(_CONVERTED).isNotNull())
    window_ms = round(conversion.within_hours * _HOUR_MS)
    if conversion.until_ts is not None:
        until_ms = conversion.until_ts * (1000 if conversion.time_unit == "s" else 1)
    else:
        until_ms = _latest_ms(events, conversions)
    merged = events.withColumn(_CONVERTED, F.lit(None).cast("bigint")).unionByName(
        conversions.withColumn(EVENT_TS_COLUMN, F.col(_CONVERTED)), allowMissingColumns=True
    )
    following = (
        # At the same moment the event comes first: it then sees that conversion.
        Window.partitionBy(*conversion.keys)
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


def add_labels(events: DataFrame, config: BuildConfig, sources: Mapping[str, Source]) -> DataFrame:
    """Adds the labels, float32. A given event may lack one, an event of the log may not.

    Args:
        events: Event rows with `__drop`.
        config: The build's config.
        sources: The sources as read; conversions are one of them.
    """
    if config.label is None and config.label_name is not None:
        # Drawn negatives get 0: what happened is a positive.
        return events.withColumn(config.label_name, F.lit(1.0).cast("float"))
    for label in config.all_labels:
        events = _add_label(events, label, sources)
    return events


def _add_label(events: DataFrame, label: LabelConfig, sources: Mapping[str, Source]) -> DataFrame:
    if label.conversion is not None:
        source = sources[label.conversion.source].good
        return add_conversion_label(events, label.name, label.conversion, source)
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
