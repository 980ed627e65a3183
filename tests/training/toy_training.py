"""A small model with a shared table, dense weights and an exact loss per row, and its batches."""

from __future__ import annotations

import tensorflow as tf

from training.embedding.table import EmbeddingTable
from training.input import Batch
from training.layers.mlp import MLP
from training.layers.pooling import pool_rows
from training.models.base import Features, RetrievalModel

VOCABULARY, DIM, LENGTH = 23, 4, 3


class ToyModel(RetrievalModel):
    """A pooled list through a hidden layer; list and item share a table, users have their own.

    Args:
        seed: Seed of the first weights.
        tables: The tables `items` and `users`; None: static ones.
    """

    def __init__(self, seed: int = 1, tables: dict[str, EmbeddingTable] | None = None) -> None:
        super().__init__(name="toy_model")
        self.user_inputs, self.item_inputs, self.temperature = ("user", "list"), ("item",), 1.0
        self.tables = tables or {
            name: EmbeddingTable(name, VOCABULARY, DIM, seed=seed, stddev=0.5)
            for name in ("items", "users")
        }
        self.mlp = MLP("toy", DIM, [5], DIM, seed=seed)

    def embed_users(self, features: Features, dropout_seed: tf.Tensor | None = None) -> tf.Tensor:
        """Returns user vectors `[batch, DIM]`."""
        ids = features["list"]
        pooled = pool_rows(self.tables["items"], ids)
        return self.mlp(pooled) + self.tables["users"].lookup(features["user"])

    def embed_items(self, features: Features, dropout_seed: tf.Tensor | None = None) -> tf.Tensor:
        """Returns item vectors `[batch, DIM]`."""
        return self.tables["items"].lookup(features["item"])

    @property
    def lookups(self) -> list[tuple[str, tf.Variable]]:
        """All features."""
        return [*super().lookups, ("list", self.tables["items"].variable)]

    @property
    def embedded_features(self) -> dict[str, EmbeddingTable]:
        """All features."""
        return {**self._scalar_tables, "list": self.tables["items"]}

    @property
    def _scalar_tables(self) -> dict[str, EmbeddingTable]:
        return {"user": self.tables["users"], "item": self.tables["items"]}


def squared_error(model: RetrievalModel, batch: Batch, seed: tf.Tensor) -> tf.Tensor:
    """Squared error of the dot product against the label, `[local_batch]`."""
    scores = tf.reduce_sum(model.embed_users(batch) * model.embed_items(batch), axis=1)
    return tf.square(scores - batch["label"])


def build_toy_batches(rows: int, count: int = 8, seed: int = 0) -> tf.data.Dataset:
    """Returns batches whose ids repeat within a batch and between batches."""
    shape = [count, rows]
    columns = {
        name: tf.random.stateless_uniform(size, [seed, stream], 0, VOCABULARY, tf.int64)
        for stream, (name, size) in enumerate(
            {"user": shape, "item": shape, "list": [*shape, LENGTH]}.items()
        )
    }
    columns["label"] = tf.random.stateless_normal(shape, [seed, 9])
    return tf.data.Dataset.from_tensor_slices(columns)
