"""The event log made ready: de-duplicated, joined, ordered, split; each loss has a reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark import StorageLevel
from pyspark.sql import Window
from pyspark.sql import functions as F

from conf.dates import DateRange
from conf.etl.build import BuildConfig
from etl.events.columns import (
    CANDIDATES,
    DROP_COLUMN,
    EVENT_TS_COLUMN,
    GIVEN_TEST_COLUMN,
    GIVEN_TOTAL_COLUMN,
    GIVEN_VALIDATION_COLUMN,
    MOMENT_COLUMN,
    POSITION_COLUMN,
    SAMPLE_POSITION_COLUMN,
    SAMPLE_TOTAL_COLUMN,
    TOTAL_COLUMN,
    add_row_identity,
    drop_events,
    is_sample,
    may_leave_out_samples,
)
from etl.events.conditions import condition_columns, mark_filtered
from etl.events.histories import add_sessions
from etl.events.joins import join_dictionaries
from etl.events.labels import ConversionCounts, add_labels, count_conversions
from etl.events.sampling import mark_not_sampled
from etl.events.splits import add_split, split_by_window
from etl.events.windowed_features import add_windowed_features
from etl.sources.source import ORDER_COLUMN, Source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_IS_KEPT, _IS_SAMPLE = "__is_kept", "__is_sample"
DUPLICATE = "duplicate"
AFTER_TEST = "after_test"
AFTER_VALIDATION = "after_validation"


@dataclass(frozen=True)
class PreparedEvents:
    """The annotated events, the frame under them that Spark keeps, and counts of conversions."""

    frame: DataFrame
    persisted: DataFrame
    conversions: Mapping[str, ConversionCounts] = field(default_factory=dict)

    def release(self) -> None:
        """Frees what Spark keeps."""
        self.persisted.unpersist()


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

    Raises:
        InputDataError: A dictionary's key is not unique, or an event that must match does not.
    """
    events = _read_log(config, sources)
    events = _mark_duplicates(events, config)
    events = split_by_window(_mark_after_given(events, config), config.split)
    events = mark_filtered(join_dictionaries(events, config, sources), config)
    events = add_windowed_features(events, config)
    conversions: Mapping[str, ConversionCounts] = {}
    if is_labelled:
        conversions = count_conversions(events, config, sources)
        events = add_labels(events, config, sources, conversions)
    # Persisted before the split, whose choice of users would else run all of this once more.
    positioned = add_sessions(_add_positions(events, config), config).drop(ORDER_COLUMN)
    positioned.persist(StorageLevel.MEMORY_AND_DISK)
    frame = mark_not_sampled(add_split(positioned, config, dates), config)
    frame = frame.drop(GIVEN_TOTAL_COLUMN, SAMPLE_POSITION_COLUMN, SAMPLE_TOTAL_COLUMN)
    return PreparedEvents(frame, positioned, conversions)


def _read_log(config: BuildConfig, sources: Mapping[str, Source]) -> DataFrame:
    log = _union_given(config, sources)
    time = config.events.time
    scale = config.event_ms
    ts = F.col(time) * F.lit(scale) if time else F.lit(None).cast("bigint")
    log = log.withColumn(EVENT_TS_COLUMN, ts).withColumn(DROP_COLUMN, F.lit(None).cast("string"))
    if config.events.history_order == "oldest_first":
        log = log.withColumns({name: F.reverse(name) for name in config.brought_history})
    if config.events.user is None:
        return add_row_identity(log, config.sources[config.events.source].column_types)
    # One shuffle serves every window below: all of them run inside a user.
    return log.repartition(F.col(config.events.user))


def _union_given(config: BuildConfig, sources: Mapping[str, Source]) -> DataFrame:
    """The log and the given test and validation events, each marked as what it is."""
    split = config.split

    def mark(name: str, test: bool, validation: bool) -> DataFrame:
        marked = sources[name].good.withColumn(GIVEN_TEST_COLUMN, F.lit(test))
        return marked.withColumn(GIVEN_VALIDATION_COLUMN, F.lit(validation))

    log = mark(config.events.source, False, False)
    if split.validation_source:
        validation = mark(split.validation_source, False, True)
        log = log.unionByName(validation, allowMissingColumns=True)
    if split.test_source:
        test = mark(split.test_source, True, False)
        if split.candidates:
            test = test.withColumnRenamed(split.candidates, CANDIDATES)
        log = log.unionByName(test, allowMissingColumns=True)
    return log


