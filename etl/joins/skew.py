"""Skewed join keys: the frequent ones are spread over several tasks by a salt.

The events of a key get salts 0 … n-1 in turn of their content's hash, and the dictionary's row of
that key is repeated once per salt: each event still meets exactly one row.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from etl.joins.plan import DictionaryJoin
from etl.sources import ORDER_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SALT_COLUMN = "__salt"

_SAMPLED_BYTES = 64 << 20
_FREQUENT_SHARE = 0.01
"""A key with this share of the events keeps one task of a hundred busy alone."""


def find_frequent_keys(events: DataFrame, join: DictionaryJoin) -> tuple[Any, ...]:
    """Samples the log and returns the keys with at least 1 % of the events: at most a hundred.

    The sample decides where rows are worked on, never what becomes of them.
    """
    keys = events.select(F.col(join.on).alias("key"))
    if join.event_bytes is not None and join.event_bytes > _SAMPLED_BYTES:
        keys = keys.sample(fraction=_SAMPLED_BYTES / join.event_bytes, seed=0)
    enough = math.ceil(keys.count() * _FREQUENT_SHARE)
    counts = keys.where(F.col("key").isNotNull()).groupBy("key").count()
    rows = counts.where(F.col("count") >= enough).orderBy(F.desc("count"), "key").collect()
    return tuple(row["key"] for row in rows)


def salt_events(
    events: DataFrame, on: str, parts: int, frequent: tuple[Any, ...] | None
) -> DataFrame:
    """Adds `__salt` to events: 0 but for spread keys. Null keys match nothing and are spread too.

    Args:
        events: Events with `__order`.
        on: Column of the key.
        parts: Number of salts.
        frequent: Keys to spread; None: all.
    """
    salt = F.pmod(F.xxhash64(ORDER_COLUMN), F.lit(parts)).cast("int")
    spread = F.col(on).isNull() | _is_spread(F.col(on), frequent)
    return events.withColumn(SALT_COLUMN, F.when(spread, salt).otherwise(F.lit(0)))


def salt_dictionary(
    dictionary: DataFrame, key: str, parts: int, frequent: tuple[Any, ...] | None
) -> DataFrame:
    """Repeats the rows of spread keys once per salt, in `__salt`; the others get salt 0."""
    one = F.array(F.lit(0))
    salts = F.when(_is_spread(F.col(key), frequent), F.sequence(F.lit(0), F.lit(parts - 1)))
    return dictionary.withColumn(SALT_COLUMN, F.explode(salts.otherwise(one)))


def _is_spread(key: Column, frequent: tuple[Any, ...] | None) -> Column:
    return F.lit(True) if frequent is None else F.coalesce(key.isin(*frequent), F.lit(False))
