"""Small models: two towers for evaluation and export, a shared table with an exact loss."""

from __future__ import annotations

import tensorflow as tf

from conf.manifest import Manifest
from training.embedding.static_table import EmbeddingTable
from training.input.batches import Batch
from training.models.retrieval import RetrievalModel
from training.networks.layers import MLP, pool_rows
from training.networks.tower import Features


class TinyTowers(tf.Module):
    """Sums of embeddings; lists are mean-pooled over their non-padded positions."""

    def __init__(self, manifest: Manifest, dim: int = 6, seed: int = 3) -> None:
        super().__init__()
        schema = manifest.schema
        self.user_inputs = ("user_id", "gender", "history")
        self.item_inputs = ("movie_id", "genres")
        rng = tf.random.Generator.from_seed(seed)
        self.tables = {
            spec.table: tf.Variable(rng.normal((spec.vocabulary_size, dim)), name=spec.table)
            for spec in schema.features
            if spec.vocabulary_size
        }
        self.table_of = {spec.name: spec.table for spec in schema.features}

    def embed_users(self, features: dict[str, tf.Tensor]) -> tf.Tensor:
        return self._sum(features, self.user_inputs)

    def embed_items(self, features: dict[str, tf.Tensor]) -> tf.Tensor:
        return self._sum(features, self.item_inputs)

    def _sum(self, features: dict[str, tf.Tensor], names: tuple[str, ...]) -> tf.Tensor:
        return tf.add_n([self._pool(features[name], self.table_of[name]) for name in names])

    def _pool(self, ids: tf.Tensor, table: str) -> tf.Tensor:
        vectors = tf.gather(self.tables[table], ids)
        if len(ids.shape) == 1:
            return vectors
        mask = tf.cast(ids != 0, tf.float32)[..., None]
        return tf.reduce_sum(vectors * mask, 1) / tf.maximum(tf.reduce_sum(mask, 1), 1.0)


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
