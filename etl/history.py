"""Everything that a user ever met before an event."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

POSITION_COLUMN = "__position"
_SEQUENCE = "__sequence"


def build_sequences(events: DataFrame, user: str, item: str) -> DataFrame:
    """Builds one row per user: all items in order of time.

    Returns:
        Columns: the user, `__sequence`.
    """
    ordered = F.array_sort(F.collect_list(F.struct(POSITION_COLUMN, F.col(item).alias("item"))))
    return events.groupBy(user).agg(F.transform(ordered, lambda x: x["item"]).alias(_SEQUENCE))


def add_seen(events: DataFrame, sequences: DataFrame, user: str, name: str) -> DataFrame:
    """Adds all distinct items that the user met strictly before each event, unbounded.

    Meant for evaluation rows: one or few per user.
    """
    seen = F.array_distinct(F.slice(F.col(_SEQUENCE), F.lit(1), F.col(POSITION_COLUMN) - F.lit(1)))
    return events.join(sequences, user).withColumn(name, seen).drop(_SEQUENCE)


def all_seen() -> Column:
    """All distinct items of `__sequence`."""
    return F.array_distinct(F.col(_SEQUENCE))
