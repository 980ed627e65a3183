"""Pooling of a padded list of embeddings into one vector."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from conf.schema import PAD_ID
from training.embedding.table import EmbeddingTable


def pool_mean(
    embeddings: tf.Tensor, ids: tf.Tensor, position_weights: tf.Tensor | None = None
) -> tf.Tensor:
    """Weighted mean over the positions that hold a token.

    Args:
        embeddings: float32 `[batch, length, dim]`; what stands at padded positions is ignored.
        ids: int `[batch, length]`, 0 for padding.
        position_weights: float32 `[length]`, above 0; None weights all positions alike.

    Returns:
        float32 `[batch, dim]`, zeros for rows without a token.
    """
    weights = tf.cast(tf.not_equal(ids, PAD_ID), embeddings.dtype)
    if position_weights is not None:
        weights *= position_weights
    total = tf.reduce_sum(weights, axis=1, keepdims=True)
    weights = tf.math.divide_no_nan(weights, total)
    return _sum_weighted(weights, embeddings)


def pool_rows(
    table: EmbeddingTable, ids: tf.Tensor, position_weights: tf.Tensor | None = None
) -> tf.Tensor:
    """As `pool_mean` of a table's rows, without a copy of a row for each position if possible.

    Args:
        table: Embeds the ids.
        ids: int `[batch, length]`, 0 for padding.
        position_weights: As for `pool_mean`.
    """
    found = None if position_weights is not None else table.find_rows(ids)
    if found is None:
        return pool_mean(table.gather(ids), ids, position_weights)
    mean = tf.sparse.segment_mean(
        found.rows, found.positions, found.segments, num_segments=tf.shape(ids)[0]
    )
    return tf.ensure_shape(mean, [ids.shape[0], table.dim])


@tf.custom_gradient
def _sum_weighted(
    weights: tf.Tensor, embeddings: tf.Tensor
) -> tuple[tf.Tensor, Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]]:
    """Sum over positions of `weights [batch, length]` times `embeddings [batch, length, dim]`.

    A product of matrices, so the weighted embeddings are never stored. The gradient is written
    out: a batched product of a column and a row, which TensorFlow would derive, is about five
    times slower on CPU than multiplying them by broadcasting.
    """
    pooled = tf.squeeze(tf.matmul(weights[:, tf.newaxis, :], embeddings), axis=1)

    def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        by_weight = tf.squeeze(tf.matmul(embeddings, upstream[:, :, tf.newaxis]), axis=2)
        by_embedding = weights[:, :, tf.newaxis] * upstream[:, tf.newaxis, :]
        return by_weight, by_embedding

    return pooled, gradient


class PositionWeights(tf.Module):
    """Learned weights of list positions: how much the k-th latest item of a history counts.

    Weights are `exp(logit)`, so they stay above 0, and start alike.

    Args:
        name: Name of the weights.
        max_len: Longest list.
    """

    def __init__(self, name: str, max_len: int) -> None:
        super().__init__(name="position_weights")
        self.max_len = max_len
        self.logits = tf.Variable(tf.zeros([max_len]), name=f"{name}/position_logits")

    def __call__(self, length: tf.Tensor | int) -> tf.Tensor:
        """Returns the weights of the first `length <= max_len` positions, float32 `[length]`."""
        return tf.exp(self.logits[:length])
