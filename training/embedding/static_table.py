"""Static embedding tables: one row per id."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from conf.schema import FIRST_TOKEN_ID, PAD_ID
from conf.training.optimizer import SparseOptimizerConfig
from conf.training.tables import Initializer, NormalConfig, UniformConfig
from training.distribution.workers import require_memory
from training.embedding.distinct_rows import BatchRows, FoundRows, spread_rows

PIECE_ROWS = 1 << 20
"""Rows that are drawn at once; a multiple of four."""
MIN_CHECKED_BYTES = 256 << 20
"""Smaller tables are built without a look at the memory that is left."""
FIRST_VALUES = NormalConfig()
_PHILOX = 1
_WITHIN_TWO = math.erf(math.sqrt(2.0))
"""Share of a normal distribution within two standard deviations."""


def list_copies(variable: tf.Variable) -> tuple[tf.Variable, ...]:
    """Returns the copy of a variable on each replica, outside of replicas."""
    if not isinstance(variable, tf.distribute.DistributedValues):
        return (variable,)
    return tuple(variable.distribute_strategy.experimental_local_results(variable))


@dataclass(frozen=True)
class RowUpdates:
    """Which rows of a table steps change: none, those that a batch looks up, or all.

    `l2` weighs the squared norms of the same rows; without an optimizer it is that of all tables.
    """

    is_trained: bool = True
    l2: float | None = None
    are_dense: bool = False
    optimizer: SparseOptimizerConfig | None = None


class EmbeddingTable(tf.Module):
    """A trainable matrix `[vocabulary_size, dim]` whose padding row reads as zeros.

    Rows start at draws that depend on the seed, the table's name and the row alone, so they are
    the same on every replica and whatever order tables are built in. The rows of padding and of
    OOV start at zeros: where training meets no OOV, a random row would speak for every unknown id.
    Without an initializer all start at zeros.
    """

    def __init__(
        self,
        name: str,
        vocabulary_size: int,
        dim: int,
        *,
        seed: int,
        initializer: Initializer | None = FIRST_VALUES,
    ) -> None:
        super().__init__(name="embedding_table")
        self._vocabulary_size = vocabulary_size
        self.dim = dim
        self.updates = RowUpdates()
        _require_memory(vocabulary_size, dim, name)
        self.rows = tf.Variable(tf.zeros([vocabulary_size, dim]), name=f"{name}/rows")
        if initializer is not None:
            _draw_first_rows(self.rows, [seed, zlib.crc32(name.encode())], initializer)

    @property
    def vocabulary_size(self) -> int:
        return self._vocabulary_size

    @property
    def variable(self) -> tf.Variable:
        return self.rows

    def lookup(self, ids: tf.Tensor, rows: BatchRows | None = None) -> tf.Tensor:
        """Returns the rows of ids, `ids.shape + [dim]`, zeros (and no gradient) for padding.

        `rows` are those of a step; None: this is outside of one.
        """
        mask = tf.cast(tf.not_equal(ids, PAD_ID), tf.float32)
        return self.gather(ids, rows) * mask[..., tf.newaxis]

    def gather(self, ids: tf.Tensor, rows: BatchRows | None = None) -> tf.Tensor:
        """As `lookup`, without the mask: for callers that weight padding by zero themselves."""
        known = self.find_rows(ids, rows)
        if known is not None and known.segments is None:
            return spread_rows(known.rows, known.positions)
        if rows is not None:
            rows.note_others(self.variable)
        return self._read(self.variable, ids)

    def find_rows(self, ids: tf.Tensor, rows: BatchRows | None) -> FoundRows | None:
        """Returns the rows of a feature of the batch where the step has them; else None."""
        return None if rows is None else rows.find(self.variable, ids, self._read)

    def read_by_key(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns keys, int64 `[n]`, and their rows, float32 `[n, dim]`, without padding."""
        return np.arange(PAD_ID + 1, self.vocabulary_size), self.rows.numpy()[PAD_ID + 1 :]

    def read_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns rows by number, `rows.shape + [dim]`, as the steps so far have left them."""
        return read_rows(self.variable, rows)

    def _read(self, variable: tf.Variable, ids: tf.Tensor) -> tf.Tensor:
        return read_rows(variable, ids)


def read_rows(table: tf.Variable, ids: tf.Tensor) -> tf.Tensor:
    """Returns rows of a table without reading the rest of it.

    `tf.nn.embedding_lookup` and `tf.gather` copy a variable that is mirrored on several devices
    as a whole, each time. In a replica, and in its update, the handle is that of its own copy; a
    gradient tape follows it where it watches the variable, as the training step's does.
    """
    if not isinstance(table, tf.distribute.DistributedValues):
        return tf.nn.embedding_lookup(table, ids)
    try:
        handle = table.handle
    except ValueError:  # Outside of replicas all copies are alike.
        return tf.gather(tf.distribute.get_strategy().experimental_local_results(table)[0], ids)
    return tf.raw_ops.ResourceGather(resource=handle, indices=ids, dtype=table.dtype)


def _require_memory(rows: int, dim: int, name: str) -> None:
    needed = rows * dim * tf.float32.size
    if needed >= MIN_CHECKED_BYTES:
        require_memory(
            f"embedding table {name!r}",
            needed,
            f"for keys such as hashes, of which few occur, set model.embeddings.{name}.kind="
            "dynamic, with shard=workers where no machine holds their rows; else lower "
            "model.embedding_dim",
            of=f"{rows:,} rows of {dim} numbers: ",
        )


def _draw_first_rows(rows: tf.Variable, seed: list[int], initializer: Initializer) -> None:
    """Fills a table piece by piece, so that a large one is in memory once and not three times.

    The draws are those of `tf.random.stateless_normal`, or `stateless_uniform`, for the whole
    table: the generator counts four numbers at a time, so a piece that starts at a multiple of four
    starts its counter there.
    """
    vocabulary_size, dim = rows.shape
    copies = tf.distribute.get_strategy().experimental_local_results(rows)
    with tf.device("CPU:0"):
        state = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    for start in range(0, vocabulary_size, PIECE_ROWS):
        stop = min(start + PIECE_ROWS, vocabulary_size)
        with tf.device("CPU:0"):
            counter = state.counter + tf.constant([start * dim // 4, 0], tf.uint64)
            draws = _draw(initializer, [stop - start, dim], state.key, counter)
            is_token = tf.cast(tf.range(start, stop) >= FIRST_TOKEN_ID, tf.float32)
            draws *= is_token[:, tf.newaxis]
        # By scatter: assigning to a slice of a variable first copies all of it.
        piece = tf.IndexedSlices(draws, tf.range(start, stop, dtype=tf.int64))
        for copy in copies:
            copy.scatter_update(piece)


def _draw(
    initializer: Initializer, shape: list[int], key: tf.Tensor, counter: tf.Tensor
) -> tf.Tensor:
    if isinstance(initializer, NormalConfig):
        normal = tf.raw_ops.StatelessRandomNormalV2
        return normal(shape=shape, key=key, counter=counter, alg=_PHILOX) * initializer.stddev
    uniform = tf.raw_ops.StatelessRandomUniformV2
    draws = uniform(shape=shape, key=key, counter=counter, alg=_PHILOX)
    if isinstance(initializer, UniformConfig):
        spread = draws * (initializer.high - initializer.low) + initializer.low
        # A product that is rounded up may reach the bound, which is left out.
        return tf.minimum(spread, np.nextafter(np.float32(initializer.high), np.float32("-inf")))
    # By the inverse of the distribution's function: a draw that is refused would shift all others.
    centered = tf.cast(2.0 * draws - 1.0, tf.float64) * _WITHIN_TWO
    return tf.cast(tf.math.erfinv(centered) * (math.sqrt(2.0) * initializer.stddev), tf.float32)
