"""Histories: what a user did strictly before an event, bounded, most recent first; and sessions.

Each history is made by windows whose frame holds no more than its `scanned` latest behaviours,
so the memory of a task does not grow with the length of a user's log. A session is a run of a
user's events without a pause longer than a gap.
"""

from __future__ import annotations

from functools import reduce
from operator import and_, or_

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from conf.etl.build import BuildConfig
from conf.etl.events import SESSION_ID, SESSION_POSITION, UserHistoryConfig
from etl.events.columns import (
    DROP_COLUMN,
    EVENT_TS_COLUMN,
    POSITION_COLUMN,
    TOTAL_COLUMN,
    running_and_whole,
)
from etl.events.conditions import find_position, matches

SESSION_COLUMN = "__session"
"""Number of the session among its user's, from 1."""
_MATCH, _RUN, _LIST = "__history_match", "__history_run", "__history_list"
_SUPERSEDED = "__history_superseded_at"
_MS_PER_DAY = 86_400_000
_MS_PER_UNIT = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": _MS_PER_DAY}


def add_histories(samples: DataFrame, config: BuildConfig) -> DataFrame:
    """Adds every history to each kept event; empty lists where nothing came before."""
    for history in config.histories:
        samples = _add_history(samples, config, history)
    return samples


def add_latest_histories(users: DataFrame, events: DataFrame, config: BuildConfig) -> DataFrame:
    """Adds every history to each user, one row each, as it stands at the end of the log."""
    user, histories = config.events.user or "", config.histories
    if not histories:
        return users
    if any(history.needs_time for history in histories):
        now = events.agg(F.max(EVENT_TS_COLUMN).alias(EVENT_TS_COLUMN))
        users = users.crossJoin(F.broadcast(now))
    if any(history.within_session for history in histories):
        users = _add_current_session(users, events, config)
    users = users.join(_collect_latest(events, config), user, "left")
    for history in histories:
        rows = users.withColumnRenamed(_latest(history), _LIST)
        users = _finish(rows, config, history, F.lit(None))
    return users.drop(EVENT_TS_COLUMN, SESSION_COLUMN, "__last_ts_ms")


def _add_history(samples: DataFrame, config: BuildConfig, history: UserHistoryConfig) -> DataFrame:
    user, met = config.events.user or "", _find_met(samples, config, history)
    samples = _mark(samples, config, history, met)
    by_user = Window.partitionBy(user).orderBy(POSITION_COLUMN)
    element, position = _element(config, history), find_position(config, history.reads)
    if met is None and position == POSITION_COLUMN:
        before = F.collect_list(element).over(by_user.rowsBetween(-history.scanned, -1))
        samples = samples.withColumn(_LIST, before)
    else:
        # Each behaviour knows the list up to itself; an event takes that of the latest one
        # before it, however many other events lie between.
        alike = Window.partitionBy(user, _MATCH).orderBy(POSITION_COLUMN)
        counted = F.collect_list(F.when(F.col(_MATCH), element))
        run = counted.over(alike.rowsBetween(1 - history.scanned, Window.currentRow))
        samples = samples.withColumn(_RUN, F.when(F.col(_MATCH), run))
        earlier = by_user.orderBy(position).rangeBetween(Window.unboundedPreceding, -1)
        latest = F.max_by(_RUN, F.when(F.col(_MATCH), F.col(POSITION_COLUMN)))
        samples = samples.withColumn(_LIST, latest.over(earlier))
    return _finish(samples, config, history, F.col(position)).drop(_MATCH, _SUPERSEDED, _RUN)


def _collect_latest(events: DataFrame, config: BuildConfig) -> DataFrame:
    """One row per user: the latest behaviours of each history, oldest first."""
    user, histories = config.events.user or "", config.histories
    met = {history.name: _find_met(events, config, history) for history in histories}
    chosen = [condition for condition in met.values() if condition is not None]
    if len(chosen) == len(histories):
        events = events.where(reduce(or_, chosen))
    for history in histories:
        events = _mark(events, config, history, met[history.name])
        later = F.col(TOTAL_COLUMN) - F.col(POSITION_COLUMN)
        if met[history.name] is not None:
            running, whole = running_and_whole(Window.partitionBy(user).orderBy(POSITION_COLUMN))
            later = F.count_if(_MATCH).over(whole) - F.count_if(_MATCH).over(running)
        found = F.struct(POSITION_COLUMN, _element(config, history).alias("element"))
        is_recent = F.col(_MATCH) & (later < history.scanned)
        events = events.withColumn(_latest(history), F.when(is_recent, found))
        events = events.drop(_MATCH, _SUPERSEDED)
    some = reduce(or_, [F.col(_latest(history)).isNotNull() for history in histories])
    lists = {name: F.sort_array(F.collect_list(name)) for name in map(_latest, histories)}
    elements = [ordered["element"].alias(name) for name, ordered in lists.items()]
    return events.where(some).groupBy(user).agg(*elements)


def _latest(history: UserHistoryConfig) -> str:
    return f"__latest_{history.name}"


def _find_met(events: DataFrame, config: BuildConfig, history: UserHistoryConfig) -> Column | None:
    """Whether an event is one of the behaviours; None: all are."""
    met = [matches(events, history.where)] if history.where is not None else []
    if config.events.where is not None and not history.columns:
        # Events that are no samples may lack an item.
        met.append(F.col(config.events.item or "").isNotNull())
    return reduce(and_, met) if met else None


