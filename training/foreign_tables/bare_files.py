"""Files of bare numbers, little-endian: int64 keys, and float32 rows in the same order.

    TFRA    <name>_mht_<n>of<shards>_rank<r>_size<ranks>-keys and …-values: a pair for each shard of
            each rank, or any other name that ends so
    mxRec   a folder of the table: key/slice.data and embedding/slice.data, each beside
            slice.attribute; before ranks are merged slice_<rank>.data

What was read of these formats: of tensorflow/recommenders-addons (0.8.1), below
`tensorflow_recommenders_addons/dynamic_embedding`, `SaveToFileSystemImpl` in
`core/kernels/cuckoo_hashtable_op.cc` and `save_to_file_system` in
`python/ops/dynamic_embedding_variable.py`; of Ascend/RecSDK `mx_rec/saver/saver.py`
(`merge_sparse_file`, `write_binary_data`; attributes in JSON are those of its releases of 2023) and
`mx_rec/saver/sparse.py`. State of optimizers beside them is not read: a moment is of use with its
step count alone, which no file has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from conf.errors import InputDataError
from conf.json_text import parse_json

KEYS, VALUES = "-keys", "-values"
_KEY_BYTES, _NUMBER_BYTES = 8, 4
_PART_ROWS = 1 << 16
_SHARD = re.compile(
    r"(?P<name>.+)_mht_(?P<shard>\d+)of(?P<shards>\d+)_rank(?P<rank>\d+)_size(?P<size>\d+)"
)
Shards = dict[tuple[int, int, int, int], re.Match[str]]
"""Beginnings of TFRA's files of a table: by shards of a rank, ranks, rank and shard."""


class ForeignRows(NamedTuple):
    """Some rows of a table.

    Attributes:
        where: File or tensors that hold them.
        first: Number of the first row there.
        keys: int64 `[n]`.
        rows: float32 `[n, dim]`.
    """

    where: str
    first: int
    keys: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True)
class BareFiles:
    """Files of bare numbers: a key for each row.

    Attributes:
        keys: int64.
        rows: float32.
    """

    keys: Path
    rows: Path

    def read(self, dim: int) -> Iterator[ForeignRows]:
        """Reads the rows, a part after the other.

        Args:
            dim: Length of a row.

        Raises:
            InputDataError: A file ends within a number, or is not as long as the other wants.
        """
        count = self._count(dim)
        for first in range(0, count, _PART_ROWS):
            wanted = min(_PART_ROWS, count - first)
            keys = np.fromfile(self.keys, "<i8", wanted, offset=first * _KEY_BYTES)
            start = first * dim * _NUMBER_BYTES
            numbers = np.fromfile(self.rows, "<f4", wanted * dim, offset=start)
            if len(keys) != wanted or len(numbers) != wanted * dim:
                raise InputDataError(f"{self.rows} was written while it was read")
            yield ForeignRows(str(self.rows), first, keys, numbers.reshape(wanted, dim))

    def _count(self, dim: int) -> int:
        key_bytes, row_bytes = self.keys.stat().st_size, self.rows.stat().st_size
        count = key_bytes // _KEY_BYTES
        if key_bytes % _KEY_BYTES:
            raise InputDataError(
                f"{self.keys} ends within a key",
                received=f"{key_bytes:,} bytes",
                allowed=f"{_KEY_BYTES} bytes a key: int64, little-endian",
                fix="save the table again; text and int32 keys are not read",
            )
        if row_bytes != count * dim * _NUMBER_BYTES:
            each = f", {row_bytes / count:g} a key" if count else ""
            raise InputDataError(
                f"{self.rows} does not hold a row of this table for each key of {self.keys.name}",
                received=f"{count:,} keys and {row_bytes:,} bytes{each}",
                allowed=f"{dim * _NUMBER_BYTES} bytes a key: {dim} numbers, float32, little-endian",
                fix="give the table the row length of the files, or save both files again; other "
                "types of numbers are not read",
            )
        return count


def list_shards(folder: Path, name: str) -> dict[str, Shards]:
    """Lists TFRA's files in a folder, by table.

    Args:
        folder: The folder.
        name: The table; empty: all of them.
    """
    found: dict[str, Shards] = {}
    for file in sorted(folder.glob(f"*_mht_*{KEYS}")):
        match = _SHARD.fullmatch(str(file).removesuffix(KEYS))
        if match is None or (name and Path(match["name"]).name != name):
            continue
        shards, size = int(match["shards"]), int(match["size"])
        place = shards, size, int(match["rank"]), int(match["shard"])
        found.setdefault(Path(match["name"]).name, {})[place] = match
    return found


