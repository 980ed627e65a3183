"""Everything that a user ever met before an event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

POSITION_COLUMN = "__position"
_SEQUENCE = "__sequence"
_OWNER = "__sequence_of"


def collect_sequence(item: str) -> Column:
    """All items of a group in order of `__position`: an aggregate."""
    # `array_sort` would interpret a function of Spark's for every comparison.
    pairs = F.collect_list(F.struct(POSITION_COLUMN, F.col(item).alias("item")))
    return F.sort_array(pairs)["item"]


def build_sequences(events: DataFrame, user: str, item: str) -> DataFrame:
    """Builds one row per user: all items in order of time.

    Returns:
        Columns: the user, `__sequence`.
    """
    return events.groupBy(user).agg(collect_sequence(item).alias(_SEQUENCE))


def add_seen(
    events: DataFrame, sequences: DataFrame, user: str, name: str, wanted: Column
) -> DataFrame:
    """Adds all distinct items that the user met strictly before an event, unbounded.

    Meant for evaluation rows, one or few per user: the others are null, and pass through one join
    with them, so that what was computed for all rows is not computed twice.

    Args:
        events: Events with `__position`.
        sequences: `build_sequences` of the same events.
        user: Column of the user.
        name: Column to add.
        wanted: Condition of the rows that get the items.
    """
    sequences = sequences.withColumnRenamed(user, _OWNER)
    joined = events.join(sequences, (F.col(user) == F.col(_OWNER)) & wanted, "left")
    seen = F.array_distinct(F.slice(F.col(_SEQUENCE), F.lit(1), F.col(POSITION_COLUMN) - F.lit(1)))
    return joined.withColumn(name, seen).drop(_SEQUENCE, _OWNER)
