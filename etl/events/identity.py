"""Identity and order of events: content hashes, draws from them, the sequence of each user.

The same however the data is partitioned: no number depends on a task or on a partition's id.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.etl.build import BuildConfig
from conf.etl.sources import is_list_type

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


POSITION_COLUMN = "__position"
MOMENT_COLUMN = "__moment"
"""Position of the first event of the same user and time; there is none without a time column."""
EVENT_TS_COLUMN = "__event_ts_ms"
"""Time of the event, milliseconds since 1970, null where it has none."""
DROP_COLUMN = "__drop"
"""Null, or the reason why the event is left out."""
_SEQUENCE = "__sequence"
_OWNER = "__sequence_of"
_LONE_PARTS = 1024


def drop_events(events: DataFrame, reason: Column) -> DataFrame:
    """Marks events as left out; an event that is left out already keeps its first reason.

    Args:
        events: Events with `__drop`.
        reason: Why an event is left out, or null.
    """
    return events.withColumn(DROP_COLUMN, F.coalesce(F.col(DROP_COLUMN), reason))


def spread_lone(is_lone: Column, time: str = EVENT_TS_COLUMN) -> Column:
    """Parts by time of rows without a key, which match nothing: one task would get them all."""
    return F.when(is_lone, F.pmod(time, F.lit(_LONE_PARTS)))


def collect_sequence(item: Column) -> Column:
    """All items of a group in order of `__position`, nulls among them: an aggregate."""
    # `array_sort` would interpret a function of Spark's for every comparison.
    pairs = F.collect_list(F.struct(POSITION_COLUMN, item.alias("item")))
    return F.sort_array(pairs)["item"]


def build_sequences(events: DataFrame, user: str, item: Column) -> DataFrame:
    """Builds one row per user: all items in order of time; null stands for an event without one.

    Returns:
        Columns: the user, `__sequence`.
    """
    return events.groupBy(user).agg(collect_sequence(item).alias(_SEQUENCE))


def add_seen(
    events: DataFrame,
    sequences: DataFrame,
    user: str,
    name: str,
    condition: Column,
    position: str = POSITION_COLUMN,
) -> DataFrame:
    """Adds all distinct items of the sequence that come strictly before an event, unbounded.

    Meant for evaluation rows, one or few per user: the others are null, and pass through one join
    with them, so that what was computed for all rows is not computed twice.

    Args:
        events: Events with `__position`.
        sequences: `build_sequences` of the same events.
        user: Column of the user.
        name: Column to add.
        condition: Condition of the rows that get the items.
        position: Column of the position that the items come before.
    """
    sequences = sequences.withColumnRenamed(user, _OWNER)
    joined = events.join(sequences, (F.col(user) == F.col(_OWNER)) & condition, "left")
    seen = F.slice(F.col(_SEQUENCE), F.lit(1), F.col(position) - F.lit(1))
    # An event that is no sample may have no item.
    seen = F.array_distinct(F.array_compact(seen))
    return joined.withColumn(name, seen).drop(_SEQUENCE, _OWNER)


ROW_COLUMNS = ("__row_low", "__row_high")
DRAW_COLUMN = "__draw"
_BITS = 53


def add_row_identity(rows: DataFrame, column_types: Mapping[str, str]) -> DataFrame:
    """Adds two 64-bit hashes of each row's content, for logs whose rows have no key.

    Args:
        rows: Rows of the log.
        column_types: Declared type of each column of the log.
    """
    content: list[Column] = []
    for name, kind in column_types.items():
        # Spark's hash skips nulls and the bounds of lists: without these, (null, 1) is (1, null).
        bound = F.coalesce(F.size(name), F.lit(-1)) if is_list_type(kind) else F.lit(0)
        content += [F.col(name).isNull(), bound, F.col(name)]
    for salt, column in enumerate(ROW_COLUMNS):
        rows = rows.withColumn(column, F.xxhash64(F.lit(salt), *content))
    return rows


def identity_columns(config: BuildConfig) -> list[str]:
    """Returns the columns that no two different records share; equal rows of a log may."""
    keys = [name for name in (config.events.user, config.events.item) if name is not None]
    rest = ROW_COLUMNS if config.events.user is None else (POSITION_COLUMN,)
    drawn = (DRAW_COLUMN,) if config.negatives is not None and config.negatives.draws else ()
    return [*keys, *rest, *drawn]


def event_columns(config: BuildConfig) -> list[str]:
    """Returns the columns that tell events apart, before any negative is drawn."""
    return [name for name in identity_columns(config) if name != DRAW_COLUMN]


def fold_columns(config: BuildConfig) -> list[str]:
    """Returns the columns that say which fold a train row is in, whatever days a run reads.

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
