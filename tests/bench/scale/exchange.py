"""What the workers of a shared table send each other in a step, by the counts of the real plan.

No network is simulated, bytes are counted: a batch with keys by Zipf's law is planned for a number
of workers by the function that plans it in training, and the blocks that come of it are sent
`workers - 1` times, rows one way and gradients the other.

Two other ways are counted beside it. An all-reduce of the batch's distinct rows by a ring sends
`2 (workers - 1) / workers` times the matrix from each worker (Patarasuk and Yuan 2009, Bandwidth
optimal all-reduce algorithms), here for rows and for gradients. An all-to-all by lookup sends a
worker only the rows that its own part of the batch names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tests.bench.scale.model import NUMBER_BYTES

BITS = 8


@dataclass(frozen=True)
class Traffic:
    """What a worker sends in a step, in the mean over batches.

    Attributes:
        workers: How many there are.
        batch: Rows of the global batch.
        distinct: Distinct table rows of the global batch.
        sent_rows: Table rows that the first worker sends; as many gradients go too.
        exchange_bytes: Bytes of these, both ways.
        ring_bytes: Of two all-reduces of the distinct rows.
        lookup_bytes: Of an all-to-all of what the workers look up themselves.
    """

    workers: int
    batch: int
    distinct: float
    sent_rows: float
    exchange_bytes: float
    ring_bytes: float
    lookup_bytes: float


def exchange_bytes(sent_rows: float, dim: int) -> float:
    """Bytes that a worker sends in a step.

    Args:
        sent_rows: Rows that it sends.
        dim: Numbers of a row; a gradient has one more, which says that the row was named.
    """
    return sent_rows * (2 * dim + 1) * NUMBER_BYTES


def ring_bytes(distinct: float, dim: int, workers: int) -> float:
    """Bytes that a worker sends in two ring all-reduces, of rows and of gradients."""
    return 2 * (workers - 1) / workers * distinct * (2 * dim + 1) * NUMBER_BYTES


def lookup_bytes(named: float, dim: int, workers: int) -> float:
    """Bytes that a worker sends where each gets what it names alone.

    Args:
        named: Distinct rows that a worker's part of the batch names, in the mean.
        dim: Numbers of a row.
        workers: How many there are; of what a worker names, `1 / workers` is its own.
    """
    return (workers - 1) / workers * named * (2 * dim + 1) * NUMBER_BYTES


def simulate(batches: Iterator[np.ndarray], workers: int, dim: int) -> Traffic:
    """Counts what a worker sends.

    Args:
        batches: Table rows that each global batch looks up, int64 `[batch, lookups]`.
        workers: How many share the table; the batch is a multiple of them.
        dim: Numbers of a row.
    """
    # TensorFlow takes seconds to load, which the page need not wait for.
    from training.embedding.key_index import MappedBatch
    from training.embedding.worker_rows import RowExchange, RowOwners

    exchange = RowExchange(RowOwners(0, workers), 0)
    plan = exchange.begin_batches(is_new_epoch=True)
    named, size = [], 0
    for rows in batches:
        plan(MappedBatch(rows.ravel(), 0), True)
        parts = rows.reshape(workers, -1)
        named.append(np.mean([len(np.unique(part)) for part in parts]))
        size = len(rows)
    found, count = exchange.describe(), len(named)
    distinct, sent = found["distinct"] / count, found["exchanged"] / count
    return Traffic(
        workers, size, distinct, sent,
        exchange_bytes(sent, dim),
        ring_bytes(distinct, dim, workers),
        lookup_bytes(float(np.mean(named)), dim, workers),
    )  # fmt: skip


def draw_batches(batch: int, length: int, keys: int, count: int) -> Iterator[np.ndarray]:
    """Draws batches as the bench of shared rows does: Zipf's law of exponent 1.

    Args:
        batch: Rows of a global batch.
        length: Items of a history; each row has one item more.
        keys: Rows of the table.
        count: How many batches.

    Yields:
        int64 `[batch, length + 1]`.
    """
    from tests.bench.train_step.trainings import BatchShape

    shape = BatchShape(batch, length, keys, distinct=min(count, BatchShape.distinct))
    for columns in shape.build().take(count).as_numpy_iterator():
        yield np.concatenate([columns["history"], columns["item"][:, None]], axis=1)


def find_network_bound(matrix_bytes: float, cpu_s: float, cores: int, gbit_s: float) -> int:
    """Returns the least number of workers at which sending takes longer than computing.

    A worker sends `(workers - 1) / workers` of a matrix and computes `1 / workers` of a step, so
    from there on each further worker has less to compute and more to send.

    Args:
        matrix_bytes: Bytes that a worker nears to send in a step as workers are added.
        cpu_s: CPU seconds of the step, all workers together.
        cores: Of a worker.
        gbit_s: Speed of a worker's link, each way.
    """
    send_s, compute_s = matrix_bytes * BITS / (gbit_s * 1e9), cpu_s / cores
    return math.floor(1 + compute_s / send_s) + 1
