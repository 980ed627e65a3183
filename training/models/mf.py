"""Matrix factorization: dot product of a user's and an item's embedding, plus item bias.

Koren, Bell & Volinsky 2009, "Matrix factorization techniques for recommender systems", eq. 4,
without the user bias and the mean, which move all items alike.
"""

from __future__ import annotations

import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.training.models import MFConfig
from training.embedding.static_table import EmbeddingTable
from training.models.embedding_tables import TableBuilder
from training.models.retrieval import RetrievalModel, find_feature
from training.networks.layers import normalize_rows
from training.networks.tower import Features

BIAS_SUFFIX = "_bias"


class MatrixFactorization(RetrievalModel):
    """Two embedding tables, and a bias per item folded into the item's vector.

    Args:
        config: The model's config.
        manifest: The dataset version whose keys it reads.
        seed: Seed of the first weights.

    Raises:
        ConfigError: The config names tables that the model cannot have.
    """

    def __init__(self, config: MFConfig, manifest: Manifest, seed: int) -> None:
        super().__init__(name="mf")
        user = find_feature(manifest, manifest.require_key("user"))
        item = find_feature(manifest, manifest.require_key("item"))
        builder = TableBuilder(config, manifest, (user, item), seed)
        user, item = builder.resolve(user), builder.resolve(item)
        self.user_inputs = (user.name,)
        self.item_inputs = (item.name,)
        self.temperature = config.temperature
        self._normalize = config.normalize
        # Users who are items too, as where users follow users, may share a table.
        self.tables = builder.build_all((user, item))
        self.user_table, self.item_table = self.tables[user.table], self.tables[item.table]
        self.item_bias: EmbeddingTable | None = None
        if config.item_bias:
            name = f"{item.table}{BIAS_SUFFIX}"
            if name in self.tables:
                raise ConfigError(
                    "the table of the items' bias has the name of another table",
                    received=name,
                    fix=f"call the table of {user.name} something else, or set "
                    "model.item_bias=false",
                )
            self.item_bias = builder.build_beside(name, self.item_table, 1)
            self.tables[name] = self.item_bias

    @property
    def id_spaces(self) -> dict[str, str]:
        """As for every model; the item's bias has the item's ids."""
        spaces = super().id_spaces
        return {name: spaces.get(name.removesuffix(BIAS_SUFFIX), name) for name in spaces}

    def embed_users(self, features: Features, dropout_seed: tf.Tensor | None = None) -> tf.Tensor:
        """Returns `[batch, embedding_dim]`, or one column of ones more with an item bias."""
        vectors = self._scale(self.user_table.lookup(features[self.user_inputs[0]]))
        if self.item_bias is None:
            return vectors
        return tf.concat([vectors, tf.ones_like(vectors[:, :1])], axis=1)

    def embed_items(self, features: Features, dropout_seed: tf.Tensor | None = None) -> tf.Tensor:
        """Returns `[batch, embedding_dim]`, or the item's bias as one column more."""
        ids = features[self.item_inputs[0]]
        vectors = self._scale(self.item_table.lookup(ids))
        if self.item_bias is None:
            return vectors
        return tf.concat([vectors, self.item_bias.lookup(ids)], axis=1)

    @property
    def lookups(self) -> list[tuple[str, tf.Variable]]:
        """Users, items and, if there is one, the items' bias."""
        bias = [] if self.item_bias is None else [(self.item_inputs[0], self.item_bias.variable)]
        return [*super().lookups, *bias]

    def _scale(self, vectors: tf.Tensor) -> tf.Tensor:
        return normalize_rows(vectors) if self._normalize else vectors

    @property
    def _scalar_tables(self) -> dict[str, EmbeddingTable]:
        return {self.user_inputs[0]: self.user_table, self.item_inputs[0]: self.item_table}
