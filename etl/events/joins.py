"""Joins of the event log with its dictionaries, as they stood at the event's time where dated.

Each key is checked and each event without an entry is counted by its reason. An as-of join
takes the entry that was valid, and known, at the event's time: events and entries of one key are
sorted together by time, one shuffle and one sort, linear in the rows. In the other joins Spark
itself splits the events of a frequent key over several tasks (adaptive skew join).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from conf.errors import InputDataError, InternalError
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

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

NULL_KEY = "null_key"
UNKNOWN_KEY = "unknown_key"
NOT_YET_VALID = "not_yet_valid"
EXPIRED = "expired"
MATCHED = "matched"
OUTCOMES = (MATCHED, NULL_KEY, UNKNOWN_KEY, NOT_YET_VALID, EXPIRED)
"""What may become of a join, in the order of the manifest."""
_BROADCAST_BYTES = 32 << 20
"""Largest dictionary, in bytes of files, that is sent to all tasks."""


@dataclass(frozen=True)
class DictionaryJoin:
    """One join: the key column of its dictionary, and whether this is known to be small."""

    key: str
    config: JoinConfig
    is_small: bool = False
    ms: Mapping[str, int] = field(default_factory=dict)
    """Milliseconds of a unit, by as-of column."""

    @property
    def name(self) -> str:
        """The dictionary's name."""
        return self.config.source

    @property
    def unique_columns(self) -> tuple[str, ...]:
        """Columns whose values no two rows of the dictionary may share."""
        as_of = self.config.as_of
        if as_of is None:
            return (self.key,)
        return (self.key, as_of.valid_from, *((as_of.known_at,) if as_of.known_at else ()))


def plan_joins(config: BuildConfig, sources: Mapping[str, Source]) -> list[DictionaryJoin]:
    """Resolves the joins of a config, in their order."""
    joins = []
    for join in config.joins:
        declared, files = config.sources[join.source], sources[join.source].files
        is_small = bool(files) and sum(file.bytes for file in files) <= _BROADCAST_BYTES
        times = join.as_of.columns if join.as_of is not None else ()
        ms = {column: declared.ms_per_unit(column) for column in times}
        joins.append(DictionaryJoin(declared.key or "", join, is_small, ms))
    return joins


def join_dictionaries(
    events: DataFrame, config: BuildConfig, sources: Mapping[str, Source]
) -> DataFrame:
    """Joins every dictionary to the events: one row per event before and after."""
    for join in plan_joins(config, sources):
        dictionary = sources[join.name].good
        check_unique_key(join.name, dictionary, join.unique_columns)
        events = join_one(events, dictionary, join)
    return events


