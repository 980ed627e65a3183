"""Softmax over sampled candidates, corrected for how the candidates were drawn (logQ).

Sampling an item in proportion to its popularity punishes popular items as negatives;
subtracting the log of its expected count from its logit undoes that (Yi et al. 2019,
"Sampling-bias-corrected neural modeling for large corpus item recommendations", section 3.2;
Bengio & Senecal 2008).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from conf.schema import FIRST_TOKEN_ID
from training.networks.layers import matmul_rows


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


# Low enough to vanish in a float32 softmax, high enough for its gradient to stay finite.
MASKED_LOGIT = -1e9


@dataclass(frozen=True)
class SoftmaxCandidates:
    """Items that each row's target is ranked against.

    Attributes:
        vectors: float32 `[candidates, dim]`.
        ids: int `[candidates]`, item ids.
        log_expected_counts: float32 `[candidates]`, log of how often the item is expected among
            the candidates; None leaves the logits uncorrected.
    """

    vectors: tf.Tensor
    ids: tf.Tensor
    log_expected_counts: tf.Tensor | None = None


def compute_sampled_softmax(
    user_vectors: tf.Tensor,
    candidates: SoftmaxCandidates,
    positions: tf.Tensor,
    *,
    temperature: float = 1.0,
    mask_accidental_hits: bool = True,
) -> tf.Tensor:
    """Cross-entropy of each row's target among the candidates.

    With `s[i, j] = <u_i, v_j> / temperature - log_expected_counts[j]`, the loss of row i is
    `logsumexp_j s[i, j] - s[i, positions[i]]`.

    Args:
        user_vectors: float32 `[batch, dim]`.
        candidates: The candidates, targets among them.
        positions: int32 `[batch]`, where each row's target stands among the candidates.
        temperature: Above 0.
        mask_accidental_hits: Whether other copies of a row's target, which would count as
            negatives of themselves, are left out.

    Returns:
        float32 `[batch]`.
    """
    logits = matmul_rows(user_vectors, candidates.vectors) / temperature
    if candidates.log_expected_counts is not None:
        logits -= candidates.log_expected_counts[tf.newaxis, :]
    if mask_accidental_hits:
        target_ids = tf.gather(candidates.ids, positions)
        same_item = target_ids[:, tf.newaxis] == candidates.ids[tf.newaxis, :]
        own = positions[:, tf.newaxis] == tf.range(tf.size(candidates.ids))[tf.newaxis, :]
        logits = tf.where(same_item & ~own, MASKED_LOGIT, logits)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=positions, logits=logits)


def compute_log_expected_counts(
    item_counts: np.ndarray,
    batch_size: int,
    uniform_negatives: int | None = None,
    drawable: np.ndarray | None = None,
) -> np.ndarray:
    """Log of how often each item is expected among one step's candidates.

    A batch holds item j `batch_size * p_j` times, p its share of the train rows; uniform
    negatives add `uniform_negatives / items` to each of the items that they are drawn from (the
    mixed distribution of Yang et al. 2020, "Mixed negative sampling for learning two-tower neural
    networks in recommendations").

    Args:
        item_counts: int64 `[vocabulary_size]`, train rows per item id.
        batch_size: Rows that are ranked together, over all replicas.
        uniform_negatives: Items drawn uniformly per step, or None.
        drawable: int64 `[items]`, ids that they are drawn from; None: all from 2 on.

    Returns:
        float32 `[vocabulary_size]`, finite: an item without a row counts as one.
    """
    counts = np.maximum(item_counts.astype(np.float64), 1.0)
    expected = batch_size * counts / max(1.0, float(item_counts.sum()))
    if uniform_negatives is not None:
        ids = np.arange(FIRST_TOKEN_ID, len(counts)) if drawable is None else drawable
        expected[ids] += uniform_negatives / max(1, len(ids))
    return np.log(expected).astype(np.float32)


def draw_uniform_items(count: int, drawable: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Draws item ids uniformly, with replacement; the same ids for the same seed.

    Args:
        count: Number of ids.
        drawable: int64 `[items]`, ids to draw from.
        seed: int32 `[2]`.

    Returns:
        int64 `[count]`.
    """
    positions = tf.random.stateless_uniform(
        [count], seed, minval=0, maxval=tf.size(drawable, tf.int64), dtype=tf.int64
    )
    return tf.gather(drawable, positions)
