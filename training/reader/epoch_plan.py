"""The plan of an epoch: which records meet in which buffer, and whose batches they make.

Training workers divide the shards before anything is shuffled (`divide_shards`): each has an order
of its own. Ranks of data-parallel loops and the workers of a data loader divide batches that all of
them plan alike (`BatchShare`): together they have one order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Rows = TypeVar("Rows", int, np.ndarray)


@dataclass(frozen=True)
class ShardRange:
    """A run of records of one shard; `start` records of the buffer come before it."""

    shard: int
    first: int
    rows: int
    start: int


@dataclass(frozen=True)
class BufferPlan:
    """Records that are shuffled together; `first` records of the epoch come before them."""

    number: int
    first: int
    rows: int
    ranges: tuple[ShardRange, ...]


def divide_shards(
    shard_rows: Sequence[int], worker: int, workers: int
) -> tuple[tuple[int, int], ...]:
    """First record and number of records that one of several workers reads of each shard.

    Whole files, as evenly as they divide: each goes to the worker that has the fewest records so
    far, the largest first. With fewer files than workers, an equal range of records of every file.
    """
    if sum(rows > 0 for rows in shard_rows) < workers:
        edges = [[rows * i // workers for i in (worker, worker + 1)] for rows in shard_rows]
        return tuple((first, last - first) for first, last in edges)
    loads, owner = [0] * workers, [0] * len(shard_rows)
    for shard in sorted(range(len(shard_rows)), key=lambda s: (-shard_rows[s], s)):
        owner[shard] = int(np.argmin(loads))
        loads[owner[shard]] += shard_rows[shard]
    return tuple((0, shard_rows[s] if owner[s] == worker else 0) for s in range(len(owner)))


def plan_buffers(
    ranges: Sequence[tuple[int, int]],
    order: Sequence[int],
    buffer_rows: int,
    interleave: int,
    multiple: int = 1,
) -> list[BufferPlan]:
    """Plans the shuffle buffers of an epoch, which together hold each record once.

    `ranges` are the first record and the number of records to read of each shard. `interleave`
    shards are read at once, a buffer taking like many records of each. Buffers are of like size;
    all but the last hold a multiple of `multiple`: batches then cross no buffer.
    """
    total = sum(rows for _, rows in ranges)
    size = _buffer_size(total, buffer_rows, multiple)
    unopened = [shard for shard in reversed(order) if ranges[shard][1]]
    opened: list[list[int]] = []
    buffers: list[BufferPlan] = []
    for first in range(0, total, max(1, size)):
        need = rows = min(size, total - first)
        taken: dict[int, list[int]] = {}  # shard: first record, records; in order
        while need:
            while len(opened) < interleave and unopened:
                shard = unopened.pop()
                opened.append([shard, *ranges[shard]])
            need = _take_evenly(opened, taken, need)
            opened = [entry for entry in opened if entry[2]]
        starts = itertools.accumulate((count for _, count in taken.values()), initial=0)
        parts = [(s, *part, start) for (s, part), start in zip(taken.items(), starts, strict=False)]
        buffers.append(BufferPlan(len(buffers), first, rows, tuple(ShardRange(*p) for p in parts)))
    return buffers


def _take_evenly(opened: Sequence[list[int]], taken: dict[int, list[int]], need: int) -> int:
    """Takes like many records of each open shard (number, next record, records that are left).

    Returns how many are needed still.
    """
    share = -(-need // len(opened))
    for entry in opened:
        shard, record, left = entry
        count = min(share, left, need)
        if count:
            taken.setdefault(shard, [record, 0])[1] += count
        entry[1:] = record + count, left - count
        need -= count
    return need


def _buffer_size(total: int, buffer_rows: int, multiple: int) -> int:
    most = max(multiple, buffer_rows - buffer_rows % multiple)
    count = max(1, -(-total // most))
    even = -(-total // count)
    return min(most, -(-even // multiple) * multiple)


@dataclass(frozen=True)
class BatchShare:
    """The part of an epoch's batches that one of several readers takes.

    Each rank takes its rows of every batch; the workers of a rank take its batches in turn.
    """

    rank: int = 0
    ranks: int = 1
    worker: int = 0
    workers: int = 1

    @property
    def is_whole(self) -> bool:
        return self.ranks == 1 and self.workers == 1

    def find_rows(self, count: Rows) -> tuple[Rows, Rows]:
        """Rows `[first, last)` of a batch of `count` rows that the rank takes.

        A batch with fewer rows than ranks gives none to any of them: so all have as many batches.
        """
        count = count * (count >= self.ranks)
        return count * self.rank // self.ranks, count * (self.rank + 1) // self.ranks

    def select_rows(self, first: int, rows: int, batch_size: int, total: int) -> np.ndarray:
        """Which of the rows `[first, first + rows)` are taken, bool `[rows]`.

        Rows before 0 are not taken, row 0 begins a batch, and `total` rows are shared out.
        """
        batch, place = np.divmod(np.arange(first, first + rows), batch_size)
        start, stop = self.find_rows(np.clip(total - batch * batch_size, 0, batch_size))
        is_own = (batch >= 0) & (batch % self.workers == self.worker)
        return is_own & (start <= place) & (place < stop)


WHOLE = BatchShare()
