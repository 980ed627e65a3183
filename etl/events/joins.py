"""Joins of the event log with its dictionaries, as they stood at the event's time where dated.

Each key is checked and each event without an entry is counted by its reason. An as-of join
takes the entry that was valid, and known, at the event's time: events and entries of one key are
sorted together by time, one shuffle and one sort, linear in the rows. In the other joins Spark
itself splits the events of a frequent key over several tasks (adaptive skew join).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from conf.errors import InputDataError
from conf.etl.build import BuildConfig
from conf.etl.events import AsOf, JoinConfig
from etl.events.columns import (
    DROP_COLUMN,
    EVENT_TS_COLUMN,
    drop_events,
    running_and_whole,
    spread_lone,
)
from etl.sources.source import ORDER_COLUMN, Source

NULL_KEY = "null_key"
UNKNOWN_KEY = "unknown_key"
NOT_YET_VALID = "not_yet_valid"
EXPIRED = "expired"
MATCHED = "matched"
OUTCOMES = (MATCHED, NULL_KEY, UNKNOWN_KEY, NOT_YET_VALID, EXPIRED)
"""What may become of a join, in the order of the manifest."""
_BROADCAST_BYTES = 32 << 20
"""Largest dictionary, in bytes of files, that is sent to all tasks."""
_IS_EVENT, _ENTRY, _VERSION, _EXISTS = "__is_event", "__entry", "__version", "__exists"
_NOW = "__now"


@dataclass(frozen=True)
class DictionaryJoin:
    """One join: the dictionary's rows, its key, whether they are known to be few.

    `ms` are the milliseconds of a unit, by as-of column.
    """

    config: JoinConfig
    rows: DataFrame
    key: str
    is_small: bool = False
    ms: Mapping[str, int] = field(default_factory=dict)

    @property
    def as_of(self) -> AsOf:
        """How entries that change are told apart, of a join that is as of the event's time."""
        return cast(AsOf, self.config.as_of)

    @property
    def versions(self) -> list[str]:
        """Times that tell the entries of a key apart; none where it has but one."""
        times = (self.config.valid_from, self.config.known_at)
        return [column for column in times if column is not None]


def plan_joins(config: BuildConfig, sources: Mapping[str, Source]) -> list[DictionaryJoin]:
    """Resolves the joins of a config, in their order."""
    joins = []
    for join in config.joins:
        declared, source = config.sources[join.source], sources[join.source]
        size = sum(file.bytes for file in source.files)
        is_small = bool(source.files) and size <= _BROADCAST_BYTES
        times = () if join.as_of is None else join.as_of.columns
        ms = {column: declared.ms_per_unit(column) for column in times}
        rows = source.good.drop(ORDER_COLUMN)
        joins.append(DictionaryJoin(join, rows, declared.key or "", is_small, ms))
    return joins


def join_dictionaries(
    events: DataFrame, config: BuildConfig, sources: Mapping[str, Source]
) -> DataFrame:
    """Joins every dictionary to the events: one row per event before and after."""
    for join in plan_joins(config, sources):
        check_unique_key(join)
        events = join_dictionary(events, join)
    return events


def check_unique_key(join: DictionaryJoin) -> None:
    """Refuses a dictionary whose key repeats: joining it would multiply events."""
    columns = [join.key, *join.versions]
    counts = join.rows.groupBy(*columns).count().where("count > 1")
    repeated = counts.orderBy(*columns).limit(5).collect()
    if repeated:
        shown = [" ".join(map(str, row[:-1])) + f" ({row['count']} rows)" for row in repeated]
        raise InputDataError(
            f"dictionary {join.config.source!r} is not unique by its key ({', '.join(columns)})",
            received=", ".join(shown),
            fix="de-duplicate the dictionary, or declare another key",
        )


def refuse_unmatched(events: DataFrame, config: BuildConfig) -> None:
    """Refuses joined events without an entry in a dictionary that must know them all."""
    for join in config.joins:
        if join.unmatched != "fail":
            continue
        on, noted = join.column, outcome_column(join.source)
        missing = events.where(F.col(noted) != MATCHED).select(on, noted).distinct()
        rows = missing.orderBy(on, noted).limit(5).collect()
        if rows:
            raise InputDataError(
                f"events have no entry in dictionary {join.source!r}",
                received=", ".join(f"{on} = {row[on]} ({row[noted]})" for row in rows) + ", …",
                fix="complete the dictionary, or set the join's `unmatched` to drop or keep",
            )


def outcome_column(name: str) -> str:
    """Column with what became of an event's join with a dictionary; null where it was left out."""
    return f"__unmatched_{name}"


def join_dictionary(events: DataFrame, join: DictionaryJoin) -> DataFrame:
    """Joins the other columns of a dictionary, by its key or as it stood at each event's time."""
    return _join_by_key(events, join) if join.config.as_of is None else _join_as_of(events, join)


