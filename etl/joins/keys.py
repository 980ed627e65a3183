"""Checks of a dictionary's keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from conf.errors import InputDataError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def check_unique_key(name: str, dictionary: DataFrame, columns: Sequence[str]) -> None:
    """Refuses a dictionary whose key repeats: joining it would multiply events.

    Args:
        name: The dictionary's name.
        dictionary: Its rows.
        columns: The key, with the columns that tell its versions apart.

    Raises:
        InputDataError: A key stands in more than one row.
    """
    counts = dictionary.groupBy(*columns).count().where("count > 1")
    repeated = counts.orderBy(*columns).limit(5).collect()
    if repeated:
        shown = [" ".join(str(row[column]) for column in columns) for row in repeated]
        raise InputDataError(
            f"dictionary {name!r} is not unique by its key ({', '.join(columns)})",
            received=", ".join(
                f"{key} ({row['count']} rows)" for key, row in zip(shown, repeated, strict=True)
            ),
            allowed="one row per key",
            fix="de-duplicate the dictionary, or declare another key",
        )
