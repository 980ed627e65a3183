"""Windows of a backtest: a span of days to train on, then days to validate and to test."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.errors import InputDataError
from conf.etl import SplitConfig
from etl.joins import DROP_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

OUTSIDE_WINDOW = "outside_window"
WINDOW_COLUMN = "__window_day"
_DAY_MS = 86_400_000
_EPOCH = datetime.date(1970, 1, 1)


def mark_outside_window(events: DataFrame, split: SplitConfig) -> DataFrame:
    """Marks what lies outside the backtest's window, and numbers the days of the window from 0.

    Nothing before or after the window reaches a sample: it is built as if on its last day.

    Args:
        events: Event rows with `__event_ts_ms` and `__drop`.
        split: The split; other strategies leave the events as they are.

    Raises:
        InputDataError: The log ends before the window's test days begin.
    """
    if split.strategy != "sliding" or split.train_days is None or split.test_days is None:
        return events
    before_test = split.train_days + (split.validation_days or 0)
    step = split.step_days or split.test_days
    first, last = _log_days(events)
    if split.start_date is not None:
        first = (split.start_date - _EPOCH).days
    start = first + split.window * step
    if start + before_test > last:
        windows = max(0, (last - first - before_test) // step + 1)
        raise InputDataError(
            f"window {split.window} of the backtest begins to test after the log has ended",
            received=f"test from {_EPOCH + datetime.timedelta(start + before_test)}, log until "
            f"{_EPOCH + datetime.timedelta(last)}",
            allowed=f"split.window 0 to {windows - 1}" if windows else "shorter train_days",
            fix="choose an earlier window, or declare fewer days",
        )
    day = F.floor(F.col("__event_ts_ms") / _DAY_MS) - F.lit(start)
    outside = (F.col(WINDOW_COLUMN) < 0) | (F.col(WINDOW_COLUMN) >= before_test + split.test_days)
    reason = F.when(outside, F.lit(OUTSIDE_WINDOW))
    return events.withColumn(WINDOW_COLUMN, day).withColumn(
        DROP_COLUMN, F.coalesce(F.col(DROP_COLUMN), reason)
    )


def _log_days(events: DataFrame) -> tuple[int, int]:
    row = events.agg(F.min("__event_ts_ms"), F.max("__event_ts_ms")).collect()[0]
    return int(row[0] // _DAY_MS), int(row[1] // _DAY_MS)
