"""Sequence models: a network over the user's sequence makes the user's vector.

The user's vector is what the network makes of the position of the latest item; it is compared with
item vectors by dot product, as those of two towers are. Networks that look back alone (SASRec,
HSTU, GRU) have such a vector at each position, and can be trained on all of them in one pass.
ComiRec makes several vectors of a user, of which the one nearest to an item counts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import keras
import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest
from conf.schema import FIRST_TOKEN_ID, FeatureSpec
from conf.training.models import ComiRecConfig, HSTUConfig, PoolingConfig, SequenceConfig
from training.input.batches import Batch, Features
from training.models.dssm import plan_pooling, select_features
from training.models.embedded_inputs import MASK_SUFFIX, EmbeddedInputs, InputFeature
from training.models.embedding_tables import TableBuilder
from training.models.item_times import ItemTimes, find_item_times
from training.models.length_groups import call_in_groups, plan_groups
from training.models.model import find_feature
from training.models.retrieval import Queries, RetrievalModel
from training.models.sequence_rows import (
    compare_rows,
    count_queries,
    find_lists,
    require_length,
    trains_everywhere,
)
from training.networks.factorization import flatten_each
from training.networks.hstu import SequenceTimes
from training.networks.layers import normalize_rows
from training.networks.network import (
    Network,
    NetworkInputs,
    TrainingPass,
    build_keras_model,
    building_layers,
)
from training.networks.sequence_registry import SEQUENCE_NETWORKS
from training.networks.sequences import read_sequence
from training.networks.tower import build_mlp, build_tower, concatenate


class SequenceModel(RetrievalModel):
    """A network over the user's sequence, and the item's row or tower.

    The vectors of the sequence's items are rows of the item's table where the build encodes both by
    one vocabulary.

    Args:
        config: The model's config.
        manifest: The dataset version whose features it reads.
        seed: Seed of the first weights.
        dtype: Type that the networks compute in.

    Attributes:
        network: Makes user vectors of sequences.
        item_tower: Network of the item tower; None: the item's row.

    Raises:
        ConfigError: The config names features that the model cannot read, the sequence has no known
            length, or its items are not those of the item's id.
    """

    def __init__(
        self, config: SequenceConfig, manifest: Manifest, seed: int, dtype: tf.DType = tf.float32
    ) -> None:
        super().__init__(name=config.name)
        self.temperature, self._normalize = config.temperature, config.normalize
        lists = find_lists(config, manifest)
        self._times = None
        if isinstance(config, HSTUConfig):
            self._times = find_item_times(config, manifest, lists[0])
        timed = () if self._times is None else self._times.names
        users = [*lists, *_select_others(config, manifest, {*timed, *(one.name for one in lists)})]
        items = select_features(manifest, config, config.item_features, "item")
        specs = (*users, *items)
        pooling = plan_pooling(config, manifest, specs)
        builder = TableBuilder(config, manifest, specs, seed)
        pooling |= {spec.name: PoolingConfig(combiner="none") for spec in lists}
        sides = [
            [builder.plan_input(spec, pooling.get(spec.name)) for spec in side]
            for side in (users, items)
        ]
        sides[0] = [replace(one, is_cut=one.spec in lists) for one in sides[0]]
        self._sequence, self._every_position = lists[0].name, trains_everywhere(config)
        self.queries_per_row = count_queries(config, manifest)
        self._rows_note = compare_rows(config, manifest)
        if isinstance(config, ComiRecConfig):
            self.interests = require_length(config.interests, lists[0])
        is_grouped = SEQUENCE_NETWORKS[config.name].is_grouped
        self._groups = plan_groups(manifest, lists[0]) if is_grouped else 1
        if self._every_position:
            _require_items(builder.resolve(lists[0]), builder, manifest)
        built = builder.build_tables([*sides[0], *sides[1]])
        self.tables = built.tables
        self._users, self._items = built.build_inputs(sides[0]), built.build_inputs(sides[1])
        self.user_inputs = tuple(dict.fromkeys((*self._users.names, *timed)))
        self.item_inputs = self._items.names
        with building_layers(config.name, seed, dtype):
            names = [spec.name for spec in lists]
            self.network = _build_network(self._users, config, names, self._times)
            first = self.network.random_layers
            self.item_tower = _build_item_tower(self._items, config, first)

    @property
    def notes(self) -> tuple[str, ...]:
        """Says where the rows are not those that such a model is for."""
        return super().notes + self._rows_note

    @property
    def embedded_inputs(self) -> Sequence[EmbeddedInputs]:
        """Users and items."""
        return self._users, self._items

    @property
    def networks(self) -> Sequence[Network]:
        """The sequence's network, and the item tower if it has layers."""
        return [net for net in (self.network, self.item_tower) if net is not None]

    def embed_users(self, features: Features, training: TrainingPass | None = None) -> tf.Tensor:
        """Returns user vectors, those of the latest item's position, or those of the interests.

        Returns:
            `[batch, embedding_dim]`, of interests `[batch, interests, embedding_dim]`.
        """
        vectors = self._encode(features, training)
        return self._scale(vectors[:, 0] if self._every_position else vectors)

    def embed_items(self, features: Features, training: TrainingPass | None = None) -> tf.Tensor:
        """Returns item vectors `[batch, embedding_dim]`."""
        inputs = self._items(features)
        tower = self.item_tower
        vectors = next(iter(inputs.values())) if tower is None else tower(inputs, training)
        return self._scale(vectors)

    def embed_queries(self, batch: Batch, item_key: str, training: TrainingPass) -> Queries:
        """Returns a query for each position of each row, or one a row.

        Position 0 is the row's own: its item is the target. The target of position k is the item of
        position k - 1. Positions weigh 1 by the longest length, so each counts alike, whatever the
        row and the width of the batch.
        """
        if not self._every_position:
            return super().embed_queries(batch, item_key, training)
        vectors = self._encode(batch, training)
        history = self._users.read_ids(self._sequence, batch)
        targets = tf.concat([batch[item_key][:, tf.newaxis], history[:, :-1]], axis=1)
        rows, width = tf.shape(vectors)[0], tf.shape(vectors)[1]
        is_item = tf.cast(targets >= FIRST_TOKEN_ID, tf.float32)
        return Queries(
            self._scale(tf.reshape(vectors, [-1, vectors.shape[2]])),
            tf.reshape(targets, [-1]),
            tf.reshape(is_item / self.queries_per_row, [-1]),
            tf.repeat(tf.range(rows), width),
            rows,
            per_row=self.queries_per_row,
        )

    def _encode(self, features: Features, training: TrainingPass | None) -> tf.Tensor:
        inputs = self._users(features)
        if self._times is not None:
            ids = self._users.read_ids(self._sequence, features)
            inputs[self._times.name] = self._times.read_ages(features, ids)
        mask = self._sequence + MASK_SUFFIX
        vectors: tf.Tensor = call_in_groups(self.network, inputs, training, mask, self._groups)
        return vectors

    def _scale(self, vectors: tf.Tensor) -> tf.Tensor:
        return normalize_rows(vectors) if self._normalize else vectors


