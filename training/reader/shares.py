"""Shares of an epoch: which files a training worker reads, and which batches of a reader are whose.

Training workers divide the shards before anything is shuffled (`divide_shards`): each reads its own
files, and has an order of its own. Ranks of data-parallel loops and the workers of a data loader
divide batches that all of them plan alike (`BatchShare`): together they have one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def divide_shards(
    shard_rows: Sequence[int], worker_index: int, workers: int
) -> tuple[tuple[int, int], ...]:
    """Returns what one of several workers reads: whole files, as evenly as they divide.

    Each file goes to the worker that has the fewest records so far, the largest first. With
    fewer files than workers each worker reads an equal range of records of every file instead.

    Args:
        shard_rows: Records of each shard.
        worker_index: Number of the worker, from 0.
        workers: How many there are.

    Returns:
        First record and number of records to read of each shard, `(0, 0)` for none. Over all
        workers each record occurs once.

    Raises:
        ValueError: There is no such worker.
    """
    if not 0 <= worker_index < workers:
        raise ValueError(f"worker {worker_index} of {workers}")
    if workers == 1:
        return tuple((0, rows) for rows in shard_rows)
    if sum(rows > 0 for rows in shard_rows) < workers:
        return tuple(
            (rows * worker_index // workers,
             rows * (worker_index + 1) // workers - rows * worker_index // workers)
            for rows in shard_rows
        )  # fmt: skip
    loads = [0] * workers
    owner = [0] * len(shard_rows)
    for shard in sorted(range(len(shard_rows)), key=lambda s: (-shard_rows[s], s)):
        owner[shard] = int(np.argmin(loads))
        loads[owner[shard]] += shard_rows[shard]
    return tuple(
        (0, rows if owner[shard] == worker_index else 0) for shard, rows in enumerate(shard_rows)
    )


@dataclass(frozen=True)
class BatchShare:
    """The part of an epoch's batches that one of several readers takes.

    Each rank takes its rows of every batch; the workers of a rank take its batches in turn.

    Attributes:
        rank: Number of the rank, from 0.
        ranks: How many there are.
        worker: Number of the worker, from 0.
        workers: How many there are.
    """

    rank: int = 0
    ranks: int = 1
    worker: int = 0
    workers: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether it is all there is."""
        return self.ranks == 1 and self.workers == 1

    def find_rows(self, count: int) -> tuple[int, int]:
        """Rows `[first, last)` of a batch that the rank takes.

        A batch with fewer rows than ranks gives none to any of them: so all have as many batches.

        Args:
            count: Rows of the batch.
        """
        if count < self.ranks:
            return 0, 0
        return count * self.rank // self.ranks, count * (self.rank + 1) // self.ranks

    def select_rows(self, first: int, rows: int, batch_size: int, total: int) -> np.ndarray:
        """Which of some rows are taken.

        Args:
            first: Number of the first of them; rows before 0 are not taken.
            rows: How many.
            batch_size: Rows per batch; row 0 begins a batch.
            total: Rows to share out.

        Returns:
            bool `[rows]`.
        """
        numbers = np.arange(first, first + rows)
        batch, place = np.divmod(numbers, batch_size)
        start, stop = self.find_rows(batch_size)
        taken = (numbers >= 0) & (batch % self.workers == self.worker)
        last, rest = divmod(total, batch_size)
        is_tail = batch == last
        rest_start, rest_stop = self.find_rows(rest)
        inside = np.where(
            is_tail, (place >= rest_start) & (place < rest_stop), (place >= start) & (place < stop)
        )
        return taken & inside & (numbers < total)
