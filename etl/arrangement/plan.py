"""The shards of a version: every split, or partition of one, and how many shards it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import numpy as np

from conf.etl import BuildConfig
from etl.split import TRAIN, record_splits


@dataclass(frozen=True)
class ShardCell:
    """A split, or one partition of it.

    Attributes:
        split: The split.
        key: What the rows of the cell carry in `__part`, "" without partitions.
        folder: Folder below the split, `date=2026-01-31` for example, or "".
        start: Spark partition of its first shard.
        count: Number of its shards.
        shard_of_bucket: Shard within the cell by bucket of the ordering key, or empty where a
            record's shard follows from its hash alone.
    """

    split: str
    key: str
    folder: str
    start: int
    count: int
    shard_of_bucket: tuple[int, ...] = ()

    def path(self, partition: int, suffix: str) -> str:
        """Path of a shard in the version."""
        name = f"part-{partition - self.start:05d}-of-{self.count:05d}{suffix}"
        return str(PurePosixPath(self.split, self.folder, name))


@dataclass(frozen=True)
class TimeBounds:
    """First and last event time of a cell, milliseconds."""

    low_ms: int
    high_ms: int


@dataclass(frozen=True)
class ShardPlan:
    """All shards.

    Attributes:
        cells: In the order of their Spark partitions.
        bounds: Event times by cell `(split, key)`, where records are ordered by time.
    """

    cells: tuple[ShardCell, ...]
    bounds: Mapping[tuple[str, str], TimeBounds] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Number of shards."""
        return sum(cell.count for cell in self.cells)

    def of_split(self, split: str) -> tuple[ShardCell, ...]:
        """The cells of a split."""
        return tuple(cell for cell in self.cells if cell.split == split)


def declared_count(config: BuildConfig, split: str) -> int:
    """Number of shards that the config gives a split, or each of its partitions."""
    return config.output.shards if split == TRAIN else config.output.eval_shards


def fixed_plan(config: BuildConfig) -> ShardPlan:
    """Plans the shards where the config alone says how many there are."""
    cells, start = [], 0
    for split in record_splits(config):
        count = declared_count(config, split)
        cells.append(ShardCell(split, "", "", start, count))
        start += count
    return ShardPlan(tuple(cells))


def assign_heaviest_first(counts: np.ndarray, shards: int) -> np.ndarray:
    """Spreads buckets over shards so that the shards become even, whatever the buckets hold.

    The heaviest bucket goes to the lightest shard, and so on (Graham 1969, longest processing time
    first: at most 4/3 of the best possible heaviest shard); ties go to the lowest number.

    Args:
        counts: Rows per bucket, int64 `[buckets]`.
        shards: Number of shards.

    Returns:
        Shard of each bucket, int64 `[buckets]`.
    """
    import heapq

    heap = [(0, shard) for shard in range(shards)]
    assigned = np.zeros(len(counts), np.int64)
    for bucket in np.lexsort((np.arange(len(counts)), -counts)):
        rows, shard = heap[0]
        assigned[bucket] = shard
        heapq.heapreplace(heap, (rows + int(counts[bucket]), shard))
    return assigned
