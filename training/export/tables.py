"""Embedding tables of a trained model as files: the row of each key.

    tables/<name>.parquet   key int64, vector list<float32>
    tables/<name>.txt       key<TAB>v1,v2,…   eight decimals, no header

Both hold the same rows, in the order of the table, and `TableStore.load` reads either. Keys are
those of the dataset: of a static table, ids. Padding and keys without a row are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import numpy as np
import tensorflow as tf

from conf.schema import PAD_ID
from training.embedding.dynamic_table import DynamicTable
from training.embedding.key_index import FIRST_ROW
from training.embedding.static_table import EmbeddingTable, read_rows
from training.embedding.table_files import PARQUET, TEXT, TableRows, write_table
from training.models.model import Model

_PART_ROWS = 1 << 16


def write_tables(directory: Path, model: Model) -> dict[str, dict[str, int]]:
    """Writes every table of a model, those of biases too.

    Args:
        directory: Where the files go; it is made.
        model: The model.

    Returns:
        `rows` and `dim` of each table, by name.
    """
    directory.mkdir()
    written = {}
    for name, table in sorted(model.tables.items()):
        keys, rows = list_keys(table)
        for ending in (PARQUET, TEXT):
            write_table(
                directory / f"{quote(name, safe='')}{ending}", _read_parts(table, keys, rows)
            )
        written[name] = {"rows": len(keys), "dim": table.dim}
    return written


def list_keys(table: EmbeddingTable) -> tuple[np.ndarray, np.ndarray]:
    """Returns the keys of a table and their rows, int64 `[n]` each, rows ascending."""
    if not isinstance(table, DynamicTable):
        ids = np.arange(PAD_ID + 1, table.vocabulary_size)
        return ids, ids
    keys = table.keys.read_keys()
    taken = np.flatnonzero(keys != PAD_ID)
    return keys[taken], taken + FIRST_ROW


def _read_parts(table: EmbeddingTable, keys: np.ndarray, rows: np.ndarray) -> Iterator[TableRows]:
    for start in range(0, len(keys), _PART_ROWS):
        part = slice(start, start + _PART_ROWS)
        values = read_rows(table.variable, tf.constant(rows[part]))
        yield keys[part], np.asarray(values, np.float32)
