"""Which rows are samples: drawn negatives, and events that a sampling leaves out.

Negatives are items that come from an alias table of the train split, by a hash of the sample, so
that the draws are the same for ever; what the user has met is drawn again until it is new,
exactly. What a sampling leaves out stays in histories, but has no record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F

from conf.etl.build import BuildConfig
from conf.etl.labels import KEEP_RATE, NegativesConfig
from conf.splits import TRAIN
from etl.events.columns import (
    DRAW_COLUMN,
    DROP_COLUMN,
    NOT_SAMPLED_COLUMN,
    POSITION_COLUMN,
    SPLIT_COLUMN,
    draw_fraction,
    event_columns,
    hash_fraction,
    is_sample,
    kept,
    leave_out_samples,
    running_and_whole,
)
from etl.events.counted_features import count_again
from etl.events.joins import join_dictionary, plan_joins
from etl.sources.source import Source

DOWN_SAMPLED = "down_sampled"
EXPOSURE_NOT_SAMPLED = "exposure_not_sampled"
INSIDE_SEQUENCE = "inside_sequence"


def before_sampling(events: DataFrame) -> DataFrame:
    """Returns samples and what only a sampling has left out: the distribution of the log."""
    reason = F.col(NOT_SAMPLED_COLUMN)
    drawn = reason.isin(DOWN_SAMPLED, EXPOSURE_NOT_SAMPLED, INSIDE_SEQUENCE)
    return events.where(reason.isNull() | drawn)


def mark_not_sampled(events: DataFrame, config: BuildConfig) -> DataFrame:
    """Notes in `__skip` which samples `train_samples`, exposures or `down_sampling` leave out."""
    label, negatives = config.label_name, config.negatives
    if config.train_samples != "all":
        return _keep_ends(events, config)
    if config.down_sampling is not None and label is not None:
        return _down_sample(events, config, config.down_sampling, label)
    if negatives is not None and not negatives.draws and label is not None:
        return _sample_exposures(events, config, negatives, label)
    return events


def _keep_ends(events: DataFrame, config: BuildConfig) -> DataFrame:
    """Keeps each user's last train sample and, if asked for, every n-th event before it."""
    is_train = (F.col(SPLIT_COLUMN) == TRAIN) & F.col(DROP_COLUMN).isNull()
    sampled, user = is_train & is_sample(), config.events.user or ""
    last = F.max(F.when(sampled, F.col(POSITION_COLUMN))).over(Window.partitionBy(user))
    later, every = last - F.col(POSITION_COLUMN), config.train_samples
    is_end = later == 0
    if not isinstance(every, str):
        # The last sample of each piece: the event at its very end may be none, without a label.
        piece = Window.partitionBy(user, F.floor(later / every))
        is_end = later == F.min(F.when(sampled, later)).over(piece)
    reason = F.when(is_train & ~F.coalesce(is_end, F.lit(False)), INSIDE_SEQUENCE)
    return leave_out_samples(events, reason)


def _down_sample(events: DataFrame, config: BuildConfig, share: float, label: str) -> DataFrame:
    sampled = (F.col(label) == 0) & (F.col(SPLIT_COLUMN) == TRAIN)
    lost = sampled & (draw_fraction(config, "down_sampling") >= share)
    rate = F.when(sampled, share).otherwise(1.0).cast("float")
    return leave_out_samples(events.withColumn(KEEP_RATE, rate), F.when(lost, DOWN_SAMPLED))


