"""Ranks of target items, counted from scores without sorting.

Ties count against the target: its rank is the number of candidates, itself included, that do not
score strictly below it. A scorer that gives every item the same score so ranks its target last,
and a NaN score can never look good.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
MISSING = -1
"""Column of an item that is not in the catalogue."""


@dataclass(frozen=True)
class Pairs:
    """Row and column of cells in a score matrix, each at most once, in row order.

    Attributes:
        rows: `[pairs]`.
        columns: `[pairs]`.
    """

    rows: IntArray
    columns: IntArray

    def __len__(self) -> int:
        return len(self.rows)


def build_pairs(rows: IntArray, columns: IntArray, targets: IntArray, items: int) -> Pairs:
    """Drops repeated cells, items outside the catalogue, and each row's own target.

    Args:
        rows: `[pairs]`, row of each cell.
        columns: `[pairs]`, catalogue column, or MISSING.
        targets: `[rows]`, column of each row's target, or MISSING.
        items: Number of columns.
    """
    keep = (columns != MISSING) & (columns != targets[rows])
    # A mask is many times faster than sorting the cells, and no larger than the scores.
    marked = np.zeros(len(targets) * items, dtype=bool)
    marked[rows[keep] * np.int64(items) + columns[keep]] = True
    codes = np.flatnonzero(marked)
    return Pairs(*np.divmod(codes, items))


def read_target_scores(scores: NDArray[np.float32], targets: IntArray) -> NDArray[np.float32]:
    """Returns the score of each row's target, `[rows]`; NaN where the target is MISSING."""
    found = scores[np.arange(len(targets)), np.maximum(targets, 0)]
    return np.where(targets == MISSING, np.float32(np.nan), found)


def rank_all(scores: NDArray[np.float32], targets: IntArray) -> NDArray[np.float64]:
    """Ranks each target among all items.

    Args:
        scores: `[rows, items]`.
        targets: `[rows]`, column of each row's target, or MISSING.

    Returns:
        `[rows]`, from 1; `inf` where the target is MISSING.
    """
    below = scores < read_target_scores(scores, targets)[:, None]
    # One call per row: numpy counts a contiguous bool row in SIMD, but not along an axis.
    counts = np.fromiter(map(np.count_nonzero, below), dtype=np.float64, count=len(below))
    return np.where(targets == MISSING, np.inf, scores.shape[1] - counts)


def count_not_below(
    scores: NDArray[np.float32], targets: IntArray, pairs: Pairs
) -> NDArray[np.float64]:
    """Counts, per row, the given cells that do not score strictly below the row's target.

    Args:
        scores: `[rows, items]`.
        targets: `[rows]`, column of each row's target, or MISSING.
        pairs: Cells to count, targets excluded.

    Returns:
        `[rows]`.
    """
    threshold = read_target_scores(scores, targets)[pairs.rows]
    above = ~(scores[pairs.rows, pairs.columns] < threshold)
    return np.bincount(pairs.rows[above], minlength=len(targets)).astype(np.float64)


def rank_without(
    full_ranks: NDArray[np.float64],
    scores: NDArray[np.float32],
    targets: IntArray,
    masked: Pairs,
) -> NDArray[np.float64]:
    """Ranks each target among all items but the masked ones, from its rank among all.

    Args:
        full_ranks: `[rows]`, what `rank_all` returned for the same scores.
        scores: `[rows, items]`.
        targets: `[rows]`, column of each row's target, or MISSING.
        masked: Cells left out, targets excluded.

    Returns:
        `[rows]`, from 1; `inf` where the target is MISSING.
    """
    return full_ranks - count_not_below(scores, targets, masked)


def rank_among(
    scores: NDArray[np.float32], targets: IntArray, candidates: Pairs
) -> NDArray[np.float64]:
    """Ranks each target among its row's candidates alone.

    Args:
        scores: `[rows, items]`.
        targets: `[rows]`, column of each row's target, or MISSING.
        candidates: Cells to rank against, targets excluded.

    Returns:
        `[rows]`, from 1; `inf` where the target is MISSING.
    """
    ranks = 1.0 + count_not_below(scores, targets, candidates)
    return np.where(targets == MISSING, np.inf, ranks)
