"""Joins of the event log with its dictionaries, as they stood at the event's time where dated.

Each key is checked and each event without an entry is counted by its reason. An as-of join
takes the entry that was valid, and known, at the event's time: events and entries of one key are
sorted together by time, one shuffle and one sort, linear in the rows. In the other joins Spark
itself splits the events of a frequent key over several tasks (adaptive skew join).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import Window
from pyspark.sql import functions as F

from conf.errors import InputDataError, InternalError
from conf.etl.build import BuildConfig
from conf.etl.events import AsOfConfig, JoinConfig
from conf.etl.time_columns import ms_per_unit
from etl.events.identity import DROP_COLUMN, EVENT_TS_COLUMN, drop_events, spread_lone
from etl.sources.source import ORDER_COLUMN, Source

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


@dataclass(frozen=True)
class DictionaryJoin:
    """One dictionary join.

    Attributes:
        name: The dictionary's name.
        key: Its key column.
        config: Event column, strategy, as-of columns, what happens to unmatched events.
        dictionary_bytes: Size of the dictionary's files, None where its source has no files.
    """

    name: str
    key: str
    config: JoinConfig
    dictionary_bytes: int | None = None

    @property
    def on(self) -> str:
        """Event column that holds the key."""
        return self.config.column

    @property
    def unique_columns(self) -> tuple[str, ...]:
        """Columns whose values no two rows of the dictionary may share."""
        as_of = self.config.as_of
        if as_of is None:
            return (self.key,)
        return (self.key, as_of.valid_from, *((as_of.known_at,) if as_of.known_at else ()))


def plan_joins(config: BuildConfig, sources: Mapping[str, Source]) -> tuple[DictionaryJoin, ...]:
    """Resolves the joins of a config, in their order."""
    return tuple(
        DictionaryJoin(
            join.source,
            config.sources[join.source].key or "",
            join,
            _size(sources[join.source]),
        )
        for join in config.joins
    )


def _size(source: Source) -> int | None:
    return sum(file.bytes for file in source.files) if source.files else None


def check_unique_key(name: str, dictionary: DataFrame, columns: Sequence[str]) -> None:
    """Refuses a dictionary whose key repeats: joining it would multiply events.

    Args:
        name: The dictionary's name.
        dictionary: Its rows.
        columns: The key, with the columns that tell its versions apart.

    Raises:
        InputDataError: A key stands in more than one row.
    """
    counts = dictionary.groupBy(*columns).count().where("count > 1")
    repeated = counts.orderBy(*columns).limit(5).collect()
    if repeated:
        shown = [" ".join(str(row[column]) for column in columns) for row in repeated]
        raise InputDataError(
            f"dictionary {name!r} is not unique by its key ({', '.join(columns)})",
            received=", ".join(
                f"{key} ({row['count']} rows)" for key, row in zip(shown, repeated, strict=True)
            ),
            allowed="one row per key",
            fix="de-duplicate the dictionary, or declare another key",
        )


NULL_KEY = "null_key"
UNKNOWN_KEY = "unknown_key"
NOT_YET_VALID = "not_yet_valid"
EXPIRED = "expired"
REASONS = (NULL_KEY, UNKNOWN_KEY, NOT_YET_VALID, EXPIRED)
MATCHED = "matched"


def mark_unmatched(events: DataFrame, name: str, reason: Column, drop: bool) -> DataFrame:
    """Notes for each event not dropped before whether it has an entry in a dictionary.

    Args:
        events: Event rows with a `__drop` column (null, or why the row is left out).
        name: The dictionary's name.
        reason: One of `REASONS`, or null for events that have an entry.
        drop: Whether the events without one are marked as dropped: `unmatched:<name>`, or
            `unmatched:<name>:<reason>` where the key as such is not unknown.
    """
    noted, outcome = _noted(name), F.coalesce(reason, F.lit(MATCHED))
    events = events.withColumn(noted, F.when(F.col(DROP_COLUMN).isNull(), outcome))
    if not drop:
        return events
    # An unknown key is the plain case, which has always had the short name.
    special = F.when(F.col(noted) != UNKNOWN_KEY, F.concat(F.lit(":"), F.col(noted)))
    text = F.concat(F.lit(f"unmatched:{name}"), F.coalesce(special, F.lit("")))
    why = F.when(F.col(noted) != MATCHED, text)
    return drop_events(events, why)


def refuse_unmatched(events: DataFrame, dictionary: DataFrame, join: DictionaryJoin) -> None:
    """Refuses events without an entry in a dictionary that must know them all.

    Args:
        events: Events after `mark_unmatched`.
        dictionary: The dictionary's rows.
        join: The join.

    Raises:
        InputDataError: An event has none.
    """
    name, on, noted = join.name, join.on, _noted(join.name)
    missing = events.where(F.col(noted) != MATCHED).select(on, noted).distinct()
    rows = missing.orderBy(on, noted).limit(5).collect()
    if rows:
        raise InputDataError(
            f"events have no entry in dictionary {name!r}",
            received=", ".join(f"{on} = {row[on]} ({row[noted]})" for row in rows) + ", …",
            allowed="an entry for each event",
            fix=describe_near_keys(events, dictionary, join)
            or "complete the dictionary, or set the join's `unmatched` to drop or keep",
        )


_NEAR_SHARE = 0.1
"""Share of events with an unknown key from which the keys are looked at."""
_NEAR_KEYS = 10_000
"""Unknown keys that are looked at."""


def plain_key(key: Column) -> Column:
    """Returns a text key without what writers change: blanks, zeros in front, `.0`, upper case.

    What pandas writes of whole numbers beside a null ends in `.0`.
    """
    text = F.lower(F.trim(F.regexp_replace(key, r"[\s\x{00A0}\x{FEFF}]+", " ")))
    return F.regexp_replace(F.regexp_replace(text, r"^(-?)0+(?=\d)", "$1"), r"^(-?\d+)\.0+$", "$1")


def describe_near_keys(
    events: DataFrame, dictionary: DataFrame, join: DictionaryJoin
) -> str | None:
    """Says how many unknown keys a dictionary has in another spelling; None: none.

    Args:
        events: Events after `mark_unmatched`.
        dictionary: The dictionary's rows.
        join: The join; only text has several spellings.
    """
    if dict(dictionary.dtypes)[join.key] != "string":
        return None
    unknown = events.where(F.col(_noted(join.name)) == UNKNOWN_KEY)
    keys = unknown.select(F.col(join.on).alias("event")).distinct().limit(_NEAR_KEYS)
    known = dictionary.select(F.col(join.key).alias("entry"))
    near = keys.join(known, plain_key(F.col("event")) == plain_key(F.col("entry")), "left")
    has_entry = F.col("entry").isNotNull()
    row = near.agg(
        F.count_distinct("event").alias("keys"),
        F.count_distinct(F.when(has_entry, F.col("event"))).alias("near"),
        F.min(F.when(has_entry, F.struct("event", "entry"))).alias("example"),
    ).collect()[0]
    if not row["near"]:
        return None
    event, entry = row["example"]
    return (
        f"{row['near']:,} of {row['keys']:,} unknown keys are in {join.name!r} in another "
        f"spelling, such as {event!r} as {entry!r}: write {join.on!r} and the key alike"
    )


def explain_unmatched(
    events: DataFrame, config: BuildConfig, sources: Mapping[str, Source], counts: UnmatchedCounts
) -> list[str]:
    """Says of each dictionary that many events do not find whether it is for the spelling.

    Args:
        events: Events after all joins, dropped ones too.
        config: The build's config.
        sources: The sources as read.
        counts: What was counted of them.
    """
    joins = [
        join
        for join in plan_joins(config, sources)
        if counts.reasons.get(join.name, {}).get(UNKNOWN_KEY, 0) > _NEAR_SHARE * counts.rows
    ]
    hints = [describe_near_keys(events, sources[join.name].good, join) for join in joins]
    return [text for text in hints if text is not None]


@dataclass(frozen=True)
class UnmatchedCounts:
    """Events, and those without an entry by dictionary and reason."""

    rows: int
    reasons: Mapping[str, Mapping[str, int]]


def count_matches(names: Iterable[str]) -> list[Column]:
    """Returns the aggregates that count events by dictionary and outcome of the join."""
    return [
        F.count_if(F.col(_noted(name)) == outcome).alias(_counted(name, outcome))
        for name in names
        for outcome in (MATCHED, *REASONS)
    ]


def read_matches(
    names: Iterable[str], rows: Iterable[Mapping[str, Any]]
) -> dict[str, dict[str, int]]:
    """Sums what `count_matches` counted over some groups.

    Returns:
        Events by dictionary: `matched`, and the reasons that occur.
    """
    groups = list(rows)
    totals = {
        name: {why: sum(row[_counted(name, why)] for row in groups) for why in (MATCHED, *REASONS)}
        for name in names
    }
    return {
        name: {why: n for why, n in counts.items() if n or why == MATCHED}
        for name, counts in totals.items()
    }


def _noted(name: str) -> str:
    return f"__unmatched_{name}"


def _counted(name: str, outcome: str) -> str:
    return f"__unmatched_{name}_{outcome}"


def join_dictionary(events: DataFrame, dictionary: DataFrame, join: DictionaryJoin) -> DataFrame:
    """Joins one dictionary to the events, without losing any event.

    Args:
        events: Event rows with a `__drop` column (null, or why the row is left out).
        dictionary: Its rows, unique by the key.
        join: The join.

    Returns:
        The events with the dictionary's other columns; why an event has no entry is noted
        (`etl.events.joins`).
    """
    key, matched = f"__key_{join.name}", f"__matched_{join.name}"
    right = dictionary.drop(ORDER_COLUMN).withColumnRenamed(join.key, key)
    right = right.withColumn(matched, F.lit(True))
    strategy = choose_strategy(join)
    if strategy is not None:
        right = right.hint("broadcast" if strategy == "broadcast" else "merge")
    joined = events.join(right, F.col(join.on) == F.col(key), "left")
    missing = F.when(F.col(join.on).isNull(), F.lit(NULL_KEY)).otherwise(F.lit(UNKNOWN_KEY))
    reason = F.when(F.col(matched).isNull(), missing)
    joined = mark_unmatched(joined, join.name, reason, drop=join.config.unmatched == "drop")
    return joined.drop(key, matched)


def choose_strategy(join: DictionaryJoin) -> str | None:
    """Returns how a dictionary is joined; None leaves it to Spark, where no size is known."""
    if join.config.strategy != "auto":
        return join.config.strategy
    if join.dictionary_bytes is None:
        return None
    small = join.dictionary_bytes <= join.config.broadcast_bytes
    return "broadcast" if small else "sort_merge"


_KEY, _TS, _IS_EVENT = "__as_of_key", "__as_of_ts_ms", "__as_of_is_event"
_ENTRY, _VERSION, _EXISTS = "__as_of_entry", "__as_of_version", "__as_of_exists"
_REASON = "__as_of_reason"


def join_as_of(events: DataFrame, dictionary: DataFrame, join: DictionaryJoin) -> DataFrame:
    """Joins to each event the newest entry that was valid and known at the event's time.

    Args:
        events: Event rows with `__event_ts_ms` (not null) and `__drop`.
        dictionary: Its rows, unique by key, `valid_from` and `known_at`.
        join: The join, with `as_of`.

    Returns:
        The events, one row each, with the dictionary's columns other than its key; why an event
        has no entry is noted (`etl.events.joins`).
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
    same = [F.col(_KEY), spread_lone(F.col(_KEY).isNull(), _TS)]
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
    end = F.try_multiply(F.col(_ENTRY)[as_of.valid_to], F.lit(ms_per_unit(as_of.time_unit)))
    now = F.col(EVENT_TS_COLUMN)
    # An entry that counts just after `valid_from` ends just after `valid_to`.
    return end <= now if as_of.match == "at_or_before" else end < now


def _milliseconds(value: Column, as_of: AsOfConfig) -> Column:
    return value * F.lit(ms_per_unit(as_of.time_unit))


def join_one(events: DataFrame, dictionary: DataFrame, join: DictionaryJoin) -> DataFrame:
    """Joins one dictionary, by its key or as it stood at each event's time, as declared."""
    if join.config.as_of is None:
        return join_dictionary(events, dictionary, join)
    return join_as_of(events, dictionary, join)


def join_dictionaries(
    events: DataFrame, config: BuildConfig, sources: Mapping[str, Source]
) -> DataFrame:
    """Joins every dictionary to the events: one row per event before and after.

    Args:
        events: Events with `__drop`, `__order` and `__event_ts_ms`.
        config: The build's config.
        sources: The sources as read.

    Raises:
        InputDataError: A dictionary's key is not unique, or an event that must match does not.
    """
    for join in plan_joins(config, sources):
        dictionary = sources[join.name].good
        check_unique_key(join.name, dictionary, join.unique_columns)
        events = join_one(events, dictionary, join)
        if join.config.unmatched == "fail":
            refuse_unmatched(events, dictionary, join)
    return events
