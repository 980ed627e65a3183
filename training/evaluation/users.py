"""Rows that are users: each as of the end of a split, with all items held out of it.

A record of `validation` or `test` shows its user just before its event, one of `users` at the end
of the log. So a user at the end of `train` is found in the first record of `validation`, where
there is none in that of `test`, and else in that of `users`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from conf.errors import ConfigError, InputDataError
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.splits import TEST, TRAIN, USERS, VALIDATION
from training.checkpoint.restore import TrainedModel
from training.encoders.vocabularies import find_named_ids, is_named
from training.evaluation.item_index import MISSING, ItemIds, Pairs, number_within, read_cells
from training.evaluation.metrics import FloatArray, IntArray
from training.evaluation.protocols import Relevance, carries_seen, require_rows
from training.input.batches import Batch, read_split

LATER_SPLITS = {TRAIN: (VALIDATION, TEST), VALIDATION: (TEST,), TEST: ()}
"""Splits of events behind each split, in order of time."""
BEFORE = {VALIDATION: TRAIN, TEST: VALIDATION}
"""As of which split users are ranked that a split evaluates."""
PER_USER = "_per_user"
"""What follows the name of a protocol whose rows are users."""


@dataclass(frozen=True)
class UserRows:
    """Numbers (ascending) of the records of a split that show a user each, and the id of each."""

    split: str
    rows: IntArray
    users: IntArray

    def take(self, chosen: NDArray[np.bool_]) -> UserRows:
        return UserRows(self.split, self.rows[chosen], self.users[chosen])


def find_user_rows(
    version_dir: ReadablePath, manifest: Manifest, as_of: str, batch_size: int
) -> tuple[UserRows, ...]:
    """Finds the record that shows each known user at the end of the split `as_of`."""
    parts, taken = [], np.zeros(0, np.int64)
    for split in (*LATER_SPLITS[as_of], USERS):
        if manifest.has_split(split):
            first = find_first_rows(version_dir, manifest, split, batch_size)
            parts.append(first.take(~np.isin(first.users, taken)))
            taken = np.concatenate((taken, parts[-1].users))
    if not parts:
        raise ConfigError(
            "nothing in this dataset shows users as of the end of that split",
            received=as_of,
            allowed=f"a dataset with the split {USERS}, or an earlier split",
        )
    return tuple(parts)


def find_first_rows(
    version_dir: ReadablePath, manifest: Manifest, split: str, batch_size: int
) -> UserRows:
    """Finds the first record of each user in a split, or all of `users`.

    The first is the one with the lowest number of its event; in a version without these numbers
    that with the fewest seen items.
    """
    user, seen = manifest.require_key("user"), manifest.keys.seen
    order = None if split == USERS else manifest.keys.event_number or seen
    if order is None and split != USERS:
        raise ConfigError(
            "no seen items tell which of a user's records is the first",
            received="keys.seen = None",
            fix="build the dataset with `seen: true`",
        )
    names = (user,) if order is None else (user, order)
    ragged = names[1:] if order == seen else ()
    ids, places = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for batch in read_split(version_dir, manifest, split, batch_size, names, ragged):
        ids.append(np.asarray(batch[user], np.int64))
        if order is not None:
            found = batch[order].row_lengths() if ragged else batch[order]
            places.append(np.asarray(found, np.int64))
    users = np.concatenate(ids)
    if split == USERS:
        return UserRows(split, np.arange(len(users)), users)
    by_user = np.lexsort((np.concatenate(places), users))
    new = np.concatenate(([True], np.diff(users[by_user]) != 0))[: len(users)]
    rows = np.sort(by_user[new])
    rows = rows[is_named(users[rows], find_named_ids(version_dir, manifest, user))]
    return UserRows(split, rows, users[rows])


def read_user_rows(
    version_dir: ReadablePath,
    manifest: Manifest,
    chosen: UserRows,
    names: Sequence[str],
    ragged: Sequence[str],
    batch_size: int,
) -> Iterator[Batch]:
    """Yields batches of the chosen records; names and ragged as for `build_eval_dataset`."""
    first = 0
    for batch in read_split(version_dir, manifest, chosen.split, batch_size, names, ragged):
        count = count_rows(batch)
        low, high = np.searchsorted(chosen.rows, (first, first + count))
        if high > low:
            rows = chosen.rows[low:high] - first
            yield {name: tf.gather(value, rows) for name, value in batch.items()}
        first += count


def count_rows(batch: Mapping[str, Any]) -> int:
    value = next(iter(batch.values()))
    return int(value.nrows() if isinstance(value, tf.RaggedTensor) else value.shape[0])


@dataclass(frozen=True)
class HeldOutItems:
    """Relevant items of users (ascending): catalogue `columns` from `starts` `[users + 1]` on.

    Each column is there once per user, MISSING as often as events name none. `unnamed` counts
    records of users that share an id, `not_relevant` those without a relevant item.
    """

    users: IntArray
    starts: IntArray
    columns: IntArray
    unnamed: int
    not_relevant: int = 0

    def find(self, users: IntArray) -> Pairs:
        """Row and column of the items of some of the users, each of whom is known."""
        position = np.searchsorted(self.users, users)
        counts = self.starts[position + 1] - self.starts[position]
        rows = np.repeat(np.arange(len(users)), counts)
        return Pairs(rows, self.columns[self.starts[position][rows] + number_within(counts)])

    def describe(self) -> dict[str, int]:
        outside = self.columns == MISSING
        reachable = np.add.reduceat(~outside, self.starts[:-1]) if len(self.users) else outside
        return {
            "rows": len(self.users),
            "relevant": len(self.columns),
            "outside_catalogue": int(outside.sum()),
            "users_outside_catalogue": int(np.count_nonzero(reachable == 0)),
            "records_without_user": self.unnamed,
            "rows_not_relevant": self.not_relevant,
        }


def read_held_out(
    trained: TrainedModel, split: str, items: ItemIds, relevance: Relevance | None
) -> HeldOutItems:
    """Reads the relevant items of each user of a split that `evaluation.filter` leaves."""
    manifest, version_dir = trained.manifest, trained.version_dir
    require_rows(manifest, split)
    user, item = manifest.require_key("user"), manifest.require_key("item")
    if split not in BEFORE:
        raise ConfigError(
            "evaluation per user ranks users as of the split before, and there is none",
            received=f"split {split}",
            allowed=", ".join(BEFORE),
            fix="evaluate another split, or set evaluation.per=event",
        )
    config, relevance = trained.config.evaluation, relevance or Relevance()
    names = (user, item, *relevance.inputs)
    how = (config.batch_size, names, relevance.inputs, config.filter)
    users, columns, not_relevant = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for batch in read_split(version_dir, manifest, split, *how):
        ids = np.asarray(batch[user], np.int64)
        relevant = relevance.find(batch, len(ids))
        not_relevant += int(np.count_nonzero(~relevant))
        users.append(ids[relevant])
        columns.append(items.columns_of(np.asarray(batch[item], np.int64)[relevant]))
    owner, column = np.concatenate(users), np.concatenate(columns)
    relevance.require(len(owner), not_relevant)
    named = is_named(owner, find_named_ids(version_dir, manifest, user))
    if not named.any():
        raise InputDataError(
            f"no record of the {split} split that is measured is of a user in the vocabulary",
            received=f"{len(owner)} records",
            allowed="evaluation per user of records whose user has an id of its own",
            fix="set evaluation.per=event, or another evaluation.filter",
        )
    unnamed = int(np.count_nonzero(~named))
    return _group_by_user(owner[named], column[named], unnamed, not_relevant)


def _group_by_user(
    owner: IntArray, column: IntArray, unnamed: int, not_relevant: int
) -> HeldOutItems:
    order = np.lexsort((column, owner))
    owner, column = owner[order], column[order]
    again = (owner[1:] == owner[:-1]) & (column[1:] == column[:-1]) & (column[1:] != MISSING)
    keep = np.concatenate(([True], ~again))[: len(owner)]
    owner, column = owner[keep], column[keep]
    found, starts = np.unique(owner, return_index=True)
    return HeldOutItems(found, np.append(starts, len(owner)), column, unnamed, not_relevant)


@dataclass(frozen=True)
class UserBatch:
    """Users with their relevant items (columns may be MISSING), and what is masked as seen."""

    features: Batch
    users: IntArray
    relevant: Pairs
    seen: Pairs | None

    def __len__(self) -> int:
        return len(self.users)

    def find_seen(self) -> NDArray[np.bool_]:
        """Tells the relevant items that are left out as seen, one bool each."""
        if self.seen is None or not len(self.seen):
            return np.zeros(len(self.relevant), bool)
        width = np.int64(1 + max(self.relevant.columns.max(initial=0), self.seen.columns.max()))
        codes, seen = (cells.rows * width + cells.columns for cells in (self.relevant, self.seen))
        return (self.relevant.columns != MISSING) & np.isin(codes, seen)


@dataclass(frozen=True)
class UserReader:
    """Reads the users of a split as of the end of the split before, with their held-out items."""

    trained: TrainedModel
    split: str
    items: ItemIds
    inputs: tuple[str, ...]
    held_out: HeldOutItems

    @property
    def masks(self) -> bool:
        mask_seen = self.trained.config.evaluation.mask_seen
        return mask_seen and carries_seen(self.trained.manifest, self.split)

    def read(self) -> Iterator[UserBatch]:
        manifest, version_dir = self.trained.manifest, self.trained.version_dir
        batch_size = self.trained.config.evaluation.batch_size
        user, seen = manifest.require_key("user"), manifest.keys.seen
        ragged = (seen,) if seen and (self.masks or seen in self.inputs) else ()
        names = tuple(dict.fromkeys((user, *self.inputs, *ragged)))
        first = find_first_rows(version_dir, manifest, self.split, batch_size)
        first = first.take(np.isin(first.users, self.held_out.users))
        for batch in read_user_rows(version_dir, manifest, first, names, ragged, batch_size):
            ids = np.asarray(batch[user], np.int64)
            met = None
            if self.masks and seen:
                cells = read_cells(batch[seen], self.items)
                codes = np.unique(cells.rows * np.int64(len(self.items)) + cells.columns)
                met = Pairs(*np.divmod(codes, len(self.items)))
            yield UserBatch(batch, ids, self.held_out.find(ids), met)


def rank_in_lists(
    scores: NDArray[np.floating], columns: IntArray, relevant: Pairs, k: int
) -> FloatArray:
    """Ranks relevant items in lists that are a place longer than the k that are measured.

    Of items that tie the relevant ones come last, and where the tie goes on behind the list none
    of them is in it. Lists are `[rows, at most k + 1]`, scores falling, columns MISSING where one
    ends; ranks are `[rows, relevant]`, `inf` of misses, `nan` of padding.
    """
    rows, length = scores.shape
    size = int(max(columns.max(initial=0), relevant.columns.max(initial=0))) + 1
    known = relevant.columns != MISSING
    codes = relevant.rows[known] * np.int64(size) + relevant.columns[known]
    cells = np.arange(rows)[:, None] * np.int64(size) + columns
    is_relevant = (columns != MISSING) & np.isin(cells, codes)
    if length > k:
        ends_in_tie = (scores[:, k] == scores[:, k - 1]) & (columns[:, k] != MISSING)
        is_relevant &= ~(ends_in_tie[:, None] & (scores == scores[:, k : k + 1]))
    order = np.lexsort((is_relevant, -scores), axis=-1)
    is_hit = np.take_along_axis(is_relevant, order, axis=1)[:, :k]
    row, position = np.nonzero(is_hit)
    return spread_ranks(relevant.rows, rows, row, (position + 1).astype(np.float64))


def spread_ranks(owners: IntArray, rows: int, found: IntArray, ranks: FloatArray) -> FloatArray:
    """Lays ranks out, `[rows, relevant]`: `inf` of items without one, `nan` of padding.

    `owners` has the row of each relevant item, `found` (ascending) that of each rank.
    """
    counts = np.bincount(owners, minlength=rows)
    matrix = np.full((rows, max(1, int(counts.max(initial=0)))), np.nan)
    matrix[np.arange(matrix.shape[1]) < counts[:, None]] = np.inf
    each = np.bincount(found, minlength=rows)
    matrix[found, number_within(each)] = ranks
    return matrix
