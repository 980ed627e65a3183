"""Models of a user's and an item's features: MF, DSSM, YouTubeDNN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest, bound_list
from conf.schema import FeatureSpec
from conf.training.models import (
    DSSMConfig,
    MFConfig,
    PoolingConfig,
    SequenceConfig,
    TowerSettings,
)
from training.input.batches import Features
from training.models.embedded_inputs import BIAS_SUFFIX, EmbeddedInputs, InputFeature
from training.models.embedding_tables import TableBuilder, complete_pooling, list_weights
from training.models.retrieval import RetrievalModel
from training.networks.layers import PositionWeights, normalize_rows
from training.networks.network import Network, StepContext, build_keras_model, building_layers
from training.networks.tower import HiddenLayers, build_own_tower, concatenate
from training.reader.feature_columns import find_feature, list_length


class TwoTowers(RetrievalModel):
    """Two sides of embedded inputs; each has a network, or is the vector itself."""

    user_tower: Network | None = None
    item_tower: Network | None = None
    _users: EmbeddedInputs
    _items: EmbeddedInputs
    _normalize: bool

    @property
    def networks(self) -> Sequence[Network]:
        return [tower for tower in (self.user_tower, self.item_tower) if tower is not None]

    @property
    def embedded_inputs(self) -> Sequence[EmbeddedInputs]:
        return self._users, self._items

    def _build_sides(
        self,
        builder: TableBuilder,
        users: Sequence[InputFeature],
        items: Sequence[InputFeature],
        weighted: Mapping[str, PositionWeights] | None = None,
    ) -> None:
        self.tables = builder.build_tables([*users, *items])
        self._users = builder.build_inputs(users, weighted)
        self._items = builder.build_inputs(items)
        self.user_inputs, self.item_inputs = self._users.names, self._items.names

    def embed_users(self, features: Features, training: StepContext | None = None) -> tf.Tensor:
        return self._embed(self._users(features, training), self.user_tower, training)

    def embed_items(self, features: Features, training: StepContext | None = None) -> tf.Tensor:
        return self._embed(self._items(features, training), self.item_tower, training)

    def _embed(
        self, inputs: Mapping[str, tf.Tensor], tower: Network | None, training: StepContext | None
    ) -> tf.Tensor:
        vectors = next(iter(inputs.values())) if tower is None else tower(inputs, training)
        return self._scale(vectors)

    def _scale(self, vectors: tf.Tensor) -> tf.Tensor:
        return normalize_rows(vectors) if self._normalize else vectors


class MatrixFactorization(TwoTowers):
    """Two embedding tables, and biases folded into the vectors: `<[p, b_u + b, 1], [q, 1, b_i]>`.

    Koren, Bell & Volinsky 2009, "Matrix factorization techniques for recommender systems", eq. 4:
    `y = b + b_u + b_i + <p, q>`, of which b and b_u, which move all items alike, may be left out.
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
        self.temperature, self._normalize = config.temperature, config.normalize
        # Users who are items too, as where users follow users, may share a table.
        self._build_sides(builder, (users,), (items,))
        self._bias = tf.Variable([0.0], name="bias") if config.user_bias else None

    @property
    def named_weights(self) -> dict[str, tf.Variable]:
        return {} if self._bias is None else {"bias": self._bias}

    def embed_users(self, features: Features, training: StepContext | None = None) -> tf.Tensor:
        """Returns `[batch, embedding_dim]`, and a column for each of the two biases."""
        name, inputs = self.user_inputs[0], self._users(features, training)
        columns = [self._scale(inputs[name])]
        if self._bias is not None:
            columns.append(inputs[name + BIAS_SUFFIX] + self._bias)
        if self._items.biases:
            columns.append(tf.ones_like(columns[0][:, :1]))
        return tf.concat(columns, axis=1)

    def embed_items(self, features: Features, training: StepContext | None = None) -> tf.Tensor:
        """Returns `[batch, embedding_dim]`, with columns as in `embed_users`."""
        name, inputs = self.item_inputs[0], self._items(features, training)
        columns = [self._scale(inputs[name])]
        if self._bias is not None:
            columns.append(tf.ones_like(columns[0][:, :1]))
        if self._items.biases:
            columns.append(inputs[name + BIAS_SUFFIX])
        return tf.concat(columns, axis=1)


class DSSM(TwoTowers):
    """A user tower and an item tower that share embedding tables.

    After Huang et al. 2013, "Learning deep structured semantic models for web search using
    clickthrough data", with embeddings in place of word hashing. A single embedded scalar without
    hidden layers is the vector itself, so an item tower over the item id alone stays a plain table;
    of YouTubeDNN so is a list that the user tower reads alone, once it is pooled.
    """

    def __init__(
        self, config: TowerSettings, manifest: Manifest, seed: int, dtype: tf.DType = tf.float32
    ) -> None:
        super().__init__(name="dssm")
        pools_alone = not isinstance(config, DSSMConfig)
        if not isinstance(config, DSSMConfig):
            config = _plan_youtube_dnn(config, manifest)
        users = select_features(manifest, config, config.user_features, "user")
        items = select_features(manifest, config, config.item_features, "item")
        pooling = plan_pooling(config, manifest, (*users, *items))
        self.temperature, self._normalize = config.temperature, config.normalize
        builder = TableBuilder(config, manifest, (*users, *items), seed)
        weighted: dict[str, PositionWeights] = {}
        if config.history_pooling == "position_weighted":
            weighted = _weigh_history(manifest, users, builder)
        sides = (users, items)
        planned = [[builder.plan_input(s, pooling.get(s.name)) for s in side] for side in sides]
        self._build_sides(builder, planned[0], planned[1], weighted)
        with building_layers("dssm", seed, dtype):
            self.user_tower = build_side("user", self._users, config, 0, pools_alone)
            first = 0 if self.user_tower is None else self.user_tower.random_layers
            self.item_tower = build_side("item", self._items, config, first, pools_alone)


