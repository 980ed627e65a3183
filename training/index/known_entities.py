"""Users and items of an export: those of its newest index, where it has one, added ones too."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from conf.artefacts.export import (
    FEATURE_PREFIX,
    INDEX_CARD,
    INDEX_DIR,
    ITEMS_FILE,
    KEY,
    SEEN,
    USERS_FILE,
    find_damaged,
    find_unfinished,
    list_indexes,
)
from conf.artefacts.run import read_json
from conf.errors import InputDataError, UpstreamNotReadyError
from conf.key_lists import describe_unmatched
from conf.storage.table_files import read_parquet
from training.index.item_columns import (
    NO_FILES,
    ItemColumns,
    ItemFiles,
    Token,
    align_columns,
    are_empty,
    find_items_file,
    read_items,
)
from training.index.vector_index import VectorIndex, build_exact, open_index

_log = logging.getLogger("sluice.training.serving")


class IncompleteVersionError(UpstreamNotReadyError):
    """Files are missing or shorter than the card beside them says: they are being copied."""


@dataclass(frozen=True)
class Users:
    """A row per user, found by the text of its key; `met` names lists of items that it has met."""

    table: pa.Table
    row_of: dict[str, int]
    met: tuple[str, ...] = (SEEN,)

    def read_list(self, column: str, row: int) -> np.ndarray:
        """Returns a list of a user; it is empty where there is no such column."""
        if column not in self.table.column_names:
            return np.zeros(0, np.int64)
        return np.asarray(self.table[column][row].values.to_numpy(zero_copy_only=False))


@dataclass(frozen=True)
class KnownEntities:
    """What is known of users and items; arrays are `[items]`, in the order of positions."""

    keys: list[Token]
    ids: np.ndarray  # int64, ascending; items at the end were added and have none.
    allowed: np.ndarray  # Those that are not blocked.
    columns: ItemColumns | None = None
    index: VectorIndex | None = None  # None: a ranking model's items are not searched for.
    number: int | None = None  # Of the index; None: the export's own vectors are searched.
    users: Users | None = None

    @cached_property
    def position_of(self) -> dict[str, int]:
        return {str(key): position for position, key in enumerate(self.keys)}

    @cached_property
    def _tensor(self) -> np.ndarray:
        is_text = bool(self.keys) and isinstance(self.keys[0], str)
        keys = [str(key).encode() for key in self.keys] if is_text else self.keys
        return np.array(keys, object if is_text else np.int64)

    def get_keys(self, positions: np.ndarray) -> np.ndarray:
        """Returns the keys of items as tensors hold them: int64, or bytes."""
        return np.asarray(self._tensor[positions])

    def find_keys(self, keys: Iterable[Token]) -> np.ndarray:
        """Returns the positions of items by their keys; unknown ones are left out."""
        found = (self.position_of.get(str(key)) for key in keys)
        return np.array([position for position in found if position is not None], np.int64)

    def get_columns(self, positions: np.ndarray) -> list[dict[str, Any]]:
        return [{} for _ in positions] if self.columns is None else self.columns.get(positions)


def find_index(version: Path) -> int | None:
    """Returns the newest index of a version that is whole; None: it has none."""
    return max(list_indexes(version), default=None)


def read_known(
    version: Path,
    card: Mapping[str, Any],
    files: ItemFiles = NO_FILES,
    users: Users | None = None,
    pages: Path | None = None,
) -> KnownEntities | None:
    """Reads what a version and its newest index know; None: the model knows no items.

    `users` have been read before; processes share what lies in `pages`.
    """
    number, index = find_index(version), None
    if number is not None:
        directory = version / INDEX_DIR / str(number)
        index = open_index(directory, check_index(directory, card))
        items = read_items(directory / ITEMS_FILE)
    elif (file := find_items_file(card)) is None:
        return None
    else:
        items = read_items(version / file)
        if items.vectors.size:
            index = VectorIndex(build_exact(items.vectors, pages))
    columns, keys = items.columns, items.keys.to_pylist()
    if files.columns is not None:
        columns = align_columns(files.columns, items.keys)
        if are_empty(columns):
            _log.warning(
                "the file of items names none of the items of %s, version %s, in its first column",
                card["name"], version.name,
            )  # fmt: skip
    found = ItemColumns(columns) if columns.num_columns else None
    users, allowed = users or _read_users(version, card), np.ones(len(keys), bool)
    known = KnownEntities(keys, items.ids, allowed, found, index, number, users)
    if (blocked := files.blocked) is not None:
        allowed[known.find_keys(blocked.keys)] = False
        if unmatched := [key for key in blocked.keys if str(key) not in known.position_of]:
            said = describe_unmatched(blocked.path, len(blocked.keys), unmatched)
            _log.warning("%s, among the items of %s, version %s", said, card["name"], version.name)
    known.get_keys(known.find_keys(keys[:1]))  # What it gathers once is not left to a request.
    return known


def _read_users(version: Path, card: Mapping[str, Any]) -> Users | None:
    if USERS_FILE not in card["files"]:
        return None
    table = read_parquet(version / USERS_FILE).combine_chunks()
    row_of = {str(key): row for row, key in enumerate(table[KEY].to_pylist())}
    if SEEN in table.column_names:
        return Users(table, row_of)
    histories = (card["users"] or {}).get("histories", ())
    return Users(table, row_of, tuple(f"{FEATURE_PREFIX}{name}" for name in histories))


def check_index(directory: Path, card: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the card of an index that is whole, and of the version with another card."""
    about = read_json(directory / INDEX_CARD)
    what = f"index {directory.name} of {card['name']}, version {card['version']},"
    fix = "build it anew: `sluice index --export` this version, and remove this one"
    if about["export"]["fingerprint"] != card["fingerprint"]:
        problem = f"{what} was made of another model than the one beside it"
        raise InputDataError(problem, received=about["export"]["fingerprint"][:12], fix=fix)
    require_files(what, directory, about["files"], fix)
    return about


def require_files(what: str, root: Path, files: Mapping[str, Any], fix: str | None = None) -> None:
    if unfinished := find_unfinished(root, files):
        raise IncompleteVersionError(f"{what} is not whole", received=unfinished)
    if damaged := find_damaged(root, files):
        raise InputDataError(f"{what} is damaged", received=damaged, fix=fix)
