"""Puts every record into its shard and place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.etl import BuildConfig
from etl.arrangement.keys import GROUP_HASH_COLUMN, HASH_COLUMN, PART_COLUMN, TIME_COLUMN
from etl.arrangement.plan import ShardPlan
from etl.arrangement.survey import bucket_column, join_bounds
from etl.features import FeaturePlan
from etl.history import POSITION_COLUMN
from etl.identity import identity_columns
from etl.records import raw_columns
from etl.split import SPLIT_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SHARD_COLUMN = "__shard"
_START, _COUNT, _TABLE = "__start", "__count", "__table"


def arrange(
    keyed: DataFrame, config: BuildConfig, plan: FeaturePlan, shards: ShardPlan
) -> DataFrame:
    """Puts each record into its shard and place by a hash of its content, or by its time.

    The same rows give the same shards in the same order, whatever the number of executors,
    input blocks or retries.

    Args:
        keyed: Records with their keys (`add_keys`).
        config: The build's config.
        plan: Its features.
        shards: The shards.

    Returns:
        The features' raw columns, partitioned by shard and sorted within.
    """
    placed = _place(keyed, config, shards)
    arranged = placed.repartitionById(shards.total, F.col(SHARD_COLUMN))
    ordered = arranged.sortWithinPartitions(*_order(config))
    return ordered.select(*[F.col(name) for name in raw_columns(plan)])


def _place(keyed: DataFrame, config: BuildConfig, shards: ShardPlan) -> DataFrame:
    if all(not cell.key and not cell.shard_of_bucket for cell in shards.cells):
        shard = F.lit(None).cast("int")
        for cell in shards.cells:
            inside = F.pmod(F.col(HASH_COLUMN), F.lit(cell.count)).cast("int") + F.lit(cell.start)
            shard = F.when(F.col(SPLIT_COLUMN) == cell.split, inside).otherwise(shard)
        return keyed.withColumn(SHARD_COLUMN, shard)
    if shards.bounds:
        keyed = join_bounds(keyed, shards.bounds)
    joined = keyed.join(F.broadcast(_cell_table(keyed, shards)), [SPLIT_COLUMN, PART_COLUMN])
    by_hash = F.pmod(F.col(HASH_COLUMN), F.col(_COUNT)).cast("int")
    if not any(cell.shard_of_bucket for cell in shards.cells):
        return joined.withColumn(SHARD_COLUMN, F.col(_START) + by_hash)
    bucket = bucket_column(config, F.col("__low"), F.col("__high"))
    return joined.withColumn(SHARD_COLUMN, F.col(_START) + F.get(_TABLE, bucket))


def _cell_table(keyed: DataFrame, shards: ShardPlan) -> DataFrame:
    rows = [
        (cell.split, cell.key, cell.start, cell.count, list(cell.shard_of_bucket))
        for cell in shards.cells
    ]
    schema = (
        f"{SPLIT_COLUMN} string, {PART_COLUMN} string, {_START} int, {_COUNT} int, "
        f"{_TABLE} array<int>"
    )
    return keyed.sparkSession.createDataFrame(rows, schema)


def _order(config: BuildConfig) -> list[Column]:
    content = [F.col(name) for name in (HASH_COLUMN, *identity_columns(config))]
    user = config.events.user
    if config.output.group_by is not None and user is not None:
        return [F.col(GROUP_HASH_COLUMN), F.col(user), F.col(POSITION_COLUMN), *content]
    if config.output.order == "time":
        return [F.col(TIME_COLUMN), *content]
    return content
