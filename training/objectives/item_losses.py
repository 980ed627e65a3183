"""Losses over items: softmax over candidates or the catalogue, pairs of items, single items.

That over the catalogue goes by blocks of items, and keeps no matrix of all scores. The forward pass
keeps the largest score and the sum of exponentials of each query while it goes over the blocks
(Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", section 3). The backward
pass scores each block again: that costs less than writing and reading the whole matrix three times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from conf.training.objectives import OwnLossConfig
from training.distribution.strategy import count_replicas
from training.networks.layers import matmul_rows
from training.networks.user_code import call_function, import_function, user_errors
from training.objectives.softmax_memory import BLOCK_ITEMS

RowLoss = Callable[..., tf.Tensor]
Sums = tuple[Any, ...]


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
    """Items of a softmax: those that rows are ranked against, or the rows' own."""

    vectors: tf.Tensor  # float32 [n, dim]
    ids: tf.Tensor  # int64 [n]
    log_counts: tf.Tensor | None = None  # float32 [n], see `LogQCorrection`


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
    """Returns the corrected scores of targets, `[n]`, and of candidates, `[n, candidates]`."""
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
    ranked = tf.where(counted, logits, -np.inf)
    best = tf.math.top_k(ranked, tf.minimum(hardest, tf.shape(logits)[1])).indices
    columns = tf.cast(best, tf.int64)
    rows = tf.range(tf.size(logits[:, 0], tf.int64))[:, tf.newaxis]
    places = tf.stack([tf.broadcast_to(rows, tf.shape(columns)), columns], axis=2)
    places = tf.reshape(places, [-1, 2])
    chosen = tf.scatter_nd(places, tf.ones_like(places[:, 0]), tf.shape(logits, tf.int64))
    return counted & (chosen > 0)


