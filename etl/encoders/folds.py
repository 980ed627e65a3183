"""Folds of train rows, by a hash of the row's key: the same in the fit and in the records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SEED = 41


def fold_column(folds: int) -> str:
    """Name of the column that holds a train row's fold, and null in every other row."""
    return f"__fold_{folds}"


def add_folds(rows: DataFrame, folds: Sequence[int], key: Sequence[str]) -> DataFrame:
    """Adds a row's fold for each number of folds.

    Args:
        rows: Rows with the columns of the key.
        folds: Numbers of folds.
        key: Columns that tell rows apart.

    Returns:
        The rows with `fold_column(n)` for each number, bigint in [0, n).
    """
    from pyspark.sql import functions as F

    row_key = F.xxhash64(F.lit(_SEED), *[F.col(f"`{name}`") for name in key])
    return rows.withColumns(
        {fold_column(n): F.pmod(row_key, F.lit(n)).cast("bigint") for n in folds}
    )
