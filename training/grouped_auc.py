"""GAUC: the mean of the users' own AUCs, weighted by their rows, from rows in any order."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import IO

import numpy as np
from numpy.typing import NDArray

KEPT_ROWS = 1 << 20
PARTITIONS = 64
_ROW = np.dtype([("user", "<i8"), ("score", "<f4"), ("positive", "?")])
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

IntArray = NDArray[np.int64]


class GroupedAUC:
    """AUC per user, weighted by the user's rows (Zhou et al. 2018, DIN, section 6.2).

    It tells how well the rows of one user are ordered, and is blind to differences between users.
    Users with rows of one class alone have no AUC and are left out.

    Exact, whatever order rows come in. Up to `kept_rows` rows are in memory; beyond that they go to
    temporary files, 13 bytes a row, partitioned by user, and one partition is read at a time. So
    memory is bounded by `kept_rows`, a 64th of the rows, or the rows of one user, whichever is
    the largest.

    Args:
        kept_rows: Rows in memory before they are written.
    """

    def __init__(self, kept_rows: int = KEPT_ROWS) -> None:
        self._kept_rows = kept_rows
        self._kept: list[NDArray[np.void]] = []
        self._rows = 0
        self._files: list[IO[bytes]] = []

    def update(
        self, users: IntArray, labels: NDArray[np.bool_], scores: NDArray[np.float32]
    ) -> None:
        """Adds rows, each `[rows]`; no score is NaN."""
        if not len(users):
            return
        rows = np.empty(len(users), dtype=_ROW)
        rows["user"], rows["score"], rows["positive"] = users, scores, labels
        self._kept.append(rows)
        self._rows += len(rows)
        if self._rows > self._kept_rows:
            self._spill()

    def result(self) -> dict[str, float | int | None]:
        """Returns `value` (None where no user has both classes), and its users and rows."""
        total, users, rows = 0.0, 0, 0
        for part in self._partitions():
            values, sizes = auc_by_group(part["user"], part["positive"], part["score"])
            total += float(values @ sizes)
            users += len(sizes)
            rows += int(sizes.sum())
        return {"value": total / rows if rows else None, "users": users, "rows": rows}

    def _spill(self) -> None:
        if not self._files:
            # Without a name: nothing is left behind, however the process ends.
            self._files = [tempfile.TemporaryFile() for _ in range(PARTITIONS)]  # noqa: SIM115
        rows = np.concatenate(self._kept)
        shift = np.uint64(64 - PARTITIONS.bit_length() + 1)
        # Bytes are sorted by radix.
        parts = (rows["user"].astype(np.uint64) * _GOLDEN >> shift).astype(np.uint8)
        order = np.argsort(parts, kind="stable")
        ends = np.cumsum(np.bincount(parts, minlength=PARTITIONS))
        for file, piece in zip(self._files, np.split(rows[order], ends[:-1]), strict=True):
            file.write(piece.tobytes())
        self._kept, self._rows = [], 0

    def _partitions(self) -> Iterator[NDArray[np.void]]:
        if not self._files:
            if self._kept:
                yield np.concatenate(self._kept)
            return
        if self._kept:
            self._spill()
        for file in self._files:
            file.seek(0)
            rows = np.frombuffer(file.read(), dtype=_ROW)
            if len(rows):
                yield rows


def auc_by_group(
    groups: IntArray, labels: NDArray[np.bool_], scores: NDArray[np.float32]
) -> tuple[NDArray[np.float64], IntArray]:
    """AUC of each group that has both classes, ties a half.

    Args:
        groups: `[rows]`, which group each row is of.
        labels: `[rows]`, whether each is a positive.
        scores: `[rows]`, no NaN.

    Returns:
        AUC and number of rows of the groups that have one, both `[groups]`.
    """
    order = np.lexsort((scores, groups))
    groups, labels, scores = groups[order], labels[order], scores[order]
    new_group = np.concatenate(([True], groups[1:] != groups[:-1]))
    starts = np.flatnonzero(new_group)
    ties = np.flatnonzero(new_group | np.concatenate(([True], scores[1:] != scores[:-1])))
    sizes = np.diff(np.append(starts, len(groups)))
    tie_sizes = np.diff(np.append(ties, len(groups)))
    # Rows of equal scores share the mean of the ranks that they take up in the whole sorted list;
    # the rank inside a group is that without the rows before the group.
    ranks = np.repeat(ties + (tie_sizes + 1) / 2.0, tie_sizes) - np.repeat(starts, sizes)
    positives = np.add.reduceat(labels.astype(np.int64), starts)
    rank_sums = np.add.reduceat(np.where(labels, ranks, 0.0), starts)
    both = (positives > 0) & (positives < sizes)
    p, n = positives[both], sizes[both]
    return (rank_sums[both] - p * (p + 1) / 2.0) / p / (n - p), n
