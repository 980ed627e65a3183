"""The event log made ready: de-duplicated, joined, ordered, split; each loss has a reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from pyspark import StorageLevel
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from conf.dates import DateRange
from conf.etl.build import BuildConfig
from etl.events.columns import (
    CANDIDATES,
    DROP_COLUMN,
    EVENT_TS_COLUMN,
    GIVEN_TEST_COLUMN,
    GIVEN_VALIDATION_COLUMN,
    MOMENT_COLUMN,
    POSITION_COLUMN,
    SAMPLES_COLUMN,
    SAMPLES_LEFT_COLUMN,
    TIE_COLUMN,
    TOTAL_COLUMN,
    add_row_identity,
    drop_events,
    is_sample,
    running_and_whole,
)
from etl.events.conditions import (
    condition_columns,
    find_position,
    find_where_columns,
    mark_filtered,
)
from etl.events.counted_features import add_windowed_features
from etl.events.histories import add_sessions
from etl.events.joins import join_dictionaries, refuse_unmatched
from etl.events.labels import ConversionCounts, add_labels, count_conversions
from etl.events.sampling import mark_not_sampled
from etl.events.splits import add_split, split_by_window
from etl.sources.source import ORDER_COLUMN, Source

_GIVEN_COLUMNS = (GIVEN_TEST_COLUMN, GIVEN_VALIDATION_COLUMN)
DUPLICATE = "duplicate"
AFTER_TEST = "after_test"
AFTER_VALIDATION = "after_validation"


@dataclass(frozen=True)
class PreparedEvents:
    """The annotated events, counts of conversions, and what frees the memory that Spark holds."""

    frame: DataFrame
    conversions: Mapping[str, ConversionCounts]
    release: Callable[[], None]


def prepare_events(
    config: BuildConfig,
    sources: Mapping[str, Source],
    dates: DateRange | None = None,
    *,
    is_labelled: bool = True,
) -> PreparedEvents:
    """Builds the annotated event frame: every good row of the log, kept or not.

    It has the columns of events and dictionaries, the declared labels where `is_labelled`, and
    those of `etl.events.columns`. A temporal split may go by the run's days.
    """
    events = _mark_duplicates(_read_log(config, sources), config)
    events = split_by_window(_mark_after_given(events, config), config.split)
    events = mark_filtered(join_dictionaries(events, config, sources), config)
    events = add_windowed_features(events, config)
    if is_labelled:
        events = add_labels(events, config, sources)
    positioned = add_sessions(_add_positions(events, config), config).drop(ORDER_COLUMN)
    # Persisted before what looks at the data, which would else run all of this once more.
    positioned.persist(StorageLevel.MEMORY_AND_DISK)
    with ExitStack() as stack:
        stack.callback(positioned.unpersist)
        refuse_unmatched(positioned, config)
        conversions = count_conversions(positioned, config, sources) if is_labelled else {}
        frame = mark_not_sampled(add_split(positioned, config, dates), config)
        return PreparedEvents(frame, conversions, stack.pop_all().close)


def _read_log(config: BuildConfig, sources: Mapping[str, Source]) -> DataFrame:
    log, time = _union_given(config, sources), config.events.time
    ts = F.col(time) * F.lit(config.event_ms) if time else F.lit(None).cast("bigint")
    log = log.withColumns({EVENT_TS_COLUMN: ts, DROP_COLUMN: F.lit(None).cast("string")})
    if config.events.history_order == "oldest_first":
        log = log.withColumns({name: F.reverse(name) for name in config.brought_history})
    if config.events.user is None:
        return add_row_identity(log, config.sources[config.events.source].column_types)
    # One shuffle serves every window below: all of them run inside a user.
    return log.repartition(F.col(config.events.user))


def _given_sources(config: BuildConfig) -> dict[str, str]:
    """The source of given events by the column that marks them; they come last, test at the end."""
    sources = (config.split.test_source, config.split.validation_source)
    given = zip(_GIVEN_COLUMNS, sources, strict=True)
    return {column: source for column, source in given if source is not None}


def _union_given(config: BuildConfig, sources: Mapping[str, Source]) -> DataFrame:
    unmarked = dict.fromkeys(_GIVEN_COLUMNS, F.lit(False))
    log = sources[config.events.source].good.withColumns(unmarked)
    for column, source in _given_sources(config).items():
        given = sources[source].good.withColumns(unmarked | {column: F.lit(True)})
        if config.split.candidates and column == GIVEN_TEST_COLUMN:
            given = given.withColumnRenamed(config.split.candidates, CANDIDATES)
        log = log.unionByName(given, allowMissingColumns=True)
    return log


def _mark_duplicates(events: DataFrame, config: BuildConfig) -> DataFrame:
    user, item, time = config.events.user, config.events.item, config.events.time
    if not config.events.deduplicate or user is None or item is None or time is None:
        return events
    item = _key_in_log(config, item)
    # A click and a purchase in one second are two events. In order of time first: the sort by
    # position that follows then finds its rows in order but for those of one moment.
    same = [user, *_given_sources(config), time, item, *condition_columns(config)]
    rank = F.row_number().over(Window.partitionBy(*same).orderBy(ORDER_COLUMN))
    return drop_events(events, F.when((rank > 1) & F.col(item).isNotNull(), DUPLICATE))


def _key_in_log(config: BuildConfig, item: str) -> str:
    """The column of the log that an item stands in, or whose dictionary gives it."""
    if item in config.sources[config.events.source].column_types:
        return item
    given_by = (j for j in config.joins if item in j.added_columns(config.sources[j.source]))
    return _key_in_log(config, next(given_by).column)


def _mark_after_given(events: DataFrame, config: BuildConfig) -> DataFrame:
    """Leaves out what comes at or after a given event of the same user: it is the future.

    A given source without times comes after the whole log, by declaration.
    """
    time, user = config.events.time, config.events.user
    if time is None or user is None:
        return events
    for column, source in _given_sources(config).items():
        if config.sources[source].column(time) is not None:
            first = F.min(F.when(F.col(column), F.col(time))).over(Window.partitionBy(user))
            earlier = ~F.col(GIVEN_TEST_COLUMN) & ~F.col(column)
            reason = AFTER_TEST if column == GIVEN_TEST_COLUMN else AFTER_VALIDATION
            events = drop_events(events, F.when(earlier & (F.col(time) >= first), reason))
    return events


def _add_positions(events: DataFrame, config: BuildConfig) -> DataFrame:
    user, time = config.events.user, config.events.time
    if user is None:
        return events
    # Ties in time are broken by the position in the input: the declared order.
    order = [*_given_sources(config), *([time] if time else []), ORDER_COLUMN]
    in_order = Window.partitionBy(user).orderBy(*order)
    running, whole = running_and_whole(in_order)
    is_kept, own = F.col(DROP_COLUMN).isNull(), is_sample() & ~F.col(GIVEN_TEST_COLUMN)
    # Made together: Spark goes through the rows once for all windows of one projection.
    windows = {
        POSITION_COLUMN: F.count_if(is_kept).over(running),
        TOTAL_COLUMN: F.count_if(is_kept).over(whole),
        SAMPLES_COLUMN: F.count_if(is_sample()).over(whole),
        SAMPLES_LEFT_COLUMN: F.count_if(own).over(whole) - F.count_if(own).over(running),
    }
    if time is not None:
        previous = F.last(F.when(is_kept, F.struct(time)), ignorenulls=True)
        before = in_order.rowsBetween(Window.unboundedPreceding, -1)
        windows[TIE_COLUMN] = is_kept & (previous.over(before) == F.struct(time))
    events = events.withColumns(windows)
    if not _needs_moments(config):
        return events
    first = F.min(F.when(is_kept, F.col(POSITION_COLUMN)))
    return events.withColumn(MOMENT_COLUMN, first.over(Window.partitionBy(user, time or "")))


def _needs_moments(config: BuildConfig) -> bool:
    """Whether something must not see the other events of an event's time."""
    reads = [history.reads for history in config.histories]
    reads.append(tuple(find_where_columns(config, config.seen_where)))
    return any(find_position(config, columns) == MOMENT_COLUMN for columns in reads)
