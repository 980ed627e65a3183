"""Histories: what a user did strictly before an event, bounded, most recent first.

Each history is made by windows whose frame holds no more than its `scanned` latest behaviours,
so the memory of a task does not grow with the length of a user's log.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from conf.etl.build import BuildConfig
from conf.etl.events import EventConditionConfig, GapsConfig, UserHistoryConfig
from etl.events.identity import EVENT_TS_COLUMN, MOMENT_COLUMN, POSITION_COLUMN
from etl.events.sample_filter import find_named_columns
from etl.events.sessions import SESSION_COLUMN, current_sessions
from etl.events.splits import TOTAL_COLUMN
from etl.features.plan import all_histories, reads_label

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def matches(events: DataFrame, where: EventConditionConfig | None) -> Column:
    """Returns whether an event meets a condition, never null; None is met by all."""
    if where is None:
        return F.lit(True)
    value = F.col(where.column)
    if where.one_of is not None:
        met = value.isin(*where.one_of)
    else:
        # The bound in the column's own precision: 4.1 read as float32 is not below 4.1. Beside
        # whole numbers it stays a fraction: 3 is below 3.5.
        is_float32 = events.schema[where.column].dataType.typeName() == "float"
        met = value >= F.lit(where.at_least).cast("float" if is_float32 else "double")
    return F.coalesce(met, F.lit(False))


def condition_columns(config: BuildConfig) -> list[str]:
    """Returns the columns of the log that tell kinds of events apart, in the log's order.

    They are those that labels, `events.where`, `seen.where` and conditions with `one_of` read:
    events of one user, item and time that differ in one, as a view and a purchase, are two.
    """
    rates = [rolling.rate.out_of for rolling in config.rolling if rolling.rate]
    parts = [history.where for history in config.histories]
    parts += [rolling.where for rolling in config.rolling]
    named = {where.column for where in (*parts, *rates) if where and where.one_of}
    named |= {label.column for label in config.all_labels if label.column is not None}
    named |= find_named_columns(config)
    return [c for c in config.sources[config.events.source].column_types if c in named]


_MATCH, _RUN, _LIST = "__history_match", "__history_run", "__history_list"
_SUPERSEDED = "__history_superseded_at"
_MS_PER_DAY = 86_400_000
_MS_PER_UNIT = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": _MS_PER_DAY}


def add_histories(samples: DataFrame, config: BuildConfig) -> DataFrame:
    """Adds every history to each event.

    Args:
        samples: Kept events with `__position`, the event's rank among its user's from 1, and
            `__moment`, `__event_ts_ms` and `__session` where a history reads them.
        config: The build's config.

    Returns:
        The events, one row each, with the columns of each history (`made_history_columns`);
        empty lists where nothing came before.
    """
    for history in all_histories(config):
        samples = _add_history(samples, config, history)
    return samples


def add_latest_histories(users: DataFrame, events: DataFrame, config: BuildConfig) -> DataFrame:
    """Adds every history to each user as it stands at the end of the log.

    Args:
        users: One row per user.
        events: Kept events, as for `add_histories`, with `__total`, the number of their user's.
        config: The build's config.
    """
    user, histories = config.events.user or "", all_histories(config)
    if any(history.needs_time for history in histories):
        now = events.agg(F.max(EVENT_TS_COLUMN).alias(EVENT_TS_COLUMN))
        users = users.crossJoin(F.broadcast(now))
    if any(history.within_session for history in histories):
        users = users.join(current_sessions(events, config), user, "left")
    for history in histories:
        users = users.join(_collect_latest(events, config, history), user, "left")
        users = _finish(users, history, position=None)
    return users.drop(EVENT_TS_COLUMN, SESSION_COLUMN)


def _add_history(samples: DataFrame, config: BuildConfig, history: UserHistoryConfig) -> DataFrame:
    user = config.events.user or ""
    by_user = Window.partitionBy(user).orderBy(POSITION_COLUMN)
    samples = _mark(samples, config, history)
    element, position = _element(config, history), find_position(config, history.reads)
    if not _is_selective(config, history) and position == POSITION_COLUMN:
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
    return _finish(samples, history, F.col(position)).drop(_MATCH, _RUN, _SUPERSEDED)


def find_position(config: BuildConfig, columns: Collection[str]) -> str:
    """Returns the column of the position before which events count for what reads columns of them.

    Of events at one time the one with a label would tell the others theirs: where columns tell a
    label, they do not see one another.
    """
    is_told = config.events.time is not None and reads_label(config, columns)
    return MOMENT_COLUMN if is_told else POSITION_COLUMN


def _collect_latest(
    events: DataFrame, config: BuildConfig, history: UserHistoryConfig
) -> DataFrame:
    """One row per user: the latest behaviours, oldest first, in `__history_list`."""
    user = config.events.user or ""
    marked = _mark(events, config, history).where(_MATCH)
    if not _is_selective(config, history):
        # Every event is a behaviour: what is left of the user's tells its rank, without a sort.
        later = F.col(TOTAL_COLUMN) - F.col(POSITION_COLUMN)
    else:
        newest_first = Window.partitionBy(user).orderBy(F.desc(POSITION_COLUMN))
        later = F.row_number().over(newest_first) - 1
    ranked = marked.withColumn("__later", later)
    bounded = ranked.where(F.col("__later") < history.scanned)
    pairs = F.collect_list(F.struct(POSITION_COLUMN, _element(config, history).alias("element")))
    return bounded.groupBy(user).agg(F.sort_array(pairs)["element"].alias(_LIST))


def _mark(events: DataFrame, config: BuildConfig, history: UserHistoryConfig) -> DataFrame:
    """Adds whether an event is one of the behaviours, and from which position it is repeated."""
    met = matches(events, history.where)
    if _leaves_out_no_items(config, history):
        met = met & F.col(config.events.item or "").isNotNull()
    events = events.withColumn(_MATCH, met)
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


def _is_selective(config: BuildConfig, history: UserHistoryConfig) -> bool:
    """Whether only some events are behaviours."""
    return history.where is not None or _leaves_out_no_items(config, history)


def _leaves_out_no_items(config: BuildConfig, history: UserHistoryConfig) -> bool:
    """Whether events without an item are none: those that are no samples may lack it."""
    return config.events.where is not None and not history.columns


def _holds_items_alone(history: UserHistoryConfig) -> bool:
    """Whether the list is one of items: Spark copies a number far faster than a struct of one."""
    beside = (history.columns, history.needs_time, history.within_session, history.distinct)
    return not any(beside)


def _element(config: BuildConfig, history: UserHistoryConfig) -> Column:
    """What the list holds of each behaviour; never null, as `collect_list` leaves nulls out."""
    if _holds_items_alone(history):
        return F.col(config.events.item or "")
    fields = [F.col(config.events.item or "").alias("item")]
    fields += [F.col(column).alias(f"carried_{column}") for column in history.columns]
    if history.needs_time:
        fields.append(F.col(EVENT_TS_COLUMN).alias("ts"))
    if history.within_session:
        fields.append(F.col(SESSION_COLUMN).alias("session"))
    if history.distinct:
        fields.append(F.col(_SUPERSEDED).alias("superseded_at"))
    return F.struct(*fields)


def _finish(rows: DataFrame, history: UserHistoryConfig, position: Column | None) -> DataFrame:
    """Turns `__history_list` into the history's columns.

    Args:
        rows: Rows with `__history_list`, oldest first, and their own time and session.
        history: The history.
        position: Of the row, or of the first at its time; None: after all events.
    """
    rows = rows.withColumn(_LIST, _select(history, position))
    if _holds_items_alone(history):
        return rows.withColumnRenamed(_LIST, history.name)
    made = {history.name: F.col(_LIST)["item"]}
    made |= {history.carried(c): F.col(_LIST)[f"carried_{c}"] for c in history.columns}
    if history.gaps:
        made[history.gaps.name] = _measure_gaps(history.gaps)
    return rows.withColumns(made).drop(_LIST)


def _select(history: UserHistoryConfig, position: Column | None) -> Column:
    """The behaviours that stay, most recent first."""
    found = F.reverse(F.coalesce(F.col(_LIST), F.array()))
    if history.window_days:
        first = F.col(EVENT_TS_COLUMN) - F.lit(round(history.window_days * _MS_PER_DAY))
        found = F.filter(found, lambda x: x["ts"] >= first)
    if history.within_session:
        found = F.filter(found, lambda x: x["session"] == F.col(SESSION_COLUMN))
    if history.distinct:
        found = F.filter(found, lambda x: _is_newest(x, position))
    return F.slice(found, 1, history.max_len) if history.scanned > history.max_len else found


def _is_newest(element: Column, position: Column | None) -> Column:
    repeated_at = element["superseded_at"]
    if position is None:
        return repeated_at.isNull()
    return repeated_at.isNull() | (repeated_at >= position)


def _measure_gaps(gaps: GapsConfig) -> Column:
    def measure(element: Column) -> Column:
        gap = (F.col(EVENT_TS_COLUMN) - element["ts"]) / F.lit(_MS_PER_UNIT[gaps.unit])
        return (F.log1p(gap) if gaps.log else gap).cast("float")

    return F.transform(_LIST, measure)
