"""What has changed of a table's rows from one state to another, by key.

    <name>.parquet            key, vector: keys that are new, or whose row has changed
    <name>.removed.parquet    key: keys that are gone

A state is known by its fingerprint, which depends on keys and rows and not on their order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from conf.errors import InputDataError
from conf.storage.table_files import read_parquet
from training.embedding.table_files import PARQUET, TableRows, load_table, write_table

_REMOVED = f".removed{PARQUET}"


@dataclass(frozen=True)
class TableDelta:
    """Changes of a table.

    Attributes:
        changed: Keys that are new or whose row has changed, ascending, and their rows.
        removed: Keys that are gone, int64 `[n]`, ascending.
        base: Fingerprint of the table before.
        result: Fingerprint of the table after.
    """

    changed: TableRows
    removed: np.ndarray
    base: str
    result: str

    def require_base(self, table: TableRows) -> None:
        """Refuses a table that is not the one before the changes.

        Raises:
            InputDataError: It is another one.
        """
        fingerprint = fingerprint_rows(table)
        if fingerprint != self.base:
            raise InputDataError(
                "the delta is for another state of the table",
                received=f"fingerprint {fingerprint[:12]}",
                allowed=self.base[:12],
                fix="apply the deltas in between first, in order, or take a full export",
            )

    def apply(self, base: TableRows) -> TableRows:
        """Returns the table after, keys ascending.

        Raises:
            InputDataError: The table is not the one before the changes.
        """
        self.require_base(base)
        keys, rows = base
        kept = ~np.isin(keys, np.concatenate([self.changed[0], self.removed]))
        result = sort_rows(
            np.concatenate([keys[kept], self.changed[0]]),
            np.concatenate([rows[kept], self.changed[1]]),
        )
        if fingerprint_rows(result) != self.result:
            raise InputDataError("the delta does not lead to the table that it names")
        return result


def compare_tables(base: TableRows, result: TableRows) -> TableDelta:
    """Returns what has changed between two states of a table."""
    (old_keys, old_rows), (keys, rows) = sort_rows(*base), sort_rows(*result)
    at = np.minimum(np.searchsorted(old_keys, keys), max(len(old_keys) - 1, 0))
    same = np.zeros(len(keys), np.bool_)
    if len(old_keys):
        same = old_keys[at] == keys
        # As bits: 0.0 and -0.0 are two rows.
        same[same] = (old_rows[at[same]].view(np.int32) == rows[same].view(np.int32)).all(axis=1)
    return TableDelta(
        changed=(keys[~same], rows[~same]),
        removed=np.setdiff1d(old_keys, keys, assume_unique=True),
        base=fingerprint_rows((old_keys, old_rows)),
        result=fingerprint_rows((keys, rows)),
    )


def sort_rows(keys: np.ndarray, rows: np.ndarray) -> TableRows:
    """Returns rows by ascending key."""
    if (keys[1:] > keys[:-1]).all():
        return keys, np.ascontiguousarray(rows)
    order = np.argsort(keys, kind="stable")
    return keys[order], rows[order]


def fingerprint_rows(table: TableRows) -> str:
    """Returns the SHA-256 of a table's length, keys and rows, in the order of the keys."""
    keys, rows = sort_rows(*table)
    digest = hashlib.sha256(np.array(rows.shape, "<i8").tobytes())
    digest.update(np.ascontiguousarray(keys, "<i8").data)
    digest.update(np.ascontiguousarray(rows, "<f4").data)
    return digest.hexdigest()


def write_delta_rows(directory: Path, name: str, delta: TableDelta) -> None:
    """Writes the changes of a table."""
    stem = quote(name, safe="")
    write_table(directory / f"{stem}{PARQUET}", [delta.changed])
    pq.write_table(pa.table({"key": delta.removed}), directory / f"{stem}{_REMOVED}")


def read_delta_rows(directory: Path, name: str, about: Mapping[str, Any]) -> TableDelta:
    """Reads the changes of a table.

    Args:
        directory: Where they were written.
        name: Name of the table.
        about: Its `dim`, and the fingerprints `base` and `result`.

    Raises:
        InputDataError: A file is damaged.
    """
    stem = quote(name, safe="")
    changed = load_table(directory / f"{stem}{PARQUET}", about["dim"])
    removed = read_parquet(directory / f"{stem}{_REMOVED}")["key"].to_numpy()
    return TableDelta(changed, removed, about["base"], about["result"])
