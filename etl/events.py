"""The event log made ready: de-duplicated, joined, ordered, split; each loss has a reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pyspark import StorageLevel
from pyspark.sql import Window
from pyspark.sql import functions as F

from conf.errors import InputDataError
from conf.etl import BuildConfig
from etl.behaviour.rolling import add_rolling
from etl.behaviour.sessions import add_sessions
from etl.behaviour.where import behaviour_columns
from etl.features import CANDIDATES
from etl.history import POSITION_COLUMN
from etl.joins import DROP_COLUMN, count_unmatched, join_dictionaries, read_unmatched
from etl.sources import ORDER_COLUMN, Source
from etl.split import EVENT_SPLITS, GIVEN_TEST_COLUMN, SPLIT_COLUMN, TOTAL_COLUMN, add_split

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

DUPLICATE = "duplicate"
AFTER_TEST = "after_test"
UNLABELLED = "unlabelled"


@dataclass(frozen=True)
class PreparedEvents:
    """The annotated events, and the frame under them that Spark keeps until it is released."""

    frame: DataFrame
    persisted: DataFrame

    def release(self) -> None:
        """Frees what Spark keeps."""
        self.persisted.unpersist()


def prepare_events(config: BuildConfig, sources: Mapping[str, Source]) -> PreparedEvents:
    """Builds the annotated event frame: every good row of the log, kept or not.

    Returns:
        A frame of event and dictionary columns, `__drop` (null, or why the row is left out),
        `__position` (rank among its user's kept events, from 1), `__total`, `__split`,
        `__event_ts_ms` and the label where one is declared.

    Raises:
        InputDataError: A dictionary's key is not unique, or an event that must match does not.
    """
    events = _read_log(config, sources)
    events = _mark_duplicates(events, config)
    events = _mark_after_test(events, config)
    events = join_dictionaries(events, config, sources)
    events = add_rolling(events, config)
    events = _add_label(events, config)
    # Persisted before the split, whose choice of users would else run all of this once more.
    positioned = add_sessions(_add_positions(events, config), config).drop(ORDER_COLUMN)
    positioned.persist(StorageLevel.MEMORY_AND_DISK)
    frame = add_split(
        positioned, config.split, config.events.user, config.events.time, config.output.seed
    )
    return PreparedEvents(frame.drop("__given_total"), positioned)


def _read_log(config: BuildConfig, sources: Mapping[str, Source]) -> DataFrame:
    log = sources[config.events.source].good.withColumn(GIVEN_TEST_COLUMN, F.lit(False))
    if config.split.test_source:
        test = sources[config.split.test_source].good.withColumn(GIVEN_TEST_COLUMN, F.lit(True))
        if config.split.candidates:
            test = test.withColumnRenamed(config.split.candidates, CANDIDATES)
        log = log.unionByName(test, allowMissingColumns=True)
    time = config.events.time
    scale = 1000 if config.events.time_unit == "s" else 1
    ts = F.col(time) * F.lit(scale) if time else F.lit(None).cast("bigint")
    log = log.withColumn("__event_ts_ms", ts).withColumn(DROP_COLUMN, F.lit(None).cast("string"))
    # One shuffle serves every window below: all of them run inside a user.
    return log.repartition(F.col(config.events.user))


def _mark_duplicates(events: DataFrame, config: BuildConfig) -> DataFrame:
    if not config.events.deduplicate or config.events.time is None:
        return events
    same = [config.events.user, config.events.item, config.events.time, GIVEN_TEST_COLUMN]
    # A click and a purchase in one second are two events.
    same += behaviour_columns(config)
    rank = F.row_number().over(Window.partitionBy(*same).orderBy(ORDER_COLUMN))
    return (
        events.withColumn("__rank", rank)
        .withColumn(DROP_COLUMN, F.when(F.col("__rank") > 1, F.lit(DUPLICATE)))
        .drop("__rank")
    )


def _mark_after_test(events: DataFrame, config: BuildConfig) -> DataFrame:
    """Leaves out what the log holds from a given test event's time on: it is the future.

    A test source without times comes after the whole log, by declaration.
    """
    time = config.events.time
    test_source = config.split.test_source
    if time is None or test_source is None or config.sources[test_source].column(time) is None:
        return events
    of_user = Window.partitionBy(config.events.user)
    first_test = F.min(F.when(F.col(GIVEN_TEST_COLUMN), F.col(time))).over(of_user)
    late = ~F.col(GIVEN_TEST_COLUMN) & (F.col(time) >= F.col("__first_test"))
    reason = F.when(late, F.lit(AFTER_TEST))
    return (
        events.withColumn("__first_test", first_test)
        .withColumn(DROP_COLUMN, F.coalesce(F.col(DROP_COLUMN), reason))
        .drop("__first_test")
    )


def _add_label(events: DataFrame, config: BuildConfig) -> DataFrame:
    """Adds the label. An event of a given test set may lack one, an event of the log may not."""
    if config.label is None:
        return events
    value = F.col(config.label.column)
    # The bound in the column's own precision: 4.1 read as float32 is not below 4.1.
    bound = F.lit(config.label.at_least).cast(events.schema[config.label.column].dataType)
    label = F.when(value.isNotNull(), (value >= bound).cast("float"))
    reason = F.when(value.isNull() & ~F.col(GIVEN_TEST_COLUMN), F.lit(UNLABELLED))
    return events.withColumn(config.label.name, label).withColumn(
        DROP_COLUMN, F.coalesce(F.col(DROP_COLUMN), reason)
    )


def _add_positions(events: DataFrame, config: BuildConfig) -> DataFrame:
    user = config.events.user
    order = [F.col(GIVEN_TEST_COLUMN)]
    if config.events.time:
        order.append(F.col(config.events.time))
    kept = F.when(F.col(DROP_COLUMN).isNull(), 1).otherwise(0)
    # Ties in time are broken by the position in the input: the declared order.
    running = (
        Window.partitionBy(user)
        .orderBy(*order, ORDER_COLUMN)
        .rowsBetween(Window.unboundedPreceding, Window.currentRow)
    )
    whole = running.rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    given = kept * F.col(GIVEN_TEST_COLUMN).cast("int")
    return (
        events.withColumn(POSITION_COLUMN, F.sum(kept).over(running))
        .withColumn(TOTAL_COLUMN, F.sum(kept).over(whole))
        .withColumn("__given_total", F.sum(given).over(whole))
    )


def kept(events: DataFrame) -> DataFrame:
    """Returns the events that become records."""
    return events.where(F.col(DROP_COLUMN).isNull())


@dataclass(frozen=True)
class EventCounts:
    """Counts of the annotated frame, from one scan of it.

    Attributes:
        joined: Events after parsing, de-duplication and joins.
        splits: Of these, per split.
        dropped: Events left out, by reason.
        event_ts_ms_range: First and last event time, None without a time column.
        unmatched: Events without an entry, by dictionary and reason, dropped or not.
    """

    joined: int
    splits: Mapping[str, int]
    dropped: Mapping[str, int]
    event_ts_ms_range: tuple[int, int] | None
    unmatched: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def count_events(events: DataFrame, config: BuildConfig) -> EventCounts:
    """Counts kept events per split and dropped ones per reason.

    Raises:
        InputDataError: The train or the test split is empty.
    """
    dictionaries = [join.source for join in config.joins]
    rows = (
        events.groupBy(DROP_COLUMN, SPLIT_COLUMN)
        .agg(
            F.count("*").alias("n"),
            F.min("__event_ts_ms").alias("low"),
            F.max("__event_ts_ms").alias("high"),
            *count_unmatched(dictionaries),
        )
        .collect()
    )
    dropped: dict[str, int] = {}
    for row in rows:
        if row[DROP_COLUMN] is not None:
            dropped[row[DROP_COLUMN]] = dropped.get(row[DROP_COLUMN], 0) + row["n"]
    good = [row for row in rows if row[DROP_COLUMN] is None]
    splits = {row[SPLIT_COLUMN]: row["n"] for row in good}
    wanted = [s for s in EVENT_SPLITS if s != "validation" or config.split.validation]
    empty = [split for split in wanted if not splits.get(split)]
    if empty:
        raise InputDataError(
            f"the {' and the '.join(empty)} split would be empty",
            received=f"{sum(splits.values()):,} events after joins: {splits or 'none'}; "
            f"dropped: {dropped or 'none'}",
            allowed="at least one record in each split",
            fix="check the log's size, `joins`, and `split` (strategy, fractions, min_events)",
        )
    lows = [row["low"] for row in good if row["low"] is not None]
    highs = [row["high"] for row in good if row["high"] is not None]
    return EventCounts(
        joined=sum(splits.values()),
        splits={split: splits[split] for split in EVENT_SPLITS if split in splits},
        dropped=dict(sorted(dropped.items())),
        event_ts_ms_range=(min(lows), max(highs)) if lows else None,
        unmatched=read_unmatched(dictionaries, [row.asDict() for row in rows]),
    )