def _mark(
    events: DataFrame, config: BuildConfig, history: UserHistoryConfig, met: Column | None
) -> DataFrame:
    """Adds whether an event is one of the behaviours, and from which position it is repeated."""
    events = events.withColumn(_MATCH, F.lit(True) if met is None else met)
    if history.distinct is None:
        return events
    item, alike = config.events.item or "", [config.events.user or "", _MATCH]
    # The position of the repeat lies ahead of the event, yet tells later events only about what
    # is behind them: each compares it with its own position.
    if history.distinct == "item":
        by_item = Window.partitionBy(*alike, item).orderBy(POSITION_COLUMN)
        repeated = F.lead(POSITION_COLUMN).over(by_item)
    else:
        in_order = Window.partitionBy(*alike).orderBy(POSITION_COLUMN)
        same = F.lead(item).over(in_order) == F.col(item)
        repeated = F.when(same, F.lead(POSITION_COLUMN).over(in_order))
    return events.withColumn(_SUPERSEDED, repeated)


def _list_beside_item(history: UserHistoryConfig) -> list[str]:
    read = {
        EVENT_TS_COLUMN: history.needs_time,
        SESSION_COLUMN: history.within_session,
        _SUPERSEDED: history.distinct,
    }
    return [*history.columns, *(name for name, is_read in read.items() if is_read)]


def _element(config: BuildConfig, history: UserHistoryConfig) -> Column:
    """What the list holds of each behaviour; never null, as `collect_list` leaves nulls out."""
    item, beside = config.events.item or "", _list_beside_item(history)
    # Spark copies a number far faster than a struct of one.
    return F.struct(*dict.fromkeys([item, *beside])) if beside else F.col(item)


def _finish(
    rows: DataFrame, config: BuildConfig, history: UserHistoryConfig, position: Column
) -> DataFrame:
    """Turns `__history_list`, oldest first, into the history's columns.

    `position` is that of the row, or of the first at its time; null: after all events.
    """
    rows = rows.withColumn(_LIST, _select(history, position))
    if not _list_beside_item(history):
        return rows.withColumnRenamed(_LIST, history.name)
    made = {history.name: F.col(_LIST)[config.events.item or ""]}
    made |= {history.carried(column): F.col(_LIST)[column] for column in history.columns}
    if history.gaps:
        now, unit = F.col(EVENT_TS_COLUMN), F.lit(_MS_PER_UNIT[history.gaps])
        ages = F.transform(_LIST, lambda x: ((now - x[EVENT_TS_COLUMN]) / unit).cast("float"))
        made[history.carried("age")] = ages
    return rows.withColumns(made).drop(_LIST)


def _select(history: UserHistoryConfig, position: Column) -> Column:
    """The behaviours that stay, most recent first."""
    found = F.reverse(F.coalesce(F.col(_LIST), F.array()))
    if history.window_days:
        first = F.col(EVENT_TS_COLUMN) - F.lit(round(history.window_days * _MS_PER_DAY))
        found = F.filter(found, lambda x: x[EVENT_TS_COLUMN] >= first)
    if history.within_session:
        found = F.filter(found, lambda x: x[SESSION_COLUMN] == F.col(SESSION_COLUMN))
    if history.distinct:
        found = F.filter(found, lambda x: x[_SUPERSEDED].isNull() | (x[_SUPERSEDED] >= position))
    return F.slice(found, 1, history.max_len) if history.scanned > history.max_len else found


def add_sessions(events: DataFrame, config: BuildConfig) -> DataFrame:
    """Adds to each event `__session`, `session_id` and `session_position`, if asked for.

    Events that are left out open no session, and what they get themselves means nothing.
    """
    if config.session_gap_minutes is None:
        return events
    user = config.events.user or ""
    in_order = Window.partitionBy(user).orderBy(POSITION_COLUMN)
    so_far, _ = running_and_whole(in_order)
    before = in_order.rowsBetween(Window.unboundedPreceding, -1)
    is_kept, event = F.col(DROP_COLUMN).isNull(), F.struct(EVENT_TS_COLUMN, POSITION_COLUMN)
    previous = F.last(F.when(is_kept, event), ignorenulls=True).over(before)
    pause = F.col(EVENT_TS_COLUMN) - previous[EVENT_TS_COLUMN]
    begins = is_kept & ~F.coalesce(pause <= _gap_ms(config), F.lit(False))
    first = F.last(F.when(F.col("__begins"), event), ignorenulls=True).over(so_far)
    # Named by its start, not its number: a run that reads fewer days gives the same name.
    start = F.concat_ws("-", F.col(user).cast("string"), F.col("__first")[EVENT_TS_COLUMN])
    position = F.col(POSITION_COLUMN) - F.col("__first")[POSITION_COLUMN] + 1
    return (
        events.withColumn("__begins", begins)
        .withColumns({SESSION_COLUMN: F.count_if("__begins").over(so_far), "__first": first})
        .withColumns({SESSION_POSITION: position, SESSION_ID: start})
        .drop("__begins", "__first")
    )


def _add_current_session(users: DataFrame, events: DataFrame, config: BuildConfig) -> DataFrame:
    """Adds the session that each user is in at the end of the log; null where its gap is over."""
    user = config.events.user or ""
    last = events.groupBy(user).agg(
        F.max(SESSION_COLUMN).alias(SESSION_COLUMN), F.max(EVENT_TS_COLUMN).alias("__last_ts_ms")
    )
    goes_on = F.col(EVENT_TS_COLUMN) - F.col("__last_ts_ms") <= _gap_ms(config)
    users = users.join(last, user, "left")
    return users.withColumn(SESSION_COLUMN, F.when(goes_on, F.col(SESSION_COLUMN)))


def _gap_ms(config: BuildConfig) -> Column:
    return F.lit(round((config.session_gap_minutes or 0) * 60_000))