def check_unique_key(name: str, dictionary: DataFrame, columns: Sequence[str]) -> None:
    """Refuses a dictionary whose key repeats: joining it would multiply events."""
    counts = dictionary.groupBy(*columns).count().where("count > 1")
    repeated = counts.orderBy(*columns).limit(5).collect()
    if repeated:
        shown = [" ".join(map(str, row[:-1])) + f" ({row['count']} rows)" for row in repeated]
        raise InputDataError(
            f"dictionary {name!r} is not unique by its key ({', '.join(columns)})",
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


def join_one(events: DataFrame, dictionary: DataFrame, join: DictionaryJoin) -> DataFrame:
    """Joins one dictionary, by its key or as it stood at each event's time, as declared."""
    if join.config.as_of is None:
        return join_dictionary(events, dictionary, join)
    return join_as_of(events, dictionary, join)


def _mark_unmatched(events: DataFrame, join: DictionaryJoin, reason: Column) -> DataFrame:
    """Notes the outcome of a join for each event not dropped before; drops those without an entry.

    The reason is `unmatched:<name>`, or `unmatched:<name>:<reason>` but for an unknown key.
    """
    noted, outcome = outcome_column(join.name), F.coalesce(reason, F.lit(MATCHED))
    events = events.withColumn(noted, F.when(F.col(DROP_COLUMN).isNull(), outcome))
    if join.config.unmatched != "drop":
        return events
    text = f"unmatched:{join.name}"
    why = F.when(F.col(noted) == UNKNOWN_KEY, text).otherwise(F.concat(F.lit(f"{text}:"), noted))
    return drop_events(events, F.when(F.col(noted) != MATCHED, why))


def outcome_column(name: str) -> str:
    """Column with what became of an event's join with a dictionary; null where it was left out."""
    return f"__unmatched_{name}"


def join_dictionary(events: DataFrame, dictionary: DataFrame, join: DictionaryJoin) -> DataFrame:
    """Joins the other columns of a dictionary by its key, without losing any event."""
    key, matched = f"__key_{join.name}", f"__matched_{join.name}"
    right = dictionary.drop(ORDER_COLUMN).withColumnRenamed(join.key, key)
    right = right.withColumn(matched, F.lit(True))
    if join.is_small:
        right = right.hint("broadcast")
    on = F.col(join.config.column)
    joined = events.join(right, on == F.col(key), "left")
    missing = F.when(on.isNull(), F.lit(NULL_KEY)).otherwise(F.lit(UNKNOWN_KEY))
    reason = F.when(F.col(matched).isNull(), missing)
    return _mark_unmatched(joined, join, reason).drop(key, matched)


_KEY, _TS, _IS_EVENT = "__as_of_key", "__as_of_ts_ms", "__as_of_is_event"
_ENTRY, _VERSION, _EXISTS = "__as_of_entry", "__as_of_version", "__as_of_exists"
_REASON = "__as_of_reason"


def join_as_of(events: DataFrame, dictionary: DataFrame, join: DictionaryJoin) -> DataFrame:
    """Joins to each event the newest entry that was valid and known at the event's time.

    Not its key, and not its `valid_to`. An event stays one row.
    """
    as_of = _as_of(join)
    left = events.withColumns(
        {_KEY: F.col(join.config.column), _TS: F.col(EVENT_TS_COLUMN), _IS_EVENT: F.lit(True)}
    )
    right = _entries(dictionary, join).withColumn(_IS_EVENT, F.lit(False))
    both = left.unionByName(right, allowMissingColumns=True)
    # At one time the entry comes before the event or after it: that is the declared match.
    tie = F.col(_IS_EVENT) if as_of.match == "at_or_before" else ~F.col(_IS_EVENT)
    same = [F.col(_KEY), spread_lone(F.col(_KEY).isNull(), _TS)]
    in_time = Window.partitionBy(*same).orderBy(_TS, tie)
    before, whole = running_and_whole(in_time)
    # The newest version is not the last to become known: a late entry may be about the past.
    newest = F.max_by(_ENTRY, _VERSION).over(before)
    exists = F.max(~F.col(_IS_EVENT)).over(whole)
    joined = both.withColumns({_ENTRY: newest, _EXISTS: exists}).where(_IS_EVENT)
    reason = (
        F.when(F.col(_KEY).isNull(), F.lit(NULL_KEY))
        .when(~F.col(_EXISTS), F.lit(UNKNOWN_KEY))
        .when(F.col(_ENTRY).isNull(), F.lit(NOT_YET_VALID))
        .when(_has_ended(join), F.lit(EXPIRED))
    )
    joined = _mark_unmatched(joined.withColumn(_REASON, reason), join, F.col(_REASON))
    valid = F.col(_REASON).isNull()
    added = {name: F.when(valid, F.col(_ENTRY)[name]) for name in _added(dictionary, join)}
    return joined.withColumns(added).drop(_KEY, _TS, _IS_EVENT, _ENTRY, _VERSION, _EXISTS, _REASON)


def select_latest(dictionary: DataFrame, join: DictionaryJoin, end: DataFrame) -> DataFrame:
    """Selects the entry of each key that is valid and known at the end of the log.

    `end` has one row, one column: the time of the log's last event, milliseconds.
    """
    now = end.toDF(EVENT_TS_COLUMN)
    entries = _entries(dictionary, join).crossJoin(F.broadcast(now))
    known = entries.where(F.col(_TS) <= F.col(EVENT_TS_COLUMN))
    latest = known.groupBy(_KEY).agg(
        F.max_by(_ENTRY, _VERSION).alias(_ENTRY), F.max(EVENT_TS_COLUMN).alias(EVENT_TS_COLUMN)
    )
    valid = latest.where(~F.coalesce(_has_ended(join), F.lit(False)))
    columns = [F.col(_ENTRY)[column].alias(column) for column in _added(dictionary, join)]
    return valid.select(F.col(_KEY).alias(join.key), *columns)


def _as_of(join: DictionaryJoin) -> AsOf:
    if join.config.as_of is None:
        raise InternalError(f"the join with {join.name!r} is not one as of the event's time")
    return join.config.as_of


def _payload(dictionary: DataFrame, join: DictionaryJoin) -> list[str]:
    return [column for column in dictionary.columns if column not in (join.key, ORDER_COLUMN)]


def _added(dictionary: DataFrame, join: DictionaryJoin) -> list[str]:
    # `valid_to` says what came later.
    ends = _as_of(join).valid_to
    return [column for column in _payload(dictionary, join) if column != ends]


def _entries(dictionary: DataFrame, join: DictionaryJoin) -> DataFrame:
    """One row per version: key, time from which it counts, its rank among versions, columns."""
    as_of = _as_of(join)
    times = [name for name in (as_of.valid_from, as_of.known_at) if name is not None]
    version = [F.col(name) * F.lit(join.ms[name]) for name in times]
    # Nobody could use an entry before it was known, however early it is valid from.
    counts_from = F.greatest(*version) if len(version) > 1 else version[0]
    return dictionary.where(F.col(join.key).isNotNull()).select(
        F.col(join.key).alias(_KEY),
        counts_from.alias(_TS),
        F.struct(*version).alias(_VERSION),
        F.struct(*_payload(dictionary, join)).alias(_ENTRY),
    )


def _has_ended(join: DictionaryJoin) -> Column:
    """Whether the entry's `valid_to` is over at the event; null where it is open."""
    as_of = _as_of(join)
    if as_of.valid_to is None:
        return F.lit(False)
    # A "never" too large for milliseconds overflows to null, which is open as well.
    end = F.try_multiply(F.col(_ENTRY)[as_of.valid_to], F.lit(join.ms[as_of.valid_to]))
    now = F.col(EVENT_TS_COLUMN)
    # An entry that counts just after `valid_from` ends just after `valid_to`.
    return end <= now if as_of.match == "at_or_before" else end < now
