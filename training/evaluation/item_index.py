"""Item index: exact top-k over the item matrix, ranks of targets, and the vectors of all users.

Seen items are masked, ties of lists are broken by id, memory is flat. Ranks are counted without
sorting. Ties count against the target: its rank is the number of candidates, itself included, that
do not score strictly below it. Equal scores of all items so rank it last, and NaN never looks good.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from conf.errors import InputDataError
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.schema import PAD_ID
from training.evaluation.metrics import FloatArray, IntArray
from training.input.batches import FINITE_ADVICE, Batch, Features, tell_non_finite
from training.models.retrieval import RetrievalModel
from training.objectives.item_catalog import read_catalog

BLOCK_CELLS = 1 << 24
"""Cells of a float32 score block: 64 MiB."""
MISSING = -1
"""Column of an item that is not in the catalogue."""


@dataclass(frozen=True)
class ItemIds:
    """All catalogue items: `ids` `[items]` int64, ascending."""

    ids: IntArray

    def __len__(self) -> int:
        return len(self.ids)

    def columns_of(self, ids: IntArray) -> IntArray:
        """Returns each id's position in `ids`, MISSING where the catalogue does not have it."""
        position = np.minimum(np.searchsorted(self.ids, ids), len(self.ids) - 1)
        return np.where(self.ids[position] == ids, position, MISSING)


@dataclass(frozen=True)
class ItemIndex(ItemIds):
    """All catalogue items and their vectors, `[items, dim]` float32."""

    vectors: NDArray[np.float32]


@dataclass(frozen=True)
class TopK:
    """Lists `[rows, k]`, best first: ids, 0 (pad) behind their end, and scores, -inf there."""

    ids: IntArray
    scores: NDArray[np.float32]


@dataclass(frozen=True)
class Pairs:
    """`[pairs]` row and column of cells in a score matrix, in row order."""

    rows: IntArray
    columns: IntArray

    def __len__(self) -> int:
        return len(self.rows)


def build_item_index(
    model: RetrievalModel, version_dir: ReadablePath, manifest: Manifest, batch_size: int
) -> ItemIndex:
    """Embeds the items of the catalogue once, `batch_size` at a time."""
    key = manifest.require_key("item")
    names = tuple(dict.fromkeys((key, *model.item_inputs)))
    ids, vectors = [], []
    for batch in _read_items(version_dir, manifest, names, batch_size):
        ids.append(np.asarray(batch[key], dtype=np.int64))
        vectors.append(np.asarray(model.embed_items(batch), dtype=np.float32))
        check_finite("item", ids[-1], vectors[-1], batch)
    return order_by_id(np.concatenate(ids), np.concatenate(vectors))


def read_item_features(
    version_dir: ReadablePath, manifest: Manifest, names: Sequence[str], batch_size: int
) -> tuple[ItemIds, Batch]:
    """Reads features of all items, the key among them: items, and a batch with a row per item."""
    batches = list(_read_items(version_dir, manifest, names, batch_size))
    columns = {name: tf.concat([batch[name] for batch in batches], 0) for name in names}
    ids, order = _sort(np.asarray(columns[manifest.require_key("item")], np.int64))
    return ItemIds(ids), {name: tf.gather(v, order) for name, v in columns.items()}


def _read_items(
    version_dir: ReadablePath, manifest: Manifest, names: Sequence[str], batch_size: int
) -> Iterator[Batch]:
    is_empty = True
    for batch in read_catalog(version_dir, manifest, names, batch_size):
        is_empty = False
        yield batch
    if is_empty:
        raise InputDataError(
            f"dataset {manifest.dataset_name!r} has no items to rank",
            received="no record of a known item in the catalogue",
            fix="build the dataset again; the train split must name at least one item",
        )


def _sort(ids: IntArray) -> tuple[IntArray, IntArray]:
    """Ids in their order, each there once, and the order."""
    order = np.argsort(ids, kind="stable")
    ids = ids[order]
    repeated = ids[1:][ids[1:] == ids[:-1]]
    if len(repeated):
        raise InputDataError("the catalogue lists an item twice", received=f"id {repeated[0]}")
    return ids, order


