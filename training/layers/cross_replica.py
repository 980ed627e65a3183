"""Collectives inside a training step."""

from __future__ import annotations

import tensorflow as tf


def gather_replicas(values: tf.Tensor) -> tf.Tensor:
    """Concatenates the replicas' values along the first axis, in replica order.

    Gradients flow back to the replica that a row came from, summed over all replicas. Outside a
    strategy, or with one replica, returns the values themselves.

    Args:
        values: `[local_batch, ...]`; the other axes equal on all replicas.

    Returns:
        `[global_batch, ...]`.
    """
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return values
    # The copy is on the replica's device, which several processes' collectives ask a tensor for.
    return context.all_gather(tf.identity(values), axis=0)


def replica_offset(local_batch: tf.Tensor | int) -> tf.Tensor:
    """Returns where this replica's rows begin in the gathered batch, int32 scalar."""
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return tf.constant(0, tf.int32)
    return tf.cast(context.replica_id_in_sync_group, tf.int32) * local_batch
