"""Matrix factorization: dot product of a user's and an item's embedding, plus biases.

Koren, Bell & Volinsky 2009, "Matrix factorization techniques for recommender systems", eq. 4:
`y = b + b_u + b_i + <p, q>`, of which b and b_u, which move all items alike, may be left out.
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
    """Two embedding tables, and biases folded into the vectors: `<[p, b_u + b, 1], [q, 1, b_i]>`.

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
        users = builder.plan_rows(user, bias=config.user_bias)
        items = builder.plan_rows(item, bias=config.item_bias)
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
        self._bias = tf.Variable([0.0], name="bias") if config.user_bias else None

    @property
    def embedded_inputs(self) -> Sequence[EmbeddedInputs]:
        """Users and items."""
        return self._users, self._items

    @property
    def named_weights(self) -> dict[str, tf.Variable]:
        """The bias of all pairs, if there is one."""
        return {} if self._bias is None else {"bias": self._bias}

    def embed_users(self, features: Features, training: TrainingPass | None = None) -> tf.Tensor:
        """Returns `[batch, embedding_dim]`, and a column for each of the two biases."""
        name, inputs = self.user_inputs[0], self._users(features)
        columns = [self._scale(inputs[name])]
        if self._bias is not None:
            columns.append(inputs[name + BIAS_SUFFIX] + self._bias)
        if self._items.biases:
            columns.append(tf.ones_like(columns[0][:, :1]))
        return tf.concat(columns, axis=1)

    def embed_items(self, features: Features, training: TrainingPass | None = None) -> tf.Tensor:
        """Returns `[batch, embedding_dim]`, with columns as in `embed_users`."""
        name, inputs = self.item_inputs[0], self._items(features)
        columns = [self._scale(inputs[name])]
        if self._bias is not None:
            columns.append(tf.ones_like(columns[0][:, :1]))
        if self._items.biases:
            columns.append(inputs[name + BIAS_SUFFIX])
        return tf.concat(columns, axis=1)

    def _scale(self, vectors: tf.Tensor) -> tf.Tensor:
        return normalize_rows(vectors) if self._normalize else vectors
