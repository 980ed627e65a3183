"""Draws that leave out what a user has met: drawn again until they are new, exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from pyspark import StorageLevel
from pyspark.sql import functions as F

from etl.negatives.candidates import (
    CANDIDATE_COLUMN,
    GROUP_COLUMN,
    PROBABILITY_COLUMN,
    Candidates,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

ROUNDS = (2, 14, 112)
"""Tries of each round, of which only the slots that are still open get to the next: a user who has
met 90 % of the probability keeps one slot in 700,000 open."""

_TRY = "__try"
_FOUND = "__found"
_UNIT = 2.0**52


@dataclass(frozen=True)
class UnseenDraws:
    """Slots that were filled.

    Attributes:
        rows: The slots with `__candidate` and `__probability`, which is that of the candidates
            that the user has not met.
        release: Frees what Spark keeps.
    """

    rows: DataFrame
    release: Callable[[], None]


def draw_unseen(
    slots: DataFrame, met: DataFrame, candidates: Candidates, user: str, key: Sequence[Column]
) -> UnseenDraws:
    """Fills each slot with the first of its tries that the user has not met.

    Rejection keeps the proportions of what is left, so the probability of an item is its own over
    that of all items which the user has not met. Slots that no try fills stay away: the user has
    met nearly everything.

    Args:
        slots: Narrow rows with `__group`, no two alike.
        met: Distinct pairs of user and `__candidate`.
        candidates: What is drawn from.
        user: User column.
        key: What a draw depends on beside the number of the try.
    """
    names = slots.columns
    opened, filled, kept = slots, [], []
    first = 0
    for tries in ROUNDS:
        numbers = F.sequence(F.lit(first), F.lit(first + tries - 1))
        drawn = candidates.draw(opened.withColumn(_TRY, F.explode(numbers)), *key, F.col(_TRY))
        seen = drawn.join(met.withColumn("__met", F.lit(True)), [user, CANDIDATE_COLUMN], "left")
        found = F.struct(_TRY, CANDIDATE_COLUMN, PROBABILITY_COLUMN)
        result = seen.groupBy(*names).agg(
            F.min(F.when(F.col("__met").isNull(), found)).alias(_FOUND)
        )
        result = result.persist(StorageLevel.MEMORY_AND_DISK)
        kept.append(result)
        filled.append(result.where(F.col(_FOUND).isNotNull()))
        opened = result.where(F.col(_FOUND).isNull()).select(*names)
        first += tries
        if opened.isEmpty():
            break
    rows = reduce(lambda one, other: one.unionByName(other), filled)
    rows = rows.select(*names, f"{_FOUND}.{CANDIDATE_COLUMN}", f"{_FOUND}.{PROBABILITY_COLUMN}")
    rows = rows.join(_met_probability(met, candidates, user), [user, GROUP_COLUMN], "left")
    unmet = F.lit(1.0) - F.coalesce(F.col("__met_probability"), F.lit(0.0))
    rows = rows.withColumn(PROBABILITY_COLUMN, F.col(PROBABILITY_COLUMN) / unmet)

    def release() -> None:
        for frame in kept:
            frame.unpersist()

    return UnseenDraws(rows.drop("__met_probability"), release)


def _met_probability(met: DataFrame, candidates: Candidates, user: str) -> DataFrame:
    """The probability of all items that a user has met, by user and group."""
    items = candidates.table.select(
        GROUP_COLUMN, F.col("__token").alias(CANDIDATE_COLUMN), "__item_probability"
    )
    # Whole numbers: their sum does not hang on the order, as that of floats does.
    units = F.sum(F.round(F.col("__item_probability") * _UNIT).cast("long"))
    return (
        met.join(items, CANDIDATE_COLUMN)
        .groupBy(user, GROUP_COLUMN)
        .agg((units / _UNIT).alias("__met_probability"))
    )
