"""Events as a build prepares them, from rows in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from etl.events.event_log import PreparedEvents, prepare_events
from tests.etl.logs import memory_source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from conf.dates import DateRange
    from conf.etl.build import BuildConfig


def prepare(
    spark: SparkSession,
    config: BuildConfig,
    log: Sequence[Sequence[Any]],
    dates: DateRange | None = None,
    **others: Sequence[Sequence[Any]],
) -> PreparedEvents:
    """The log's rows, and those of other sources by name."""
    rows = {config.events.source: log, **others}
    sources = {name: memory_source(spark, config, name, rows[name]) for name in rows}
    return prepare_events(config, sources, dates)