def _select_others(
    config: SequenceConfig, manifest: Manifest, names: Collection[str]
) -> list[FeatureSpec]:
    """Returns the user's features beside the sequence and its times, which have these names."""
    both = [name for name in (*config.user_features, *config.pooling) if name in names]
    if both:
        raise ConfigError(
            "the network reads each position of the sequence: it is neither joined nor pooled",
            received=", ".join(both),
            fix="leave it out of model.user_features and model.pooling",
        )
    return select_features(manifest, config, config.user_features, "user")


def _require_items(sequence: FeatureSpec, builder: TableBuilder, manifest: Manifest) -> None:
    """Checks that the sequence's ids are those of items, as each of them is a target."""
    item = builder.resolve(find_feature(manifest, manifest.require_key("item")))
    is_keyed = builder.is_keyed(item) or builder.is_keyed(sequence)
    if is_keyed or sequence.encoding != item.encoding or sequence.table != item.table:
        build = f", or build {sequence.name} with the encoding of {item.name}"
        raise ConfigError(
            "each item of the sequence is a target, so it needs the ids of the item itself"
            + (", by a vocabulary and in a static table: keys are no targets" if is_keyed else ""),
            received=f"{sequence.name}: {sequence.encoding} in table {sequence.table}; "
            f"{item.name}: {item.encoding} in table {item.table}",
            fix="set model.every_position=false" + ("" if is_keyed else build),
        )


def _build_network(
    inputs: EmbeddedInputs, config: SequenceConfig, names: Sequence[str], times: ItemTimes | None
) -> Network:
    tensors = inputs.build_keras_inputs()
    sequence = read_sequence(tensors, names)
    of_items = None
    if times is not None:
        ages = keras.Input(sequence.is_read.shape[1:], name=times.name)
        tensors[times.name] = ages
        names, of_items = [*names, times.name], SequenceTimes(ages, times.of_targets)
    network = SEQUENCE_NETWORKS[config.name]
    encoded = network.build(sequence, of_items, config)
    if network.looks_back and not trains_everywhere(config):
        encoded = encoded[:, 0]
    others = flatten_each(tensors, without=names)
    output = _project(encoded, others, config)
    return Network(build_keras_model("user_tower", tensors, output))


def _project(
    encoded: keras.KerasTensor, others: Sequence[keras.KerasTensor], config: SequenceConfig
) -> keras.KerasTensor:
    """Joins other features, and maps all to the length of an item's vector if it has to."""
    dim = config.embedding_dim
    if not others and not config.hidden_units and encoded.shape[-1] == dim:
        return encoded
    if len(encoded.shape) == 3:
        each = keras.ops.zeros_like(encoded[:, :, :1])
        others = [each + keras.ops.expand_dims(other, 1) for other in others]
    joined = concatenate([encoded, *others])
    hidden = build_mlp(joined, config.hidden_units, dropout=config.dropout)
    return keras.layers.Dense(dim)(hidden)


def _build_item_tower(
    inputs: EmbeddedInputs, config: SequenceConfig, first_seed: int
) -> Network | None:
    """Builds the network of the item tower, None where the only input is the vector."""
    if not inputs.features:
        raise ConfigError(
            "the item tower has no input feature",
            allowed="one or more features of role item",
            fix="leave model.item_features out, or name features",
        )
    if _is_row(inputs.features, config) and not config.item_hidden_units:
        return None
    tensors: NetworkInputs = inputs.build_keras_inputs()
    output = build_tower(
        tensors,
        hidden_units=config.item_hidden_units,
        output_dim=config.embedding_dim,
        dropout=config.dropout,
    )
    return Network(build_keras_model("item_tower", tensors, output), first_seed)


def _is_row(features: Sequence[InputFeature], config: SequenceConfig) -> bool:
    only = features[0]
    return len(features) == 1 and only.dim == config.embedding_dim and not only.spec.is_list