def pair_shards(shards: Shards) -> tuple[BareFiles, ...]:
    """Returns the files of all shards of a table.

    Raises:
        InputDataError: Shards are missing, or it was saved twice.
    """
    layouts = {place[:2] for place in shards}
    one = next(iter(shards.values()))
    if len(layouts) > 1:
        raise InputDataError(
            f"{one['name']} was saved twice, in other shards",
            received=", ".join(f"{n} shards of {size} ranks" for n, size in sorted(layouts)),
            fix="delete the files of the earlier one, or name a file by its full beginning",
        )
    [(count, size)] = layouts
    for match in shards.values():
        if not (1 <= int(match["shard"]) <= count and int(match["rank"]) < size):
            raise InputDataError(
                f"a shard of {one['name']} is none of those that its name counts",
                received=match[0] + KEYS,
                allowed=f"shards 1 to {count:,} of ranks 0 to {size - 1:,}",
                fix="delete the file, or give it the name that it was saved by",
            )
    # A name may count more shards than memory has room for: none is listed but the first missing.
    wanted = ((count, size, rank, n) for rank in range(size) for n in range(1, count + 1))
    missing = next((place for place in wanted if place not in shards), None)
    if missing is not None:
        *_, rank, shard = missing
        raise InputDataError(
            f"{count * size - len(shards):,} of {count * size:,} shards of {one['name']} are "
            "missing",
            received=f"no …_mht_{shard}of{count}_rank{rank}_size{size}{KEYS}",
            fix="bring the files of all ranks together",
        )
    return tuple(
        require_both(BareFiles(Path(match[0] + KEYS), Path(match[0] + VALUES)))
        for _, match in sorted(shards.items())
    )


def pair_siblings(stem: Path) -> tuple[BareFiles, ...] | None:
    """Returns the files of all shards that were saved with one; None: it is no shard.

    Args:
        stem: Its path without `-keys`.

    Raises:
        InputDataError: Shards are missing.
    """
    match = _SHARD.fullmatch(str(stem))
    if match is None:
        return None
    layout, name = (int(match["shards"]), int(match["size"])), Path(match["name"]).name
    found = list_shards(stem.parent, name).get(name, {})
    return pair_shards({place: shard for place, shard in found.items() if place[:2] == layout})


def require_both(files: BareFiles) -> BareFiles:
    """Returns a pair of files that are both there.

    Raises:
        InputDataError: One is missing.
    """
    for file in (files.keys, files.rows):
        if not file.is_file():
            raise InputDataError(
                "keys without their rows, or the other way round",
                received=f"no {file}",
                fix="save the table again, or copy both files",
            )
    return files


def list_slices(folder: Path) -> tuple[BareFiles, ...]:
    """Returns mxRec's files of a table: a pair for each rank, or one of all.

    Args:
        folder: Of the table.

    Raises:
        InputDataError: Keys and rows are not of the same ranks, or not as their attributes say.
    """
    parts = {
        part: {file.name: file for file in sorted((folder / part).glob("slice*.data"))}
        for part in ("key", "embedding")
    }
    names = set(parts["key"])
    whole = {"slice.data"}, {f"slice_{rank}.data" for rank in range(len(names))}
    if not names or names != set(parts["embedding"]) or names not in whole:
        shown = "; ".join(f"{part}: {', '.join(f) or 'none'}" for part, f in parts.items())
        raise InputDataError(
            f"{folder} does not hold the keys and rows of one table",
            received=shown,
            allowed="slice.data in both, or slice_<rank>.data of all ranks from 0 on in both",
            fix="copy the files of all ranks, or save the table again",
        )
    pairs = [BareFiles(parts["key"][name], parts["embedding"][name]) for name in sorted(names)]
    for pair in pairs:
        _check_attributes(pair)
    return tuple(pairs)


def _check_attributes(pair: BareFiles) -> None:
    """Compares files with what mxRec wrote of them beside, where it did."""
    key_bytes, row_bytes = pair.keys.stat().st_size, pair.rows.stat().st_size
    about_keys, about_rows = _read_attributes(pair.keys), _read_attributes(pair.rows)
    if about_keys and about_keys[0] * _KEY_BYTES != key_bytes:
        raise InputDataError(
            f"{pair.keys} is not as long as {pair.keys.with_suffix('.attribute').name} says",
            received=f"{key_bytes:,} bytes",
            allowed=f"{about_keys[0] * _KEY_BYTES:,} bytes: {about_keys[0]:,} keys",
            fix="save the table again; tables with offsets beside keys (host memory, releases of "
            "2023) are not read",
        )
    if about_rows and about_rows[0] * _KEY_BYTES != key_bytes:
        raise InputDataError(
            f"{pair.rows} has not as many rows as {pair.keys.name} has keys",
            received=f"{about_rows[0]:,} rows by its attribute",
            allowed=f"{key_bytes // _KEY_BYTES:,} rows",
            fix="save the table again",
        )
    if about_rows and about_rows[0] * about_rows[1] * _NUMBER_BYTES != row_bytes:
        raise InputDataError(
            f"{pair.rows} is not as long as {pair.rows.with_suffix('.attribute').name} says",
            received=f"{row_bytes:,} bytes",
            allowed=f"{about_rows[0]:,} rows of {about_rows[1]:,} numbers, float32",
            fix="save the table again",
        )


def _read_attributes(data: Path) -> tuple[int, ...]:
    """Shape of a file: numbers of int64, or JSON with `shape`; empty where nothing says it."""
    file = data.with_suffix(".attribute")
    if not file.is_file():
        return ()
    content = file.read_bytes()
    try:
        if content.startswith(b"{"):
            about = parse_json(content.decode())
            if about["data_type"] not in ("float32", "int64", "uint64"):
                raise ValueError(f"data_type {about['data_type']}")
            shape = [int(each) for each in about["shape"]]
        else:
            shape = np.frombuffer(content, "<i8").tolist()
        if len(shape) < 2 and "embedding" in data.parts[-2]:
            raise ValueError(f"shape {shape}")
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise InputDataError(
            f"{file} does not describe a file of a table",
            received=str(error),
            allowed="rows, numbers a row, bytes a number as int64; or JSON: data_type, shape",
        ) from error
    return tuple(shape)
