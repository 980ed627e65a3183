"""Rows to score: the samples of a log whose labels nobody knows yet, as raw values in Parquet.

The events go through joins, histories, sessions and windowed features as in a build, but end as the
raw values that encoders read: any model of the dataset takes them, since its encoders are inside
it. Labels are not read, and their columns may be null or missing.

    rows.parquet/_rows.json            what the rows are of, and what was left out
    rows.parquet/part-00000.parquet    the rows, in order of time
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from conf.artefacts.run import write_json
from conf.dates import DateRange
from conf.encoders import ENCODERS_DIR
from conf.errors import (
    ConfigError,
    InputDataError,
    InternalError,
    UpstreamNotReadyError,
    read_code_version,
)
from conf.etl.build import BuildConfig
from conf.etl.contract import ContractConfig
from conf.etl.encodings import FeatureConfig
from conf.etl.split import SplitConfig
from conf.schema import fingerprint
from conf.storage.atomic_output import PRIVATE, staged_directory
from conf.storage.table_files import open_parquet
from etl.encoders.feature_plan import plan_features, sampling_columns
from etl.events.columns import DROP_COLUMN, EVENT_TS_COLUMN, NOT_SAMPLED_COLUMN, kept
from etl.events.conditions import check_where
from etl.events.counted_features import add_most_frequent
from etl.events.event_log import prepare_events
from etl.events.histories import add_histories
from etl.events.splits import check_dates, is_inside, name_outside
from etl.quality.time_units import count_sources
from etl.sources.bad_rows import settle_bad_rows
from etl.sources.session_settings import changed_settings, choose_partitions, with_read_settings
from etl.sources.snapshot import check_inputs_unchanged, read_inputs
from etl.versions.publish import find_dataset, hold_dataset, read_current

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SUFFIX = ".parquet"
RECORD_FILE = "_rows.json"
"""Record of the rows; readers of a folder of Parquet skip what begins with `_`."""
_SERVED_ROLES = ("user", "item", "context", "id")
logger = logging.getLogger("sluice.build")


@with_read_settings
def write_rows_to_score(
    spark: SparkSession, config: BuildConfig, dates: DateRange | None, target: Path
) -> dict[str, Any]:
    """Writes the samples of a run's days as raw values; returns the content of `_rows.json`.

    Earlier rows are replaced when all is done.
    """
    columns = check_rows_to_score(config, dates, target)
    unlabelled = leave_out_labels(config)
    sources, inputs = read_inputs(spark, unlabelled, dates, label_columns(config))
    counted = count_sources(unlabelled, sources)
    settle_bad_rows(counted.sources, counted.counts, unlabelled.sources)
    partitions = choose_partitions(spark, inputs.bytes)
    with changed_settings(spark, partitions), ExitStack() as stack:
        prepared = prepare_events(unlabelled, counted.sources, dates, is_labelled=False)
        stack.callback(prepared.release)
        rows, dropped = _count_rows(prepared.frame, dates)
        record = {
            "format_version": 1,
            "dataset": config.name,
            "dates": None if dates is None else [str(dates.first), str(dates.last)],
            "read": {name: count.read for name, count in counted.counts.items()},
            "bad": {name: count.bad for name, count in counted.counts.items() if count.bad},
            "config_sha256": fingerprint(config.resolved()),
            "code_version": read_code_version(),
            "rows": rows,
            "dropped": dropped,
            "columns": columns,
        }
        encoders = _hold_item_lists(config, stack)
        frame = _choose_rows(prepared.frame, config, dates, encoders)
        with staged_directory(target) as staging:
            _write_row_files(frame, staging, record)
            # While the rows of before are still in their place.
            check_inputs_unchanged(spark, unlabelled, inputs, dates)
    logger.info("%s rows to score: %s", f"{rows:,}", target)
    return record


def check_rows_to_score(
    config: BuildConfig, dates: DateRange | None, target: Path
) -> dict[str, str]:
    """Checks all that needs no data, and returns by name of a row's column that of the events."""
    is_taken = target.exists() and not (target / RECORD_FILE).is_file()
    if is_taken or target.suffix != _SUFFIX:
        raise ConfigError(
            f"rows to score cannot be written to {target}",
            fix=f"name a new folder that ends in {_SUFFIX}, or earlier rows, which are replaced",
        )
    check_where(config)
    check_dates(leave_out_labels(config), dates)
    return choose_columns(config)


def leave_out_labels(config: BuildConfig) -> BuildConfig:
    """Returns a build's config without what only training and evaluation need."""
    changes = {
        # Rules that read a column of the log tell events apart, also where it is null.
        "label": tuple(label for label in config.all_labels if label.conversion is None) or None,
        "negatives": None,
        "down_sampling": None,
        "weights": None,
        "train_samples": "all",
        # All events are of one that needs no scan.
        "split": SplitConfig(strategy="hash", key=config.split.key),
        "contract": ContractConfig(),
    }
    unlabelled = config.model_copy(update=changes)
    return unlabelled.model_copy(update={"sources": unlabelled.used_sources})


