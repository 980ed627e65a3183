"""Evaluation of a user's whole held-out set: one row per user, several relevant items.

A user is ranked as of the end of the split before, from the user's first record in the split; the
items of all the user's records there are relevant, or of those that pass `evaluation.filter`.
Items that are left out as seen, and items outside the catalogue, stay relevant and are missed by
every list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conf.errors import ConfigError, InputDataError
from conf.schema import PAD_ID
from training.checkpoint.restore import TrainedModel
from training.encoders.vocabularies import find_named_ids, is_named
from training.evaluation.item_index import (
    ItemIds,
    ItemIndex,
    TopK,
    check_finite,
    rank_top_k,
    read_cells,
)
from training.evaluation.metrics import MISSING, FloatArray, IntArray, Pairs
from training.evaluation.protocols import (
    Relevance,
    carries_seen,
    find_relevant_rows,
    require_relevant,
    require_rows,
)
from training.evaluation.users_as_of import (
    BEFORE,
    UserRows,
    find_first_rows,
    read_user_rows,
)
from training.input.batches import Batch, build_eval_dataset, read_batches
from training.models.retrieval import RetrievalModel

PER_USER = "_per_user"
"""What the names of the full protocols have at their end where a row is a user."""


@dataclass(frozen=True)
class HeldOutItems:
    """The relevant items of each user of a split.

    Attributes:
        users: `[users]`, their ids, ascending.
        starts: `[users + 1]`, where each user's items begin.
        columns: `[items]`, catalogue columns, each once per user; MISSING for each record whose
            item is not in the catalogue.
        unnamed: Records of users outside the vocabulary, which belong to no one.
        not_relevant: Records whose item the label says is not relevant.
    """

    users: IntArray
    starts: IntArray
    columns: IntArray
    unnamed: int
    not_relevant: int = 0

    def find(self, users: IntArray) -> Pairs:
        """Returns the relevant items of some users: their row, and the column or MISSING."""
        position = np.searchsorted(self.users, users)
        counts = self.starts[position + 1] - self.starts[position]
        rows = np.repeat(np.arange(len(users)), counts)
        offsets = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        return Pairs(rows, self.columns[self.starts[position][rows] + offsets])

    def describe(self) -> dict[str, int]:
        """Returns how many items are relevant, and how many cannot be found."""
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
    """Reads the items of each user in a split, of the records that pass `evaluation.filter`.

    Args:
        trained: The run and its dataset.
        split: Name of the split.
        items: The catalogue.
        relevance: What says which records count (`find_relevance`); None: all do.

    Raises:
        ConfigError: The dataset has no users or no seen items, or no split is before this one.
        InputDataError: The split is empty, a record is damaged, or none is relevant or of a known
            user.
    """
    require_user_rows(trained, split)
    manifest, version_dir = trained.manifest, trained.version_dir
    user, item = manifest.require_key("user"), manifest.require_key("item")
    named_ids = find_named_ids(version_dir, manifest, user)
    config = trained.config.evaluation
    relevance = relevance or Relevance()
    dataset = build_eval_dataset(
        version_dir,
        manifest,
        split,
        config.batch_size,
        (user, item, *relevance.inputs),
        relevance.inputs,
        config.filter,
    )
    users, columns = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    not_relevant = 0
    for batch in read_batches(dataset, version_dir, manifest, split):
        ids = np.asarray(batch[user], np.int64)
        relevant = find_relevant_rows(batch, len(ids), relevance)
        not_relevant += int(np.count_nonzero(~relevant))
        users.append(ids[relevant])
        columns.append(items.columns_of(np.asarray(batch[item], np.int64)[relevant]))
    owner, column = np.concatenate(users), np.concatenate(columns)
    require_relevant(relevance, len(owner), not_relevant)
    named = is_named(owner, named_ids)
    if not named.any():
        raise InputDataError(
            f"no record of the {split} split that is measured is of a user in the vocabulary",
            received=f"{len(owner)} records",
            allowed="evaluation per user of records whose user has an id of its own",
            fix="set evaluation.per=event, or another evaluation.filter",
        )
    unnamed = int(np.count_nonzero(~named))
    order = np.lexsort((column[named], owner[named]))
    owner, column = owner[named][order], column[named][order]
    again = (owner[1:] == owner[:-1]) & (column[1:] == column[:-1]) & (column[1:] != MISSING)
    keep = np.concatenate(([True], ~again))[: len(owner)]
    owner, column = owner[keep], column[keep]
    found, starts = np.unique(owner, return_index=True)
    return HeldOutItems(found, np.append(starts, len(owner)), column, unnamed, not_relevant)


def require_user_rows(trained: TrainedModel, split: str) -> None:
    """Refuses a split whose users cannot be ranked as of an earlier one.

    Raises:
        ConfigError: The dataset has no users or no seen items, or the split is train.
        InputDataError: The split does not exist, is empty, or holds no events.
    """
    require_rows(trained.manifest, split)
    trained.manifest.require_key("user")
    if split not in BEFORE:
        raise ConfigError(
            "evaluation per user ranks users as of the split before, and there is none",
            received=f"split {split}",
            allowed=", ".join(BEFORE),
            fix="evaluate another split, or set evaluation.per=event",
        )


@dataclass(frozen=True)
class UserBatch:
    """Users of a split.

    Attributes:
        features: Their first records.
        users: `[rows]`, their ids.
        relevant: Row and column of the relevant items; MISSING outside the catalogue.
        seen: Cells that are left out, each once; None: no cell.
    """

    features: Batch
    users: IntArray
    relevant: Pairs
    seen: Pairs | None

    def __len__(self) -> int:
        return len(self.users)

    def count_left_out(self) -> int:
        """Counts the relevant items that are left out as seen: no list can hold them."""
        if self.seen is None:
            return 0
        width = 1 + max(self.relevant.columns.max(initial=0), self.seen.columns.max(initial=0))
        relevant, seen = (
            cells.rows * width + cells.columns for cells in (self.relevant, self.seen)
        )
        known = self.relevant.columns != MISSING
        return len(np.intersect1d(relevant[known], seen, assume_unique=True))


@dataclass(frozen=True)
class UserReader:
    """Reads the users of a split with what is relevant to them.

    Attributes:
        trained: The model's run and dataset.
        split: Name of the split.
        items: The catalogue.
        inputs: Features to read.
        mask_seen: Whether items that users had met before the split are left out; where the
            dataset does not carry them, none is.
        held_out: What is relevant to each user.
    """

    trained: TrainedModel
    split: str
    items: ItemIds
    inputs: tuple[str, ...]
    mask_seen: bool
    held_out: HeldOutItems

    @property
    def masks(self) -> bool:
        """Whether seen items are left out."""
        return self.mask_seen and carries_seen(self.trained.manifest, self.split)

    def read(self) -> Iterator[UserBatch]:
        """Yields the users of `held_out`, in the order of their first records.

        These show users as they were at the end of the split before, whether or not
        `evaluation.filter` leaves the record itself.
        """
        manifest, version_dir = self.trained.manifest, self.trained.version_dir
        batch_size = self.trained.config.evaluation.batch_size
        user, seen = manifest.require_key("user"), manifest.keys.seen
        ragged = (seen,) if seen and (self.masks or seen in self.inputs) else ()
        names = tuple(dict.fromkeys((user, *self.inputs, *ragged)))
        first = find_first_rows(version_dir, manifest, self.split, batch_size)
        measured = np.isin(first.users, self.held_out.users)
        first = UserRows(self.split, first.rows[measured], first.users[measured])
        for batch in read_user_rows(version_dir, manifest, first, names, ragged, batch_size):
            ids = np.asarray(batch[user], np.int64)
            met = self._cells(batch[seen]) if self.masks and seen else None
            yield UserBatch(batch, ids, self.held_out.find(ids), met)

    def _cells(self, ragged: Any) -> Pairs:
        cells = read_cells(ragged, self.items)
        codes = np.unique(cells.rows * np.int64(len(self.items)) + cells.columns)
        return Pairs(*np.divmod(codes, len(self.items)))


class ListScorer:
    """Ranks a model's best items for users; memory is that of the lists and of one block.

    Args:
        model: The model.
        index: Its items.
        k: The longest list that is measured.
    """

    def __init__(self, model: RetrievalModel, index: ItemIndex, k: int) -> None:
        self._model, self._index, self._k = model, index, k

    def rank(self, batch: UserBatch) -> TopK:
        """Returns the best k + 1 items of each user: the last tells whether the list ends in a tie.

        Raises:
            InputDataError: A vector is not finite.
        """
        features = {name: batch.features[name] for name in self._model.user_inputs}
        vectors = np.asarray(self._model.embed_users(features), np.float32)
        check_finite("user", batch.users, vectors, features)
        return rank_top_k(vectors, self._index, self._k + 1, batch.seen)

    def measure(self, batch: UserBatch, lists: TopK) -> FloatArray:
        """Returns the ranks of the relevant items, `[rows, relevant]`."""
        columns = self._index.columns_of(lists.ids)
        columns = np.where(lists.ids == PAD_ID, MISSING, columns)
        return rank_in_lists(lists.scores, columns, batch.relevant, self._k)


def rank_in_lists(
    scores: NDArray[np.floating], columns: IntArray, relevant: Pairs, k: int
) -> FloatArray:
    """Ranks relevant items in lists; of equal scores they come last.

    An item whose equals may go on behind the list's end counts as not found.

    Args:
        scores: `[rows, length]`, descending.
        columns: `[rows, length]`; MISSING where a list has ended.
        relevant: Row and column of relevant items, each once; MISSING outside the catalogue.
        k: Ranks beyond it count as not found.

    Returns:
        `[rows, relevant]`, from 1; `inf` where it was not found, `nan` as padding.
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
    """Lays ranks out as a matrix with a row each.

    Args:
        owners: Row of each relevant item.
        rows: Number of rows.
        found: Row of each item that was found, ascending.
        ranks: Their ranks.

    Returns:
        `[rows, relevant]`: the ranks, then `inf` for each item that was not found, then `nan`.
    """
    counts = np.bincount(owners, minlength=rows)
    matrix = np.full((rows, max(1, int(counts.max(initial=0)))), np.nan)
    matrix[np.arange(matrix.shape[1]) < counts[:, None]] = np.inf
    each = np.bincount(found, minlength=rows)
    matrix[found, np.arange(len(found)) - np.repeat(np.cumsum(each) - each, each)] = ranks
    return matrix


