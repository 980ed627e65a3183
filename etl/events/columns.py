"""Columns that a build makes beside the log's: their names, marks of rows, hashes, draws.

The same however the data is partitioned: no number depends on a task or on a partition's id.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.window import WindowSpec

from conf.etl.build import BuildConfig
from conf.etl.sources import is_list_type

EVENT_TS_COLUMN = "__event_ts_ms"
"""Time of the event, milliseconds since 1970, null where it has none."""
DROP_COLUMN = "__drop"
"""Null, or the reason why the event is left out."""
NOT_SAMPLED_COLUMN = "__skip"
"""Null, or the reason why a kept event is no sample."""
SEEN_COLUMN = "__seen"
"""Whether an event meets the condition of `seen`; there is no such column without it."""
POSITION_COLUMN = "__position"
"""Rank of an event among its user's kept events, from 1."""
TOTAL_COLUMN = "__total"
"""Kept events of the user."""
TIE_COLUMN = "__tie"
"""Whether a kept event has the time of its user's kept event before it; none without a time."""
MOMENT_COLUMN = "__moment"
"""Position of the first event of the same user and time, where something reads it."""
SAMPLES_COLUMN = "__samples"
"""Samples of the user, given ones included."""
SAMPLES_LEFT_COLUMN = "__samples_left"
"""Samples of the user after the event; those of a given test source do not count."""
SPLIT_COLUMN = "__split"
GIVEN_TEST_COLUMN = "__given_test"
GIVEN_VALIDATION_COLUMN = "__given_validation"
ROW_COLUMNS = ("__row_low", "__row_high")
DRAW_COLUMN = "__draw"
CANDIDATES = "candidates"
_LONE_PARTS = 1024
_BITS = 53


def kept(events: DataFrame) -> DataFrame:
    """Returns the events that are not left out."""
    return events.where(F.col(DROP_COLUMN).isNull())


def is_sample() -> Column:
    """Whether an event is a sample."""
    return F.col(DROP_COLUMN).isNull() & F.col(NOT_SAMPLED_COLUMN).isNull()


def drop_events(events: DataFrame, reason: Column) -> DataFrame:
    """Marks events as left out where `reason` is not null; the first reason stays."""
    return events.withColumn(DROP_COLUMN, F.coalesce(F.col(DROP_COLUMN), reason))


def leave_out_samples(events: DataFrame, reason: Column) -> DataFrame:
    """Marks events as no samples where `reason` is not null; the first reason stays."""
    return events.withColumn(NOT_SAMPLED_COLUMN, F.coalesce(F.col(NOT_SAMPLED_COLUMN), reason))


def running_and_whole(in_order: WindowSpec) -> tuple[WindowSpec, WindowSpec]:
    """Frames up to each row, and of all rows, for which Spark goes through the rows but once."""
    first, last = Window.unboundedPreceding, Window.unboundedFollowing
    return in_order.rowsBetween(first, Window.currentRow), in_order.rowsBetween(first, last)


def spread_lone(is_lone: Column) -> Column:
    """Parts by time of rows without a key, which match nothing: one task would get them all."""
    return F.when(is_lone, F.pmod(EVENT_TS_COLUMN, F.lit(_LONE_PARTS)))


def add_row_identity(rows: DataFrame, column_types: Mapping[str, str]) -> DataFrame:
    """Adds two 64-bit hashes of each row's content, for logs whose rows have no key."""
    content: list[Column] = []
    for name, kind in column_types.items():
        # Spark's hash skips nulls and the bounds of lists: without these, (null, 1) is (1, null).
        bound = F.coalesce(F.size(name), F.lit(-1)) if is_list_type(kind) else F.lit(0)
        content += [F.col(name).isNull(), bound, F.col(name)]
    for salt, column in enumerate(ROW_COLUMNS):
        rows = rows.withColumn(column, F.xxhash64(F.lit(salt), *content))
    return rows


def event_columns(config: BuildConfig) -> list[str]:
    """Columns that tell events apart, before any negative is drawn; equal rows share them."""
    keys = [name for name in (config.events.user, config.events.item) if name is not None]
    rest = ROW_COLUMNS if config.events.user is None else (POSITION_COLUMN,)
    return [*keys, *rest]


def identity_columns(config: BuildConfig) -> list[str]:
    """Columns that no two different records share; equal rows of a log may."""
    drawn = [DRAW_COLUMN] if config.negatives is not None and config.negatives.draws else []
    return event_columns(config) + drawn


def fold_columns(config: BuildConfig) -> list[str]:
    """Columns that say which fold a train row is in, whatever days a run reads.

    Positions count the events that are read; a time stays what it is. Equal events at one time
    are in one fold, which has none of their labels.
    """
    columns = event_columns(config)
    if config.events.time is None:
        return columns
    return [EVENT_TS_COLUMN if name == POSITION_COLUMN else name for name in columns]


def hash_fraction(*columns: Column) -> Column:
    """Returns a double in [0, 1), uniform over distinct values: 53 bits of their hash."""
    bits = F.shiftrightunsigned(F.xxhash64(*columns), 64 - _BITS)
    return bits.cast("double") * F.lit(2.0**-_BITS)


def draw_fraction(config: BuildConfig, purpose: str) -> Column:
    """Returns a double in [0, 1) that hangs on the seed and the event alone."""
    return hash_fraction(
        F.lit(config.output.seed), F.lit(purpose), *map(F.col, event_columns(config))
    )
