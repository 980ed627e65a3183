"""Rows of a table that workers share: who owns which, and how they are exchanged.

Rows are numbered in order of arrival, so frequent keys have the first ones: they are dealt out in
turn. Row `r`, from 2 on, belongs to worker `(r - 2) % workers` and lies there at
`2 + (r - 2) // workers`; the rows of padding and of unknown keys are everywhere.

    a step      rows: each owner's block to all workers, an all-gather
                gradients: each block to its owner, where they are summed, an all-to-all
    outside     the chief asks for rows, by a sum over the workers

How long a block is depends on the batch. A collective keeps the shape that it first had under its
key, so each length has keys of its own; the key is an input of TensorFlow's collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from training.distribution.strategy import count_workers, has_gpu
from training.distribution.workers import Workers
from training.embedding.device_tier import PlaceBatch, PlacedBatch
from training.embedding.key_index import FIRST_ROW, DistinctKeys, MappedBatch

T = TypeVar("T")

# Apart from those of TensorFlow's strategies, which count from 1 and from 100.
_GROUP_KEY, _FIRST_KEY = 1 << 20, 1 << 24
_KEYS = 1 << 10  # of one collective: more than there are lengths of blocks
_LEAST_ROWS, _MOST_ROWS = 1 << 8, 1 << 16
_END = 0


BLOCK_SIZES = np.array([m << e for e in range(26) for m in range(16, 32)] + [1 << 30], np.int64)
"""Rows that a worker sends in a step: few lengths, as TensorFlow keeps a record for each,
and at most a sixteenth of padding."""


@dataclass(frozen=True)
class RowOwners:
    """The workers that own a table's rows, seen from one of them: the `index`-th of `count`."""

    index: int
    count: int

    def find_owners(self, rows: Any) -> Any:
        return (rows - FIRST_ROW) % self.count

    def are_own(self, rows: np.ndarray) -> np.ndarray:
        """Returns which rows are those of a key, and this worker's."""
        return (rows >= FIRST_ROW) & (self.find_owners(rows) == self.index)

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
    first, then a block of each worker's. Places are in that matrix; `own` is this worker's block,
    filled up with row 0, and `new_places` where its new rows lie at this worker.
    """
    found = DistinctKeys(rows, 0)
    distinct = found.keys
    is_key = distinct >= FIRST_ROW
    owner = np.where(is_key, owners.find_owners(distinct), owners.count)
    number = np.zeros(len(distinct), np.int64)  # of each row, among those of its owner
    for worker in range(owners.count):
        number[owner == worker] = np.arange(np.count_nonzero(owner == worker))
    block = round_block(int(number.max(initial=-1)) + 1)
    own, is_mine = np.zeros(block, np.int64), owner == owners.index
    own[number[is_mine]] = owners.to_local(distinct[is_mine])
    places = found.spread(np.where(is_key, FIRST_ROW + owner * block + number, distinct))
    is_own = owners.find_owners(new_rows) == owners.index
    new_places = owners.to_local(new_rows[is_own])
    count = int(np.count_nonzero(is_key))
    return PlacedBatch(places, new_places, distinct=count, own=own, is_own=is_own)


def round_block(rows: int) -> int:
    return int(BLOCK_SIZES[np.searchsorted(BLOCK_SIZES, rows)])


def find_owners(strategy: tf.distribute.Strategy) -> RowOwners | None:
    """Returns the processes that train with a strategy as owners of rows; None: there is one."""
    count = count_workers(strategy)
    return RowOwners(strategy.cluster_resolver.task_id, count) if count > 1 else None


class RowExchange:
    """The exchange of the rows of one key space, by number: each has collectives of its own."""

    def __init__(self, owners: RowOwners, number: int) -> None:
        self.owners, self._number = owners, number
        self.batches = self.distinct = self.block_rows = 0

    def begin_batches(self, *, is_new_epoch: bool) -> PlaceBatch:
        """Returns the function that plans the exchange of the batches to come, and counts it."""
        if is_new_epoch:
            self.batches = self.distinct = self.block_rows = 0

        def plan(found: MappedBatch, is_trained: bool) -> PlacedBatch:
            placed = plan_exchange(self.owners, found.rows, found.new_rows)
            if is_trained:
                self.batches += 1
                self.distinct += placed.distinct
                self.block_rows += len(placed.own)
            return placed

        return plan

    def describe(self) -> dict[str, int]:
        """`exchanged` are the rows that this worker has sent and been sent in this epoch."""
        return {
            "workers": self.owners.count,
            "distinct": self.distinct,
            "exchanged": self.block_rows * (self.owners.count - 1),
        }

    def begin(self, own: tf.Tensor) -> None:
        """Takes the rows of this worker's block for the step that is traced, int64 `[block]`."""
        self.own = own

    def gather(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns all workers' blocks, `[block, dim]`, behind the two rows of no key: zeros."""
        dims = [int(value.shape[1]) for value in values]
        block = tf.concat(values, axis=1)
        gathered = tf.raw_ops.CollectiveGatherV2(input=block, **self._name(block, 0))
        gathered = tf.ensure_shape(gathered, [None, sum(dims)])
        whole = tf.concat([tf.zeros([FIRST_ROW, sum(dims)]), gathered], axis=0)
        return list(tf.split(whole, dims, axis=1))

    @property
    def places(self) -> tf.Tensor:
        return FIRST_ROW + self.owners.count * tf.size(self.own)

    def sum_at_owner(self, shares: tf.Tensor, table: int) -> tf.Tensor:
        """Returns the rows of this worker's block, `[block, n]`, summed over all workers.

        `shares` are this worker's numbers for each place, float32 `[places, n]`; each table has a
        collective of its own.
        """
        workers, length = self.owners.count, shares.shape[1]
        blocks = tf.reshape(shares[FIRST_ROW:], [workers, tf.size(self.own), length])
        received = tf.raw_ops.CollectiveAllToAllV2(input=blocks, **self._name(self.own, 1 + table))
        return tf.reduce_sum(tf.ensure_shape(received, [workers, None, length]), axis=0)

    def _name(self, block: tf.Tensor, purpose: int) -> dict[str, object]:
        length = tf.searchsorted(BLOCK_SIZES, tf.shape(block, tf.int64)[:1])[0]
        first = _FIRST_KEY + (self._number * _KEYS + purpose) * _KEYS
        return {
            "group_size": self.owners.count,
            "group_key": _GROUP_KEY,
            "instance_key": first + tf.cast(length, tf.int32),
            "ordering_token": _ordering_token(),
        }


@functools.cache
def _ordering_token() -> list[tf.Tensor]:
    """What collectives of one graph name to run in its order, as NCCL needs it on all workers."""
    if not has_gpu():
        return []
    with tf.init_scope():
        token = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name="order of exchanges")
        tf.raw_ops.AssignVariableOp(resource=token, value=0.0)
    return [token]