class PopularityLists:
    """Ranks of relevant items in one order for everyone, what each user has seen left out.

    Of equally popular items the relevant ones come last, as in `rank_in_lists`.

    Args:
        counts: `[items]`, training events of each item.
    """

    name = "popularity"

    def __init__(self, counts: IntArray) -> None:
        _, self._levels = np.unique(-counts, return_inverse=True)
        self._ends = np.cumsum(np.bincount(self._levels))

    def measure(self, batch: UserBatch) -> FloatArray:
        """Returns the ranks of the relevant items, `[rows, relevant]`."""
        rows, columns = _rankable(batch)
        levels, size = self._levels[columns], np.int64(len(self._ends) + 1)
        ranks = self._ends[levels].astype(np.float64)
        if batch.seen is not None and len(batch.seen):
            codes = np.sort(batch.seen.rows * size + self._levels[batch.seen.columns])
            upto = np.searchsorted(codes, rows * size + levels, side="right")
            ranks -= upto - np.searchsorted(codes, rows * size)
        # Relevant items of one row that tie take the last places of their tie, one each.
        own = rows * size + levels
        order = np.argsort(own, kind="stable")
        ranks[order] -= np.searchsorted(own[order], own[order], side="right") - np.arange(
            1, len(own) + 1
        )
        return spread_ranks(batch.relevant.rows, len(batch), rows, ranks)


