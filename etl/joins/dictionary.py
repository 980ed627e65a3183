"""The join of events with a dictionary that has one row per key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from etl.joins.plan import DictionaryJoin
from etl.joins.skew import SALT_COLUMN, find_frequent_keys, salt_dictionary, salt_events
from etl.joins.unmatched import NULL_KEY, UNKNOWN_KEY, mark_unmatched
from etl.sources import ORDER_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def join_dictionary(events: DataFrame, dictionary: DataFrame, join: DictionaryJoin) -> DataFrame:
    """Joins one dictionary to the events, without losing any event.

    Args:
        events: Event rows with a `__drop` column (null, or why the row is left out) and, for a
            salted join, `__order`.
        dictionary: Its rows, unique by the key.
        join: The join.

    Returns:
        The events with the dictionary's other columns; why an event has no entry is noted
        (`etl.joins.unmatched`).
    """
    key, matched = f"__key_{join.name}", f"__matched_{join.name}"
    right = dictionary.drop(ORDER_COLUMN).withColumnRenamed(join.key, key)
    right = right.withColumn(matched, F.lit(True))
    condition = F.col(join.on) == F.col(key)
    strategy = choose_strategy(join)
    if strategy == "salted":
        frequent = None if join.config.salts else find_frequent_keys(events, join)
        parts = join.config.salts or int(
            events.sparkSession.conf.get("spark.sql.shuffle.partitions") or 1
        )
        events = salt_events(events, join.on, parts, frequent)
        right = salt_dictionary(right, key, parts, frequent)
        condition = condition & (events[SALT_COLUMN] == right[SALT_COLUMN])
    if strategy is not None:
        right = right.hint("broadcast" if strategy == "broadcast" else "merge")
    joined = events.join(right, condition, "left").drop(SALT_COLUMN)
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
