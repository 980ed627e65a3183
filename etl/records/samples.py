"""The rows that become records: samples of every split, the item corpus, one row per user.

The splits `catalog` and `users` hold what serving knows: a feature that it cannot know is
refused before anything is read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.encoders import VocabularySpec
from conf.encoders.target import FOLD_COLUMN
from conf.errors import ConfigError
from conf.etl.build import BuildConfig
from conf.splits import CATALOG, TRAIN, USERS
from etl.encoders.feature_plan import (
    EVENT_NUMBER,
    SEEN,
    FeaturePlan,
    brought_items,
    history_names,
    raw_value_columns,
)
from etl.encoders.joined_vocabulary import read_tokens
from etl.encoders.number_fit import add_folds
from etl.events.columns import (
    EVENT_TS_COLUMN,
    NOT_SAMPLED_COLUMN,
    POSITION_COLUMN,
    SEEN_COLUMN,
    SPLIT_COLUMN,
    fold_columns,
    kept,
)
from etl.events.conditions import find_position, find_where_columns
from etl.events.counted_features import (
    add_latest_windowed_features,
    add_most_frequent,
    windowed_feature_names,
)
from etl.events.histories import add_histories, add_latest_histories
from etl.events.joins import plan_joins, select_latest
from etl.sources.source import Source

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

logger = logging.getLogger("sluice.build")

_SEQUENCE, _OWNER = "__sequence", "__sequence_of"


def user_columns(config: BuildConfig, plan: FeaturePlan) -> set[str]:
    """Returns the columns of user features that dictionaries of users give."""
    return _columns(plan, "user", config.events.user) - _made(config, "user")


def item_columns(config: BuildConfig, plan: FeaturePlan) -> set[str]:
    """Returns the columns of item features that dictionaries of items give."""
    return _columns(plan, "item", config.events.item) - _made(config, "item")


def check_served_columns(config: BuildConfig, plan: FeaturePlan) -> None:
    """Checks that what serving asks of a user or an item is known without an event.

    Raises:
        ConfigError: A feature of role user or item is a column of the event, or a rolling feature
            by other keys; or a list that is made for items has another role.
    """
    _check_item_lists(config, plan)
    splits = config.record_splits
    if USERS in splits:
        _check(config, user_columns(config, plan), "user", _made(config, "user"))
    if CATALOG in splits:
        _check(config, item_columns(config, plan), "item", _made(config, "item"))


def _check_item_lists(config: BuildConfig, plan: FeaturePlan) -> None:
    names = {counted.name for counted in config.most_frequent}
    for feature in plan.features:
        if names.intersection(feature.columns) and feature.role not in ("item", "id"):
            raise ConfigError(
                f"feature {feature.name!r} holds what stands beside the item, which is to be found",
                received=f"role {feature.role}",
                allowed="role item, or id",
            )


def _columns(plan: FeaturePlan, role: str, key: str | None) -> set[str]:
    return {c for f in plan.features if f.role == role for c in f.columns if c != key}


def _made(config: BuildConfig, role: str) -> set[str]:
    """Columns of the log, or made of it, that are known at its end for a user or an item alone."""
    if role == "item":
        counted = {counted.name for counted in config.most_frequent}
        return counted | windowed_feature_names(config, config.events.item or "")
    counted = windowed_feature_names(config, config.events.user or "")
    # A request is made at some time, as an event is.
    time = () if config.events.time is None else (config.events.time,)
    return {*history_names(config), *config.brought_history, *counted, *time}


def _check(config: BuildConfig, columns: set[str], role: str, made: set[str]) -> None:
    key = (config.events.user if role == "user" else config.events.item) or ""
    known = {
        column
        for join in config.joins
        if join.column == key
        for column in config.sources[join.source].column_types
    }
    unknown = sorted(columns - known)
    if unknown:
        raise ConfigError(
            f"features of role {role} must be the {role}'s id, columns of a dictionary joined on "
            f"{key!r}, or counted by {key!r} alone: serving has no event to take others from",
            received=", ".join(unknown),
            allowed=", ".join(sorted({*known, *made, key})),
            fix="give the feature the role context, or join a dictionary",
        )


def build_samples(events: DataFrame, config: BuildConfig) -> DataFrame:
    """Builds one row per event that is a sample, with its history, and what evaluation needs."""
    user = config.events.user or ""
    samples = add_histories(events, config)
    # After the windows: an event that is no sample stays in the histories of those that are.
    samples = samples.where(F.col(NOT_SAMPLED_COLUMN).isNull())
    if not config.seen:
        return samples
    if config.numbers_events:
        samples = samples.withColumn(EVENT_NUMBER, _number_event(config))
    sequences = events.groupBy(F.col(user).alias(_OWNER)).agg(
        _collect_sequence(_seen_item(config)).alias(_SEQUENCE)
    )
    is_evaluated = F.col(SPLIT_COLUMN) != TRAIN
    # One or few rows per user: the others pass through one join with them, and get null.
    samples = samples.join(sequences, (F.col(user) == F.col(_OWNER)) & is_evaluated, "left")
    before = F.col(find_position(config, find_where_columns(config, config.seen_where)))
    seen = F.slice(F.col(_SEQUENCE), F.lit(1), before - F.lit(1))
    # An event that is no sample may have no item.
    seen = F.array_distinct(F.array_compact(seen))
    samples = samples.withColumn(SEEN, seen).drop(_SEQUENCE, _OWNER)
    if (brought := _brought_and_seen(config)) is None:
        return samples
    return samples.withColumn(SEEN, F.when(is_evaluated, _join_items(F.col(SEEN), F.col(brought))))


def _number_event(config: BuildConfig) -> Column:
    """The number of an event among its user's, from 1.

    A run counts from the first day that it reads: where days are built apart, the day leads.
    """
    number = F.col(POSITION_COLUMN).cast("bigint")
    if config.output.partition_overwrite != "dynamic":
        return number
    return F.floor(F.col(EVENT_TS_COLUMN) / 86_400_000) * F.lit(10**9) + number


def _brought_and_seen(config: BuildConfig) -> str | None:
    """The log's own list of items, which are seen too; not where only some events count."""
    return brought_items(config) if config.seen_where is None else None


