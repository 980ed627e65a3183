"""Losses over items: softmax over candidates, pairs of items, single items, a user's formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from conf.training.objectives import OwnLossConfig
from training.networks.layers import matmul_rows
from training.networks.user_code import call_function, import_function, user_errors

RowLoss = Callable[..., tf.Tensor]


def count_replicas() -> int:
    """Returns how many replicas run the step; 1 outside of a strategy."""
    context = tf.distribute.get_replica_context()
    return 1 if context is None else int(context.num_replicas_in_sync)


def gather_replicas(values: tf.Tensor) -> tf.Tensor:
    """Concatenates the replicas' `[local_batch, ...]` in replica order, `[global_batch, ...]`.

    Gradients flow back to the replica that a row came from, summed over all replicas.
    """
    if count_replicas() == 1:
        return values
    context = tf.distribute.get_replica_context()
    # The copy is on the replica's device, which several processes' collectives ask a tensor for.
    return context.all_gather(tf.identity(values), axis=0)


def replica_offset(local_batch: tf.Tensor | int) -> tf.Tensor:
    """Returns where this replica's rows begin in the gathered batch, int32 scalar."""
    if count_replicas() == 1:
        return tf.constant(0, tf.int32)
    context = tf.distribute.get_replica_context()
    return tf.cast(context.replica_id_in_sync_group, tf.int32) * local_batch


# Low enough to vanish in a float32 softmax, high enough for its gradient to stay finite.
MASKED_LOGIT = -1e9


@dataclass(frozen=True)
class SoftmaxItems:
    """Items of a softmax: those that rows are ranked against, or the rows' own.

    Attributes:
        vectors: float32 `[n, dim]`.
        ids: int64 `[n]`, item ids.
        log_counts: float32 `[n]`, what is subtracted from the item's logit: the log of how often
            it is expected among the candidates, times the correction's strength; None: nothing.
    """

    vectors: tf.Tensor
    ids: tf.Tensor
    log_counts: tf.Tensor | None = None


def compute_sampled_softmax(
    queries: tf.Tensor,
    targets: SoftmaxItems,
    candidates: SoftmaxItems,
    masked: tf.Tensor,
    *,
    temperature: float = 1.0,
    hardest: int | None = None,
    dtype: tf.DType = tf.float32,
) -> tf.Tensor:
    """Cross-entropy of each query's target among the candidates, float32 `[n]`.

    With `s(q, j) = <q, v_j> / temperature - log_counts[j]`, the loss of query i with target t is
    `log(exp s(i, t) + sum_j exp s(i, j)) - s(i, t)` over the candidates j that are not masked.

    Args:
        queries: float32 `[n, dim]`.
        targets: The item of each query, `[n]`.
        candidates: Items that all queries are ranked against, `[candidates]`.
        masked: Candidates that are no negatives of a query, the target's own place and copies
            among them; bool `[n, candidates]`.
        temperature: Above 0.
        hardest: Candidates that count for a query, see `keep_hardest`.
        dtype: Type that products are computed in.
    """
    own, logits = score_candidates(queries, targets, candidates, temperature, dtype)
    masked = ~keep_hardest(logits, ~masked, hardest)
    logits = tf.concat([own[:, tf.newaxis], tf.where(masked, MASKED_LOGIT, logits)], axis=1)
    first = tf.zeros_like(own, tf.int32)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=first, logits=logits)


def score_candidates(
    queries: tf.Tensor,
    targets: SoftmaxItems,
    candidates: SoftmaxItems,
    temperature: float,
    dtype: tf.DType = tf.float32,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the corrected scores of targets, `[n]`, and of candidates, `[n, candidates]`.

    Arguments and formula are those of `compute_sampled_softmax`.
    """
    logits = matmul_rows(queries, candidates.vectors, dtype) / temperature
    own = tf.reduce_sum(queries * targets.vectors, axis=1) / temperature
    if candidates.log_counts is not None:
        logits -= candidates.log_counts[tf.newaxis, :]
        own -= targets.log_counts
    return own, logits


def keep_hardest(logits: tf.Tensor, counted: tf.Tensor, hardest: int | None) -> tf.Tensor:
    """Returns which candidates count for a query: those of the highest scores (None: all).

    After the dynamic sampling of Zhang et al. 2013, "Optimizing top-N collaborative filtering via
    dynamic negative item sampling". Of equal scores the first are taken. All `[n, candidates]`.
    """
    if hardest is None:
        return counted
    shape = tf.shape(logits)
    ranked = tf.where(counted, logits, -np.inf)
    columns = tf.math.top_k(ranked, tf.minimum(hardest, shape[1])).indices
    rows = tf.broadcast_to(tf.range(shape[0])[:, tf.newaxis], tf.shape(columns))
    places = tf.reshape(tf.stack([rows, columns], axis=2), [-1, 2])
    chosen = tf.scatter_nd(places, tf.ones_like(places[:, 0]), shape)
    return counted & (chosen > 0)


def compute_drawn_loss(
    kind: str, own: tf.Tensor, drawn: tf.Tensor, counted: tf.Tensor
) -> tf.Tensor:
    """Loss of each query whose item is compared with items drawn for it, float32 `[n]`.

    `bpr` is the mean over the drawn items of `-log sigmoid(own - drawn)` (Rendle et al. 2009, "BPR:
    Bayesian personalized ranking from implicit feedback", section 4.1). `binary` is `-log
    sigmoid(own)` plus the sum of `-log sigmoid(-drawn)`.

    Args:
        kind: `bpr` or `binary`.
        own: Logits of the queries' own items, float32 `[n]`.
        drawn: Logits of the drawn ones, float32 `[n, count]`.
        counted: Whether a drawn item counts, bool `[n, count]`.
    """
    weights = tf.cast(counted, tf.float32)
    if kind == "binary":
        return tf.nn.softplus(-own) + tf.reduce_sum(weights * tf.nn.softplus(drawn), axis=1)
    each = weights * tf.nn.softplus(drawn - own[:, tf.newaxis])
    return tf.math.divide_no_nan(tf.reduce_sum(each, axis=1), tf.reduce_sum(weights, axis=1))


def build_user_loss(config: OwnLossConfig | None) -> RowLoss | None:
    """Builds a user's formula, from scores to the loss of each row, float32 `[n]`; or None.

    It is given labels and logits, `[n]` each; or the scores of rows' items `[n]`, those of other
    items `[n, count]`, and which of these count, bool `[n, count]`. Weights of rows and tasks are
    applied to what it returns: a mean over the batch would count once for every row.
    """
    if config is None:
        return None
    name, params = f"loss {config.function}", config.params
    function = import_function("loss", config.function)

    def compute(*scores: Any) -> tf.Tensor:
        losses = call_function(f"{name} fails", function, *scores, **params)
        advice = "return a float for each row, shape [rows]: no mean over rows"
        with user_errors(f"{name} does not give one value for each row", advice):
            return tf.cast(tf.reshape(losses, tf.shape(scores[0])), tf.float32)

    return compute
