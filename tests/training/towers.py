"""A minimal retrieval model: the contract that evaluation, export and prediction rely on."""

from __future__ import annotations

import tensorflow as tf

from conf.manifest import Manifest


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