def _latest_brought(config: BuildConfig, name: str) -> Column:
    """The list of a user's latest event that brings one, an aggregate; it begins with its item.

    An item that was shown and not taken, as the label says, is no part of it. A list that others
    are aligned to, or of something else than items, stays as it came.
    """
    latest, is_alone = F.col(name), len(config.brought_history) == 1
    if is_alone and brought_items(config) == name:
        item = F.col(config.events.item or "")
        if config.first_label is not None:
            item = F.when(F.col(config.first_label.name) > 0, item)
        own = F.array_compact(F.array(item))
        latest = F.concat(own, latest)
    return F.max_by(latest, F.when(F.col(name).isNotNull(), F.col(POSITION_COLUMN)))


def _join_items(items: Column, others: Column) -> Column:
    """Distinct items of two lists, either of which may be null."""
    nothing = F.array()
    both = F.concat(F.coalesce(items, nothing), F.coalesce(others, nothing))
    return F.array_distinct(F.array_compact(both))


def _collect_sequence(item: Column) -> Column:
    """All items of a group in order of `__position`, nulls among them: an aggregate."""
    # `array_sort` would interpret a function of Spark's for every comparison.
    pairs = F.collect_list(F.struct(POSITION_COLUMN, item.alias("item")))
    return F.sort_array(pairs)["item"]


def _seen_item(config: BuildConfig) -> Column:
    """The item of an event, null where the event does not make it a seen one."""
    item = F.col(config.events.item or "")
    return item if config.seen_where is None else F.when(F.col(SEEN_COLUMN), item)


def build_users(
    log: DataFrame, config: BuildConfig, plan: FeaturePlan, sources: Mapping[str, Source]
) -> DataFrame:
    """Builds one row per user with all that is known at the end of the log: for serving.

    The time of the log is its end for all of them.
    """
    user, events = config.events.user or "", kept(log)
    columns = user_columns(config, plan)
    changing = _latest_entries(config, sources, events, user)
    wanted = [(table, sorted(columns & set(table.columns))) for table in changing]
    columns -= {column for _, names in wanted for column in names}
    found = [F.max(column).alias(column) for column in sorted(columns)]
    found += [_latest_brought(config, name).alias(name) for name in config.brought_history]
    if config.seen:
        items, brought = _collect_sequence(_seen_item(config)), _brought_and_seen(config)
        latest = _latest_brought(config, brought) if brought else F.array()
        found.append(_join_items(items, latest).alias(SEEN))
    attributes = events.groupBy(user).agg(*found) if found else events.select(user).distinct()
    users = add_latest_histories(attributes, events, config)
    users = add_latest_windowed_features(users, log, config, user)
    for table, names in wanted:
        users = users.join(table.select(user, *names), user, "left")
    time = config.events.time
    if time in _columns(plan, "user", user):
        end = events.agg(F.max_by(time, EVENT_TS_COLUMN).alias(time))
        users = users.crossJoin(F.broadcast(end))
    return users.withColumn(SPLIT_COLUMN, F.lit(USERS))


