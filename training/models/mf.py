"""Matrix factorization: dot product of a user's and an item's embedding, plus item bias.

Koren, Bell & Volinsky 2009, "Matrix factorization techniques for recommender systems", eq. 4,
without the user bias and the mean, which move all items alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.training.models import MFConfig
from training.input.batches import Features
from training.models.embedded_inputs import BIAS_SUFFIX, EmbeddedInputs
from training.models.embedding_tables import TableBuilder
from training.models.model import find_feature
from training.models.retrieval import RetrievalModel
from training.networks.layers import normalize_rows
from training.networks.network import TrainingPass


class MatrixFactorization(RetrievalModel):
    """Two embedding tables, and a bias per item folded into the item's vector.

    Args:
        config: The model's config.
        manifest: The dataset version whose keys it reads.
        seed: Seed of the first weights.

    Raises:
        ConfigError: The config names tables that the model cannot have, or gives them two lengths.
    """

    def __init__(self, config: MFConfig, manifest: Manifest, seed: int) -> None:
        super().__init__(name="mf")
        user = find_feature(manifest, manifest.require_key("user"))
        item = find_feature(manifest, manifest.require_key("item"))
        builder = TableBuilder(config, manifest, (user, item), seed)
        users, items = builder.plan_rows(user), builder.plan_rows(item, bias=config.item_bias)
        if users.dim != items.dim:
            raise ConfigError(
                "matrix factorization multiplies vectors of one length",
                received=f"{users.spec.table}: {users.dim}, {items.spec.table}: {items.dim}",
                fix="give both tables one `dim`, or set model.embedding_dim alone",
            )
        self.user_inputs, self.item_inputs = (user.name,), (item.name,)
        self.temperature = config.temperature
        self._normalize = config.normalize
        # Users who are items too, as where users follow users, may share a table.
        built = builder.build_tables((users, items))
        self.tables = built.tables
        self._users = built.build_inputs((users,))
        self._items = built.build_inputs((items,))

    @property
    def embedded_inputs(self) -> Sequence[EmbeddedInputs]:
        """Users and items."""
        return self._users, self._items

    def embed_users(self, features: Features, training: TrainingPass | None = None) -> tf.Tensor:
        """Returns `[batch, embedding_dim]`, or one column of ones more with an item bias."""
        vectors = self._scale(self._users(features)[self.user_inputs[0]])
        if not self._items.biases:
            return vectors
        return tf.concat([vectors, tf.ones_like(vectors[:, :1])], axis=1)

    def embed_items(self, features: Features, training: TrainingPass | None = None) -> tf.Tensor:
        """Returns `[batch, embedding_dim]`, or the item's bias as one column more."""
        name = self.item_inputs[0]
        inputs = self._items(features)
        vectors = self._scale(inputs[name])
        if not self._items.biases:
            return vectors
        return tf.concat([vectors, inputs[name + BIAS_SUFFIX]], axis=1)

    def _scale(self, vectors: tf.Tensor) -> tf.Tensor:
        return normalize_rows(vectors) if self._normalize else vectors
