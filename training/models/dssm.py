"""DSSM: two towers over pooled embeddings, compared by cosine; and YouTubeDNN, with one tower.

After Huang et al. 2013, "Learning deep structured semantic models for web search using
clickthrough data", with embeddings in place of word hashing; Covington et al. 2016, "Deep neural
networks for YouTube recommendations", section 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest, bound_list
from conf.schema import FeatureSpec
from conf.training.models import (
    DSSMConfig,
    OwnTowerConfig,
    PoolingConfig,
    SequenceConfig,
    TowerSettings,
    YouTubeDNNConfig,
)
from training.input.batches import Features
from training.models.embedded_inputs import EmbeddedInputs
from training.models.embedding_tables import TableBuilder
from training.models.model import find_feature
from training.models.pooling import complete_pooling, find_weights
from training.models.retrieval import RetrievalModel
from training.networks.layers import PositionWeights, normalize_rows
from training.networks.network import Network, TrainingPass, build_keras_model, building_layers
from training.networks.tower import build_own_tower, build_tower, check_activation
from training.reader.feature_columns import list_length


class DSSM(RetrievalModel):
    """A user tower and an item tower that share embedding tables.

    A single embedded scalar without hidden layers is the vector itself: an item tower over the
    item id alone stays a plain table.

    Args:
        config: The model's config.
        manifest: The dataset version whose features it reads.
        seed: Seed of the first weights.
        dtype: Type that the towers compute in.
        pools_alone: Whether a list, if it is all that a tower without hidden layers reads, is the
            vector itself once it is pooled.

    Attributes:
        user_tower: Network of the user tower; None: the vector itself.
        item_tower: Network of the item tower; None: the vector itself.

    Raises:
        ConfigError: The config names features that the model cannot read, or asks for weights of
            history positions where there is no history of a known length.
    """

    def __init__(
        self,
        config: DSSMConfig,
        manifest: Manifest,
        seed: int,
        dtype: tf.DType = tf.float32,
        *,
        pools_alone: bool = False,
    ) -> None:
        super().__init__(name="dssm")
        check_activation(config.activation)
        users = select_features(manifest, config, config.user_features, "user")
        items = select_features(manifest, config, config.item_features, "item")
        pooling = plan_pooling(config, manifest, (*users, *items))
        self.temperature, self._normalize = config.temperature, config.normalize
        builder = TableBuilder(config, manifest, (*users, *items), seed)
        weighted: dict[str, PositionWeights] = {}
        if config.history_pooling == "position_weighted":
            embedded = [spec.name for spec in users if builder.is_embedded(spec)]
            users, history = _bound_history(manifest, users, embedded)
            length = list_length(next(spec for spec in users if spec.name == history)) or 0
            weighted[history] = PositionWeights(f"user_tower/{history}", length)
        sides = [
            [builder.plan_input(spec, pooling.get(spec.name)) for spec in side]
            for side in (users, items)
        ]
        built = builder.build_tables([*sides[0], *sides[1]])
        self.tables = built.tables
        self._users = built.build_inputs(sides[0], weighted)
        self._items = built.build_inputs(sides[1])
        self.user_inputs, self.item_inputs = self._users.names, self._items.names
        with building_layers("dssm", seed, dtype):
            self.user_tower = self.item_tower = None
            if not _is_vector(self._users, config, "user", pools_alone):
                self.user_tower = _build_network("user", self._users, config)
            first = 0 if self.user_tower is None else self.user_tower.random_layers
            if not _is_vector(self._items, config, "item", pools_alone):
                self.item_tower = _build_network("item", self._items, config, first)

    @property
    def embedded_inputs(self) -> Sequence[EmbeddedInputs]:
        """Users and items."""
        return self._users, self._items

    @property
    def networks(self) -> Sequence[Network]:
        """The towers that have layers."""
        return [tower for tower in (self.user_tower, self.item_tower) if tower is not None]

    def embed_users(self, features: Features, training: TrainingPass | None = None) -> tf.Tensor:
        """Returns user vectors `[batch, embedding_dim]`; of length one if normalized."""
        return self._embed(self._users(features), self.user_tower, training)

    def embed_items(self, features: Features, training: TrainingPass | None = None) -> tf.Tensor:
        """Returns item vectors `[batch, embedding_dim]`; of length one if normalized."""
        return self._embed(self._items(features), self.item_tower, training)

    def _embed(
        self,
        inputs: Mapping[str, tf.Tensor],
        tower: Network | None,
        training: TrainingPass | None,
    ) -> tf.Tensor:
        vectors = next(iter(inputs.values())) if tower is None else tower(inputs, training)
        return normalize_rows(vectors) if self._normalize else vectors


def _own_tower(config: DSSMConfig | SequenceConfig, side: str) -> OwnTowerConfig | None:
    found: OwnTowerConfig | None = getattr(config, f"{side}_tower", None)
    return found


def _hidden_units(config: DSSMConfig, side: str) -> tuple[int, ...]:
    return config.user_hidden_units if side == "user" else config.item_hidden_units


def _is_vector(inputs: EmbeddedInputs, config: DSSMConfig, side: str, pools_alone: bool) -> bool:
    """Whether the only input of a tower is its vector."""
    if not inputs.features:
        raise ConfigError(
            f"the {side}_tower has no input feature",
            allowed="one or more features of the dataset",
            fix=f"name some in model.{side}_features, or build the dataset with one",
        )
    if _own_tower(config, side) is not None:
        return False
    only = inputs.features[0]
    is_one = len(inputs.features) == 1 and (pools_alone or not only.spec.is_list)
    return is_one and only.dim == config.embedding_dim and not _hidden_units(config, side)


def _build_network(
    side: str, inputs: EmbeddedInputs, config: DSSMConfig, first_seed: int = 0
) -> Network:
    """Builds the network of a tower."""
    tensors = inputs.build_keras_inputs()
    if (own := _own_tower(config, side)) is not None:
        output = build_own_tower(own, side, tensors, config.embedding_dim)
        return Network(build_keras_model(f"{side}_tower", tensors, output), first_seed)
    dropout = config.dropout
    if side == "item" and config.item_dropout is not None:
        dropout = config.item_dropout or None
    output = build_tower(
        tensors,
        hidden_units=_hidden_units(config, side),
        output_dim=config.embedding_dim,
        activation=config.activation,
        batch_normalization=config.batch_normalization,
        l2=config.kernel_l2,
        dropout=dropout,
    )
    return Network(build_keras_model(f"{side}_tower", tensors, output), first_seed)


def build_youtube_dnn(
    config: YouTubeDNNConfig, manifest: Manifest, seed: int, dtype: tf.DType = tf.float32
) -> DSSM:
    """Builds a YouTubeDNN: a tower over what users did, and the table of the items that they met.

    It is a DSSM without the user's id, whose items are their ids alone; a history that the user
    tower has alone, without hidden layers, is the user's vector once it is pooled.

    Args:
        config: The model's config.
        manifest: The dataset version whose features it reads.
        seed: Seed of the first weights.
        dtype: Type that the tower computes in.

    Raises:
        ConfigError: As of `DSSM`.
    """
    users = config.user_features
    if users is None:
        found = [spec.name for spec in manifest.schema.features if spec.role == "user"]
        weights = {pooling.weights for pooling in config.pooling.values()}
        weights |= {manifest.keys.user, *find_weights(manifest).values()}
        users = tuple(name for name in found if name not in weights)
    shared = {name: getattr(config, name) for name in TowerSettings.model_fields}
    towers = DSSMConfig(
        **{**shared, "user_features": users, "item_features": (manifest.require_key("item"),)}
    )
    return DSSM(towers, manifest, seed, dtype, pools_alone=True)


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
    history = manifest.find_history()
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


def plan_pooling(
    config: DSSMConfig | SequenceConfig, manifest: Manifest, specs: Sequence[FeatureSpec]
) -> dict[str, PoolingConfig]:
    """Returns how lists are pooled that something is said of, by name.

    Raises:
        ConfigError: No vector comes of a list, or its weights are features of the other side.
    """
    by_name = {spec.name: spec for spec in specs}
    completed = complete_pooling(config.pooling, manifest, by_name)
    for name, pooling in completed.items():
        key = f"model.pooling.{name}"
        if pooling.combiner == "none" and _own_tower(config, by_name[name].role) is None:
            raise ConfigError(
                f"{key}: a tower takes one vector of each list",
                received="combiner none",
                allowed="mean, sum, max, last; none for a tower of one's own (model.user_tower)",
            )
        learns_positions = getattr(config, "history_pooling", None) == "position_weighted"
        if name == manifest.find_history() and learns_positions:
            raise ConfigError(
                f"{key} and model.history_pooling=position_weighted both pool the history",
                fix="leave one of them out",
            )
        for beside in (pooling.weights, pooling.ids):
            if beside is not None and manifest.schema[beside].role != by_name[name].role:
                raise ConfigError(
                    f"{key} names a feature of another role",
                    received=f"{beside} (role {manifest.schema[beside].role})",
                    allowed=f"features of role {by_name[name].role}",
                )
    return completed


def select_features(
    manifest: Manifest,
    config: DSSMConfig | SequenceConfig,
    names: tuple[str, ...] | None,
    role: str,
    key: str | None = None,
) -> list[FeatureSpec]:
    """Returns features of one side; of its role, as only those are known when serving.

    Args:
        manifest: The dataset version.
        config: The model's config.
        names: Their names; None: all of the role but weights of lists.
        role: user or item.
        key: Key of the config that names them; None: that of the role's features.

    Raises:
        ConfigError: The dataset has no such feature, or it is of another role.
    """
    if names is None:
        weights = {pooling.weights for pooling in config.pooling.values()}
        weights |= set(find_weights(manifest).values())
        of_role = [spec for spec in manifest.schema.features if spec.role == role]
        return [spec for spec in of_role if spec.name not in weights]
    specs = [find_feature(manifest, name) for name in names]
    for spec in specs:
        if spec.role != role:
            raise ConfigError(
                f"{key or f'model.{role}_features'} names a feature of another role",
                received=f"{spec.name} (role {spec.role})",
                allowed=", ".join(s.name for s in manifest.schema.features if s.role == role),
            )
    return specs
