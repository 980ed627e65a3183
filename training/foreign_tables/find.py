"""What another system saved under a path: files of TFRA or mxRec, or tensors of a checkpoint."""

from __future__ import annotations

import itertools
import os
import re
from pathlib import Path

from conf.errors import ConfigError
from training.foreign_tables.bare_files import (
    KEYS,
    VALUES,
    BareFiles,
    list_shards,
    list_slices,
    pair_shards,
    pair_siblings,
    require_both,
)
from training.foreign_tables.tensor_pairs import (
    TABLE_MARK,
    TensorPairs,
    find_checkpoint,
    pick_table,
)

Sources = tuple[BareFiles | TensorPairs, ...]
_MOST_NAMED = 5
_MOST_FOLDERS = 2000
"""Folders that are looked through for a message: a path may be that of a whole disk."""


def find_foreign_table(path: Path) -> Sources | None:
    """Finds what another system saved under a path.

    Args:
        path: Of TFRA the folder or the common beginning of its files (`rows/user` of
            `rows/user_mht_…`); of checkpoints the prefix, the folder or a SavedModel, then
            `#<table>` where there are several; of mxRec the folder of the table.

    Returns:
        Its parts, or None: there is no such thing.

    Raises:
        ConfigError: There are several tables, or none of that name.
        InputDataError: A part is missing.
    """
    plain, mark, table = str(path).rpartition(TABLE_MARK)
    if mark and not path.exists() and find_checkpoint(path) is None:
        prefix = find_checkpoint(Path(plain))
        if prefix is not None:
            return (pick_table(prefix, table),)
    if path.is_dir():
        return _find_in_folder(path)
    stem = path.with_name(re.sub(r"(?<=.)-(keys|values)$", "", path.name))
    bare = BareFiles(stem.with_name(stem.name + KEYS), stem.with_name(stem.name + VALUES))
    there = [file.is_file() for file in (bare.keys, bare.rows)]
    if all(there) or (any(there) and not path.exists()):
        return pair_siblings(stem) or (require_both(bare),)
    if path.exists() and path.suffix != ".index":
        return None
    prefix = find_checkpoint(path)
    if prefix is not None:
        return (pick_table(prefix, ""),)
    shards = list_shards(path.parent, "")
    if shards and path.name not in shards:
        raise ConfigError(
            "there are no files of this table",
            received=path,
            allowed=", ".join(str(path.parent / name) for name in sorted(shards)[:_MOST_NAMED]),
            fix="name one of them",
        )
    return pair_shards(shards[path.name]) if shards else None


def _find_in_folder(path: Path) -> Sources:
    if (path / "key").is_dir() and (path / "embedding").is_dir():
        return list_slices(path)
    prefix = find_checkpoint(path)
    if prefix is not None:
        return (pick_table(prefix, ""),)
    shards = list_shards(path, "")
    if len(shards) == 1:
        return pair_shards(*shards.values())
    if shards:
        raise ConfigError(
            "the folder holds files of several tables",
            received=path,
            allowed=", ".join(str(path / name) for name in sorted(shards)),
            fix="name one of them",
        )
    inside = _list_tables_of_mxrec(path)
    raise ConfigError(
        "the folder is no table that Sluice reads",
        received=path,
        allowed=", ".join(map(str, inside[:_MOST_NAMED]))
        or "a file of `sluice export --tables` or TableStore.save; files of TFRA, or a folder of "
        "them; a checkpoint or SavedModel with tables; mxRec's folder of a table (key, embedding)",
        fix="name the folder of one table" if inside else "correct the path",
    )


def _list_tables_of_mxrec(folder: Path) -> list[Path]:
    """Lists folders of tables below a folder, among the first that it holds."""
    found = itertools.islice(os.walk(folder), _MOST_FOLDERS)
    return sorted(Path(path) for path, names, _ in found if {"key", "embedding"} <= set(names))
