"""What tells records apart, and numbers drawn from it: the same however data is partitioned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from conf.etl import BuildConfig
from conf.etl.columns import is_list_type
from etl.history import POSITION_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

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


def hash_fraction(*columns: Column) -> Column:
    """Returns a double in [0, 1), uniform over distinct values: 53 bits of their hash."""
    bits = F.shiftrightunsigned(F.xxhash64(*columns), 64 - _BITS)
    return bits.cast("double") * F.lit(2.0**-_BITS)
