"""Point-in-time joins: the dictionary as it stood, and as it was known, at the event's time.

Events and entries of one key are sorted together by time, and each event takes the newest entry
before it: one shuffle and one sort, linear in the rows, whatever the number of versions per key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from conf.errors import InternalError
from conf.etl import AsOfConfig
from etl.joins.plan import DictionaryJoin
from etl.joins.unmatched import EXPIRED, NOT_YET_VALID, NULL_KEY, UNKNOWN_KEY, mark_unmatched
from etl.sources import ORDER_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

EVENT_TS_COLUMN = "__event_ts_ms"

_KEY, _TS, _IS_EVENT = "__as_of_key", "__as_of_ts_ms", "__as_of_is_event"
_ENTRY, _VERSION, _EXISTS = "__as_of_entry", "__as_of_version", "__as_of_exists"
_REASON = "__as_of_reason"
_NULL_KEY_PARTS = 1024
_SCALES = {"s": 1000, "ms": 1}


def join_as_of(events: DataFrame, dictionary: DataFrame, join: DictionaryJoin) -> DataFrame:
    """Joins to each event the newest entry that was valid and known at the event's time.

    Args:
        events: Event rows with `__event_ts_ms` (not null) and `__drop`.
        dictionary: Its rows, unique by key, `valid_from` and `known_at`.
        join: The join, with `as_of`.

    Returns:
        The events, one row each, with the dictionary's columns other than its key; why an event
        has no entry is noted (`etl.joins.unmatched`).
    """
    as_of = _as_of(join)
    columns = _added(dictionary, join)
    left = events.withColumns(
        {_KEY: F.col(join.on), _TS: F.col(EVENT_TS_COLUMN), _IS_EVENT: F.lit(True)}
    )
    right = _entries(dictionary, join).withColumn(_IS_EVENT, F.lit(False))
    both = left.unionByName(right, allowMissingColumns=True)
    # At one time the entry comes before the event or after it: that is the declared match.
    tie = F.col(_IS_EVENT) if as_of.match == "at_or_before" else ~F.col(_IS_EVENT)
    # Events without a key match nothing; spread, they keep no task busy alone.
    same = [F.col(_KEY), F.when(F.col(_KEY).isNull(), F.pmod(_TS, F.lit(_NULL_KEY_PARTS)))]
    before = (
        Window.partitionBy(*same)
        .orderBy(_TS, tie)
        .rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    # The newest version is not the last to become known: a late entry may be about the past.
    newest = F.max_by(_ENTRY, _VERSION).over(before)
    exists = F.max(~F.col(_IS_EVENT)).over(Window.partitionBy(*same))
    joined = both.withColumns({_ENTRY: newest, _EXISTS: exists}).where(_IS_EVENT)
    reason = (
        F.when(F.col(_KEY).isNull(), F.lit(NULL_KEY))
        .when(~F.col(_EXISTS), F.lit(UNKNOWN_KEY))
        .when(F.col(_ENTRY).isNull(), F.lit(NOT_YET_VALID))
        .when(_has_ended(as_of), F.lit(EXPIRED))
    )
    joined = mark_unmatched(
        joined.withColumn(_REASON, reason),
        join.name,
        F.col(_REASON),
        drop=join.config.unmatched == "drop",
    )
    valid = F.col(_REASON).isNull()
    added = {column: F.when(valid, F.col(_ENTRY)[column]) for column in columns}
    return joined.withColumns(added).drop(_KEY, _TS, _IS_EVENT, _ENTRY, _VERSION, _EXISTS, _REASON)


def select_latest(dictionary: DataFrame, join: DictionaryJoin, end: DataFrame) -> DataFrame:
    """Selects the entry of each key that is valid and known at the end of the log.

    Args:
        dictionary: Its rows.
        join: The join, with `as_of`.
        end: One row, one column: the time of the log's last event, milliseconds.

    Returns:
        One row per key that has such an entry: the dictionary's columns.
    """
    now = end.toDF(EVENT_TS_COLUMN)
    entries = _entries(dictionary, join).crossJoin(F.broadcast(now))
    known = entries.where(F.col(_TS) <= F.col(EVENT_TS_COLUMN))
    latest = known.groupBy(_KEY).agg(
        F.max_by(_ENTRY, _VERSION).alias(_ENTRY), F.max(EVENT_TS_COLUMN).alias(EVENT_TS_COLUMN)
    )
    valid = latest.where(~F.coalesce(_has_ended(_as_of(join)), F.lit(False)))
    columns = [F.col(_ENTRY)[column].alias(column) for column in _added(dictionary, join)]
    return valid.select(F.col(_KEY).alias(join.key), *columns)


def _as_of(join: DictionaryJoin) -> AsOfConfig:
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
    version = [_milliseconds(F.col(as_of.valid_from), as_of)]
    if as_of.known_at is not None:
        version.append(_milliseconds(F.col(as_of.known_at), as_of))
    # Nobody could use an entry before it was known, however early it is valid from.
    counts_from = F.greatest(*version) if len(version) > 1 else version[0]
    return dictionary.where(F.col(join.key).isNotNull()).select(
        F.col(join.key).alias(_KEY),
        counts_from.alias(_TS),
        F.struct(*version).alias(_VERSION),
        F.struct(*_payload(dictionary, join)).alias(_ENTRY),
    )


def _has_ended(as_of: AsOfConfig) -> Column:
    """Whether the entry's `valid_to` is over at the event; null where it is open."""
    if as_of.valid_to is None:
        return F.lit(False)
    # A "never" too large for milliseconds overflows to null, which is open as well.
    end = F.try_multiply(F.col(_ENTRY)[as_of.valid_to], F.lit(_SCALES[as_of.time_unit]))
    now = F.col(EVENT_TS_COLUMN)
    # An entry that counts just after `valid_from` ends just after `valid_to`.
    return end <= now if as_of.match == "at_or_before" else end < now


def _milliseconds(value: Column, as_of: AsOfConfig) -> Column:
    return value * F.lit(_SCALES[as_of.time_unit])
