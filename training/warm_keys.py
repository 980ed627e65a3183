"""Dynamic tables of an earlier run in a new one: which keys come over, and from which rows."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from training.embedding.dynamic_table import DynamicTable
from training.embedding.key_index import FIRST_ROW
from training.embedding.key_space import KeySpace
from training.models.base import RetrievalModel
from training.row_matching import NO_ROW, EncodedVersion, match_keys


@dataclass(frozen=True)
class MatchedKeys:
    """What a dynamic table takes over.

    Attributes:
        keys: Its keys, int64 `[n]`, in the order of the earlier table.
        rows: Row of the earlier table for each row of the new one, int64 `[2 + n]`.
    """

    keys: np.ndarray
    rows: np.ndarray


def match_dynamic_table(
    model: RetrievalModel,
    table: DynamicTable,
    earlier: np.ndarray,
    versions: tuple[EncodedVersion, EncodedVersion],
) -> MatchedKeys | str:
    """Returns what a dynamic table takes over of an earlier one, or why it can take nothing.

    Args:
        model: The new model.
        table: One of its tables.
        earlier: Keys of the earlier table, int64 `[n]`, from row 2 on.
        versions: The dataset version to train on, and that of the earlier run.
    """
    feature = next(
        name
        for name, other in model.embedded_features.items()
        if isinstance(other, DynamicTable) and other.keys is table.keys
    )
    found = match_keys(feature, earlier, *versions)
    if found is None:
        return f"its keys are made in another way: those of feature {feature!r}"
    places = np.flatnonzero(found != NO_ROW) if found is not earlier else np.arange(len(earlier))
    if table.keys.max_rows is not None and len(places) > table.keys.max_rows:
        return f"{len(places):,} keys there, and max_rows is {table.keys.max_rows:,}"
    rows = np.concatenate([np.arange(FIRST_ROW), places + FIRST_ROW])
    return MatchedKeys(found[places], rows)


def set_keys(model: RetrievalModel, space: KeySpace, keys: np.ndarray) -> None:
    """Gives keys rows with first values, in all tables and optimizer state that have the keys."""
    space.set_keys(keys)
    for matrix in space.matrices:
        matrix.assign(np.full((len(keys) + FIRST_ROW, matrix.dim), matrix.fill, np.float32))
    for table in model.tables.values():
        if isinstance(table, DynamicTable) and table.keys is space:
            padding = np.zeros((FIRST_ROW, table.dim), np.float32)
            table.rows.assign(np.concatenate([padding, table.draw_rows(keys)]))
