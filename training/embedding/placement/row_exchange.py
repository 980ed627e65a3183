"""Exchange of a batch's rows between the workers that own them, in a step.

    rows        each owner's block to all workers: an all-gather
    gradients   each block to its owner, where they are summed: an all-to-all

Both send `workers - 1` blocks from each worker. How long a block is depends on the batch. A
collective keeps the shape that it first had under its key, so each length has keys of its own; the
key is an input of TensorFlow's collectives.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from conf.schema import FIRST_TOKEN_ID as FIRST_ROW
from training.distribution.strategy import count_workers
from training.embedding.placement.device_tier import PlacedBatch
from training.embedding.placement.row_owners import BLOCK_SIZES, RowOwners, plan_exchange

# Apart from those of TensorFlow's strategies, which count from 1 and from 100.
_GROUP_KEY, _FIRST_KEY = 1 << 20, 1 << 24
_KEYS = 1 << 10  # of one collective: more than there are lengths of blocks


def find_owners(strategy: tf.distribute.Strategy) -> RowOwners | None:
    """Returns the processes that train with a strategy as owners of rows; None: there is one."""
    count = count_workers(strategy)
    return RowOwners(strategy.cluster_resolver.task_id, count) if count > 1 else None


class RowExchange:
    """The exchange of the rows of one key space.

    Args:
        owners: The workers.
        number: Of the key space; each has collectives of its own, its tables too.
    """

    def __init__(self, owners: RowOwners, number: int) -> None:
        self.owners, self._number = owners, number
        self._own: tf.Tensor | None = None
        self.batches = self.distinct = self.block_rows = 0

    def begin_plans(self, *, is_new_epoch: bool) -> None:
        """Begins the batches of an epoch, or of the rest of one.

        Args:
            is_new_epoch: Whether what happens is counted from nothing.
        """
        if is_new_epoch:
            self.batches = self.distinct = self.block_rows = 0

    def plan(self, rows: np.ndarray, new_rows: np.ndarray, *, is_counted: bool) -> PlacedBatch:
        """Plans the exchange of a batch: see `plan_exchange`.

        Args:
            rows: Rows of the global batch, int64 `[n]`.
            new_rows: Those of them that are new.
            is_counted: Whether a step trains on it.
        """
        placed = plan_exchange(self.owners, rows, new_rows)
        if is_counted:
            self.batches += 1
            self.distinct += placed.distinct
            self.block_rows += len(placed.own)
        return placed

    def describe(self) -> dict[str, int]:
        """Returns what was exchanged in this epoch.

        `exchanged` are the rows that this worker has sent to others and been sent, each way;
        their gradients go as often.
        """
        return {
            "workers": self.owners.count,
            "distinct": self.distinct,
            "exchanged": self.block_rows * (self.owners.count - 1),
        }

    def render(self, label: str) -> list[str]:
        """Returns the same in words.

        Args:
            label: Name of the table.
        """
        batches = max(1, self.batches)
        sent = self.block_rows * (self.owners.count - 1) / batches
        return [
            f"table {label}: rows of {self.owners.count} workers; in this epoch a batch had "
            f"{self.distinct / batches:,.0f} distinct rows, each worker sent {sent:,.0f} of them "
            "and their gradients"
        ]

    @property
    def own(self) -> tf.Tensor:
        """Rows of this worker's block in the step that is traced, int64 `[block]`."""
        if self._own is None:
            raise RuntimeError("no step has begun")
        return self._own

    def begin(self, own: tf.Tensor) -> None:
        """Takes the rows of this worker's block for the step that is traced."""
        self._own = own

    def gather(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the blocks of all workers behind the two rows of no key, which are zeros.

        Args:
            values: This worker's block of each matrix, float32 `[block, dim]`.

        Returns:
            float32 `[2 + workers * block, dim]` per matrix.
        """
        dims = [int(value.shape[1]) for value in values]
        block = tf.concat(values, axis=1)
        gathered = tf.raw_ops.CollectiveGatherV2(input=block, **self._name(block, 0))
        gathered = tf.ensure_shape(gathered, [None, sum(dims)])
        whole = tf.concat([tf.zeros([FIRST_ROW, sum(dims)]), gathered], axis=0)
        return list(tf.split(whole, dims, axis=1))

    @property
    def places(self) -> tf.Tensor:
        """Rows of the matrix of the batch, int32 scalar."""
        return FIRST_ROW + self.owners.count * tf.size(self.own)

    def sum_at_owner(self, shares: tf.Tensor, table: int) -> tf.Tensor:
        """Returns the rows of this worker's block, summed over all workers.

        Args:
            shares: This worker's numbers for each place, float32 `[places, n]`.
            table: Number of the table that they are of; each has a collective of its own.

        Returns:
            float32 `[block, n]`.
        """
        workers, length = self.owners.count, shares.shape[1]
        blocks = tf.reshape(shares[FIRST_ROW:], [workers, tf.size(self.own), length])
        received = tf.raw_ops.CollectiveAllToAllV2(input=blocks, **self._name(self.own, 1 + table))
        return tf.reduce_sum(tf.ensure_shape(received, [workers, None, length]), axis=0)

    def _name(self, block: tf.Tensor, purpose: int) -> dict[str, object]:
        """Returns what names a collective of this block's length."""
        length = tf.searchsorted(BLOCK_SIZES, tf.shape(block, tf.int64)[:1])[0]
        first = _FIRST_KEY + (self._number * _KEYS + purpose) * _KEYS
        return {
            "group_size": self.owners.count,
            "group_key": _GROUP_KEY,
            "instance_key": first + tf.cast(length, tf.int32),
            "ordering_token": [],
        }
