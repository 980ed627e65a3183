"""Files of embedding tables, and what changes between two states of one.

    <name>.parquet           key int64, vector list<float32>; exact
    <name>.npz               keys int64 [n], rows float32 [n, dim], for `numpy.load`; exact
    any other name           key<TAB>v1,v2,…   one line per key, eight decimals, no header

A delta has two files, of keys that are new or whose row has changed, and of keys that are gone:

    <name>.parquet           key, vector
    <name>.removed.parquet   key

Files are read by what they hold, whatever their names. Each is written whole or not at all. A state
of a table is known by its fingerprint, which depends on keys and rows and not on their order.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from conf.errors import ConfigError, InputDataError
from conf.schema import PAD_ID
from conf.storage.atomic_output import atomic_file
from conf.storage.table_files import open_parquet, read_parquet

PARQUET, NPZ, TEXT = ".parquet", ".npz", ".txt"
_REMOVED = f".removed{PARQUET}"
_PARQUET_MAGIC, _ZIP_MAGIC = b"PAR1", b"PK\x03\x04"
TableRows = tuple[np.ndarray, np.ndarray]
"""Keys, int64 `[n]`, and their rows, float32 `[n, dim]`."""
_SCHEMA = pa.schema(
    [
        pa.field("key", pa.int64(), nullable=False),
        pa.field("vector", pa.list_(pa.float32()), nullable=False),
    ]
)
_PART_ROWS = 1 << 16
_NUMPY = (ValueError, zipfile.BadZipFile)
"""What NumPy raises of a damaged file."""


def write_table(path: Path, parts: Iterable[TableRows]) -> None:
    """Writes the rows of a table, part by part; an earlier file is replaced at the end."""
    write = {PARQUET: _write_parquet, NPZ: _write_npz}.get(path.suffix, _write_text)
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError("no file that a table can be written to", received=path)
    with atomic_file(path) as unfinished:
        write(unfinished, parts)


def write_tables(directory: Path, tables: Mapping[str, TableRows]) -> None:
    """Writes tables by name in each format, in a directory that it makes."""
    directory.mkdir()
    for name, (keys, rows) in tables.items():
        for ending in (PARQUET, NPZ, TEXT):
            parts = ((keys[part], rows[part]) for part in list_parts(len(keys)))
            write_table(directory / f"{quote(name, safe='')}{ending}", parts)


def list_parts(count: int) -> list[slice]:
    """Returns the parts that so many rows are written by, one at least."""
    return [slice(first, first + _PART_ROWS) for first in range(0, max(1, count), _PART_ROWS)]


def _write_parquet(path: Path, parts: Iterable[TableRows]) -> None:
    with pq.ParquetWriter(path, _SCHEMA) as writer:
        for keys, rows in parts:
            offsets = np.arange(len(keys) + 1, dtype=np.int32) * rows.shape[1]
            vectors = pa.ListArray.from_arrays(offsets, rows.astype(np.float32).ravel())
            writer.write_batch(pa.record_batch([pa.array(keys), vectors], schema=_SCHEMA))


def _write_text(path: Path, parts: Iterable[TableRows]) -> None:
    with path.open("w", encoding="ascii", newline="\n") as out:
        for keys, rows in parts:
            line = "%d\t" + ",".join(["%.8f"] * rows.shape[1]) + "\n"
            out.writelines(line % (key, *row) for key, row in zip(keys, rows.tolist(), strict=True))


def _write_npz(path: Path, parts: Iterable[TableRows]) -> None:
    keys, rows = (np.concatenate(column) for column in zip(*parts, strict=True))
    with path.open("wb") as file:
        np.savez(file, keys=keys, rows=rows.astype(np.float32))


def read_table(path: Path, dim: int) -> Iterator[TableRows]:
    """Reads the rows of a table, of `dim` finite numbers each, a part after the other.

    Raises:
        ConfigError: No such file.
        InputDataError: The file is damaged, a row has another length, or a number is not finite.
    """
    if not path.is_file():
        raise ConfigError("no such file of a table", received=path)
    first = 0
    try:
        for keys, vectors in _find_reader(path)(path):
            yield _check_rows(path, first, (keys, vectors), dim)
            first += len(keys)
    except (pa.ArrowException, LookupError, TypeError, OSError, EOFError, *_NUMPY) as error:
        raise InputDataError(f"{path} cannot be read", received=str(error)) from error


def _find_reader(path: Path) -> Callable[[Path], Iterator[tuple[pa.Array, pa.Array]]]:
    with path.open("rb") as file:
        magic = file.read(len(_ZIP_MAGIC))
    return {_PARQUET_MAGIC: _read_parquet, _ZIP_MAGIC: _read_npz}.get(magic, _read_text)


def _read_npz(path: Path) -> Iterator[tuple[pa.Array, pa.Array]]:
    with np.load(path, allow_pickle=False) as arrays:
        keys, rows = arrays["keys"], arrays["rows"]
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), rows.shape[1])
    yield _require_whole(pa.array(keys)), vectors


def _read_parquet(path: Path) -> Iterator[tuple[pa.Array, pa.Array]]:
    with open_parquet(path) as file:
        for batch in file.iter_batches(columns=_SCHEMA.names):
            yield _require_whole(batch["key"]), batch["vector"]


def _require_whole(keys: pa.Array) -> pa.Array:
    """Refuses keys that are rounded: pandas makes float64 of a column that lacks a value."""
    if not pa.types.is_integer(keys.type):
        raise ValueError(f"keys are whole numbers of 64 bits, and these are {keys.type}")
    return keys.cast(pa.int64())


def _read_text(path: Path) -> Iterator[tuple[pa.Array, pa.Array]]:
    if path.stat().st_size == 0:
        return
    reader = pyarrow.csv.open_csv(
        path,
        read_options=pyarrow.csv.ReadOptions(column_names=_SCHEMA.names),
        parse_options=pyarrow.csv.ParseOptions(
            delimiter="\t", quote_char=False, ignore_empty_lines=False
        ),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types={"key": pa.int64(), "vector": pa.string()}
        ),
    )
    for batch in reader:
        yield batch["key"], pc.split_pattern(batch["vector"], ",")


def _check_rows(path: Path, first: int, part: tuple[pa.Array, pa.Array], dim: int) -> TableRows:
    """Returns keys, which must be there, and rows, each of which must hold `dim` finite numbers."""
    keys, vectors = part[0], part[1].cast(pa.list_(pa.float32()))
    is_right = pc.and_(pc.is_valid(keys), pc.equal(pc.list_value_length(vectors), dim))
    is_right = pc.fill_null(is_right, False).to_numpy(zero_copy_only=False)
    if is_right.all():
        rows = vectors.flatten().to_numpy(zero_copy_only=False).reshape(-1, dim)
        is_right = np.isfinite(rows).all(axis=1)
    if not is_right.all():
        bad = int(np.argmin(is_right))
        raise InputDataError(
            f"{path}, row {first + bad + 1:,}: no row of this table",
            received=f"key {keys[bad]}: {vectors[bad].as_py()}"[:80],
            allowed=f"a whole number of 64 bits, and {dim} finite numbers",
        )
    return keys.to_numpy(), rows


def load_table(path: Path, dim: int, *, has_padding: bool = True) -> TableRows:
    """Reads all rows of a table as `read_table` does; refuses key 0, if it pads, and keys twice."""
    parts = [(np.empty(0, np.int64), np.empty((0, dim), np.float32)), *read_table(path, dim)]
    keys, rows = (np.concatenate(column) for column in zip(*parts, strict=True))
    distinct = np.unique(keys[keys != PAD_ID] if has_padding else keys)
    if len(distinct) != len(keys):
        raise InputDataError(
            f"{path} holds a key twice" + (", or key 0, which is padding" if has_padding else ""),
            received=f"{len(keys):,} rows of {len(distinct):,} keys",
            fix="leave one row of each key",
        )
    return keys, rows


@dataclass(frozen=True)
class TableDelta:
    """Changes of a table, keys ascending, and its fingerprints before (`base`) and after."""

    changed: TableRows
    removed: np.ndarray
    base: str
    result: str

    def require_base(self, table: TableRows) -> None:
        """Refuses a table that is not the one before the changes."""
        fingerprint = fingerprint_rows(table)
        if fingerprint != self.base:
            raise InputDataError(
                "the delta is for another state of the table",
                received=f"fingerprint {fingerprint[:12]}",
                allowed=self.base[:12],
                fix="apply the deltas in between first, in order, or take a full export",
            )

    def apply(self, base: TableRows) -> TableRows:
        """Returns the table after, keys ascending; refuses one that is not the table before."""
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
    """Reads the changes of a table, whose `dim`, `base` and `result` are known."""
    stem = quote(name, safe="")
    changed = load_table(directory / f"{stem}{PARQUET}", about["dim"])
    removed = read_parquet(directory / f"{stem}{_REMOVED}")["key"].to_numpy()
    return TableDelta(changed, removed, about["base"], about["result"])
