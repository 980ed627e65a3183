"""Sigmoid cross-entropy of a user's and an item's vector against the label."""

from __future__ import annotations

import tensorflow as tf


def compute_binary_loss(
    user_vectors: tf.Tensor,
    item_vectors: tf.Tensor,
    labels: tf.Tensor,
    *,
    temperature: float = 1.0,
) -> tf.Tensor:
    """Cross-entropy of `sigmoid(<u_i, v_i> / temperature)` against the label.

    Args:
        user_vectors: float32 `[batch, dim]`.
        item_vectors: float32 `[batch, dim]`.
        labels: `[batch]`, each in `[0, 1]`.
        temperature: Above 0.

    Returns:
        float32 `[batch]`.
    """
    logits = tf.reduce_sum(user_vectors * item_vectors, axis=1) / temperature
    return tf.nn.sigmoid_cross_entropy_with_logits(
        labels=tf.cast(labels, logits.dtype), logits=logits
    )
