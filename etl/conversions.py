"""Delayed conversions: whether one followed an event within the attribution window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from conf.etl import BuildConfig, ConversionConfig
from etl.joins import DROP_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

IMMATURE = "immature"
_CONVERTED = "__converted_ts_ms"
_HOUR_MS = 3_600_000


def add_conversion_label(
    events: DataFrame, config: BuildConfig, conversion: ConversionConfig, source: DataFrame
) -> DataFrame:
    """Adds the label: 1 if a conversion of the same keys came in [event, event + window].

    Events and conversions are merged in time by key, rather than joined: an event stays one row
    however many conversions its keys have.

    Args:
        events: Event rows with `__event_ts_ms` and `__drop`.
        config: The build's config.
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
        conversions.withColumn("__event_ts_ms", F.col(_CONVERTED)), allowMissingColumns=True
    )
    following = (
        # At the same moment the event comes first: it then sees that conversion.
        Window.partitionBy(*conversion.keys)
        .orderBy("__event_ts_ms", F.col(_CONVERTED).asc_nulls_first())
        .rowsBetween(Window.currentRow, Window.unboundedFollowing)
    )
    label = config.label_name or ""
    next_ms = F.min(_CONVERTED).over(following)
    in_time = F.col("__next_ms") - F.col("__event_ts_ms") <= window_ms
    # A given event without a time has no window, hence no label.
    timed = F.col("__event_ts_ms").isNotNull()
    labelled = (
        merged.withColumn("__next_ms", next_ms)
        .where(F.col(_CONVERTED).isNull())
        .withColumn(label, F.when(timed, F.coalesce(in_time, F.lit(False))).cast("float"))
        .drop("__next_ms", _CONVERTED)
    )
    if conversion.immature == "keep":
        return labelled
    # Positives too: dropping only the others would make the latest events look better.
    late = F.col("__event_ts_ms") + F.lit(window_ms) > F.lit(until_ms)
    return labelled.withColumn(
        DROP_COLUMN, F.coalesce(F.col(DROP_COLUMN), F.when(late, F.lit(IMMATURE)))
    )


def _latest_ms(events: DataFrame, conversions: DataFrame) -> int:
    """The latest time of either; both sources hold a row, or the build has stopped before."""
    latest = [
        frame.agg(F.max(column)).collect()[0][0]
        for frame, column in ((events, "__event_ts_ms"), (conversions, _CONVERTED))
    ]
    return max(int(value) for value in latest if value is not None)