def label_columns(config: BuildConfig) -> frozenset[str]:
    """Returns the columns of the log that only labels and weights need: rows may lack them."""
    read = {label.column for label in config.all_labels if label.column is not None}
    if config.weights is not None and config.weights.column is not None:
        read.add(config.weights.column)
    events = config.events
    served = {column for feature in _served_features(config) for column in feature.columns}
    return frozenset(read - {events.user, events.item, events.time} - served)


def _served_features(config: BuildConfig) -> list[FeatureConfig]:
    made = set(sampling_columns(config))
    served = (feature for feature in config.features if feature.role in _SERVED_ROLES)
    return [feature for feature in served if made.isdisjoint(feature.columns)]


def choose_columns(config: BuildConfig) -> dict[str, str]:
    """Returns the event columns of a row by name; no name is that of another column's feature."""
    plan_features(config)
    labels, features = label_columns(config), _served_features(config)
    made_of = {feature.name: feature.columns[0] for feature in features}
    log = config.sources[config.events.source].column_types
    read = (column for feature in features for column in feature.columns)
    chosen: dict[str, str] = {}
    for column in dict.fromkeys((*log, *read)):
        if column in labels:
            continue
        if made_of.get(column, column) == column:
            chosen[column] = column
            continue
        readers = [feature for feature in features if column in feature.columns]
        if several := [feature.name for feature in readers if len(feature.columns) > 1]:
            raise ConfigError(
                f"feature {several[0]!r} reads {column!r}, the name of another feature, made of "
                f"{made_of[column]!r}: a row cannot tell them apart",
                fix=f"rename feature {column!r}, build the dataset anew, and train again",
            )
        chosen |= {feature.name: column for feature in readers}
    return chosen


def _count_rows(events: DataFrame, dates: DateRange | None) -> tuple[int, dict[str, int]]:
    """Counts the events: those that become rows, those of other days, and the others by reason."""
    outside = [] if dates is None else [name_outside(dates)]
    why = F.coalesce(*outside, DROP_COLUMN, NOT_SAMPLED_COLUMN).alias("__why")
    counts = {row["__why"]: row["count"] for row in events.groupBy(why).count().collect()}
    rows = counts.pop(None, 0)
    if not rows:
        days = "all days" if dates is None else f"{dates.first} to {dates.last}"
        shown = ", ".join(f"{why} {n:,}" for why, n in sorted(counts.items()))
        raise InputDataError(
            f"there is no row to score of {days}",
            received=f"dropped: {shown or 'none'}",
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
    keys = filter(None, (config.events.user, config.events.item))
    content = F.xxhash64(*config.sources[config.events.source].column_types)
    return rows.orderBy(EVENT_TS_COLUMN, *keys, content)


def _hold_item_lists(config: BuildConfig, stack: ExitStack) -> Path | None:
    """The folder of the lists that the dataset's current version has counted for items."""
    if not config.most_frequent:
        return None
    paths = stack.enter_context(hold_dataset(find_dataset(config.output.root, config.name)))
    current = read_current(paths)
    if current is None:
        raise UpstreamNotReadyError(
            f"dataset {config.name!r} has no version yet, and most_frequent is counted by one",
            fix="build the dataset first",
        )
    return paths.version(current) / ENCODERS_DIR


def _write_row_files(frame: DataFrame, staging: Path, record: Mapping[str, Any]) -> None:
    """Writes rows, in order, as Parquet files, and the record of them."""
    chosen = [F.col(column).alias(name) for name, column in record["columns"].items()]
    # Spark takes the percent signs of a URI for those of a name.
    frame.select(*chosen).write.mode("overwrite").parquet(f"file://{staging.absolute()}")
    parts = sorted(staging.glob("part-*.parquet"))
    written = sum(open_parquet(part).metadata.num_rows for part in parts)
    if written != record["rows"]:
        raise InternalError(
            f"{written:,} rows were written of {record['rows']:,} events chosen",
            fix="nothing was replaced; on a cluster all hosts must see the directory by its path",
        )
    for number, part in enumerate(parts):  # Spark's names are drawn anew in each run.
        part.chmod(part.stat().st_mode & PRIVATE)
        part.rename(staging / f"part-{number:05d}{_SUFFIX}")
    for path in [staging / "_SUCCESS", *staging.glob(".*.crc")]:
        path.unlink(missing_ok=True)
    write_json(staging / RECORD_FILE, dict(record))
