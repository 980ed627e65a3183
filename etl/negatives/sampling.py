"""Adds drawn negatives to the samples: new rows, with another item, label 0 and a probability."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pyspark import StorageLevel
from pyspark.sql import functions as F

from conf.etl import BuildConfig, NegativesConfig
from etl.behaviour.rolling import count_again
from etl.events import kept
from etl.identity import DRAW_COLUMN, event_columns
from etl.joins import join_one, plan_joins
from etl.negatives.candidates import (
    CANDIDATE_COLUMN,
    GROUP_COLUMN,
    PROBABILITY_COLUMN,
    Candidates,
    fit_candidates,
    group_of,
)
from etl.negatives.unseen import draw_unseen
from etl.sources import Source
from etl.split import SPLIT_COLUMN, TRAIN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


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
    samples: DataFrame, log: DataFrame, config: BuildConfig, sources: Mapping[str, Source]
) -> Negatives:
    """Adds `per_positive` drawn rows for each positive of the config's splits.

    A drawn row is the positive with another item, what the item's dictionaries say of it and what
    had happened to it by the time of the positive, label 0, and no value in the column that the
    label was read from. The draws hang on the seed, the event and the number of the draw alone.

    Args:
        samples: Samples (`etl.records.build_samples`).
        log: Every event (`etl.events.prepare_events`). Popularity is counted on those that are
            kept, and these are what users have met.
        config: The build's config.
        sources: The sources as read; negatives get their features from the dictionaries.
    """
    negatives, label = config.negatives, config.label_name
    if negatives is None or not negatives.draws or label is None:
        return Negatives(samples, {}, _release_nothing)
    events = kept(log)
    candidates = fit_candidates(events, config.events.item or "", negatives)
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
    draw: tuple[Candidates, list[Column]],
) -> tuple[DataFrame, Mapping[str, int], Callable[[], None]]:
    user, item = config.events.user or "", config.events.item or ""
    met = events if negatives.not_seen == "all" else events.where(F.col(SPLIT_COLUMN) == TRAIN)
    met = met.select(user, F.col(item).alias(CANDIDATE_COLUMN)).distinct()
    candidates, key = draw
    columns = event_columns(config)
    # Narrow rows go through the draws; the samples are joined to what comes out of them.
    slots = _open_slots(positives.select(*columns, SPLIT_COLUMN, GROUP_COLUMN), negatives)
    found = draw_unseen(slots, met, candidates, user, key)
    rows = found.rows.persist(StorageLevel.MEMORY_AND_DISK)

    def release() -> None:
        rows.unpersist()
        found.release()

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
    item, label = config.events.item or "", config.label
    rows = drawn.withColumn(item, F.col(CANDIDATE_COLUMN)).drop(CANDIDATE_COLUMN)
    of_item = {item}
    for join in plan_joins(config, sources):
        if join.on not in of_item:
            continue
        added = join.config.added_columns(config.sources[join.name])
        # An item without an entry was drawn as it is; the log's frequent keys are not the draws'.
        plain = {"unmatched": "keep", "strategy": "auto", "salts": None}
        rows = join_one(
            rows.drop(*added),
            sources[join.name].good,
            replace(join, config=join.config.model_copy(update=plain)),
        )
        of_item |= set(added)
    rows = count_again(rows, log, config, of_item)
    if label is not None and label.column is not None:
        # It tells of the positive what did not happen with this item.
        unknown = F.lit(None).cast(drawn.schema[label.column].dataType)
        rows = rows.withColumn(label.column, unknown)
    return rows.withColumn(config.label_name or "", F.lit(0.0).cast("float"))
