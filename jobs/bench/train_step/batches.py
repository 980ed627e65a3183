"""Batches with long histories, ids drawn by Zipf's law as clicks are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from conf.schema import FIRST_TOKEN_ID


@dataclass(frozen=True)
class BatchShape:
    """Size of a batch, and what its ids look like.

    Attributes:
        rows: Rows per batch.
        length: Items per history.
        vocabulary_size: Ids are below it.
        exponent: Of Zipf's law; the k-th most frequent item has a weight of `k ** -exponent`.
        distinct: Batches that are made; they are repeated.
        seed: Seed of the draws.
    """

    rows: int
    length: int
    vocabulary_size: int
    exponent: float = 1.0
    distinct: int = 16
    seed: int = 0

    def build(self, spread: int = 1) -> tf.data.Dataset:
        """Returns the batches over and over: `history`, `item`, `label`.

        Args:
            spread: What ids are multiplied by, to reach all over a larger table.
        """
        rng = np.random.default_rng(self.seed)
        tokens = self.vocabulary_size - FIRST_TOKEN_ID
        share = np.cumsum(np.arange(1, tokens + 1, dtype=np.float64) ** -self.exponent)
        # Frequent items lie all over the table, as where ids are hashed or came over time.
        id_of_rank = FIRST_TOKEN_ID + rng.permutation(tokens)
        draws = rng.random((self.distinct, self.rows, self.length + 1)) * share[-1]
        ids = id_of_rank[np.minimum(np.searchsorted(share, draws), tokens - 1)] * spread
        columns = {
            "history": ids[:, :, 1:].astype(np.int64),
            "item": ids[:, :, 0].astype(np.int64),
            "label": rng.integers(0, 2, ids.shape[:2]).astype(np.float32),
        }
        return tf.data.Dataset.from_tensor_slices(columns).repeat().prefetch(2)

    def build_arriving(self, share: float) -> tf.data.Dataset:
        """Returns the batches over and over, with new ids in place of some items of histories.

        Args:
            share: Of the items, how many are ids that no batch has had before.
        """

        def replace(number: tf.Tensor, batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            history = batch["history"]
            cells = tf.reshape(tf.range(tf.size(history, tf.int64)), tf.shape(history))
            first = (number + 1) * tf.size(history, tf.int64) + self.vocabulary_size
            every = round(1 / share)
            return {**batch, "history": tf.where(cells % every == 0, first + cells, history)}

        return self.build().enumerate().map(replace).prefetch(2)

    def count_unique(self) -> float:
        """Distinct ids per batch, in the mean."""
        counts = [
            len(np.unique(np.append(batch["history"], batch["item"])))
            for batch in self.build().take(self.distinct).as_numpy_iterator()
        ]
        return float(np.mean(counts))
