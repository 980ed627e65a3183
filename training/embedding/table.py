"""A static embedding table: one row per id, rows of a batch looked up by gather."""

from __future__ import annotations

import zlib

import tensorflow as tf

from conf.schema import FIRST_TOKEN_ID, PAD_ID


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
        self.vocabulary_size = vocabulary_size
        self.dim = dim
        self.rows = tf.Variable(
            _first_rows(name, vocabulary_size, dim, seed, stddev), name=f"{name}/rows"
        )

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
        return tf.nn.embedding_lookup(self.rows, ids)


def _first_rows(
    name: str, vocabulary_size: int, dim: int, seed: int, stddev: float | None
) -> tf.Tensor:
    if stddev is None:
        return tf.zeros([vocabulary_size, dim])
    draws = tf.random.stateless_normal(
        [vocabulary_size, dim], seed=[seed, zlib.crc32(name.encode())], stddev=stddev
    )
    is_token = tf.cast(tf.range(vocabulary_size) >= FIRST_TOKEN_ID, tf.float32)
    return draws * is_token[:, tf.newaxis]
