"""Candidates of the sampled protocol, drawn uniformly from the items a user has not met."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from training.ranks import IntArray, Pairs


@dataclass
class UniformNegatives:
    """Draws candidates without replacement, row after row of a split.

    The draws depend on the seed and on a row's position in the split, not on the batch size.

    Attributes:
        items: Number of catalogue columns.
        count: Candidates per row; fewer where a user has met nearly everything.
        seed: Seed of the draws.
    """

    items: int
    count: int
    seed: int
    _rng: np.random.Generator = field(init=False)
    _rows_done: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Starts at the first row of a split."""
        self._rng = np.random.default_rng(self.seed)

    def draw(self, seen: Pairs | None, targets: IntArray) -> Pairs:
        """Draws the candidates of the next rows.

        Args:
            seen: Cells that must not be drawn, or None.
            targets: `[rows]`, column of each row's target (never drawn), or MISSING.

        Returns:
            At most `count` cells per row, in row order.
        """
        rows = len(targets)
        banned = self._banned(seen, targets)
        # Twice as many as needed; rejecting banned and repeated ones keeps the draw uniform.
        draws = self._rng.integers(0, self.items, size=(rows, 2 * self.count))
        codes = (np.arange(rows)[:, None] * np.int64(self.items) + draws).ravel()
        codes = codes[self._is_first(codes, banned, rows)]
        row_of = codes // self.items
        found = np.bincount(row_of, minlength=rows)
        position = np.arange(len(codes)) - np.repeat(np.cumsum(found) - found, found)
        short = found < self.count
        codes = codes[(position < self.count) & ~short[row_of]]
        if short.any():
            banned = np.sort(banned)
        parts = [codes, *(self._draw_row(int(row), banned) for row in np.flatnonzero(short))]
        self._rows_done += rows
        merged = np.sort(np.concatenate(parts))
        return Pairs(*np.divmod(merged, self.items))

    def _is_first(self, codes: IntArray, banned: IntArray, rows: int) -> NDArray[np.bool_]:
        """Marks the first draw of each cell that is not banned, without sorting."""
        order = np.arange(len(codes), dtype=np.int32)
        # Only cells written here are read; of repeated ones the last assignment stays, hence
        # the reverse order.
        first = np.empty(rows * self.items, dtype=np.int32)
        first[codes[::-1]] = order[::-1]
        first[banned] = -1
        return first[codes] == order

    def _banned(self, seen: Pairs | None, targets: IntArray) -> IntArray:
        hit = np.flatnonzero(targets >= 0)
        codes = hit * np.int64(self.items) + targets[hit]
        if seen is not None:
            codes = np.concatenate((codes, seen.rows * np.int64(self.items) + seen.columns))
        return codes

    def _draw_row(self, row: int, banned: IntArray) -> IntArray:
        """Draws one row from its explicit complement, where rejection ran short."""
        start = row * np.int64(self.items)
        low, high = np.searchsorted(banned, (start, start + self.items))
        allowed = np.setdiff1d(np.arange(start, start + self.items), banned[low:high])
        generator = np.random.default_rng((self.seed, self._rows_done + row))
        size = min(self.count, len(allowed))
        return generator.choice(allowed, size=size, replace=False)