def order_by_id(ids: IntArray, vectors: NDArray[np.float32]) -> ItemIndex:
    """Builds an index from ids in any order; each id once, all vectors finite."""
    ids, order = _sort(ids)
    vectors = np.ascontiguousarray(vectors[order])
    check_finite("item", ids, vectors)
    return ItemIndex(ids, vectors)


def check_finite(
    side: str,
    ids: IntArray,
    vectors: NDArray[np.float32],
    features: Features = MappingProxyType({}),
) -> None:
    """Refuses vectors `[rows, …, dim]` with NaN or infinity, whose scores have no order."""
    bad = ~np.isfinite(vectors).all(axis=tuple(range(1, vectors.ndim)))
    if bad.any():
        count, odd = f"{int(bad.sum())} of {len(ids)} vectors", tell_non_finite(features)
        raise InputDataError(
            f"the model's {side} vectors are not finite",
            received=f"{count}, first of {side} id {ids[bad][0]}{odd}",
            fix=FINITE_ADVICE if odd else "look for features far from all that training has seen",
        )


def score_items(
    user_vectors: NDArray[np.float32], items: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Dot products of users and items `[items, dim]`, of a user with several vectors the largest.

    Users are `[rows, dim]` or `[rows, interests, dim]` float32, scores `[rows, items]`. One
    interest after the other: two such matrices are held.
    """
    if user_vectors.ndim == 2:
        return user_vectors @ items.T
    scores = user_vectors[:, 0] @ items.T
    for number in range(1, user_vectors.shape[1]):
        np.maximum(scores, user_vectors[:, number] @ items.T, out=scores)
    return scores


def score_cells(
    user_vectors: NDArray[np.float32], items: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Scores one item `[pairs, dim]` for each user, as `score_items` does, `[pairs]` float32."""
    scores = np.einsum("p...d,pd->p...", user_vectors, items)
    return scores if scores.ndim == 1 else scores.max(axis=1)


def number_within(counts: IntArray) -> IntArray:
    """Numbers from 0 of the members of each row, one row after the other, `[sum of counts]`."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def find_cells(lengths: IntArray, ids: IntArray, items: ItemIds) -> Pairs:
    """Cells of the score matrix of `ids`, of which each row has some, `lengths` `[rows]`.

    Repeated cells stay; ids outside of what is ranked are dropped.
    """
    columns = items.columns_of(ids)
    known = columns != MISSING
    return Pairs(np.repeat(np.arange(len(lengths)), lengths)[known], columns[known])


def read_cells(ragged: Any, items: ItemIds) -> Pairs:
    """Cells of ragged item ids `[rows, None]`, see `find_cells`."""
    lengths = np.asarray(ragged.row_lengths(), np.int64)
    return find_cells(lengths, np.asarray(ragged.flat_values, np.int64), items)


def build_pairs(rows: IntArray, columns: IntArray, targets: IntArray, items: int) -> Pairs:
    """Drops repeated cells, items outside the catalogue (MISSING), and each row's own target."""
    keep = (columns != MISSING) & (columns != targets[rows])
    # A mask is many times faster than sorting the cells, and no larger than the scores.
    marked = np.zeros(len(targets) * items, dtype=bool)
    marked[rows[keep] * np.int64(items) + columns[keep]] = True
    return Pairs(*np.divmod(np.flatnonzero(marked), items))


def read_target_scores(scores: NDArray[np.float32], targets: IntArray) -> NDArray[np.float32]:
    """Returns the score of each row's target, `[rows]`; NaN where the target is MISSING."""
    own = scores[np.arange(len(targets)), np.maximum(targets, 0)]
    return np.where(targets == MISSING, np.float32(np.nan), own)


def rank_all(scores: NDArray[np.float32], targets: IntArray) -> FloatArray:
    """Ranks targets `[rows]` (columns, or MISSING: `inf`) by scores `[rows, items]`, from 1."""
    below = scores < read_target_scores(scores, targets)[:, None]
    # One call per row: numpy counts a contiguous bool row in SIMD, but not along an axis.
    counts = np.fromiter(map(np.count_nonzero, below), dtype=np.float64, count=len(below))
    return np.where(targets == MISSING, np.inf, scores.shape[1] - counts)


def count_not_below(scores: NDArray[np.float32], targets: IntArray, pairs: Pairs) -> FloatArray:
    """Counts, per row, the given cells (no targets) that do not score below the row's target."""
    threshold = read_target_scores(scores, targets)[pairs.rows]
    above = ~(scores[pairs.rows, pairs.columns] < threshold)
    return np.bincount(pairs.rows[above], minlength=len(targets)).astype(np.float64)


def rank_among(scores: NDArray[np.float32], targets: IntArray, candidates: Pairs) -> FloatArray:
    ranks = 1.0 + count_not_below(scores, targets, candidates)
    return np.where(targets == MISSING, np.inf, ranks)


def rank_top_k(
    user_vectors: NDArray[np.float32],
    index: ItemIndex,
    k: int,
    seen: Pairs | None = None,
    block_cells: int = BLOCK_CELLS,
) -> TopK:
    """Finds the k items of the highest score for each user, see `score_items`.

    The catalogue is scored `block_cells` at a time and merged, so that memory does not grow with
    it. `seen` cells are left out. Equal scores keep the order of ids: `tf.math.top_k` puts the
    lower position first, and blocks are merged in that order.
    """
    rows = len(user_vectors)
    width = max(1, block_cells // max(rows, 1))
    best_scores = np.full((rows, k), -np.inf, dtype=np.float32)
    best_ids = np.full((rows, k), PAD_ID, dtype=np.int64)
    for start in range(0, len(index), width):
        stop = min(start + width, len(index))
        scores = score_items(user_vectors, index.vectors[start:stop])
        if seen is not None:
            inside = (seen.columns >= start) & (seen.columns < stop)
            scores[seen.rows[inside], seen.columns[inside] - start] = -np.inf
        values, columns = _take_better(scores, best_scores[:, -1], k)
        # What was best so far comes first, so that ties keep the lower id.
        merged_scores = np.concatenate((best_scores, values), axis=1)
        merged_ids = np.concatenate((best_ids, index.ids[start + columns]), axis=1)
        best_scores, order = take_top(merged_scores, k)
        best_ids = np.take_along_axis(merged_ids, order, axis=1)
    return TopK(np.where(np.isneginf(best_scores), PAD_ID, best_ids), best_scores)


def _take_better(
    scores: NDArray[np.float32], floors: NDArray[np.float32], k: int
) -> tuple[NDArray[np.float32], IntArray]:
    """A block's scores above `floors` `[rows]`, the worst of each list so far, and their columns.

    After the first blocks these are few, and finding them is far cheaper than sorting the block.
    Both are `[rows, at most 4 k]`, in the order of columns or of scores; -inf where there is none.
    """
    better = scores > floors[:, None]
    counts = np.fromiter(map(np.count_nonzero, better), np.int64, len(better))
    widest = int(counts.max(initial=0))
    if widest > 4 * k:
        return take_top(scores, k)
    rows, columns = np.divmod(np.flatnonzero(better), scores.shape[1])
    places = number_within(counts)
    found = np.full((len(scores), widest), -np.inf, np.float32)
    where = np.zeros((len(scores), widest), np.int64)
    found[rows, places], where[rows, places] = scores[rows, columns], columns
    return found, where


def take_top(scores: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], IntArray]:
    """Returns the k highest scores of each row and their columns; ties by column."""
    # The scores are on the host, and only the CPU's kernel promises the order of ties.
    with tf.device("/CPU:0"):
        found = tf.math.top_k(scores, k=min(k, scores.shape[1]), sorted=True)
    return found.values.numpy(), found.indices.numpy().astype(np.int64)