def build_catalog(
    log: DataFrame,
    config: BuildConfig,
    plan: FeaturePlan,
    sources: Mapping[str, Source],
    tokens: DataFrame,
) -> DataFrame:
    """Builds one row per item of the vocabulary, with the features of the item tower."""
    item = config.events.item or ""
    columns = item_columns(config, plan)
    catalog = add_latest_windowed_features(tokens.toDF(item), log, config, item)
    fixed = [
        sources[join.source].good.withColumnRenamed(config.sources[join.source].key or "", item)
        for join in config.joins
        if join.column == item and join.as_of is None
    ]
    for dictionary in (*fixed, *_latest_entries(config, sources, kept(log), item)):
        attributes = sorted(columns & set(dictionary.columns))
        if attributes:
            catalog = catalog.join(dictionary.select(item, *attributes), item, "left")
    return catalog.withColumn(SPLIT_COLUMN, F.lit(CATALOG))


def _latest_entries(
    config: BuildConfig, sources: Mapping[str, Source], events: DataFrame, key: str
) -> list[DataFrame]:
    """The as-of dictionaries of one event column as they stand at the end, by that column."""
    end = events.agg(F.max(EVENT_TS_COLUMN))
    return [
        select_latest(join, end)
        for join in plan_joins(config, sources)
        if join.config.as_of is not None and join.config.column == key
    ]


@dataclass(frozen=True)
class EventRows:
    """What records are made of.

    Attributes:
        samples: Rows of the event splits: kept events, and drawn negatives.
        log: Every event, those that are left out with their reason.
        sources: The sources as read.
        newest_ts_ms: Time of the last event; None: events have no time.
    """

    samples: DataFrame
    log: DataFrame
    sources: Mapping[str, Source]
    newest_ts_ms: int | None = None


def build_record_rows(
    rows: EventRows,
    config: BuildConfig,
    plan: FeaturePlan,
    items: VocabularySpec | None,
    served: Sequence[str],
    encoders_dir: Path,
) -> DataFrame:
    """Builds one row per record, of the samples and of served splits, with what encoders read."""
    records = rows.samples
    if items is not None and CATALOG in served:
        tokens = read_tokens(records.sparkSession, encoders_dir, items).select("token")
        _warn_of_unknown_items(config, plan, rows.sources, tokens)
        catalog = build_catalog(rows.log, config, plan, rows.sources, tokens)
        records = records.unionByName(catalog, allowMissingColumns=True)
    if USERS in served:
        users = build_users(rows.log, config, plan, rows.sources)
        records = records.unionByName(users, allowMissingColumns=True)
    records = add_most_frequent(records, config, encoders_dir)
    return _add_train_folds(_add_raw_values(records, config, plan), config, plan)


def _warn_of_unknown_items(
    config: BuildConfig, plan: FeaturePlan, sources: Mapping[str, Source], tokens: DataFrame
) -> None:
    """Says how many items are in lists alone, though events without an entry are dropped."""
    item = config.events.item or ""
    shared = [v for v in plan.vocabularies if item in v.columns and len(v.columns) > 1]
    for join in config.joins if shared else ():
        if join.column != item or join.unmatched != "drop" or join.as_of is not None:
            continue
        key = config.sources[join.source].key or ""
        known = sources[join.source].good.select(F.col(key).alias(tokens.columns[0]))
        unknown = tokens.join(known, tokens.columns[0], "left_anti").count()
        if unknown:
            logger.warning(
                "%d of %d items of the catalogue are in no row of %s: lists of the log name "
                "them, and they may be recommended without features",
                unknown, tokens.count(), join.source,
            )  # fmt: skip


def _add_train_folds(records: DataFrame, config: BuildConfig, plan: FeaturePlan) -> DataFrame:
    """Adds the fold of train rows, where an out-of-fold encoding reads it; null in other rows."""
    if not plan.has_targets:
        return records
    folded = add_folds(records, fold_columns(config))
    is_train = F.col(SPLIT_COLUMN) == TRAIN
    return folded.withColumn(FOLD_COLUMN, F.when(is_train, F.col(FOLD_COLUMN)))


def _add_raw_values(records: DataFrame, config: BuildConfig, plan: FeaturePlan) -> DataFrame:
    """Adds what fitted encoders read, as it is, to all rows but those of train."""
    is_held_out = F.col(SPLIT_COLUMN) != TRAIN
    columns = {}
    for column, name in raw_value_columns(config).items():
        value = F.col(column)
        if not plan.is_list(column):
            is_text = plan.value_type(column) == "float64"
            value = F.array_compact(F.array(value.cast("string") if is_text else value))
        columns[name] = F.when(is_held_out, value)
    return records.withColumns(columns)


def raw_columns(plan: FeaturePlan) -> tuple[str, ...]:
    """Returns the columns that encoders read: those of the features, and the fold."""
    return (*plan.columns, FOLD_COLUMN) if plan.has_targets else plan.columns
