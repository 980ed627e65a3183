"""Which worker owns which rows of a table, and where a batch's distinct rows are exchanged.

Rows are numbered in order of arrival, so frequent keys have the first ones: they are dealt out in
turn, and each worker owns as many as the others. Row `r`, from 2 on, belongs to worker
`(r - 2) % workers` and lies there at `2 + (r - 2) // workers`; the rows of padding and of unknown
keys are everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from conf.schema import FIRST_TOKEN_ID as FIRST_ROW
from etl.tfrecord.reading import inlined, kernel
from training.embedding.placement.device_tier import PlacedBatch

_LEAST_BLOCK = 16
_MOST_BLOCK = 1 << 30


def _list_block_sizes() -> np.ndarray:
    """Lengths that blocks are rounded up to: at most a sixteenth is padding."""
    sizes = [_LEAST_BLOCK]
    while sizes[-1] < _MOST_BLOCK:
        sizes.append(sizes[-1] + (1 << max(0, sizes[-1].bit_length() - 5)))
    return np.array(sizes, np.int64)


BLOCK_SIZES = _list_block_sizes()
"""Rows that a worker sends in a step: few lengths, as TensorFlow keeps a record for each."""


@dataclass(frozen=True)
class RowOwners:
    """The workers that own a table's rows, seen from one of them.

    Attributes:
        index: Number of this worker.
        count: How many there are.
    """

    index: int
    count: int

    def find_owners(self, rows: Any) -> Any:
        """Returns the owner of rows from 2 on, arrays or tensors of whole numbers."""
        return (rows - FIRST_ROW) % self.count

    def to_local(self, rows: Any) -> Any:
        """Returns where rows from 2 on lie at their owners."""
        return FIRST_ROW + (rows - FIRST_ROW) // self.count

    def count_local(self, rows: Any) -> Any:
        """Returns the rows that this worker holds, the first two included, of so many in all."""
        return FIRST_ROW + (rows - FIRST_ROW + self.count - 1 - self.index) // self.count

    def count_most(self, rows: int) -> int:
        """Returns the most rows that a worker holds, of so many in all."""
        return RowOwners(0, self.count).count_local(rows)

    def list_rows(self, rows: int) -> np.ndarray:
        """Returns the rows that this worker holds, in their order there, of so many in all."""
        own = np.arange(FIRST_ROW + self.index, rows, self.count)
        return np.concatenate([np.arange(FIRST_ROW), own])


def plan_exchange(owners: RowOwners, rows: np.ndarray, new_rows: np.ndarray) -> PlacedBatch:
    """Plans the exchange of a batch's rows; each worker plans the same but for what it owns.

    The matrix that the workers put together for a step has the rows of padding and of unknown keys
    first, then a block of each worker's.

    Args:
        owners: The workers.
        rows: Rows of the global batch, int64 `[n]`, repeats allowed.
        new_rows: Those of them that are new.

    Returns:
        Places in that matrix; `own` is this worker's block, filled up with row 0, and
        `new_places` where its new rows lie at this worker.
    """
    rows = np.ascontiguousarray(rows, np.int64)
    scratch = np.zeros(1 << max(4, int(2 * len(rows)).bit_length()), np.int32)
    distinct, positions = np.empty(len(rows), np.int64), np.empty(len(rows), np.int32)
    found, counts = np.empty((2, len(rows)), np.int64), np.zeros(owners.count, np.int64)
    count = _find_distinct(rows, owners.count, scratch, distinct, positions, found, counts)
    block = round_block(int(counts.max()))
    owner, number = found[:, :count]
    own = np.zeros(block, np.int64)
    is_mine = owner == owners.index
    own[number[is_mine]] = owners.to_local(distinct[:count][is_mine])
    places = np.concatenate([FIRST_ROW + owner * block + number, np.arange(FIRST_ROW)])
    is_own = owners.find_owners(new_rows) == owners.index
    new_places = owners.to_local(new_rows[is_own])
    return PlacedBatch(places[positions], new_places, distinct=count, own=own, is_own=is_own)


def round_block(rows: int) -> int:
    """Returns the length of blocks that hold so many rows."""
    return int(BLOCK_SIZES[np.searchsorted(BLOCK_SIZES, rows)])


@inlined
def _mix(row):  # type: ignore[no-untyped-def]
    mixed = np.uint64(row) * np.uint64(0x9E3779B97F4A7C15)
    return mixed ^ (mixed >> np.uint64(32))


@kernel
def _find_distinct(  # type: ignore[no-untyped-def]
    rows, workers, scratch, distinct, positions, found, counts
):
    """Lists distinct rows, in order of arrival, with owner and number there; returns how many.

    The positions of rows below 2 count from behind: -2 is padding's, -1 that of unknown keys.
    """
    mask, count = len(scratch) - 1, 0
    for i in range(len(rows)):
        row = rows[i]
        if row < FIRST_ROW:
            positions[i] = row - FIRST_ROW
            continue
        slot = np.int64(_mix(row) & np.uint64(mask))
        while scratch[slot] != 0 and distinct[scratch[slot] - 1] != row:
            slot = (slot + 1) & mask
        if scratch[slot] == 0:
            owner = (row - FIRST_ROW) % workers
            distinct[count], found[0, count], found[1, count] = row, owner, counts[owner]
            counts[owner] += 1
            count += 1
            scratch[slot] = count
        positions[i] = scratch[slot] - 1
    return count