def _sample_exposures(
    events: DataFrame, config: BuildConfig, negatives: NegativesConfig, label: str
) -> DataFrame:
    """Keeps, of each group's rows with label 0, those of the smallest hashes."""
    alive = is_sample() & F.col(SPLIT_COLUMN).isin(list(negatives.splits))
    exposed = F.coalesce(alive & (F.col(label) == 0), F.lit(False))
    # Rows of the same content have the same hash and are the same record: any order will do.
    by_draw = Window.partitionBy(SPLIT_COLUMN, negatives.within or config.events.user or "")
    by_draw = by_draw.orderBy(draw_fraction(config, "exposure"), *event_columns(config))
    ranked, whole = running_and_whole(by_draw)
    quota = F.count_if(alive & (F.col(label) > 0)).over(whole) * negatives.per_positive
    probability = F.least(F.lit(1.0), quota / F.count_if(exposed).over(whole))
    marked = events.withColumns({
        negatives.probability: F.when(exposed, probability).otherwise(1.0).cast("float"),
        "__lost": exposed & (F.count_if(exposed).over(ranked) > quota),
    })  # fmt: skip
    return leave_out_samples(marked, F.when(F.col("__lost"), EXPOSURE_NOT_SAMPLED)).drop("__lost")


def build_alias_table(
    weights: np.ndarray, groups: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Builds the alias tables of all groups in one sweep; each has a row per outcome.

    A draw takes a row of its group uniformly, and a fraction in [0, 1): below the row's threshold
    the outcome is the row's, else that of its alias. Walker 1977, "An efficient method for
    generating discrete random variables", with the sweep of Hübschle-Schneider & Sanders 2022,
    "Parallel weighted random sampling", section 4: rows below the mean weight are filled up by
    those above it in turn; one that has given too much is filled up by the next. Running sums
    tell who fills whom.

    Returns:
        Of each row the threshold in [0, 1], its alias, a row of the same group, and the
        probability of its outcome in its group, all `[n]`.
    """
    sizes = np.bincount(groups)
    probabilities = weights / np.bincount(groups, weights)[groups]
    scaled = probabilities * sizes[groups]
    small, large = np.flatnonzero(scaled < 1), np.flatnonzero(scaled >= 1)
    thresholds, aliases = np.ones(len(weights)), np.arange(len(weights), dtype=np.int64)
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
    return thresholds, aliases, probabilities


CANDIDATE_COLUMN = "__candidate"
PROBABILITY_COLUMN = "__probability"
GROUP_COLUMN = "__group"
_INDEX, _SIZE, _HASH, _COUNT = "__index", "__size", "__draw_hash", "__count"
_OWN, _ALIAS, _THRESHOLD, _DRAWN = "__own", "__alias", "__threshold", "__drawn"


@dataclass(frozen=True)
class NegativeCandidates:
    """An alias table as frames: of each group and index two items, and the size of each group.

    A draw depends on the columns of `key` alone.
    """

    table: DataFrame
    sizes: DataFrame
    key: Sequence[Column]

    def draw(self, slots: DataFrame, *more: str) -> DataFrame:
        """Draws an item for each slot whose `__group` has some; slots differ by key and `more`."""
        hashed = slots.join(self.sizes, GROUP_COLUMN)
        hashed = hashed.withColumn(_HASH, F.xxhash64(*self.key, DRAW_COLUMN, *more))
        hashed = hashed.withColumn(_INDEX, F.pmod(F.col(_HASH), F.col(_SIZE)))
        drawn = hashed.join(self.table, [GROUP_COLUMN, _INDEX])
        is_own = hash_fraction(F.col(_HASH), F.lit("alias")) < F.col(_THRESHOLD)
        item = F.when(is_own, F.col(_OWN)).otherwise(F.col(_ALIAS)).alias(_DRAWN)
        return drawn.select(*slots.columns, item).select(*slots.columns, f"{_DRAWN}.*")


def _group_of(config: NegativesConfig) -> Column:
    """The group that a row draws from: its category, or the one that all items are in."""
    return F.col(config.within) if config.within is not None else F.lit(0)


def _fit_candidates(
    events: DataFrame, config: BuildConfig, negatives: NegativesConfig, popular: Column
) -> NegativeCandidates:
    """Builds the alias table of the train split's items, by their events where `popular` holds."""
    item = F.col(config.events.item or "")
    in_train = (F.col(SPLIT_COLUMN) == TRAIN) & item.isNotNull()
    # An item's category is its dictionary's; the least, should an item ever have two.
    group = F.min(_group_of(negatives)).alias(GROUP_COLUMN)
    grouped = events.where(in_train).groupBy(item.alias(CANDIDATE_COLUMN))
    counted = grouped.agg(F.count_if(popular).alias(_COUNT), group)
    items = counted.where(F.col(GROUP_COLUMN).isNotNull()).toArrow()
    order = [(GROUP_COLUMN, "ascending"), (CANDIDATE_COLUMN, "ascending")]
    tables = _tabulate(items.sort_by(order).combine_chunks(), negatives.exponent)
    table, sizes = map(events.sparkSession.createDataFrame, tables)
    key = [F.lit(config.output.seed), F.lit("negative"), *map(F.col, event_columns(config))]
    return NegativeCandidates(table, sizes, key)


def _tabulate(items: pa.Table, exponent: float) -> tuple[pa.Table, pa.Table]:
    """The alias table of sorted items by group and index, and the size of each group."""
    names, tokens = items[GROUP_COLUMN].combine_chunks(), items[CANDIDATE_COLUMN].combine_chunks()
    groups = np.asarray(pc.dictionary_encode(names).indices).astype(np.int64)  # from 0, sorted
    weights = np.maximum(items[_COUNT].to_numpy(), 1).astype(np.float64) ** exponent
    thresholds, aliases, probabilities = build_alias_table(weights, groups)
    own = pa.StructArray.from_arrays(
        [tokens, pa.array(probabilities)], [CANDIDATE_COLUMN, PROBABILITY_COLUMN]
    )
    table = {
        GROUP_COLUMN: names,
        _INDEX: np.arange(len(groups), dtype=np.int64) - np.searchsorted(groups, groups),
        _OWN: own,
        _THRESHOLD: thresholds,
        _ALIAS: own.take(pa.array(aliases)),
    }
    sizes = {GROUP_COLUMN: names.unique(), _SIZE: np.bincount(groups)}
    return pa.table(table), pa.table(sizes)


_ROUNDS = (2, 14, 112)
"""Tries of each round, of which only the slots that are still open get to the next: a user who has
met 90 % of the probability keeps one slot in 700,000 open."""
_TRY, _FOUND = "__try", "__found"
_UNIT = 2.0**52


def _number(rows: DataFrame, name: str, first: int, count: int) -> DataFrame:
    """Repeats each row `count` times, with a number from `first`."""
    return rows.withColumn(name, F.explode(F.sequence(F.lit(first), F.lit(first + count - 1))))


def _fill_unseen(
    slots: DataFrame, met: DataFrame, candidates: NegativeCandidates, stack: ExitStack
) -> DataFrame:
    """Fills each slot with the first of its tries that the user has not met.

    Rejection keeps the proportions of what is left, so the probability of an item is its own over
    that of all items which the user has not met. Slots that no try fills stay away: the user has
    met nearly everything. Slots are narrow rows with `__group`, no two alike; `met` are distinct
    pairs of user and `__candidate`.
    """
    user, names, opened, results, first = met.columns[0], slots.columns, slots, [], 0
    for tries in _ROUNDS:
        drawn = candidates.draw(_number(opened, _TRY, first, tries), _TRY)
        seen = drawn.join(met.withColumn("__met", F.lit(True)), [user, CANDIDATE_COLUMN], "left")
        taken = F.struct(_TRY, CANDIDATE_COLUMN, PROBABILITY_COLUMN)
        unmet = F.min(F.when(F.col("__met").isNull(), taken))
        results.append(_keep(seen.groupBy(*names).agg(unmet.alias(_FOUND)), stack))
        opened = results[-1].where(F.col(_FOUND).isNull()).select(*names)
        first += tries
        if opened.isEmpty():
            break
    rows = reduce(DataFrame.unionByName, results).where(F.col(_FOUND).isNotNull())
    rows = rows.select(*names, f"{_FOUND}.{CANDIDATE_COLUMN}", f"{_FOUND}.{PROBABILITY_COLUMN}")
    rows = rows.join(_met_probability(met, candidates, user), [user, GROUP_COLUMN], "left")
    left = F.lit(1.0) - F.coalesce(F.col("__met_probability"), F.lit(0.0))
    rows = rows.withColumn(PROBABILITY_COLUMN, F.col(PROBABILITY_COLUMN) / left)
    return _keep(rows.drop("__met_probability"), stack)


def _keep(frame: DataFrame, stack: ExitStack) -> DataFrame:
    stack.callback(frame.unpersist)
    return frame.persist(StorageLevel.MEMORY_AND_DISK)


def _met_probability(met: DataFrame, candidates: NegativeCandidates, user: str) -> DataFrame:
    """The probability of all items that a user has met, by user and group."""
    items = candidates.table.select(GROUP_COLUMN, f"{_OWN}.*")
    # Whole numbers: their sum does not hang on the order, as that of floats does.
    units = F.sum(F.round(F.col(PROBABILITY_COLUMN) * _UNIT).cast("long"))
    return (
        met.join(items, CANDIDATE_COLUMN)
        .groupBy(user, GROUP_COLUMN)
        .agg((units / _UNIT).alias("__met_probability"))
    )


@dataclass(frozen=True)
class Negatives:
    """Samples with their negatives, the number of these by split, and what frees Spark's memory."""

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
    The kept events of the log are what is drawn from, and what users have met.
    """
    negatives, label, stack = config.negatives, config.label_name, ExitStack()
    if negatives is None or not negatives.draws or label is None:
        return Negatives(samples, {}, stack.close)
    events, is_positive = kept(log), F.col(label) > 0
    # An event inside a sequence trains too: the row that ends the sequence holds it.
    trains = F.coalesce(F.col(NOT_SAMPLED_COLUMN) == INSIDE_SEQUENCE, F.lit(True))
    candidates = _fit_candidates(events, config, negatives, is_positive & trains)
    chosen = is_positive & F.col(SPLIT_COLUMN).isin(list(negatives.splits))
    positives = samples.where(chosen).withColumn(GROUP_COLUMN, _group_of(negatives))
    if negatives.not_seen is None:
        drawn = candidates.draw(_number(positives, DRAW_COLUMN, 1, negatives.per_positive))
        counted = positives.join(candidates.sizes, GROUP_COLUMN, "left_semi")
        counts = _count(counted, F.lit(negatives.per_positive))
    else:
        columns = event_columns(config)
        # Narrow rows go through the draws; the samples are joined to what comes out of them.
        slots = positives.select(*columns, SPLIT_COLUMN, GROUP_COLUMN)
        slots = _number(slots, DRAW_COLUMN, 1, negatives.per_positive)
        if negatives.not_seen == "train":
            events = events.where(F.col(SPLIT_COLUMN) == TRAIN)
        item = F.col(config.events.item or "").alias(CANDIDATE_COLUMN)
        met = events.select(config.events.user or "", item).distinct()
        rows = _fill_unseen(slots, met, candidates, stack)
        drawn = positives.join(rows.drop(SPLIT_COLUMN, GROUP_COLUMN), columns)
        counts = _count(rows, F.lit(1))
    rows = _replace_items(drawn, log, config, sources)
    rows = rows.withColumn(negatives.probability, F.col(PROBABILITY_COLUMN).cast("float"))
    certain = {DRAW_COLUMN: F.lit(0), negatives.probability: F.lit(1.0).cast("float")}
    given = samples.withColumns(certain)
    return Negatives(given.unionByName(rows.select(*given.columns)), counts, stack.close)


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
        if join.config.column not in of_item:
            continue
        added = join.config.added_columns(config.sources[join.config.source])
        # An item without an entry was drawn as it is.
        lenient = replace(join, config=join.config.model_copy(update={"unmatched": "keep"}))
        rows = join_dictionary(rows.drop(*added), lenient)
        of_item |= set(added)
    rows = count_again(rows, log, config, of_item)
    # The label's column tells of the positive what did not happen with this item.
    read = {label.column for label in config.all_labels if label.column is not None}
    nothing = {name: F.lit(None).cast(drawn.schema[name].dataType) for name in read}
    labels = {config.label_name or "", *(label.name for label in config.further_labels)}
    return rows.withColumns(nothing | dict.fromkeys(labels, F.lit(0.0).cast("float")))
