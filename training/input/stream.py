"""The rows of an epoch in the order in which they are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from training.input.epoch_plan import PoolPlan, plan_pools
from training.input.pool import PoolReader
from training.input.pool_config import PoolConfig
from training.input.rows import Rows
from training.input.shard_reader import Shard

_ORDER, _POOL = 0, 1  # streams of random numbers


@dataclass(frozen=True)
class StreamConfig:
    """What an epoch is made of.

    Attributes:
        shards: Shards of the split, by number.
        ranges: First record and number of records to read of each.
        pools: What pools are made of.
        pool_rows: Records that are shuffled together.
        interleave: Shards that are read at once.
        batch_size: Rows per batch.
        seed: The run's seed; None keeps the order of the records.
        is_exact: Whether as many rows are delivered as are planned.
        redraw: Draws the rows of a pool anew, given a seed; None leaves them.
    """

    shards: tuple[Shard, ...]
    ranges: tuple[tuple[int, int], ...]
    pools: PoolConfig
    pool_rows: int
    interleave: int
    batch_size: int
    seed: int | None
    is_exact: bool = True
    redraw: Callable[[Rows, Sequence[int]], Rows] | None = None

    @property
    def rows(self) -> int:
        """Records that are planned."""
        return sum(rows for _, rows in self.ranges)


def read_epoch(config: StreamConfig, epoch: int, first_row: int = 0) -> Iterator[Rows]:
    """Reads an epoch's rows, pool by pool; the next pool fills while one is used.

    Pools before `first_row` are not read at all where every planned record is delivered, and
    otherwise read and dropped: only then is it known how many rows they have.

    Args:
        config: What the epoch is made of.
        epoch: Zero-based epoch.
        first_row: Rows to leave out at the start.

    Yields:
        The rows of each pool. The same for the same seed and epoch, whatever the threads.

    Raises:
        InputDataError: As for `PoolReader.start`.
    """
    plans = _plan(config, epoch)
    skip = first_row
    if config.is_exact:
        done = [plan for plan in plans if plan.first + plan.rows <= first_row]
        plans, skip = plans[len(done) :], first_row - sum(plan.rows for plan in done)
    reader = PoolReader(config.shards, config.pools)
    try:
        pending: Callable[[], Rows] | None = None
        for number, plan in enumerate(plans):
            # The rows before the first that is wanted are not even decoded.
            low = skip if config.is_exact and config.redraw is None else 0
            if pending is None:
                pending = reader.start(plan, _places(config, epoch, plan), low)
            rows = pending()
            pending = None
            if number + 1 < len(plans):
                following = plans[number + 1]
                pending = reader.start(following, _places(config, epoch, following))
            if config.redraw is not None:
                rows = config.redraw(rows, [config.seed or 0, epoch, plan.number])
            dropped = min(skip - low, rows.count)
            skip -= low + dropped
            if rows.count > dropped:
                yield rows.slice(dropped, rows.count)
    finally:
        reader.close()


def _plan(config: StreamConfig, epoch: int) -> list[PoolPlan]:
    order: Sequence[int] = range(len(config.shards))
    if config.seed is not None:
        rng = np.random.default_rng([config.seed, epoch, _ORDER])
        order = rng.permutation(len(config.shards)).tolist()
    return plan_pools(config.ranges, order, config.pool_rows, config.interleave, config.batch_size)


def _places(config: StreamConfig, epoch: int, plan: PoolPlan) -> np.ndarray:
    if config.seed is None:
        return np.arange(plan.rows)
    rng = np.random.default_rng([config.seed, epoch, _POOL, plan.number])
    return rng.permutation(plan.rows)
