"""What negatives are drawn from: the items of the train split, and how probable each is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F

from conf.etl import NegativesConfig
from etl.identity import hash_fraction
from etl.negatives.alias import build_alias_table
from etl.split import SPLIT_COLUMN, TRAIN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

CANDIDATE_COLUMN = "__candidate"
PROBABILITY_COLUMN = "__probability"
GROUP_COLUMN = "__group"
_INDEX = "__index"
_SIZE = "__size"
_HASH = "__draw_hash"


@dataclass(frozen=True)
class Candidates:
    """An alias table as frames, joined to draws by index.

    Attributes:
        table: `__group`, `__index`, `__token`, `__item_probability`, `__threshold`, `__alias`,
            `__alias_probability`: one row per item.
        sizes: `__group` and `__size`, its number of items.
    """

    table: DataFrame
    sizes: DataFrame

    def draw(self, slots: DataFrame, *key: Column) -> DataFrame:
        """Draws one item for each slot, by a hash of its key.

        Args:
            slots: Rows with `__group`.
            key: What the draw depends on, and nothing else.

        Returns:
            The slots whose group has items, with `__candidate` and `__probability`.
        """
        hashed = slots.join(self.sizes, GROUP_COLUMN).withColumn(_HASH, F.xxhash64(*key))
        hashed = hashed.withColumn(_INDEX, F.pmod(F.col(_HASH), F.col(_SIZE)))
        drawn = hashed.join(self.table, [GROUP_COLUMN, _INDEX])
        own = hash_fraction(F.col(_HASH), F.lit("alias")) < F.col("__threshold")
        return drawn.withColumns(
            {
                CANDIDATE_COLUMN: F.when(own, F.col("__token")).otherwise(F.col("__alias")),
                PROBABILITY_COLUMN: F.when(own, F.col("__item_probability")).otherwise(
                    F.col("__alias_probability")
                ),
            }
        ).drop(_SIZE, _HASH, _INDEX, *_TABLE_COLUMNS)


_TABLE_COLUMNS = ("__token", "__item_probability", "__threshold", "__alias", "__alias_probability")


def group_of(config: NegativesConfig) -> Column:
    """The group that a row draws from: its category, or the one that all items are in."""
    return F.col(config.category) if config.category is not None else F.lit(0)


def fit_candidates(events: DataFrame, item: str, config: NegativesConfig) -> Candidates:
    """Counts the items of the train split, and builds their alias table.

    Only one row per item comes to the driver, as Arrow, like a vocabulary.

    Args:
        events: Kept events with `__split`.
        item: Item column.
        config: The distribution: word2vec's distortion of the counts, count^alpha.
    """
    train = events.where(F.col(SPLIT_COLUMN) == TRAIN)
    # An item's category is its dictionary's; the least, should an item ever have two.
    counted = (
        train.groupBy(F.col(item).alias("__token"))
        .agg(F.count("*").alias("count"), F.min(group_of(config)).alias(GROUP_COLUMN))
        .where(F.col(GROUP_COLUMN).isNotNull())
    )
    items = counted.toArrow().sort_by([(GROUP_COLUMN, "ascending"), ("__token", "ascending")])
    items = items.combine_chunks()
    groups = _group_numbers(items[GROUP_COLUMN])
    weights = items["count"].to_numpy().astype(np.float64) ** config.exponent
    alias = build_alias_table(weights, groups)
    starts = np.searchsorted(groups, groups, "left")
    token = items["__token"].combine_chunks()
    table = pa.table(
        {
            GROUP_COLUMN: items[GROUP_COLUMN],
            _INDEX: np.arange(len(groups), dtype=np.int64) - starts,
            "__token": token,
            "__item_probability": alias.probabilities,
            "__threshold": alias.thresholds,
            "__alias": token.take(pa.array(alias.aliases)),
            "__alias_probability": alias.probabilities[alias.aliases],
        }
    )
    spark = events.sparkSession
    sizes = table.group_by(GROUP_COLUMN).aggregate([("__token", "count")])
    sizes = sizes.select([GROUP_COLUMN, "__token_count"]).rename_columns([GROUP_COLUMN, _SIZE])
    return Candidates(spark.createDataFrame(table), spark.createDataFrame(sizes))


def _group_numbers(groups: pa.ChunkedArray) -> np.ndarray:
    """Numbers sorted groups from 0."""
    encoded = pc.dictionary_encode(groups).combine_chunks()
    return np.asarray(encoded.indices).astype(np.int64)
