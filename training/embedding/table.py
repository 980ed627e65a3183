"""A static embedding table: one row per id, rows of a batch looked up by gather."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import tensorflow as tf

from conf.schema import FIRST_TOKEN_ID, PAD_ID
from training.embedding.distinct_rows import FoundRows, current_rows, spread_rows
from training.embedding.row_shards import Rows, RowShards, build_rows

PIECE_ROWS = 1 << 20
"""Rows that are drawn at once; a multiple of four."""
_PHILOX = 1


class EmbeddingTable(tf.Module):
    """A trainable matrix `[vocabulary_size, dim]` whose padding row reads as zeros.

    Rows start at draws that depend on the seed, the table's name and the row alone, so they are
    the same on every replica and whatever order tables are built in. The rows of padding and of
    OOV start at zeros: where training meets no OOV, a random row would speak for every unknown id.

    Args:
        name: Name of the table; features that name the same table share it.
        vocabulary_size: Number of ids, padding and OOV included.
        dim: Length of a row.
        seed: Seed of the first values.
        stddev: Standard deviation of the first values; None starts at zeros.
    """

    def __init__(
        self, name: str, vocabulary_size: int, dim: int, *, seed: int, stddev: float | None = 0.05
    ) -> None:
        super().__init__(name="embedding_table")
        self._vocabulary_size = vocabulary_size
        self.dim = dim
        self.rows: Rows = build_rows(vocabulary_size, dim, f"{name}/rows")
        if stddev is not None:
            _draw_first_rows(self.rows, [seed, zlib.crc32(name.encode())], stddev)

    @property
    def vocabulary_size(self) -> int:
        """Number of ids, padding and OOV included."""
        return self._vocabulary_size

    @property
    def variable(self) -> tf.Variable | RowShards:
        """What rows are read from."""
        return self.rows

    def lookup(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the rows of ids, zeros (and no gradient) where the id is padding.

        Args:
            ids: int32 or int64, any shape, each in `[0, vocabulary_size)`.

        Returns:
            float32 `ids.shape + [dim]`.
        """
        mask = tf.cast(tf.not_equal(ids, PAD_ID), tf.float32)
        return self.gather(ids) * mask[..., tf.newaxis]

    def gather(self, ids: tf.Tensor) -> tf.Tensor:
        """As `lookup`, without the mask: for callers that weight padding by zero themselves."""
        found = self.find_rows(ids)
        if found is not None and found.segments is None:
            return spread_rows(found.rows, found.positions)
        shared = current_rows()
        if shared is not None:
            shared.note_others(self.variable)
        return self._read(self.variable, ids)

    def find_rows(self, ids: tf.Tensor) -> FoundRows | None:
        """Returns the rows of a feature of the batch where the step has them; else None."""
        shared = current_rows()
        return None if shared is None else shared.find(self.variable, ids, self._read)

    def _read(self, variable: tf.Variable | RowShards, ids: tf.Tensor) -> tf.Tensor:
        return read_rows(variable, ids)


def read_rows(table: Rows, ids: tf.Tensor) -> tf.Tensor:
    """Returns rows of a table without reading the rest of it.

    `tf.nn.embedding_lookup` and `tf.gather` copy a variable that is mirrored on several devices
    as a whole, each time. In a replica, and in its update, the handle is that of its own copy; a
    gradient tape follows it where it watches the variable, as the training step's does.

    Args:
        table: Variable `[vocabulary_size, dim]`, or its shards.
        ids: int32 or int64, any shape.

    Returns:
        `ids.shape + [dim]`; its gradient names rows.
    """
    if isinstance(table, RowShards):
        return table.lookup(ids)
    if not isinstance(table, tf.distribute.DistributedValues):
        return tf.nn.embedding_lookup(table, ids)
    try:
        handle = table.handle
    except ValueError:  # Outside of replicas all copies are alike.
        return tf.gather(tf.distribute.get_strategy().experimental_local_results(table)[0], ids)
    return tf.raw_ops.ResourceGather(resource=handle, indices=ids, dtype=table.dtype)


def _draw_first_rows(rows: Rows, seed: list[int], stddev: float) -> None:
    """Fills a table piece by piece, so that a large one is in memory once and not three times.

    The draws are those of `tf.random.stateless_normal` for the whole table: its generator counts
    four numbers at a time, so a piece that starts at a multiple of four starts its counter there.
    """
    vocabulary_size, dim = rows.shape
    copies: Sequence[Rows] = [rows]
    if not isinstance(rows, RowShards):
        copies = tf.distribute.get_strategy().experimental_local_results(rows)
    with tf.device("CPU:0"):
        state = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    for start in range(0, vocabulary_size, PIECE_ROWS):
        stop = min(start + PIECE_ROWS, vocabulary_size)
        with tf.device("CPU:0"):
            draws = tf.raw_ops.StatelessRandomNormalV2(
                shape=[stop - start, dim],
                key=state.key,
                counter=state.counter + tf.constant([start * dim // 4, 0], tf.uint64),
                alg=_PHILOX,
            )
            is_token = tf.cast(tf.range(start, stop) >= FIRST_TOKEN_ID, tf.float32)
            draws *= stddev * is_token[:, tf.newaxis]
        # By scatter: assigning to a slice of a variable first copies all of it.
        piece = tf.IndexedSlices(draws, tf.range(start, stop))
        for copy in copies:
            copy.scatter_update(piece)