def _mark_unmatched(events: DataFrame, join: DictionaryJoin, reason: Column) -> DataFrame:
    """Notes the outcome of a join for each event not dropped before; drops those without an entry.

    The reason is `unmatched:<name>`, or `unmatched:<name>:<reason>` but for an unknown key.
    """
    name = join.config.source
    noted, outcome = outcome_column(name), F.coalesce(reason, F.lit(MATCHED))
    events = events.withColumn(noted, F.when(F.col(DROP_COLUMN).isNull(), outcome))
    if join.config.unmatched != "drop":
        return events
    text = f"unmatched:{name}"
    why = F.when(F.col(noted) == UNKNOWN_KEY, text).otherwise(F.concat(F.lit(f"{text}:"), noted))
    return drop_events(events, F.when(F.col(noted) != MATCHED, why))


def _join_by_key(events: DataFrame, join: DictionaryJoin) -> DataFrame:
    key, on = f"__key_{join.config.source}", F.col(join.config.column)
    entries = join.rows.withColumnRenamed(join.key, key)
    if join.is_small:
        entries = F.broadcast(entries)
    joined = events.join(entries, on == F.col(key), "left")
    missing = F.when(on.isNull(), NULL_KEY).otherwise(UNKNOWN_KEY)
    return _mark_unmatched(joined, join, F.when(F.col(key).isNull(), missing)).drop(key)


def _join_as_of(events: DataFrame, join: DictionaryJoin) -> DataFrame:
    """Joins to each event the newest entry that was valid and known at the event's time.

    Not its key, and not its `valid_to`. An event stays one row.
    """
    entries = _list_entries(join).withColumn(_IS_EVENT, F.lit(False))
    both = events.withColumn(_IS_EVENT, F.lit(True)).unionByName(entries, allowMissingColumns=True)
    key, is_event = F.col(join.config.column), F.col(_IS_EVENT)
    # At one time the entry comes before the event or after it: that is the declared match.
    tie = is_event if join.as_of.match == "at_or_before" else ~is_event
    in_time = Window.partitionBy(key, spread_lone(key.isNull())).orderBy(EVENT_TS_COLUMN, tie)
    before, whole = running_and_whole(in_time)
    # The newest version is not the last to become known: a late entry may be about the past.
    newest, exists = F.max_by(_ENTRY, _VERSION).over(before), F.max(~is_event).over(whole)
    joined = both.withColumns({_ENTRY: newest, _EXISTS: exists}).where(is_event)
    reason = (
        F.when(key.isNull(), NULL_KEY)
        .when(~F.col(_EXISTS), UNKNOWN_KEY)
        .when(F.col(_ENTRY).isNull(), NOT_YET_VALID)
        .when(_has_ended(join, EVENT_TS_COLUMN), EXPIRED)
    )
    added = {name: F.when(reason.isNull(), F.col(_ENTRY)[name]) for name in _list_added(join)}
    joined = _mark_unmatched(joined.withColumns(added), join, reason)
    return joined.drop(_IS_EVENT, _ENTRY, _VERSION, _EXISTS)


def select_latest(join: DictionaryJoin, end: DataFrame) -> DataFrame:
    """Selects the entry of each key, in the event's column, that counts at the end of the log.

    `end` has one row, one column: the time of the log's last event, milliseconds.
    """
    key = join.config.column
    entries = _list_entries(join).crossJoin(F.broadcast(end.toDF(_NOW)))
    known = entries.where(F.col(EVENT_TS_COLUMN) <= F.col(_NOW))
    newest = F.max_by(_ENTRY, _VERSION).alias(_ENTRY)
    latest = known.groupBy(key).agg(newest, F.max(_NOW).alias(_NOW))
    valid = latest.where(~F.coalesce(_has_ended(join, _NOW), F.lit(False)))
    return valid.select(key, *[F.col(_ENTRY)[name].alias(name) for name in _list_added(join)])


def _list_added(join: DictionaryJoin) -> list[str]:
    # `valid_to` says what came later.
    return [name for name in join.rows.columns if name not in (join.key, join.as_of.valid_to)]


def _list_entries(join: DictionaryJoin) -> DataFrame:
    """One row per version: key and time from which it counts, in the events' columns; the rest."""
    version = [F.col(name) * F.lit(join.ms[name]) for name in join.versions]
    # Nobody could use an entry before it was known, however early it is valid from.
    counts_from = F.greatest(*version) if len(version) > 1 else version[0]
    entry = [name for name in join.rows.columns if name != join.key]
    return join.rows.where(F.col(join.key).isNotNull()).select(
        F.col(join.key).alias(join.config.column),
        counts_from.alias(EVENT_TS_COLUMN),
        F.struct(*version).alias(_VERSION),
        F.struct(*entry).alias(_ENTRY),
    )


def _has_ended(join: DictionaryJoin, now: str) -> Column:
    """Whether the entry's `valid_to` is over at `now`; null where it is open."""
    ends = join.as_of.valid_to
    if ends is None:
        return F.lit(False)
    # A "never" too large for milliseconds overflows to null, which is open as well.
    end = F.try_multiply(F.col(_ENTRY)[ends], F.lit(join.ms[ends]))
    # An entry that counts just after `valid_from` ends just after `valid_to`.
    return end <= F.col(now) if join.as_of.match == "at_or_before" else end < F.col(now)
