"""Splits of the event log: leave-one-out, temporal, or given; never at random by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.errors import InputDataError
from conf.etl import SplitConfig
from etl.history import POSITION_COLUMN
from etl.joins import DROP_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SPLIT_COLUMN = "__split"
TOTAL_COLUMN = "__total"
GIVEN_TEST_COLUMN = "__given_test"

TRAIN, VALIDATION, TEST = "train", "validation", "test"
CATALOG, USERS = "catalog", "users"
EVENT_SPLITS = (TRAIN, VALIDATION, TEST)
ALL_SPLITS = (*EVENT_SPLITS, CATALOG, USERS)


def add_split(
    events: DataFrame, config: SplitConfig, user: str, time: str | None, seed: int
) -> DataFrame:
    """Adds `__split` to kept events.

    Args:
        events: Kept events with `__position` and `__total` (events of the user), and, for a
            given split, `__given_test`.
        config: The strategy.
        user: User column.
        time: Time column, or None.
        seed: Salt of the hash that chooses the validation users.
    """
    if config.strategy == "temporal":
        return events.withColumn(SPLIT_COLUMN, _temporal(events, config, time))
    remaining = F.col(TOTAL_COLUMN) - F.col(POSITION_COLUMN)
    enough = F.col(TOTAL_COLUMN) >= config.min_events
    if config.strategy == "given":
        is_test = F.col(GIVEN_TEST_COLUMN)
        remaining = remaining - F.col("__given_total") + F.lit(1)
    else:
        is_test = enough & (remaining == 0)
    validation = F.lit(False)
    if config.validation:
        validation = enough & (remaining == 1) & ~is_test
        if config.validation_users is not None:
            chosen = _choose_users(events, user, config, seed)
            events = events.join(F.broadcast(chosen), user, "left")
            validation = validation & F.col("__validation_user").isNotNull()
    split = F.when(is_test, TEST).when(validation, VALIDATION).otherwise(TRAIN)
    return events.withColumn(SPLIT_COLUMN, split).drop("__validation_user")


def _choose_users(events: DataFrame, user: str, config: SplitConfig, seed: int) -> DataFrame:
    """The users with the smallest hashes: the same ones however the data is partitioned."""
    users = events.where(F.col(TOTAL_COLUMN) >= config.min_events).select(user).distinct()
    return (
        users.orderBy(F.xxhash64(F.lit(seed), F.col(user)), F.col(user))
        .limit(config.validation_users or 0)
        .withColumn("__validation_user", F.lit(True))
    )


def _temporal(events: DataFrame, config: SplitConfig, time: str | None) -> Column:
    if time is None:
        raise InputDataError(
            "a temporal split needs a time column",
            received="events.time: null",
            fix="declare events.time, or use split.strategy: leave_one_out",
        )
    test_from, validation_from = config.test_from_ts, config.validation_from_ts
    if test_from is None or (validation_from is None and config.validation):
        late = 1 - config.test_fraction
        earlier = late - config.validation_fraction
        # Exact percentiles: the approximate ones depend on how the data is partitioned.
        row = (
            events.where(F.col(DROP_COLUMN).isNull())
            .agg(
                F.percentile(time, F.lit(late)).alias("test"),
                F.percentile(time, F.lit(earlier)).alias("validation"),
            )
            .collect()[0]
        )
        test_from = test_from if test_from is not None else int(row["test"])
        if validation_from is None:
            validation_from = min(int(row["validation"]), test_from)
    split = F.when(F.col(time) >= test_from, TEST)
    if config.validation and validation_from is not None:
        split = split.when(F.col(time) >= validation_from, VALIDATION)
    return split.otherwise(TRAIN)