class RandomLists:
    """Ranks of relevant items in a random order of each user's unseen items.

    Args:
        items: Number of items.
        seed: Seed of the draws.
    """

    name = "random"

    def __init__(self, items: int, seed: int) -> None:
        self._items, self._rng = items, np.random.default_rng(seed)

    def measure(self, batch: UserBatch) -> FloatArray:
        """Returns the ranks of the relevant items, `[rows, relevant]`."""
        rows, _ = _rankable(batch)
        left = np.full(len(batch), self._items)
        if batch.seen is not None:
            left -= np.bincount(batch.seen.rows, minlength=len(batch))
        counts = np.bincount(rows, minlength=len(batch))
        ranks = [self._rng.choice(n, c, replace=False) for n, c in zip(left, counts, strict=True)]
        drawn = np.ones(len(rows))
        drawn += np.concatenate([np.zeros(0), *ranks])
        return spread_ranks(batch.relevant.rows, len(batch), rows, drawn)


def _rankable(batch: UserBatch) -> tuple[IntArray, IntArray]:
    """Rows and columns of the relevant items that are in the catalogue and not left out."""
    keep = batch.relevant.columns != MISSING
    if batch.seen is not None and len(batch.seen):
        size = np.int64(max(batch.seen.columns.max(), batch.relevant.columns.max()) + 1)
        codes = batch.relevant.rows * size + batch.relevant.columns
        keep &= ~np.isin(codes, batch.seen.rows * size + batch.seen.columns)
    return batch.relevant.rows[keep], batch.relevant.columns[keep]


def describe_protocol(name: str, items: int, reader: UserReader) -> dict[str, Any]:
    """Returns what `metrics.json` says of a protocol per user, without its systems."""
    return {
        "name": name + PER_USER,
        "per": "user",
        "mask_seen": reader.masks,
        "candidates": items,
        **reader.held_out.describe(),
    }
