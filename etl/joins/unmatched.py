"""Events without an entry in a dictionary: why, and how many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from conf.errors import InputDataError

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

DROP_COLUMN = "__drop"

NULL_KEY = "null_key"
UNKNOWN_KEY = "unknown_key"
NOT_YET_VALID = "not_yet_valid"
EXPIRED = "expired"
REASONS = (NULL_KEY, UNKNOWN_KEY, NOT_YET_VALID, EXPIRED)


def mark_unmatched(events: DataFrame, name: str, reason: Column, drop: bool) -> DataFrame:
    """Notes for each event not dropped before why it has no entry in a dictionary.

    Args:
        events: Event rows with a `__drop` column (null, or why the row is left out).
        name: The dictionary's name.
        reason: One of `REASONS`, or null for events that have an entry.
        drop: Whether the events without one are marked as dropped: `unmatched:<name>`, or
            `unmatched:<name>:<reason>` where the key as such is not unknown.
    """
    noted = _noted(name)
    events = events.withColumn(noted, F.when(F.col(DROP_COLUMN).isNull(), reason))
    if not drop:
        return events
    # An unknown key is the plain case, which has always had the short name.
    special = F.when(F.col(noted) != UNKNOWN_KEY, F.concat(F.lit(":"), F.col(noted)))
    text = F.concat(F.lit(f"unmatched:{name}"), F.coalesce(special, F.lit("")))
    why = F.when(F.col(noted).isNotNull(), text)
    return events.withColumn(DROP_COLUMN, F.coalesce(F.col(DROP_COLUMN), why))


def refuse_unmatched(events: DataFrame, name: str, on: str) -> None:
    """Refuses events without an entry in a dictionary that must know them all.

    Args:
        events: Events after `mark_unmatched`.
        name: The dictionary's name.
        on: Event column that holds the key.

    Raises:
        InputDataError: An event has none.
    """
    noted = _noted(name)
    missing = events.where(F.col(noted).isNotNull()).select(on, noted).distinct()
    rows = missing.orderBy(on, noted).limit(5).collect()
    if rows:
        raise InputDataError(
            f"events have no entry in dictionary {name!r}",
            received=", ".join(f"{on} = {row[on]} ({row[noted]})" for row in rows) + ", …",
            allowed="an entry for each event",
            fix="complete the dictionary, or set the join's `unmatched` to drop or keep",
        )


def count_unmatched(names: Iterable[str]) -> list[Column]:
    """Returns the aggregates that count unmatched events by dictionary and reason."""
    return [
        F.count_if(F.col(_noted(name)) == reason).alias(_counted(name, reason))
        for name in names
        for reason in REASONS
    ]


def read_unmatched(
    names: Iterable[str], rows: Iterable[Mapping[str, Any]]
) -> dict[str, dict[str, int]]:
    """Sums what `count_unmatched` counted over some groups.

    Returns:
        Events by dictionary and reason; only those that occur.
    """
    groups = list(rows)
    totals = {
        name: {reason: sum(row[_counted(name, reason)] for row in groups) for reason in REASONS}
        for name in names
    }
    return {
        name: {reason: n for reason, n in counts.items() if n}
        for name, counts in totals.items()
        if any(counts.values())
    }


def _noted(name: str) -> str:
    return f"__unmatched_{name}"


def _counted(name: str, reason: str) -> str:
    return f"__unmatched_{name}_{reason}"