def build_side(
    side: str,
    inputs: EmbeddedInputs,
    config: DSSMConfig | SequenceConfig,
    first_seed: int,
    pools_alone: bool = False,
) -> Network | None:
    """Builds the tower of a side; None: its only input is the vector."""
    if not inputs.features:
        raise ConfigError(
            f"the {side}_tower has no input feature",
            allowed="one or more features of the dataset",
            fix=f"name some in model.{side}_features, or build the dataset with one",
        )
    only, dim = inputs.features[0], config.embedding_dim
    units, own = getattr(config, f"{side}_hidden_units"), getattr(config, f"{side}_tower", None)
    is_one = len(inputs.features) == 1 and (pools_alone or not only.spec.is_list)
    if is_one and only.dim == dim and not units and own is None:
        return None
    tensors = inputs.build_keras_inputs()
    if own is None:
        layers = HiddenLayers("relu", config.dropout, getattr(config, "batch_normalization", False))
        hidden = layers.stack(concatenate(list(tensors.values())), units)
        output = keras.layers.Dense(dim)(hidden)
    else:
        output = build_own_tower(own, tensors, dim)
    return Network(build_keras_model(f"{side}_tower", tensors, output), first_seed)


def _plan_youtube_dnn(config: TowerSettings, manifest: Manifest) -> DSSMConfig:
    """Returns a DSSM without the user's id, whose items are their ids alone.

    Covington et al. 2016, "Deep neural networks for YouTube recommendations", section 3: a tower
    over what users did, and the table of the items that they met.
    """
    users = config.user_features
    if users is None:
        found = select_features(manifest, config, None, "user")
        users = tuple(spec.name for spec in found if spec.name != manifest.keys.user)
    shared = {name: getattr(config, name) for name in TowerSettings.model_fields}
    items = (manifest.require_key("item"),)
    return DSSMConfig(**{**shared, "user_features": users, "item_features": items})


def _weigh_history(
    manifest: Manifest, users: Sequence[FeatureSpec], builder: TableBuilder
) -> dict[str, PositionWeights]:
    history = manifest.find_history()
    lists = [bound_list(manifest, spec) for spec in users if spec.name == history and spec.is_list]
    lengths = {spec.name: list_length(spec) for spec in lists if builder.is_embedded(spec)}
    if not any(lengths.values()):
        raise ConfigError(
            "model.history_pooling=position_weighted needs a history of a known length",
            received=f"history {history!r}, user features {', '.join(s.name for s in users)}",
            allowed="keys.history among the user features, with a vocabulary and a max_len",
            fix="set model.history_pooling=mean, add the history to model.user_features, or build "
            "the dataset with a history feature that has a max_len",
        )
    return {n: PositionWeights(f"user_tower/{n}", int(most or 0)) for n, most in lengths.items()}


def plan_pooling(
    config: DSSMConfig | SequenceConfig, manifest: Manifest, specs: Sequence[FeatureSpec]
) -> dict[str, PoolingConfig]:
    """Returns how lists are pooled that something is said of, by name."""
    by_name = {spec.name: spec for spec in specs}
    completed = complete_pooling(config.pooling, manifest, by_name)
    for name, pooling in completed.items():
        key, role = f"model.pooling.{name}", by_name[name].role
        if pooling.combiner == "none" and getattr(config, f"{role}_tower", None) is None:
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
        if pooling.weights is not None:
            _require_role(manifest.schema[pooling.weights], role, key, manifest)
    return completed


def select_features(
    manifest: Manifest,
    config: TowerSettings | SequenceConfig,
    names: tuple[str, ...] | None,
    role: str,
    key: str | None = None,
) -> list[FeatureSpec]:
    """Returns features of one side; of its role, as only those are known when serving.

    None: all of the role but weights of lists. `key` of the config names them.
    """
    if names is None:
        weights = list_weights(config.pooling, manifest)
        of_role = [spec for spec in manifest.schema.features if spec.role == role]
        return [spec for spec in of_role if spec.name not in weights]
    specs = [find_feature(manifest, name) for name in names]
    for spec in specs:
        _require_role(spec, role, key or f"model.{role}_features", manifest)
    return specs


def _require_role(spec: FeatureSpec, role: str, key: str, manifest: Manifest) -> None:
    if spec.role != role:
        raise ConfigError(
            f"{key} names a feature of another role",
            received=f"{spec.name} (role {spec.role})",
            allowed=", ".join(s.name for s in manifest.schema.features if s.role == role),
        )
