"""A parameter server in this process: rows of 64-bit keys that are pulled, pushed and deleted.

It stands on the index of the dynamic tables. For trainers of one's own; the trainer of Sluice has
its tables on the devices.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from conf.artefacts.delta import read_delta
from conf.artefacts.export import TABLES_DIR
from conf.errors import ConfigError
from conf.training.tables import Initializer, NormalConfig
from training.embedding.device_tier import HostRows
from training.embedding.dynamic_table import draw_first_rows
from training.embedding.key_index import (
    KEY,
    META,
    TIME,
    DistinctKeys,
    KeyRecords,
    UsedRows,
    pack_meta,
    unpack_meta,
)
from training.embedding.table_files import (
    TableRows,
    list_parts,
    load_table,
    read_delta_rows,
    write_table,
)

MOST_ROWS = (1 << 32) - 1
MIN_ROWS = 1 << 10
_INT64 = np.iinfo(np.int64)


class TableStore:
    """Rows of one length, by key; made when they are first pulled or pushed.

    Keys are whole numbers of 64 bits, each as good as any other: unlike in the tables of models, 0
    is no padding and 1 no unknown value. First values are a function of `seed`, `name` and key
    alone, those of a dynamic table. Methods may be called from several threads.

    Args:
        dim: Length of a row.
        seed: Seed of the first values.
        name: Name of the table; tables of another name start at other values.
        initializer: Distribution of the first values; None: normal, standard deviation 0.05.

    Raises:
        ConfigError: `dim` is not positive.

    Example:
        >>> store = TableStore(dim=2)
        >>> store.push([[7, 8]], [[[1.0, 2.0], [3.0, 4.0]]])
        >>> store.pull([8, 7]).tolist()
        [[3.0, 4.0], [1.0, 2.0]]
    """

    def __init__(
        self,
        dim: int,
        *,
        seed: int = 0,
        name: str = "table",
        initializer: Initializer | None = None,
    ) -> None:
        if dim < 1:
            raise ConfigError("a row has at least one number", received=f"dim = {dim}")
        self.dim = dim
        initializer = initializer or NormalConfig()
        self._draws: Any = {"seed": seed, "table": name, "initializer": initializer}
        self._lock = threading.RLock()
        self._records, self._used = KeyRecords(), UsedRows(MOST_ROWS)
        self._rows = HostRows(MIN_ROWS, dim, 0.0)
        self._created = 0

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: int) -> bool:
        wanted = _check_keys(key).reshape(1)
        with self._lock:
            return bool(self._records.find(wanted)[0])

    @property
    def bytes(self) -> int:
        """Memory that keys and rows take, that for rows to come included."""
        return self._records.bytes + self._used.bytes + self._rows.values.nbytes

    def pull(self, keys: ArrayLike) -> np.ndarray:
        """Returns the rows of keys, float32 `keys.shape + [dim]`; keys that have none get one.

        Raises:
            ConfigError: Keys that are no whole numbers of 64 bits.
        """
        wanted = _check_keys(keys)
        distinct = DistinctKeys(wanted.ravel(), 0, has_padding=False)
        with self._lock:
            rows, is_new = self._find_or_create(distinct.keys)
            if is_new.any():
                self._rows.values[rows[is_new]] = draw_first_rows(
                    distinct.keys[is_new], self.dim, **self._draws, has_oov=False
                )
            pulled = self._rows.values[distinct.spread(rows)]
        return pulled.reshape(*wanted.shape, self.dim)

    def push(self, keys: ArrayLike, values: ArrayLike) -> None:
        """Sets the rows of keys; of a key that occurs twice the last values stay.

        Args:
            keys: Whole numbers of any shape.
            values: Finite numbers, `keys.shape + [dim]`.

        Raises:
            ConfigError: Keys that are no whole numbers of 64 bits, or values of another shape or
                that are not finite. Nothing is set.
        """
        wanted = _check_keys(keys)
        given = self._check_values(wanted, values)
        distinct = DistinctKeys(wanted.ravel(), 0, has_padding=False)
        with self._lock:
            rows, _ = self._find_or_create(distinct.keys)
            self._rows.values[distinct.spread(rows)] = given

    def delete(self, keys: ArrayLike) -> int:
        """Forgets keys, returns how many had a row; pulled again, they start at first values."""
        known = DistinctKeys(_check_keys(keys).ravel(), 0, has_padding=False).keys
        with self._lock:
            meta = self._records.find(known)
            has_row = meta != 0
            self._records.remove(np.ascontiguousarray(known[has_row]))
            self._used.give_back(unpack_meta(meta[has_row])[0])
            return int(np.count_nonzero(has_row))

    def save(self, path: str | Path) -> int:
        """Writes all keys with their rows, in the order of their creation; returns how many.

        Args:
            path: A file, of which an earlier one is replaced at the end: `.parquet` and `.npz`
                (`keys`, `rows`) are exact, any other name is text (`key<TAB>v1,v2,…`, eight
                decimals).

        Raises:
            ConfigError: No such directory, or the path is one.
        """
        with self._lock:
            records = self._records.read_all()
            records = records[np.argsort(records[:, TIME], kind="stable")]
            parts = (self._read_rows(records[part]) for part in list_parts(len(records)))
            write_table(Path(path), parts)
        print(f"{len(records):,} keys")
        return len(records)

    def load(self, path: str | Path) -> int:
        """Replaces all keys and rows by those of a file that `save` or `sluice export` wrote.

        Returns how many there are. What was there stays if the file is refused.

        Raises:
            ConfigError: No such file.
            InputDataError: A row is damaged or has another length, or a key occurs twice.
        """
        keys, rows = load_table(Path(path), self.dim, has_padding=False)
        with self._lock:
            self._records, self._used, self._created = KeyRecords(), UsedRows(MOST_ROWS), 0
            self._rows = HostRows(MIN_ROWS, self.dim, 0.0)
            self.push(keys, rows)
        return len(keys)

    def apply(self, path: str | Path, table: str) -> int:
        """Brings the rows to what a delta of `sluice export --delta-since` leads to.

        Args:
            path: Directory of the delta, or of a model's deltas: the newest one.
            table: Name of the table in it.

        Returns:
            How many keys have changed or are gone.

        Raises:
            ConfigError: The delta has no such table, or its rows have another length.
            InputDataError: The delta is damaged, or leads from other rows than these.
            UpstreamNotReadyError: There is no such delta.
        """
        directory, about = read_delta(Path(path))
        described = about["tables"].get(table, {})
        if described.get("dim") != self.dim:
            dims = {name: each["dim"] for name, each in about["tables"].items()}
            raise ConfigError(
                "the delta has no such table of rows of this length",
                received=f"{table}, {self.dim} numbers a row",
                allowed=", ".join(f"{name}, {dim}" for name, dim in sorted(dims.items())),
            )
        delta = read_delta_rows(directory / TABLES_DIR, table, described)
        with self._lock:
            delta.require_base(self._read_rows(self._records.read_all()))
            self.delete(delta.removed)
            self.push(*delta.changed)
        return len(delta.removed) + len(delta.changed[0])

    def _check_values(self, keys: np.ndarray, values: ArrayLike) -> np.ndarray:
        given = np.asarray(values, np.float32)
        if given.shape != (*keys.shape, self.dim):
            raise ConfigError(
                "the values that were pushed have another shape than their keys",
                received=f"keys {list(keys.shape)}, values {list(given.shape)}",
                allowed=f"values {[*keys.shape, self.dim]}",
            )
        if not np.isfinite(given).all():
            raise ConfigError("values that were pushed are not finite", received="NaN or infinity")
        return given.reshape(-1, self.dim)

    def _find_or_create(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the rows of distinct keys, and which of them were made now."""
        meta = self._records.find(keys)
        is_new = meta == 0
        rows = unpack_meta(meta)[0]
        if not is_new.any():
            return rows, is_new
        count = int(np.count_nonzero(is_new))
        rows[is_new] = self._used.take(count)
        self._rows.reserve(int(rows.max()) + 1)
        records = np.empty((count, 3), np.int64)
        records[:, KEY] = keys[is_new]
        records[:, TIME] = self._created + np.arange(count)
        records[:, META] = pack_meta(rows[is_new], np.ones(count, np.int64))
        self._records.put(records)
        self._created += count
        return rows, is_new

    def _read_rows(self, records: np.ndarray) -> TableRows:
        return records[:, KEY].copy(), self._rows.values[unpack_meta(records[:, META])[0]]


def _check_keys(keys: ArrayLike) -> np.ndarray:
    found = np.asarray(keys)
    if found.size == 0:
        return np.empty(found.shape, np.int64)
    fits = found.dtype.kind == "i" or (found.dtype.kind == "u" and found.max() <= _INT64.max)
    if not fits:
        raise ConfigError(
            "keys are whole numbers of 64 bits",
            received=f"{found.dtype}, such as {found.ravel()[0]!r}",
            allowed=f"{_INT64.min} to {_INT64.max}",
            fix="hash text first: `tf.fingerprint(texts).numpy().view('<i8')[:, 0]` gives the keys "
            "of `{kind: hash_key}`; of a billion texts, any two get the same with a chance of 3 %",
        )
    return found.astype(np.int64)
