"""Which records meet in which shuffle buffer: arithmetic on the manifest's counts alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ShardRange:
    """A run of records of one shard.

    Attributes:
        shard: Number of the shard in the split.
        first: Number of its first record in the shard.
        rows: How many records.
        start: How many records of the buffer come before it.
    """

    shard: int
    first: int
    rows: int
    start: int


@dataclass(frozen=True)
class BufferPlan:
    """Records that are shuffled together.

    Attributes:
        number: Number of the buffer in the epoch.
        first: How many records of the epoch come before it.
        rows: How many it holds.
        ranges: Where they come from.
    """

    number: int
    first: int
    rows: int
    ranges: tuple[ShardRange, ...]


def limit_rows(shard_rows: Sequence[int], take: int | None) -> list[int]:
    """Records to read of each shard so that the first `take` of all are read."""
    left = sum(shard_rows) if take is None else take
    limited = []
    for rows in shard_rows:
        limited.append(min(rows, left))
        left -= limited[-1]
    return limited


def plan_buffers(
    ranges: Sequence[tuple[int, int]],
    order: Sequence[int],
    buffer_rows: int,
    interleave: int,
    multiple: int = 1,
) -> list[BufferPlan]:
    """Plans the shuffle buffers of an epoch.

    `interleave` shards are read at once, a buffer taking like many records of each; when one ends
    the next in order follows it. Buffers are of like size: none is left with few records.

    Args:
        ranges: First record and number of records to read of each shard.
        order: Order of the shards.
        buffer_rows: Records that a buffer holds at most (at least `multiple`).
        interleave: Shards that are read at once.
        multiple: Buffers but the last hold a multiple of it: batches then cross no buffer.

    Returns:
        Buffers in order; together they hold each record once.
    """
    total = sum(rows for _, rows in ranges)
    size = _buffer_size(total, buffer_rows, multiple)
    unopened = [shard for shard in reversed(order) if ranges[shard][1]]
    opened: list[_OpenShard] = []
    buffers: list[BufferPlan] = []
    for first in range(0, total, max(1, size)):
        rows = min(size, total - first)
        taken: dict[int, list[int]] = {}  # shard: first record, records; in order
        need = rows
        while need:
            while len(opened) < interleave and unopened:
                shard = unopened.pop()
                opened.append(_OpenShard(shard, *ranges[shard]))
            need = _take_evenly(opened, taken, need)
            opened = [entry for entry in opened if entry.left]
        buffers.append(BufferPlan(len(buffers), first, rows, _number_ranges(taken)))
    return buffers


@dataclass
class _OpenShard:
    """A shard that is being read: its number, its next record, how many are left."""

    shard: int
    record: int
    left: int


def _take_evenly(opened: Sequence[_OpenShard], taken: dict[int, list[int]], need: int) -> int:
    """Takes like many records of each open shard; returns how many are needed still."""
    share = -(-need // len(opened))
    for entry in opened:
        count = min(share, entry.left, need)
        if count:
            taken.setdefault(entry.shard, [entry.record, 0])[1] += count
        entry.record, entry.left = entry.record + count, entry.left - count
        need -= count
    return need


def _number_ranges(taken: dict[int, list[int]]) -> tuple[ShardRange, ...]:
    parts, start = [], 0
    for shard, (record, count) in taken.items():
        parts.append(ShardRange(shard, record, count, start))
        start += count
    return tuple(parts)


def _buffer_size(total: int, buffer_rows: int, multiple: int) -> int:
    most = max(multiple, buffer_rows - buffer_rows % multiple)
    count = max(1, -(-total // most))
    even = -(-total // count)
    return min(most, -(-even // multiple) * multiple)