def _mark_duplicates(events: DataFrame, config: BuildConfig) -> DataFrame:
    user, item, time = config.events.user, config.events.item, config.events.time
    if not config.events.deduplicate or user is None or item is None or time is None:
        return events
    item = _key_in_log(config, item)
    # A click and a purchase in one second are two events. In order of time first: the sort by
    # position that follows then finds its rows in order but for those of one moment.
    same = [user, *_given_columns(config), time, item, *condition_columns(config)]
    rank = F.row_number().over(Window.partitionBy(*same).orderBy(ORDER_COLUMN))
    repeated = (F.col("__rank") > 1) & F.col(item).isNotNull()
    return (
        events.withColumn("__rank", rank)
        .withColumn(DROP_COLUMN, F.when(repeated, F.lit(DUPLICATE)))
        .drop("__rank")
    )


def _key_in_log(config: BuildConfig, item: str) -> str:
    """The column of the log that an item stands in, or whose dictionary gives it."""
    if item in config.sources[config.events.source].column_types:
        return item
    given_by = (j for j in config.joins if item in j.added_columns(config.sources[j.source]))
    return _key_in_log(config, next(given_by).column)


def _given_columns(config: BuildConfig) -> list[str]:
    """What tells given events from those of the log, where there are any: they come last."""
    given = {
        GIVEN_TEST_COLUMN: config.split.test_source,
        GIVEN_VALIDATION_COLUMN: config.split.validation_source,
    }
    return [column for column, source in given.items() if source]


def _mark_after_given(events: DataFrame, config: BuildConfig) -> DataFrame:
    """Leaves out what comes at or after a given event of the same user: it is the future.

    A given source without times comes after the whole log, by declaration.
    """
    time, user = config.events.time, config.events.user
    given = {
        AFTER_TEST: (config.split.test_source, F.col(GIVEN_TEST_COLUMN)),
        AFTER_VALIDATION: (config.split.validation_source, F.col(GIVEN_VALIDATION_COLUMN)),
    }
    earlier = ~F.col(GIVEN_TEST_COLUMN)
    for reason, (source, is_given) in given.items():
        if time is None or user is None or source is None:
            continue
        if config.sources[source].column(time) is not None:
            first = F.min(F.when(is_given, F.col(time))).over(Window.partitionBy(user))
            late = earlier & ~is_given & (F.col(time) >= F.col("__first_given"))
            marked = drop_events(events.withColumn("__first_given", first), F.when(late, reason))
            events = marked.drop("__first_given")
    return events


def _add_positions(events: DataFrame, config: BuildConfig) -> DataFrame:
    user = config.events.user
    if user is None:
        return events
    order = [F.col(name) for name in _given_columns(config)]
    if config.events.time:
        order.append(F.col(config.events.time))
    flags = {_IS_KEPT: F.col(DROP_COLUMN).isNull(), _IS_SAMPLE: is_sample()}
    events = events.withColumns({name: flag.cast("int") for name, flag in flags.items()})
    # Ties in time are broken by the position in the input: the declared order.
    running = (
        Window.partitionBy(user)
        .orderBy(*order, ORDER_COLUMN)
        .rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    whole = running.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    given = F.lit(0).cast("bigint")
    if config.split.test_source:
        given = F.sum(F.col(_IS_SAMPLE) * F.col(GIVEN_TEST_COLUMN).cast("int")).over(whole)
    # Made together: Spark goes through the rows once for all windows of one projection.
    windows = {
        POSITION_COLUMN: F.sum(_IS_KEPT).over(running),
        TOTAL_COLUMN: F.sum(_IS_KEPT).over(whole),
        GIVEN_TOTAL_COLUMN: given,
    }
    if may_leave_out_samples(config):
        windows[SAMPLE_POSITION_COLUMN] = F.sum(_IS_SAMPLE).over(running)
        windows[SAMPLE_TOTAL_COLUMN] = F.sum(_IS_SAMPLE).over(whole)
    events = events.withColumns(windows)
    if config.events.time:
        position = F.when(F.col(_IS_KEPT) == 1, F.col(POSITION_COLUMN))
        at_once = Window.partitionBy(user, config.events.time)
        events = events.withColumn(MOMENT_COLUMN, F.min(position).over(at_once))
    return events.drop(_IS_KEPT, _IS_SAMPLE)
