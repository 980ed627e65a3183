"""Sessions: events of a user without a pause longer than a gap between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from conf.etl.build import BuildConfig
from conf.etl.events import SessionsConfig
from etl.events.identity import DROP_COLUMN, EVENT_TS_COLUMN, POSITION_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SESSION_COLUMN = "__session"
"""Number of the session among its user's, from 1."""


def add_sessions(events: DataFrame, config: BuildConfig) -> DataFrame:
    """Adds to each event its session and its place in it.

    Args:
        events: Events with `__drop`, `__position` and `__event_ts_ms`; those left out open no
            session, and what they get themselves means nothing.
        config: The build's config; without `sessions` nothing is added.

    Returns:
        The events with `__session`, `<name>_id` and `<name>_position`.
    """
    sessions, user = config.sessions, config.events.user or ""
    if sessions is None:
        return events
    is_kept = F.col(DROP_COLUMN).isNull()
    in_order = Window.partitionBy(user, is_kept).orderBy(POSITION_COLUMN)
    pause = F.col(EVENT_TS_COLUMN) - F.lag(EVENT_TS_COLUMN).over(in_order)
    begins = F.when(pause.isNull() | (pause > _gap_ms(sessions)), 1).otherwise(0)
    so_far = in_order.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    in_session = Window.partitionBy(user, is_kept, SESSION_COLUMN).orderBy(POSITION_COLUMN)
    return (
        events.withColumn("__begins", begins)
        .withColumn(SESSION_COLUMN, F.sum("__begins").over(so_far))
        .drop("__begins")
        .withColumn(sessions.position_column, F.row_number().over(in_session).cast("bigint"))
        # Named by its start, not its number: a run that reads fewer days gives the same name.
        .withColumn(
            sessions.id_column,
            F.concat_ws("-", F.col(user).cast("string"), F.first(EVENT_TS_COLUMN).over(in_session)),
        )
    )


def current_sessions(events: DataFrame, config: BuildConfig) -> DataFrame:
    """Returns the session that each user is in at the end of the log: user, `__session`.

    Null where the user's last event is further back than a session's gap.
    """
    user = config.events.user or ""
    last = events.groupBy(user).agg(
        F.max(SESSION_COLUMN).alias(SESSION_COLUMN), F.max(EVENT_TS_COLUMN).alias("__last_ts_ms")
    )
    end = F.broadcast(events.agg(F.max(EVENT_TS_COLUMN).alias("__end_ts_ms")))
    sessions = config.sessions or SessionsConfig()
    goes_on = F.col("__end_ts_ms") - F.col("__last_ts_ms") <= _gap_ms(sessions)
    return last.crossJoin(end).select(
        user, F.when(goes_on, F.col(SESSION_COLUMN)).alias(SESSION_COLUMN)
    )


def _gap_ms(sessions: SessionsConfig) -> Column:
    return F.lit(round(sessions.gap_minutes * 60_000))
