"""The rows that become records: samples of every split, the catalogue, and one row per user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.errors import ConfigError
from conf.etl import BuildConfig
from etl.encoders.folds import add_folds, fold_column
from etl.features import SEEN, FeaturePlan
from etl.history import POSITION_COLUMN, add_history, add_seen, all_seen, build_sequences, latest
from etl.sources import Source
from etl.split import ALL_SPLITS, CATALOG, SPLIT_COLUMN, TRAIN, USERS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

HASH_COLUMN = "__hash"
SHARD_COLUMN = "__shard"


def build_samples(events: DataFrame, config: BuildConfig) -> DataFrame:
    """Builds one row per kept event, with its history, and what evaluation needs to know.

    Args:
        events: Kept events (`etl.events.prepare_events`).
        config: The build's config.
    """
    user, item = config.events.user, config.events.item
    samples = events
    if config.history:
        samples = add_history(samples, user, item, config.history.name, config.history.max_len)
    if not config.seen:
        return samples
    is_train = F.col(SPLIT_COLUMN) == TRAIN
    nothing = F.lit(None).cast(events.select(F.array(item)).schema[0].dataType)
    train = samples.where(is_train).withColumn(SEEN, nothing)
    evaluation = add_seen(samples.where(~is_train), build_sequences(events, user, item), user, SEEN)
    return train.unionByName(evaluation)


def drop_short_histories(samples: DataFrame, config: BuildConfig) -> DataFrame:
    """Leaves out samples whose history is shorter than `history.min_len`."""
    if config.history is None or config.history.min_len is None:
        return samples
    return samples.where(F.size(config.history.name) >= config.history.min_len)


def build_users(events: DataFrame, config: BuildConfig, plan: FeaturePlan) -> DataFrame:
    """Builds one row per user with all that is known at the end of the log: for serving.

    Raises:
        ConfigError: A user feature is a column of the event, not of a dictionary of users.
    """
    user, item = config.events.user, config.events.item
    history = config.history.name if config.history else None
    columns = {
        column
        for f in plan.features
        if f.role == "user"
        for column in f.columns
        if column not in (user, history)
    }
    _check_columns(config, columns, user, "user")
    attributes = (
        events.groupBy(user).agg(*[F.max(c).alias(c) for c in sorted(columns)])
        if columns
        else events.select(user).distinct()
    )
    users = build_sequences(events, user, item)
    if config.history and history:
        users = users.withColumn(history, latest(config.history.max_len))
    if config.seen:
        users = users.withColumn(SEEN, all_seen())
    return users.drop("__sequence").join(attributes, user).withColumn(SPLIT_COLUMN, F.lit(USERS))


def build_catalog(
    config: BuildConfig, plan: FeaturePlan, sources: Mapping[str, Source], tokens: DataFrame
) -> DataFrame:
    """Builds one row per item of the vocabulary, with the features of the item tower.

    Args:
        config: The build's config.
        plan: Its features.
        sources: The sources as read.
        tokens: One column: the tokens of the item's vocabulary.

    Raises:
        ConfigError: An item feature is a column of the event, not of a dictionary of items.
    """
    item = config.events.item
    columns = {
        column for f in plan.features if f.role == "item" for column in f.columns if column != item
    }
    _check_columns(config, columns, item, "item")
    catalog = tokens.toDF(item)
    for join in config.joins:
        wanted = [c.name for c in config.sources[join.source].columns if c.name in columns]
        if join.column == item and wanted:
            key = config.sources[join.source].key or ""
            dictionary = sources[join.source].good.select(F.col(key).alias(item), *wanted)
            catalog = catalog.join(dictionary, item, "left")
    return catalog.withColumn(SPLIT_COLUMN, F.lit(CATALOG))


def _check_columns(config: BuildConfig, columns: set[str], key: str, role: str) -> None:
    known = {
        column.name
        for join in config.joins
        if join.column == key
        for column in config.sources[join.source].columns
    }
    unknown = sorted(columns - known)
    if unknown:
        raise ConfigError(
            f"features of role {role} must be the {role}'s id or columns of a dictionary joined "
            f"on {key!r}: serving has no event to take them from",
            received=", ".join(unknown),
            allowed=", ".join(sorted(known | {key})),
            fix="give the feature the role context, or join a dictionary",
        )


def shard_counts(config: BuildConfig) -> dict[str, int]:
    """Returns the number of shards per split, in the order of their partition ids."""
    return {
        split: config.output.shards if split == TRAIN else config.output.eval_shards
        for split in ALL_SPLITS
    }


def arrange(records: DataFrame, config: BuildConfig, plan: FeaturePlan) -> DataFrame:
    """Puts each record into its shard and place by a hash of its content.

    The same rows give the same shards in the same order, whatever the number of executors,
    input blocks or retries; and the order within a split is a global shuffle.

    Returns:
        The features' raw columns, partitioned by shard and sorted within.
    """
    user, item = config.events.user, config.events.item
    identity = [F.col(SPLIT_COLUMN), F.col(user), F.col(item), F.col(POSITION_COLUMN)]
    hashed = records.withColumn(HASH_COLUMN, F.xxhash64(F.lit(config.output.seed), *identity))
    start, shard = 0, F.lit(None).cast("int")
    for split, count in shard_counts(config).items():
        inside = F.pmod(F.col(HASH_COLUMN), F.lit(count)).cast("int") + F.lit(start)
        shard = F.when(F.col(SPLIT_COLUMN) == split, inside).otherwise(shard)
        start += count
    arranged = hashed.withColumn(SHARD_COLUMN, shard).repartitionById(start, F.col(SHARD_COLUMN))
    ordered = arranged.sortWithinPartitions(HASH_COLUMN, user, item, POSITION_COLUMN)
    return _raw_columns(ordered, config, plan)


def row_key(config: BuildConfig) -> tuple[str, ...]:
    """Columns that tell the rows of the event log, and the samples made of them, apart."""
    return config.events.user, config.events.item, POSITION_COLUMN


def _raw_columns(records: DataFrame, config: BuildConfig, plan: FeaturePlan) -> DataFrame:
    """Leaves the columns that encoders read: those of the features, and the folds of train rows."""
    folded = add_folds(records, plan.folds, row_key(config))
    folds = [fold_column(n) for n in plan.folds]
    is_train = F.col(SPLIT_COLUMN) == TRAIN
    return folded.select(
        *[F.col(name) for name in plan.columns],
        *[F.when(is_train, F.col(name)).alias(name) for name in folds],
    )
