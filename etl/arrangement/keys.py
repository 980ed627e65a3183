"""Columns that decide a record's place: the hash of its content, its partition, its time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.errors import ConfigError, did_you_mean
from conf.etl import BuildConfig
from conf.etl.output import DATE_PARTITION
from etl.identity import identity_columns
from etl.split import EVENT_SPLITS, SPLIT_COLUMN
from etl.tfrecord.partitions import partition_path

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

HASH_COLUMN = "__hash"
GROUP_HASH_COLUMN = "__group_hash"
PART_COLUMN = "__part"
TIME_COLUMN = "__event_ts_ms"

_PARTITION_TYPES = ("int64", "string")


def check_partition_columns(config: BuildConfig, column_types: Mapping[str, str]) -> None:
    """Refuses partition columns that are not there or have no safe text form.

    Args:
        config: The build's config.
        column_types: Declared type by column.

    Raises:
        ConfigError: Names the first such column; or records without a time are to be ordered or
            partitioned by it, or records without a user grouped by it.
    """
    output = config.output
    if output.group_by is not None and config.events.user is None:
        raise ConfigError(
            "the output is to be grouped by user, but the events have none",
            received="events.user: null",
            fix="declare events.user, or leave out output.group_by",
        )
    for name in output.partition_by:
        if name == DATE_PARTITION and name not in column_types:
            continue
        if column_types.get(name) not in _PARTITION_TYPES:
            raise ConfigError(
                f"output.partition_by names a column that cannot be partitioned by: {name!r}",
                received=column_types.get(name, "no such column"),
                allowed=f"{DATE_PARTITION}, or a declared column of type "
                + " or ".join(_PARTITION_TYPES),
                fix=did_you_mean(name, [DATE_PARTITION, *column_types]),
            )
    needs_time = output.order == "time" or (
        DATE_PARTITION in output.partition_by and DATE_PARTITION not in column_types
    )
    if needs_time and config.events.time is None:
        raise ConfigError(
            "the output is to be ordered or partitioned by time, but the events have none",
            received="events.time: null",
            fix="declare events.time, or leave out output.order and output.partition_by",
        )


def add_keys(records: DataFrame, config: BuildConfig) -> DataFrame:
    """Adds `__hash`, `__part` and, for grouped output, `__group_hash`.

    The hash is of the split and of what tells records apart: the same rows have the same keys
    whatever the number of executors, input blocks or retries.
    """
    output, events = config.output, config.events
    names = (SPLIT_COLUMN, *identity_columns(config))
    seed, identity = F.lit(output.seed), [F.col(name) for name in names]
    keyed = records.withColumn(HASH_COLUMN, F.xxhash64(seed, *identity))
    keyed = keyed.withColumn(PART_COLUMN, _part(keyed, config))
    if output.group_by is None or events.user is None:
        return keyed
    group = F.xxhash64(seed, F.coalesce(F.col(events.user).cast("string"), F.lit("")))
    # Rows of no user (the catalogue) are spread as without groups.
    return keyed.withColumn(
        GROUP_HASH_COLUMN,
        F.when(F.col(events.user).isNotNull(), group).otherwise(F.col(HASH_COLUMN)),
    )


def _part(records: DataFrame, config: BuildConfig) -> Column:
    if not config.output.partition_by:
        return F.lit("")
    values = [_partition_value(records, name) for name in config.output.partition_by]
    # JSON leaves nulls out unless they are kept: a null must not look like another value.
    text = F.to_json(F.array(*values), {"ignoreNullFields": "false"})
    return F.when(F.col(SPLIT_COLUMN).isin(*EVENT_SPLITS), text).otherwise(F.lit(""))


def _partition_value(records: DataFrame, name: str) -> Column:
    if name in records.columns:
        # An empty text has no folder name of its own; it goes with null.
        return F.nullif(F.col(name).cast("string"), F.lit(""))
    return F.date_format(F.timestamp_millis(TIME_COLUMN), "yyyy-MM-dd")


def partition_folder(config: BuildConfig, key: str) -> str:
    """Folder below the split that a `__part` stands for."""
    return partition_path(config.output.partition_by, json.loads(key)) if key else ""