def compute_drawn_loss(
    kind: str, own: tf.Tensor, drawn: tf.Tensor, counted: tf.Tensor
) -> tf.Tensor:
    """Loss of each query whose item is compared with items drawn for it, float32 `[n]`.

    `bpr` is the mean over the drawn items of `-log sigmoid(own - drawn)` (Rendle et al. 2009, "BPR:
    Bayesian personalized ranking from implicit feedback", section 4.1). `binary` is `-log
    sigmoid(own)` plus the sum of `-log sigmoid(-drawn)`.

    Logits of the queries' own items are `[n]`, those of the drawn ones and which of them count
    `[n, count]`.
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


def compute_catalog_softmax(
    queries: tf.Tensor,
    items: tf.Tensor,
    positions: tf.Tensor,
    masked: tf.Tensor | None = None,
    rows: tf.Tensor | None = None,
    *,
    temperature: float = 1.0,
    dtype: tf.DType = tf.float32,
    block: int = BLOCK_ITEMS,
) -> tf.Tensor:
    """Cross-entropy of each query's target among all items, float32 `[n]`; 0 where it is none.

    Args:
        queries: float32 `[n, dim]`.
        items: float32 `[items, dim]`.
        positions: int64 `[n]`, where the target is among the items; below 0: it is none of them.
        masked: Items that are left out of a row, unless they are the target; bool `[rows, items]`,
            or None.
        rows: int64 `[n]`, the row of `masked` that each query is of; None: they are the rows.
        block: Items that are scored at once.
    """
    of_queries = tf.range(tf.size(positions, tf.int64)) if rows is None else rows
    size = tf.shape(items)[0] if items.shape[0] is None else int(items.shape[0])
    catalog = _Catalog(positions, masked, of_queries, size, block, 1.0 / temperature, dtype)

    @tf.custom_gradient
    def compute(
        queries: tf.Tensor, items: tf.Tensor
    ) -> tuple[tf.Tensor, Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]]:
        highest, total = catalog.sum_exponentials(queries, items)
        own = tf.reduce_sum(catalog.half(queries) * catalog.half(catalog.pick_targets(items)), 1)
        losses = highest + tf.math.log(total) - own * catalog.scale

        def differentiate(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            kept = tf.where(positions < 0, 0.0, upstream * catalog.scale)
            return catalog.differentiate(queries, items, (highest, total), kept)

        return tf.where(positions < 0, 0.0, losses), differentiate

    losses: tf.Tensor = compute(queries, items)
    return losses


@dataclass(frozen=True)
class _Catalog:
    """The blocks of a catalogue; see `compute_catalog_softmax`. `dtype` is that of products."""

    positions: tf.Tensor
    masked: tf.Tensor | None
    rows: tf.Tensor
    size: int | tf.Tensor
    block: int
    scale: float
    dtype: tf.DType

    def half(self, values: tf.Tensor) -> tf.Tensor:
        """Returns values as float32 that products see: rounded where they compute in half."""
        return tf.cast(tf.cast(values, self.dtype), tf.float32)

    def pick_targets(self, items: tf.Tensor) -> tf.Tensor:
        """Returns the items of the queries, `[n, dim]`; any for those without one."""
        return tf.gather(items, tf.maximum(self.positions, 0))

    def score(self, queries: tf.Tensor, block: tf.Tensor, start: int | tf.Tensor) -> tf.Tensor:
        """Returns the scores of a block of items, float32 `[n, block]`."""
        scores = self._multiply(queries * self.scale, block, transpose_b=True)
        if self.masked is None:
            return scores
        width = tf.shape(block)[0]
        marks = tf.slice(self.masked, [0, start], [tf.shape(self.masked)[0], width])
        places = tf.cast(start + tf.range(width), tf.int64)
        is_own = places[tf.newaxis, :] == self.positions[:, tf.newaxis]
        return tf.where(tf.gather(marks, self.rows) & ~is_own, MASKED_LOGIT, scores)

    def sum_exponentials(self, queries: tf.Tensor, items: tf.Tensor) -> Sums:
        """Returns each query's highest score and its sum of exponentials beside that, `[n]`."""

        def add(number: int | tf.Tensor, block: tf.Tensor, *sums: tf.Tensor) -> Sums:
            highest, total = sums
            scores = self.score(queries, block, number * self.block)
            higher = tf.maximum(highest, tf.reduce_max(scores, axis=1))
            added = tf.reduce_sum(tf.exp(scores - higher[:, tf.newaxis]), axis=1)
            return higher, total * tf.exp(highest - higher) + added

        def step(number: tf.Tensor, *sums: tf.Tensor) -> Sums:
            return number + 1, *add(number, self._cut(items, number), *sums)

        none = tf.zeros_like(queries[:, 0])
        _, *sums = self._repeat(step, (0, none + tf.float32.min, none))
        return add(self._full, items[self._full * self.block :], *sums)

    def differentiate(
        self, queries: tf.Tensor, items: tf.Tensor, sums: Sums, upstream: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the gradients of queries and items; the upstream one is scaled, `[n]`.

        What is left of a target that is nearly sure is a difference of numbers near 1: of the log
        of a sum, whose digits go into the highest score, it would not be much.
        """
        highest, of_total = sums[0][:, tf.newaxis], (upstream / sums[1])[:, tf.newaxis]

        def add(number: int | tf.Tensor, block: tf.Tensor, total: tf.Tensor) -> Sums:
            scores = self.score(queries, block, number * self.block)
            shares = tf.exp(scores - highest) * of_total
            of_block = self._multiply(shares, queries, transpose_a=True)
            return total + self._multiply(shares, block), of_block

        def step(number: tf.Tensor, total: tf.Tensor, parts: tf.TensorArray) -> Sums:
            total, of_block = add(number, self._cut(items, number), total)
            return number + 1, total, parts.write(number, of_block)

        dim = items.shape[1]
        parts = tf.TensorArray(tf.float32, self._full, element_shape=[self.block, dim])
        _, total, parts = self._repeat(step, (0, tf.zeros_like(queries), parts))
        of_queries, last = add(self._full, items[self._full * self.block :], total)
        of_items = tf.concat([tf.reshape(parts.stack(), [-1, dim]), last], axis=0)
        places = tf.maximum(self.positions, 0)[:, tf.newaxis]  # Those without one weigh 0.
        own = upstream[:, tf.newaxis]
        of_items = tf.tensor_scatter_nd_sub(of_items, places, queries * own)
        return (
            of_queries - self.pick_targets(items) * own,
            tf.ensure_shape(of_items, items.shape),
        )

    @property
    def _full(self) -> int | tf.Tensor:
        """Number of full blocks; what is left is one more, which may be empty."""
        return self.size // self.block

    def _repeat(self, step: Callable[..., Sums], start: Sums) -> Sums:
        """Goes over the full blocks, one after the other, as each takes memory."""
        if isinstance(self._full, int) and not self._full:
            return start  # XLA compiles the loop's body too, whose block the items do not fill.
        found: Sums = tf.while_loop(
            lambda number, *_: number < self._full, step, start, parallel_iterations=1
        )
        return found

    def _cut(self, items: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        return tf.slice(items, [number * self.block, 0], [self.block, items.shape[1]])

    def _multiply(self, left: tf.Tensor, right: tf.Tensor, **options: bool) -> tf.Tensor:
        product = tf.matmul(tf.cast(left, self.dtype), tf.cast(right, self.dtype), **options)
        return tf.cast(product, tf.float32)
