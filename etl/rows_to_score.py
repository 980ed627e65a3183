"""Rows to score: the samples of a log whose labels nobody knows yet, as raw values in Parquet.

A build makes records of samples, with features and labels. Here the same events go the same way,
through joins, histories, sessions and windowed features, but end as the raw values that encoders
read: any model of the dataset takes them, whatever version it was trained on, since its encoders
are inside it. Labels are not read, and their columns may be null or missing.

    rows.parquet/_rows.json            what the rows are of, and what was left out
    rows.parquet/part-00000.parquet    the rows, in order of time
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.dates import DateRange
from conf.errors import ConfigError, InputDataError
from conf.etl.build import BuildConfig
from conf.storage.atomic_output import staged_directory
from etl.events.date_range import check_dates, name_outside
from etl.events.event_log import kept, prepare_events
from etl.events.histories import add_histories
from etl.events.identity import DROP_COLUMN, EVENT_TS_COLUMN
from etl.events.most_frequent import add_most_frequent
from etl.events.sample_filter import NOT_SAMPLED_COLUMN, check_where
from etl.events.splits import is_inside
from etl.quality.time_units import count_sources
from etl.rows_to_score_files import (
    RECORD_FILE,
    ROWS_SUFFIX,
    describe_rows,
    hold_item_lists,
    write_row_files,
)
from etl.sources.bad_rows import check_bad_rows, check_columns
from etl.sources.session_settings import changed_settings, choose_partitions, with_read_settings
from etl.sources.snapshot import check_inputs_unchanged, read_inputs
from etl.unlabelled_rows import choose_columns, label_columns, leave_out_labels

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ALL_DAYS = "all days"
logger = logging.getLogger("sluice.build")


@dataclass(frozen=True)
class WrittenRows:
    """Rows that were written, and what became of the others.

    Attributes:
        target: The directory.
        rows: Rows that were written.
        read: Rows that were read, by source.
        bad: Bad rows by source and reason.
        dropped: Events that are no rows, by reason; with the bad and the written rows these are all
            rows that were read of the log.
        columns: What a row holds.
    """

    target: Path
    rows: int
    read: Mapping[str, int]
    bad: Mapping[str, Mapping[str, int]]
    dropped: Mapping[str, int]
    columns: tuple[str, ...]


@with_read_settings
def write_rows_to_score(
    spark: SparkSession, config: BuildConfig, dates: DateRange | None, target: Path
) -> WrittenRows:
    """Writes the samples of a run's days as raw values; earlier rows are replaced when all is done.

    Args:
        spark: Session; its time zone is UTC meanwhile.
        config: The config of the dataset that the model was trained on.
        dates: Days whose events become rows; None: the whole log. Events before them are what
            histories, windowed features and joins see.
        target: Directory to write, which all executors see; its name ends in `.parquet`.

    Raises:
        ConfigError: The features do not fit the declared columns, a name stands for two columns, or
            the target is something else than rows.
        InputDataError: A source was refused, changed while it was read, or has no such row.
        UpstreamNotReadyError: A source has no file yet for a day, or the dataset no version that
            an item's lists are taken from.
    """
    columns = check_rows_to_score(config, dates, target)
    unlabelled, optional = leave_out_labels(config), label_columns(config)
    sources, inputs = read_inputs(spark, unlabelled, dates, optional)
    counted = count_sources(unlabelled, sources)
    for name, counts in counted.counts.items():
        check_bad_rows(counted.sources[name], counts, unlabelled.sources[name])
        check_columns(name, unlabelled.sources[name], counts)
    partitions = choose_partitions(spark, config.spark.shuffle_partitions, inputs.bytes)
    with changed_settings(spark, partitions), ExitStack() as stack:
        prepared = prepare_events(unlabelled, counted.sources, dates, is_labelled=False)
        stack.callback(prepared.release)
        rows, dropped = _count_rows(prepared.frame, dates)
        encoders = stack.enter_context(hold_item_lists(config))
        frame = _choose_rows(prepared.frame, config, dates, encoders)
        record = describe_rows(config, dates, rows, dropped, counted.counts, columns)
        target.parent.mkdir(parents=True, exist_ok=True)
        with staged_directory(target) as staging:
            write_row_files(frame, columns, staging, record)
            # While the rows of before are still in their place.
            check_inputs_unchanged(spark, unlabelled, inputs, dates)
    logger.info("%s rows to score: %s", f"{rows:,}", target)
    return WrittenRows(target, rows, record["read"], record["bad"], dropped, tuple(columns))


def check_rows_to_score(
    config: BuildConfig, dates: DateRange | None, target: Path
) -> dict[str, str]:
    """Checks all that needs no data, and returns by name of a row's column that of the events.

    Raises:
        ConfigError: See `write_rows_to_score`.
    """
    if not target.name.endswith(ROWS_SUFFIX) or target.name == ROWS_SUFFIX:
        raise ConfigError(
            "rows to score are written as a folder of Parquet files",
            received=str(target),
            allowed=f"a name that ends in {ROWS_SUFFIX}",
        )
    if target.exists() and not (target / RECORD_FILE).is_file():
        raise ConfigError(
            "something else stands where the rows shall go",
            received=str(target),
            allowed="a new name, or that of earlier rows, which are replaced",
        )
    check_where(config)
    check_dates(leave_out_labels(config), dates)
    return choose_columns(config)


def _count_rows(events: DataFrame, dates: DateRange | None) -> tuple[int, dict[str, int]]:
    """Counts the events: those that become rows, those of other days, and the others by reason."""
    outside = [] if dates is None else [name_outside(dates)]
    why = F.coalesce(*outside, DROP_COLUMN, NOT_SAMPLED_COLUMN).alias("__why")
    counts = {row["__why"]: row["count"] for row in events.groupBy(why).count().collect()}
    rows = counts.pop(None, 0)
    if not rows:
        days = _ALL_DAYS if dates is None else f"{dates.first} to {dates.last}"
        raise InputDataError(
            "there is no row to score",
            received=f"{days}; dropped: "
            + (", ".join(f"{why} {n:,}" for why, n in sorted(counts.items())) or "none"),
            allowed="events of the run's days that would be samples if their label were known",
            fix="correct --date, or look at what was dropped",
        )
    return rows, dict(sorted(counts.items()))


def _choose_rows(
    events: DataFrame, config: BuildConfig, dates: DateRange | None, encoders: Path | None
) -> DataFrame:
    """The rows with all columns, in order."""
    rows = add_histories(kept(events), config)
    # After the windows: an event that is no sample stays in the histories of those that are.
    rows = rows.where(F.col(NOT_SAMPLED_COLUMN).isNull())
    if dates is not None:
        rows = rows.where(is_inside(dates))
    if encoders is not None:
        rows = add_most_frequent(rows, config, encoders)
    keys = [name for name in (config.events.user, config.events.item) if name is not None]
    content = F.xxhash64(*config.sources[config.events.source].column_types)
    return rows.orderBy(EVENT_TS_COLUMN, *keys, content)
