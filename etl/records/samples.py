"""The rows that become records: samples of every split, the item corpus, one row per user.

The splits `catalog` and `users` hold what serving knows: a feature that it cannot know is
refused before anything is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.dates import DateRange
from conf.encoders import ENCODERS_DIR, VocabularySpec
from conf.encoders.target import FOLD_COLUMN
from conf.errors import ConfigError
from conf.etl.build import BuildConfig
from conf.manifest import Manifest
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
from etl.events.sampling import Negatives, add_negatives
from etl.events.splits import is_inside
from etl.sources.source import Source

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

_SEQUENCE, _OWNER = "__sequence", "__sequence_of"


@dataclass(frozen=True)
class VersionPlan:
    """What a version is made by, before anything is read, and where."""

    config: BuildConfig
    features: FeaturePlan
    staging: Path
    dates: DateRange | None = None  # whose events become samples; None: all
    base: tuple[Path, Manifest] | None = None  # whose other days are kept; None: all is built

    @property
    def encoders(self) -> Path:
        """Directory of the encoders."""
        return self.staging / ENCODERS_DIR


def served_columns(config: BuildConfig, plan: FeaturePlan, role: str) -> set[str]:
    """Returns the columns of features of users, or items, that their dictionaries give."""
    return _columns(plan, role) - {_key(config, role)} - _made(config, role)


def _key(config: BuildConfig, role: str) -> str:
    return (config.events.user if role == "user" else config.events.item) or ""


def _columns(plan: FeaturePlan, role: str) -> set[str]:
    return {column for f in plan.features if f.role == role for column in f.columns}


def _made(config: BuildConfig, role: str) -> set[str]:
    """Columns of the log, or made of it, that are known at its end for a user or an item alone."""
    counted = windowed_feature_names(config, _key(config, role))
    if role == "item":
        return {*counted, *(most.name for most in config.most_frequent)}
    # A request is made at some time, as an event is.
    time = () if config.events.time is None else (config.events.time,)
    return {*history_names(config), *config.brought_history, *counted, *time}


def check_served_columns(config: BuildConfig, plan: FeaturePlan) -> None:
    """Refuses features of a user or an item that serving cannot know without an event."""
    beside_item = {counted.name for counted in config.most_frequent}
    for feature in plan.features:
        if beside_item.intersection(feature.columns) and feature.role not in ("item", "id"):
            raise ConfigError(
                f"feature {feature.name!r} holds what stands beside the item, which is to be found",
                received=f"role {feature.role}",
                allowed="role item, or id",
            )
    for split, role in ((USERS, "user"), (CATALOG, "item")):
        if split in config.record_splits:
            _check_role(config, served_columns(config, plan, role), role)


def _check_role(config: BuildConfig, columns: set[str], role: str) -> None:
    key = _key(config, role)
    joins = [join for join in config.joins if join.column == key]
    known = {name for join in joins for name in config.sources[join.source].column_types}
    if unknown := sorted(columns - known):
        raise ConfigError(
            f"features of role {role} need columns of a dictionary joined on {key!r}, or counted "
            "by it alone: serving has no event to take others from",
            received=", ".join(unknown),
            allowed=", ".join(sorted({*known, *_made(config, role), key})),
            fix="give the feature the role context, or join a dictionary",
        )


def build_samples(events: DataFrame, config: BuildConfig) -> DataFrame:
    """Builds one row per event that is a sample, with its history, and what evaluation needs."""
    samples = add_histories(events, config)
    # After the windows: an event that is no sample stays in the histories of those that are.
    samples = samples.where(F.col(NOT_SAMPLED_COLUMN).isNull())
    if config.numbers_events:
        samples = samples.withColumn(EVENT_NUMBER, _number_event(config))
    return _add_seen(samples, events, config) if config.seen else samples


def draw_samples(version: VersionPlan, log: DataFrame, sources: Mapping[str, Source]) -> Negatives:
    """Builds the samples of the run's days, with their negatives."""
    samples = build_samples(kept(log), version.config)
    if version.dates is not None:
        samples = samples.where(is_inside(version.dates))
    return add_negatives(samples, log, version.config, sources)


def _add_seen(samples: DataFrame, events: DataFrame, config: BuildConfig) -> DataFrame:
    """Adds the items that a user has seen before an event, to rows that evaluation reads."""
    user = config.events.user or ""
    sequence = _collect_sequence(_seen_item(config)).alias(_SEQUENCE)
    sequences = events.groupBy(F.col(user).alias(_OWNER)).agg(sequence)
    is_evaluated = F.col(SPLIT_COLUMN) != TRAIN
    # One or few rows per user: the others pass through one join with them, and get null.
    samples = samples.join(sequences, (F.col(user) == F.col(_OWNER)) & is_evaluated, "left")
    before = F.col(find_position(config, find_where_columns(config, config.seen_where)))
    seen = F.slice(F.col(_SEQUENCE), F.lit(1), before - F.lit(1))
    # An event that is no sample may have no item.
    seen = F.array_distinct(F.array_compact(seen))
    if (brought := _brought_and_seen(config)) is not None:
        seen = F.when(is_evaluated, _join_items(seen, F.col(brought)))
    return samples.withColumn(SEEN, seen).drop(_SEQUENCE, _OWNER)


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
    columns = served_columns(config, plan, "user")
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
    if time in _columns(plan, "user"):
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
    columns = served_columns(config, plan, "item")
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
    """What records are made of."""

    samples: DataFrame  # of the event splits: kept events, and drawn negatives
    log: DataFrame  # every event, those that are left out with their reason
    sources: Mapping[str, Source]
    newest_ts_ms: int | None = None  # time of the last event; None: events have no time


def build_record_rows(
    version: VersionPlan, rows: EventRows, items: VocabularySpec | None, served: Sequence[str]
) -> DataFrame:
    """Builds one row per record, of the samples and of served splits, with what encoders read."""
    config, plan, records = version.config, version.features, rows.samples
    if items is not None and CATALOG in served:
        tokens = read_tokens(records.sparkSession, version.encoders, items).select("token")
        catalog = build_catalog(rows.log, config, plan, rows.sources, tokens)
        records = records.unionByName(catalog, allowMissingColumns=True)
    if USERS in served:
        users = build_users(rows.log, config, plan, rows.sources)
        records = records.unionByName(users, allowMissingColumns=True)
    records = add_most_frequent(records, config, version.encoders)
    return _add_train_folds(_add_raw_values(records, config, plan), config, plan)


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
