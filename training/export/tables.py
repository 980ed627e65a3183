"""Embedding tables of a trained model, by key: laid out for serving, and as files.

    tables/<name>.parquet   key int64, vector list<float32>
    tables/<name>.txt       key<TAB>v1,v2,…   eight decimals, no header

Both hold the same rows by ascending key, and `TableStore.load` reads either. Keys are
those of the dataset: of a static table, ids. Padding and keys without a row are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from conf.schema import PAD_ID
from training.embedding.dynamic_table import DynamicTable
from training.embedding.growing_rows import GrowingRows
from training.embedding.key_index import FIRST_ROW
from training.embedding.key_space import KeySpace
from training.embedding.static_table import EmbeddingTable
from training.embedding.table_delta import fingerprint_rows
from training.embedding.table_files import PARQUET, TEXT, TableRows, write_table
from training.models.model import Model

_PART_ROWS = 1 << 16


def sort_keys(model: Model) -> None:
    """Gives the keys of dynamic tables rows by ascending key, without gaps.

    So what is exported depends on keys and rows alone, and not on when a key came. Counts and
    times of keys are forgotten: it is for models that are not trained any further.
    """
    spaces: dict[KeySpace, list[GrowingRows]] = {}
    for table in model.tables.values():
        if isinstance(table, DynamicTable):
            spaces.setdefault(table.keys, []).append(table.rows)
    for space, matrices in spaces.items():
        keys = space.read_keys()
        taken = np.flatnonzero(keys != PAD_ID)
        order = taken[np.argsort(keys[taken])]
        rows = np.concatenate([np.arange(FIRST_ROW), order + FIRST_ROW])
        sorted_rows = [matrix.numpy()[rows] for matrix in matrices]
        space.set_keys(keys[order])
        for matrix, values in zip(matrices, sorted_rows, strict=True):
            matrix.assign(values)


def read_table_rows(table: EmbeddingTable) -> TableRows:
    """Returns the keys of a table, in the order of their rows, and the rows, in host memory."""
    values = table.rows.numpy()
    if not isinstance(table, DynamicTable):
        return np.arange(PAD_ID + 1, table.vocabulary_size), values[PAD_ID + 1 :]
    keys = table.keys.read_keys()
    taken = np.flatnonzero(keys != PAD_ID)
    return keys[taken], values[taken + FIRST_ROW]


def describe_tables(model: Model) -> dict[str, dict[str, Any]]:
    """Returns `rows`, `dim` and `fingerprint` of each table, by name, those of biases too."""
    return {name: _describe(read_table_rows(table)) for name, table in sorted(model.tables.items())}


def _describe(table: TableRows) -> dict[str, Any]:
    rows, dim = table[1].shape
    return {"rows": rows, "dim": dim, "fingerprint": fingerprint_rows(table)}


def write_tables(directory: Path, tables: Mapping[str, TableRows]) -> None:
    """Writes tables as files.

    Args:
        directory: Where the files go; it is made.
        tables: Keys and rows of each table, by name.
    """
    directory.mkdir()
    for name, (keys, rows) in tables.items():
        for ending in (PARQUET, TEXT):
            write_table(directory / f"{quote(name, safe='')}{ending}", _cut(keys, rows))


def _cut(keys: np.ndarray, rows: np.ndarray) -> Iterator[TableRows]:
    for start in range(0, len(keys), _PART_ROWS):
        part = slice(start, start + _PART_ROWS)
        yield keys[part], rows[part]