class ServedRows:
    """The rows of a run's tables, which the workers serve to their chief, for validation.

    The chief asks: number of the matrix and how many rows; the rows. The others answer with those
    that they own, and zeros. Each message is a sum over the workers, of one of a few lengths.
    """

    def __init__(self, workers: Workers, tables: Mapping[str, Any]) -> None:
        rows = {name: tables[name].rows for name in sorted(tables)}
        owned = {name: found for name, found in rows.items() if hasattr(found, "read_remote")}
        self._workers, self._names, self._matrices = workers, list(owned), list(owned.values())

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """The rows that this worker owns, by the table's name."""
        pairs = zip(self._names, self._matrices, strict=True)
        return {f"table {name}": matrix.variable for name, matrix in pairs}

    def share(self, decide: Callable[[], T]) -> T:
        if not self._matrices:
            return self._workers.share(decide)

        def decide_served() -> T:
            with self._asking():
                return decide()

        if not self._workers.is_chief:
            self._serve()
        return self._workers.share(decide_served)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        # A signal may end the block at any time, and a question must be brought to its end.
        with ThreadPoolExecutor(1, thread_name_prefix="rows of workers") as asking:
            for number, matrix in enumerate(self._matrices):
                matrix.read_remote = self._build_reader(asking, number)
            try:
                yield
            finally:
                for matrix in self._matrices:
                    matrix.read_remote = None
                asking.submit(self._tell, _END, 0).result()

    def _build_reader(
        self, asking: ThreadPoolExecutor, number: int
    ) -> Callable[[np.ndarray], np.ndarray]:
        dim = self._matrices[number].dim

        def read(rows: np.ndarray) -> np.ndarray:
            pieces = np.split(rows, range(_MOST_ROWS, len(rows), _MOST_ROWS))
            found = [asking.submit(self._ask, number, piece).result() for piece in pieces]
            return np.concatenate([np.empty((0, dim), np.float32), *found])

        return read

    def _ask(self, number: int, rows: np.ndarray) -> np.ndarray:
        self._tell(1 + number, len(rows))
        return self._answer(number, rows)[: len(rows)]

    def _tell(self, question: int, count: int) -> tuple[int, int]:
        own = [question, count] if self._workers.is_chief else [0, 0]
        told = self._workers.sum(tf.constant(own, tf.int64)).numpy()
        return int(told[0]), int(told[1])

    def _serve(self) -> None:
        while True:
            question, count = self._tell(_END, 0)
            if question == _END:
                return
            self._answer(question - 1, np.zeros(count, np.int64))

    def _answer(self, number: int, rows: np.ndarray) -> np.ndarray:
        """Returns rows, padded; the chief alone knows which ones."""
        length = max(_LEAST_ROWS, 1 << max(0, len(rows) - 1).bit_length())
        asked = np.zeros(length, np.int64)
        asked[: len(rows)] = rows
        asked = self._workers.sum(tf.constant(asked)).numpy()
        own = self._matrices[number].read_own(asked)
        return np.asarray(self._workers.sum(tf.constant(own)))
