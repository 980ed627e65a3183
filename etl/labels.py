"""The label of each event, by the config's rule; what has none is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.etl import BuildConfig, LabelConfig
from etl.conversions import IMMATURE, add_conversion_label
from etl.joins import DROP_COLUMN
from etl.sources import Source
from etl.split import GIVEN_TEST_COLUMN, GIVEN_VALIDATION_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

UNLABELLED = "unlabelled"
LABEL_REASONS = (UNLABELLED, IMMATURE)
"""Why the label leaves events out: they stay what happened before others."""


def add_label(events: DataFrame, config: BuildConfig, sources: Mapping[str, Source]) -> DataFrame:
    """Adds the label, float32. A given event may lack one, an event of the log may not.

    Args:
        events: Event rows with `__drop`.
        config: The build's config.
        sources: The sources as read; conversions are one of them.
    """
    label = config.label
    if label is None:
        if config.label_name is None:
            return events
        # Drawn negatives get 0: what happened is a positive.
        return events.withColumn(config.label_name, F.lit(1.0).cast("float"))
    if label.conversion is not None:
        source = sources[label.conversion.source].good
        return add_conversion_label(events, config, label.conversion, source)
    value = F.col(label.column or "")
    given = F.col(GIVEN_TEST_COLUMN) | F.col(GIVEN_VALIDATION_COLUMN)
    reason = F.when(value.isNull() & ~given, F.lit(UNLABELLED))
    rule = _apply_rule(events, label, value).cast("float")
    return events.withColumn(label.name, F.when(value.isNotNull(), rule)).withColumn(
        DROP_COLUMN, F.coalesce(F.col(DROP_COLUMN), reason)
    )


def _apply_rule(events: DataFrame, label: LabelConfig, value: Column) -> Column:
    # Bounds and values in the column's own precision: 4.1 read as float32 is not below 4.1.
    kind = events.schema[label.column or ""].dataType
    if label.graded:
        return value
    if label.at_least is not None:
        return value >= F.lit(label.at_least).cast(kind)
    return value.isin([F.lit(allowed).cast(kind) for allowed in label.values])
