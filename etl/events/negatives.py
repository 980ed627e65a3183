"""Drawn negatives: samples of items that the user has not met, each with its probability.

Items come from an alias table of the train split, by a hash of the sample, so that the draws
are the same for ever; what the user has met is drawn again until it is new, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark import StorageLevel
from pyspark.sql import functions as F

from conf.etl.build import BuildConfig
from conf.etl.labels import NegativesConfig
from conf.splits import TRAIN
from etl.events.down_sampling import INSIDE_SEQUENCE
from etl.events.event_log import kept
from etl.events.identity import DRAW_COLUMN, event_columns, hash_fraction
from etl.events.joins import join_one, plan_joins
from etl.events.sample_filter import NOT_SAMPLED_COLUMN
from etl.events.splits import SPLIT_COLUMN
from etl.events.windowed_features import count_again
from etl.sources.source import Source

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class AliasTable:
    """One row per outcome; groups are distributions of their own.

    A draw takes a row of its group uniformly, and a fraction in [0, 1): below the row's threshold
    the outcome is the row's, else that of its alias.

    Attributes:
        thresholds: `[n]` in [0, 1].
        aliases: `[n]` row of the other outcome, of the same group.
        probabilities: `[n]` probability of each row's outcome in its group.
    """

    thresholds: FloatArray
    aliases: IntArray
    probabilities: FloatArray


def build_alias_table(weights: FloatArray, groups: IntArray) -> AliasTable:
    """Builds the tables of all groups in one sweep, without a loop.

    Walker 1977, "An efficient method for generating discrete random variables", with the sweep of
    Hübschle-Schneider & Sanders 2022, "Parallel weighted random sampling", section 4: rows below
    the mean weight are filled up by those above it in turn; one that has given too much is filled
    up by the next. Running sums tell who fills whom.

    Args:
        weights: `[n]`, positive.
        groups: `[n]` group of each row, rising: 0, 0, 1, …
    """
    sizes = np.bincount(groups)
    probabilities = weights / np.bincount(groups, weights)[groups]
    scaled = probabilities * sizes[groups]
    small, large = np.flatnonzero(scaled < 1), np.flatnonzero(scaled >= 1)
    thresholds, aliases = np.ones(len(weights)), np.arange(len(weights), dtype=np.int64)
    if not len(small) or not len(large):
        return AliasTable(thresholds, aliases, probabilities)
    missing = np.concatenate([[0.0], np.cumsum(1 - scaled[small])])
    surplus = np.cumsum(scaled[large] - 1)
    # Rounding must not lend from another group, and a group may be even but for rounding.
    first = np.searchsorted(groups[large], groups[small], "left")
    last = np.searchsorted(groups[large], groups[small], "right") - 1
    giver = np.clip(np.searchsorted(surplus, missing[:-1], "right"), first, np.maximum(first, last))
    uneven = last >= first
    thresholds[small[uneven]] = scaled[small[uneven]]
    aliases[small[uneven]] = large[giver[uneven]]
    filled = np.clip(
        np.searchsorted(missing[:-1], surplus, "left"),
        np.searchsorted(groups[small], groups[large], "left"),
        np.searchsorted(groups[small], groups[large], "right"),
    )
    given = missing[filled]
    has_next = np.append(groups[large[1:]] == groups[large[:-1]], False)
    thresholds[large] = np.where(has_next, np.clip(1 - (given - surplus), 0, 1), 1.0)
    aliases[large] = np.where(has_next, np.append(large[1:], 0), large)
    return AliasTable(thresholds, aliases, probabilities)


CANDIDATE_COLUMN = "__candidate"
PROBABILITY_COLUMN = "__probability"
GROUP_COLUMN = "__group"
_INDEX = "__index"
_SIZE = "__size"
_HASH = "__draw_hash"
_COUNT = "__count"


@dataclass(frozen=True)
class NegativeCandidates:
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


@dataclass(frozen=True)
class Popular:
    """The rows by which `popularity` counts items: positives among the rows that train.

    Attributes:
        condition: Whether a row counts.
        rows: The rows; None: the kept events.
    """

    condition: Column
    rows: DataFrame | None = None


_TABLE_COLUMNS = ("__token", "__item_probability", "__threshold", "__alias", "__alias_probability")


def group_of(config: NegativesConfig) -> Column:
    """The group that a row draws from: its category, or the one that all items are in."""
    return F.col(config.category) if config.category is not None else F.lit(0)


def fit_candidates(
    events: DataFrame, item: str, config: NegativesConfig, popular: Popular
) -> NegativeCandidates:
    """Counts the items of the train split, and builds their alias table.

    Every item of the split's events can be drawn. One that no positive has counts as one. Only one
    row per item comes to the driver, as Arrow, like a vocabulary.

    Args:
        events: Kept events with `__split`.
        item: Item column.
        config: The distribution: word2vec's distortion of the counts, count^alpha.
        popular: The rows that are counted.
    """
    in_train = (F.col(SPLIT_COLUMN) == TRAIN) & F.col(item).isNotNull()
    # An item's category is its dictionary's; the least, should an item ever have two.
    of_token = F.min(group_of(config)).alias(GROUP_COLUMN)
    token = F.col(item).alias("__token")
    positives = F.count_if(popular.condition).alias(_COUNT)
    if popular.rows is None:
        counted = events.where(in_train).groupBy(token).agg(positives, of_token)
    else:
        counts = popular.rows.where(in_train).groupBy(token).agg(positives)
        counted = events.where(in_train).groupBy(token).agg(of_token)
        counted = counted.join(counts, "__token", "left")
    counted = counted.where(F.col(GROUP_COLUMN).isNotNull())
    items = counted.toArrow().sort_by([(GROUP_COLUMN, "ascending"), ("__token", "ascending")])
    items = items.combine_chunks()
    groups = _group_numbers(items[GROUP_COLUMN])
    counts = pc.fill_null(items[_COUNT], 0).to_numpy()
    weights = np.maximum(counts, 1).astype(np.float64) ** config.exponent
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
    return NegativeCandidates(spark.createDataFrame(table), spark.createDataFrame(sizes))


def _group_numbers(groups: pa.ChunkedArray) -> np.ndarray:
    """Numbers sorted groups from 0."""
    encoded = pc.dictionary_encode(groups).combine_chunks()
    return np.asarray(encoded.indices).astype(np.int64)


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
    slots: DataFrame,
    met: DataFrame,
    candidates: NegativeCandidates,
    user: str,
    key: Sequence[Column],
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
        draw = F.struct(_TRY, CANDIDATE_COLUMN, PROBABILITY_COLUMN)
        result = seen.groupBy(*names).agg(
            F.min(F.when(F.col("__met").isNull(), draw)).alias(_FOUND)
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


def _met_probability(met: DataFrame, candidates: NegativeCandidates, user: str) -> DataFrame:
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


@dataclass(frozen=True)
class Negatives:
    """Samples with their negatives.

    Attributes:
        samples: All rows, the drawn ones included.
        drawn: Number of drawn rows by split.
        release: Frees what Spark keeps; to be called when the rows are written.
    """

    samples: DataFrame
    drawn: Mapping[str, int]
    release: Callable[[], None]


def add_negatives(
    samples: DataFrame,
    log: DataFrame,
    config: BuildConfig,
    sources: Mapping[str, Source],
    all_samples: DataFrame | None = None,
) -> Negatives:
    """Adds `per_positive` drawn rows for each positive of the config's splits.

    A drawn row is the positive with another item, what the item's dictionaries say of it and what
    had happened to it by the time of the positive, label 0, and no value in the column that the
    label was read from. The draws hang on the seed, the event and the number of the draw alone.

    Args:
        samples: Samples (`etl.records.samples.build_samples`).
        log: Every event (`etl.events.event_log.prepare_events`). The kept ones are what is drawn
            from, and what users have met.
        config: The build's config.
        sources: The sources as read; negatives get their features from the dictionaries.
        all_samples: The samples of every day that was read; None: they are the kept events that
            are not marked as no samples.
    """
    negatives, label = config.negatives, config.label_name
    if negatives is None or not negatives.draws or label is None:
        return Negatives(samples, {}, _release_nothing)
    events = kept(log)
    popular = _find_popular(label, all_samples)
    candidates = fit_candidates(events, config.events.item or "", negatives, popular)
    salt = config.output.seed if negatives.seed is None else negatives.seed
    key = [F.lit(salt), F.lit("negative"), *map(F.col, event_columns(config)), F.col(DRAW_COLUMN)]
    positive = (F.col(label) > 0) & F.col(SPLIT_COLUMN).isin(list(negatives.splits))
    positives = samples.where(positive).withColumn(GROUP_COLUMN, group_of(negatives))
    if negatives.not_seen is None:
        counted = positives.join(candidates.sizes, GROUP_COLUMN, "left_semi")
        counts: Mapping[str, int] = _count(counted, F.lit(negatives.per_positive))
        drawn = candidates.draw(_open_slots(positives, negatives), *key)
        release: Callable[[], None] = _release_nothing
    else:
        drawn, counts, release = _draw_unseen(
            positives, events, config, negatives, (candidates, key)
        )
    probability = negatives.probability
    drawn = drawn.withColumnRenamed(PROBABILITY_COLUMN, probability).drop(GROUP_COLUMN)
    drawn = drawn.withColumn(probability, F.col(probability).cast("float"))
    given = samples.withColumn(DRAW_COLUMN, F.lit(0)).withColumn(
        probability, F.lit(1.0).cast("float")
    )
    replaced = _replace_items(drawn, log, config, sources).select(*given.columns)
    return Negatives(given.unionByName(replaced), counts, release)


def _find_popular(label: str, all_samples: DataFrame | None) -> Popular:
    positive = F.col(label) > 0
    if all_samples is not None:
        return Popular(positive, all_samples)
    # An event inside a sequence trains too: the row that ends the sequence holds it.
    skipped = F.coalesce(F.col(NOT_SAMPLED_COLUMN), F.lit(INSIDE_SEQUENCE))
    return Popular(positive & (skipped == INSIDE_SEQUENCE))


def _release_nothing() -> None:
    """Nothing is kept."""


def _open_slots(positives: DataFrame, negatives: NegativesConfig) -> DataFrame:
    numbers = F.sequence(F.lit(1), F.lit(negatives.per_positive))
    return positives.withColumn(DRAW_COLUMN, F.explode(numbers))


def _draw_unseen(
    positives: DataFrame,
    events: DataFrame,
    config: BuildConfig,
    negatives: NegativesConfig,
    draw: tuple[NegativeCandidates, list[Column]],
) -> tuple[DataFrame, Mapping[str, int], Callable[[], None]]:
    user, item = config.events.user or "", config.events.item or ""
    met = events if negatives.not_seen == "all" else events.where(F.col(SPLIT_COLUMN) == TRAIN)
    met = met.select(user, F.col(item).alias(CANDIDATE_COLUMN)).distinct()
    candidates, key = draw
    columns = event_columns(config)
    # Narrow rows go through the draws; the samples are joined to what comes out of them.
    slots = _open_slots(positives.select(*columns, SPLIT_COLUMN, GROUP_COLUMN), negatives)
    drawn = draw_unseen(slots, met, candidates, user, key)
    rows = drawn.rows.persist(StorageLevel.MEMORY_AND_DISK)

    def release() -> None:
        rows.unpersist()
        drawn.release()

    return (
        positives.join(rows.drop(SPLIT_COLUMN, GROUP_COLUMN), columns),
        _count(rows, F.lit(1)),
        release,
    )


def _count(rows: DataFrame, each: Column) -> dict[str, int]:
    counted = rows.groupBy(SPLIT_COLUMN).agg(F.sum(each).alias("n")).collect()
    return {row[SPLIT_COLUMN]: row["n"] for row in counted}


def _replace_items(
    drawn: DataFrame, log: DataFrame, config: BuildConfig, sources: Mapping[str, Source]
) -> DataFrame:
    """Puts the drawn item into the row, with everything that hangs on it."""
    item = config.events.item or ""
    rows = drawn.withColumn(item, F.col(CANDIDATE_COLUMN)).drop(CANDIDATE_COLUMN)
    of_item = {item}
    for join in plan_joins(config, sources):
        if join.on not in of_item:
            continue
        added = join.config.added_columns(config.sources[join.name])
        # An item without an entry was drawn as it is; the draws are not as many as the events.
        plain = {"unmatched": "keep", "strategy": "auto"}
        rows = join_one(
            rows.drop(*added),
            sources[join.name].good,
            replace(join, config=join.config.model_copy(update=plain)),
        )
        of_item |= set(added)
    rows = count_again(rows, log, config, of_item)
    for column in {label.column for label in config.all_labels if label.column is not None}:
        # It tells of the positive what did not happen with this item.
        rows = rows.withColumn(column, F.lit(None).cast(drawn.schema[column].dataType))
    names = {config.label_name or "", *(label.name for label in config.labels)}
    return rows.withColumns({name: F.lit(0.0).cast("float") for name in sorted(names)})
