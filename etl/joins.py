"""Joins of the event log with its dictionaries, each key checked, each loss counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.errors import InputDataError
from etl.sources import ORDER_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

DROP_COLUMN = "__drop"


def check_unique_key(name: str, dictionary: DataFrame, key: str) -> None:
    """Refuses a dictionary whose key repeats: joining it would multiply events.

    Raises:
        InputDataError: A key stands in more than one row.
    """
    repeated = dictionary.groupBy(key).count().where("count > 1").orderBy(key).limit(5).collect()
    if repeated:
        raise InputDataError(
            f"dictionary {name!r} is not unique by its key ({key})",
            received=", ".join(f"{row[key]} ({row['count']} rows)" for row in repeated),
            allowed="one row per key",
            fix="de-duplicate the dictionary, or declare another key",
        )


def join_dictionary(
    events: DataFrame, name: str, dictionary: DataFrame, key: str, on: str, drop_unmatched: bool
) -> DataFrame:
    """Joins one dictionary to the events, without losing any event.

    Args:
        events: Event rows with a `__drop` column (null, or why the row is left out).
        name: The dictionary's name.
        dictionary: Its rows.
        key: Its key column.
        on: Event column that holds the key.
        drop_unmatched: Whether events without an entry are marked as dropped.

    Returns:
        The events with the dictionary's other columns.
    """
    right = dictionary.drop(ORDER_COLUMN)
    renamed, matched = f"__key_{name}", f"__matched_{name}"
    right = right.withColumnRenamed(key, renamed).withColumn(matched, F.lit(True))
    joined = events.join(right, F.col(on) == F.col(renamed), "left")
    if drop_unmatched:
        reason = F.when(F.col(matched).isNull(), F.lit(f"unmatched:{name}"))
        joined = joined.withColumn(DROP_COLUMN, F.coalesce(F.col(DROP_COLUMN), reason))
    return joined.drop(renamed, matched)


def check_all_matched(
    events: DataFrame, name: str, dictionary: DataFrame, key: str, on: str
) -> None:
    """Refuses events that have no entry in a dictionary that must know them all.

    Raises:
        InputDataError: An event's key is missing from the dictionary.
    """
    missing = (
        events.select(on)
        .distinct()
        .join(dictionary.select(F.col(key).alias(on)), on, "left_anti")
        .orderBy(on)
        .limit(5)
        .collect()
    )
    if missing:
        raise InputDataError(
            f"events have no entry in dictionary {name!r}",
            received=f"{on} = " + ", ".join(str(row[0]) for row in missing) + ", …",
            allowed="an entry for each event",
            fix="complete the dictionary, or set the join's `unmatched` to drop or keep",
        )
