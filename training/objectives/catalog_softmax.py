"""Softmax over the whole catalogue in blocks of items, which keeps no matrix of all scores.

The forward pass keeps the largest score and the sum of exponentials of each query while it goes
over the blocks (Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", section 3).
The backward pass scores each block again: that costs less than writing and reading the whole matrix
three times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from training.objectives.softmax_memory import BLOCK_ITEMS

Sums = tuple[Any, ...]
MASKED_SCORE = -1e9
"""Low enough to vanish in a float32 softmax, high enough to stay finite."""


def compute_catalog_softmax(
    queries: tf.Tensor,
    items: tf.Tensor,
    positions: tf.Tensor,
    masked: tf.Tensor | None = None,
    rows: tf.Tensor | None = None,
    *,
    temperature: float = 1.0,
    dtype: tf.DType = tf.float32,
) -> tf.Tensor:
    """Cross-entropy of each query's target among all items, float32 `[n]`; 0 where it is none.

    Args:
        queries: float32 `[n, dim]`.
        items: float32 `[items, dim]`.
        positions: int32 `[n]`, where the target is among the items; below 0: it is none of them.
        masked: Items that are left out of a row, unless they are the target; bool `[rows, items]`,
            or None.
        rows: int32 `[n]`, the row of `masked` that each query is of; None: they are the rows.
        temperature: Above 0.
        dtype: Type that products are computed in.
    """
    of_queries = tf.range(tf.shape(queries)[0]) if rows is None else rows
    size = tf.shape(items)[0] if items.shape[0] is None else int(items.shape[0])
    catalog = _Catalog(positions, masked, of_queries, size, 1.0 / temperature, dtype)

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
        places = start + tf.range(width)
        is_own = places[tf.newaxis, :] == self.positions[:, tf.newaxis]
        return tf.where(tf.gather(marks, self.rows) & ~is_own, MASKED_SCORE, scores)

    def sum_exponentials(self, queries: tf.Tensor, items: tf.Tensor) -> Sums:
        """Returns each query's highest score and its sum of exponentials beside that, `[n]`."""

        def add(number: int | tf.Tensor, block: tf.Tensor, *sums: tf.Tensor) -> Sums:
            highest, total = sums
            scores = self.score(queries, block, number * BLOCK_ITEMS)
            higher = tf.maximum(highest, tf.reduce_max(scores, axis=1))
            added = tf.reduce_sum(tf.exp(scores - higher[:, tf.newaxis]), axis=1)
            return higher, total * tf.exp(highest - higher) + added

        def step(number: tf.Tensor, *sums: tf.Tensor) -> Sums:
            return number + 1, *add(number, _cut(items, number), *sums)

        none = tf.zeros_like(queries[:, 0])
        _, *sums = self._repeat(step, (0, none + tf.float32.min, none))
        return add(self._full, items[self._full * BLOCK_ITEMS :], *sums)

    def differentiate(
        self, queries: tf.Tensor, items: tf.Tensor, sums: Sums, upstream: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the gradients of queries and items; the upstream one is scaled, `[n]`.

        What is left of a target that is nearly sure is a difference of numbers near 1: of the log
        of a sum, whose digits go into the highest score, it would not be much.
        """
        highest, of_total = sums[0][:, tf.newaxis], (upstream / sums[1])[:, tf.newaxis]

        def add(number: int | tf.Tensor, block: tf.Tensor, total: tf.Tensor) -> Sums:
            scores = self.score(queries, block, number * BLOCK_ITEMS)
            shares = tf.exp(scores - highest) * of_total
            of_block = self._multiply(shares, queries, transpose_a=True)
            return total + self._multiply(shares, block), of_block

        def step(number: tf.Tensor, total: tf.Tensor, parts: tf.TensorArray) -> Sums:
            total, of_block = add(number, _cut(items, number), total)
            return number + 1, total, parts.write(number, of_block)

        dim = items.shape[1]
        parts = tf.TensorArray(tf.float32, self._full, element_shape=[BLOCK_ITEMS, dim])
        _, total, parts = self._repeat(step, (0, tf.zeros_like(queries), parts))
        of_queries, last = add(self._full, items[self._full * BLOCK_ITEMS :], total)
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
        return self.size // BLOCK_ITEMS

    def _repeat(self, step: Callable[..., Sums], start: Sums) -> Sums:
        """Goes over the full blocks, one after the other, as each takes memory."""
        if isinstance(self._full, int) and not self._full:
            return start  # XLA compiles the loop's body too, whose block the items do not fill.
        found: Sums = tf.while_loop(
            lambda number, *_: number < self._full, step, start, parallel_iterations=1
        )
        return found

    def _multiply(self, left: tf.Tensor, right: tf.Tensor, **options: bool) -> tf.Tensor:
        product = tf.matmul(tf.cast(left, self.dtype), tf.cast(right, self.dtype), **options)
        return tf.cast(product, tf.float32)


def _cut(items: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """Returns a full block."""
    return tf.slice(items, [number * BLOCK_ITEMS, 0], [BLOCK_ITEMS, items.shape[1]])
