"""DSSM: two towers over pooled embeddings, compared by cosine.

After Huang et al. 2013, "Learning deep structured semantic models for web search using
clickthrough data", with embeddings in place of word hashing.
"""

from __future__ import annotations

import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.schema import FeatureSpec
from conf.training.models import DSSMConfig
from training.embedding.static_table import EmbeddingTable
from training.input.feature_columns import bound_list, list_length
from training.models.embedding_tables import TableBuilder
from training.models.retrieval import RetrievalModel, find_feature
from training.networks.tower import Features, Tower, TowerConfig


class DSSM(RetrievalModel):
    """A user tower and an item tower that share embedding tables; vectors have length one.

    Args:
        config: The model's config.
        manifest: The dataset version whose features it reads.
        seed: Seed of the first weights.

    Raises:
        ConfigError: The config names features that the model cannot read, or asks for weights of
            history positions where there is no history of a known length.
    """

    def __init__(self, config: DSSMConfig, manifest: Manifest, seed: int) -> None:
        super().__init__(name="dssm")
        users = _side(manifest, config.user_features, "user")
        items = _side(manifest, config.item_features, "item")
        self.user_inputs = tuple(spec.name for spec in users)
        self.item_inputs = tuple(spec.name for spec in items)
        self.temperature = config.temperature
        builder = TableBuilder(config, manifest, (*users, *items), seed)
        users, items = ([builder.resolve(spec) for spec in side] for side in (users, items))
        embedded = [spec for spec in (*users, *items) if builder.is_embedded(spec)]
        self.tables = builder.build_all(embedded)
        of_features = {spec.name: self.tables[spec.table] for spec in embedded}
        ordered = None
        if config.history_pooling == "position_weighted":
            users, ordered = _bound_history(manifest, users, [spec.name for spec in embedded])
        self.user_tower = Tower(
            TowerConfig(
                "user_tower",
                config.user_hidden_units,
                config.embedding_dim,
                config.dropout,
                ordered,
            ),
            users,
            of_features,
            seed,
        )
        self.item_tower = Tower(
            TowerConfig(
                "item_tower", config.item_hidden_units, config.embedding_dim, config.dropout
            ),
            items,
            of_features,
            seed,
        )

    def embed_users(self, features: Features, dropout_seed: tf.Tensor | None = None) -> tf.Tensor:
        """Returns unit user vectors `[batch, embedding_dim]`."""
        return self.user_tower(features, dropout_seed)

    def embed_items(self, features: Features, dropout_seed: tf.Tensor | None = None) -> tf.Tensor:
        """Returns unit item vectors `[batch, embedding_dim]`."""
        return self.item_tower(features, dropout_seed)

    @property
    def lookups(self) -> list[tuple[str, tf.Variable]]:
        """Scalars and pooled lists."""
        pooled = {**self.user_tower.pooled_tables, **self.item_tower.pooled_tables}
        return [*super().lookups, *((name, table.variable) for name, table in pooled.items())]

    @property
    def embedded_features(self) -> dict[str, EmbeddingTable]:
        """Table of each feature, lists of any pooling included."""
        return {**self.user_tower.tables, **self.item_tower.tables}

    @property
    def _scalar_tables(self) -> dict[str, EmbeddingTable]:
        return {**self.user_tower.scalar_tables, **self.item_tower.scalar_tables}


def _bound_history(
    manifest: Manifest, users: list[FeatureSpec], embedded: list[str]
) -> tuple[list[FeatureSpec], str]:
    """Returns the user features with a bounded history, and the history's name."""
    bounded = [bound_list(manifest, spec) for spec in users]
    weighable = [
        spec.name
        for spec in bounded
        if spec.is_list and spec.name in embedded and list_length(spec) is not None
    ]
    history = manifest.keys.history
    if history is None or history not in weighable:
        raise ConfigError(
            "model.history_pooling=position_weighted needs a history of a known length",
            received=f"history {history!r}, user features {', '.join(s.name for s in users)}",
            allowed="keys.history among the user features, with a vocabulary and a max_len",
            fix="set model.history_pooling=mean, add the history to model.user_features, or build "
            "the dataset with a history feature that has a max_len",
        )
    return [new if new.name == history else old for old, new in zip(users, bounded, strict=True)], (
        history
    )


def _side(manifest: Manifest, names: tuple[str, ...] | None, role: str) -> list[FeatureSpec]:
    """Features of one tower; they must be of its role, as only those are known when serving."""
    if names is None:
        return [spec for spec in manifest.schema.features if spec.role == role]
    specs = [find_feature(manifest, name) for name in names]
    for spec in specs:
        if spec.role != role:
            raise ConfigError(
                f"model.{role}_features names a feature of another role",
                received=f"{spec.name} (role {spec.role})",
                allowed=", ".join(s.name for s in manifest.schema.features if s.role == role),
            )
    return specs
