"""Sequence models: a network over the user's sequence makes the user's vector.

It is what the network makes of the position of the latest item. Networks that look back alone
(SASRec, HSTU, GRU) have such a vector at each position, and can be trained on all of them in one
pass. ComiRec makes several vectors of a user, of which the one nearest to an item counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from conf.errors import ConfigError
from conf.manifest import Manifest, bound_list, has_sequences
from conf.schema import FIRST_TOKEN_ID, FeatureSpec
from conf.training.input import HeldOutConfig
from conf.training.models import HSTUConfig, ModelConfig, PoolingConfig, SequenceConfig
from training.input.batches import Batch, Features
from training.models.embedded_inputs import MASK_SUFFIX, EmbeddedInputs
from training.models.embedding_tables import TableBuilder
from training.models.retrieval import Queries
from training.models.two_towers import TwoTowers, build_side, plan_pooling, select_features
from training.networks.factorization import flatten_each
from training.networks.network import (
    Network,
    StepContext,
    build_keras_model,
    building_layers,
    call_in_groups,
    plan_groups,
)
from training.networks.sequences import SEQUENCE_NETWORKS, read_sequence
from training.networks.tower import HiddenLayers, concatenate
from training.reader.feature_columns import find_feature, list_length

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
UNKNOWN_AGE = -1.0


class SequenceModel(TwoTowers):
    """A network over the user's sequence, and the item's row or tower.

    The vectors of the sequence's items are rows of the item's table where the build encodes both by
    one vocabulary.
    """

    user_tower: Network

    def __init__(
        self, config: SequenceConfig, manifest: Manifest, seed: int, dtype: tf.DType = tf.float32
    ) -> None:
        super().__init__(name=config.name)
        self.temperature, self._normalize = config.temperature, config.normalize
        lists = find_lists(config, manifest)
        sequence, names = lists[0], [spec.name for spec in lists]
        self._times = find_item_times(config, manifest, sequence)
        timed = () if self._times is None else self._times.names
        if both := {*timed, *names} & {*config.user_features, *config.pooling}:
            raise ConfigError(
                "the network reads each position of the sequence: it is neither joined nor pooled",
                received=", ".join(sorted(both)),
                fix="leave it out of model.user_features and model.pooling",
            )
        users = [*lists, *select_features(manifest, config, config.user_features, "user")]
        items = select_features(manifest, config, config.item_features, "item")
        pooling = plan_pooling(config, manifest, (*users, *items))
        pooling |= {name: PoolingConfig(combiner="none") for name in names}
        builder = TableBuilder(config, manifest, (*users, *items), seed)
        sides = [
            [builder.plan_input(s, pooling.get(s.name)) for s in side] for side in (users, items)
        ]
        sides[0] = [replace(one, is_cut=one.spec in lists) for one in sides[0]]
        self._sequence, self._every_position = sequence.name, trains_everywhere(config)
        if self._every_position:
            _require_items(builder.resolve(sequence), builder, manifest)
            self.queries_per_row = list_length(sequence) or 1
        self.interests = getattr(config, "interests", None)
        is_grouped = SEQUENCE_NETWORKS[config.name].is_grouped
        self._groups = plan_groups(manifest, sequence) if is_grouped else 1
        self._build_sides(builder, sides[0], sides[1])
        self.user_inputs = tuple(dict.fromkeys((*self._users.names, *timed)))
        with building_layers(config.name, seed, dtype):
            self.user_tower = _build_network(self._users, config, names, self._times)
            first = self.user_tower.random_layers
            self.item_tower = build_side("item", self._items, config, first)
        self.notes = _compare_rows(config, manifest, list_length(sequence))

    def embed_users(self, features: Features, training: StepContext | None = None) -> tf.Tensor:
        """Returns the vectors of the latest item's position, or those of the interests."""
        vectors = self._encode(features, training)
        return self._scale(vectors[:, 0] if self._every_position else vectors)

    def embed_queries(self, batch: Batch, item_key: str, training: StepContext) -> Queries:
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
        rows = tf.shape(vectors)[0]
        numbers = tf.range(tf.size(batch[item_key], tf.int64))[:, tf.newaxis]
        is_item = tf.cast(targets >= FIRST_TOKEN_ID, tf.float32)
        return Queries(
            self._scale(tf.reshape(vectors, [-1, vectors.shape[2]])),
            tf.reshape(targets, [-1]),
            tf.reshape(is_item / self.queries_per_row, [-1]),
            tf.reshape(tf.broadcast_to(numbers, tf.shape(targets)), [-1]),
            rows,
            per_row=self.queries_per_row,
        )

    def _encode(self, features: Features, training: StepContext | None) -> tf.Tensor:
        inputs = self._users(features, training)
        if self._times is not None:
            ids = self._users.read_ids(self._sequence, features)
            inputs[self._times.name] = self._times.read_ages(features, ids)
        mask = self._sequence + MASK_SUFFIX
        vectors: tf.Tensor = call_in_groups(self.user_tower, inputs, training, mask, self._groups)
        return vectors


def _require_items(sequence: FeatureSpec, builder: TableBuilder, manifest: Manifest) -> None:
    """Checks that the sequence's ids are those of items, as each of them is a target."""
    item = builder.resolve(find_feature(manifest, manifest.require_key("item")))
    is_keyed = builder.is_keyed(item) or builder.is_keyed(sequence)
    if is_keyed or sequence.encoding != item.encoding or sequence.table != item.table:
        raise ConfigError(
            "each item of the sequence is a target, so it needs the ids of the item itself, by a "
            "vocabulary and in a static table",
            received=f"{sequence.name}: {sequence.encoding} in table {sequence.table}; "
            f"{item.name}: {item.encoding} in table {item.table}",
            fix="set model.every_position=false, or build both with one vocabulary",
        )


def _build_network(
    inputs: EmbeddedInputs, config: SequenceConfig, names: Sequence[str], times: ItemTimes | None
) -> Network:
    tensors = inputs.build_keras_inputs()
    sequence = read_sequence(tensors, names)
    if times is not None:
        ages = tensors[times.name] = keras.Input(sequence.is_read.shape[1:], name=times.name)
        names = [*names, times.name]
        sequence = replace(sequence, ages=ages, of_targets=times.of_targets)
    network = SEQUENCE_NETWORKS[config.name]
    output = network.build(sequence, config)
    if network.looks_back and not trains_everywhere(config):
        output = output[:, 0]
    others = flatten_each(tensors, without=names)
    if others or config.hidden_units or output.shape[-1] != config.embedding_dim:
        if len(output.shape) == 3:
            each = keras.ops.zeros_like(output[:, :, :1])
            others = [each + keras.ops.expand_dims(other, 1) for other in others]
        layers, joined = HiddenLayers(dropout=config.dropout), concatenate([output, *others])
        output = keras.layers.Dense(config.embedding_dim)(layers.stack(joined, config.hidden_units))
    return Network(build_keras_model("user_tower", tensors, output))


def find_lists(config: SequenceConfig, manifest: Manifest) -> list[FeatureSpec]:
    """Returns the lists of the sequence with their bounds, that of the items first."""
    history, names = manifest.find_history(), config.sequence
    if names is None and history is None:
        raise ConfigError(
            "the model reads a sequence, and the dataset has no history, or several",
            received=", ".join(manifest.histories) or None,
            fix="name a list in model.sequence, or build the dataset with a history",
        )
    found = select_features(manifest, config, names or (str(history),), "user", "model.sequence")
    return [bound_list(manifest, spec) for spec in found]


def trains_everywhere(config: SequenceConfig) -> bool:
    """Whether each item of a history is a target, not the row's item alone."""
    return bool(getattr(config, "every_position", False))


def _list_histories(manifest: Manifest) -> list[Mapping[str, Any]]:
    """Returns the histories that the build has made; none where rows bring their own."""
    return list(manifest.source.config.get("histories") or ())


def _compare_rows(
    config: SequenceConfig, manifest: Manifest, length: int | None
) -> tuple[str, ...]:
    """Says that targets are lost, or repeat; nothing where the build did not make the histories."""
    if not _list_histories(manifest):
        return ()
    samples = manifest.source.config.get("train_samples")
    learns_all, are_whole = trains_everywhere(config), has_sequences(manifest.source.config)
    if learns_all and not are_whole:
        found = "learns each item of a history, and each event has a row with those before it: an "
        fix = "item is a target many times in an epoch; build with train_samples, or set "
        return (f"{config.name} {found}{fix}model.every_position=false",)
    if are_whole and not learns_all:
        found = f"learns the item of a row alone, and rows stand for whole sequences ({samples}): "
        fix = "their other items are no targets; build with train_samples: all"
        return (f"{config.name} {found}{fix}",)
    if not isinstance(samples, int) or length in (None, samples):
        return ()
    what = "the others are no targets" if samples > length else "events are targets of several rows"
    found = f"a sequence holds {length} events (max_len), and begins anew every {samples} "
    return (f"{found}(train_samples): {what}; build with the same number for both",)


def require_held_out(
    model: ModelConfig, held_out: HeldOutConfig | None, manifest: Manifest
) -> None:
    """Refuses held-out rows that later rows' histories would train on, position by position."""
    if held_out is None or not isinstance(model, SequenceConfig) or not trains_everywhere(model):
        return
    if set(held_out.key) == {manifest.keys.user} or not _reaches_back(model, held_out, manifest):
        return
    samples = manifest.source.config.get("train_samples", "all")
    raise ConfigError(
        f"{model.name} trains on every item of a history: a held-out row whose user has later "
        "ones is trained on all the same",
        received=f"input.validation.hash_of: {held_out.hash_of!r}, model.every_position: true, "
        f"rows by train_samples: {samples}",
        allowed="whole users: hash_of the user's feature; or rows that share no target: "
        "train_samples of the sequence's max_len or more",
        fix="hold users out, or set model.every_position=false",
    )


def _reaches_back(model: SequenceConfig, held_out: HeldOutConfig, manifest: Manifest) -> bool:
    """Whether rows have the targets of other rows of their user in their histories."""
    # Of rows that bring their own histories nothing is known.
    if all(history.get("within_session") for history in _list_histories(manifest)):
        return manifest.keys.item in held_out.key
    samples = manifest.source.config.get("train_samples", "all")
    if not isinstance(samples, int):
        return not has_sequences(manifest.source.config)
    return samples < (list_length(find_lists(model, manifest)[0]) or 0)


@dataclass(frozen=True)
class ItemTimes:
    """Where the times of a sequence's items stand."""

    name: str  # List of gaps to the row's event (float32), or of times (int64).
    request: str | None  # Feature with the time of the row's event; gaps need none.
    seconds: float  # Of a unit of the list.
    are_gaps: bool

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,) if self.request is None else (self.name, self.request)

    @property
    def of_targets(self) -> bool:
        """Whether ages count back from the row's event, not from its latest item."""
        return self.are_gaps or self.request is not None

    def read_ages(self, batch: Features, ids: tf.Tensor) -> tf.Tensor:
        """Returns how old each item was at the row's event, or at its latest item: float32 seconds.

        `ids` are those of the items, int `[batch, length]`, 0 padding. `UNKNOWN_AGE` stands for an
        item after the event, or without a time; a time of 0 or less is none. A list that is shorter
        than that of the items is gaps of 0 behind its end.
        """
        values = batch[self.name]
        if isinstance(values, tf.RaggedTensor):
            values = values.to_tensor(0)
        latest = tf.reduce_max(values, axis=1)
        if self.request is not None:
            latest = tf.cast(tf.reshape(batch[self.request], [-1]), values.dtype)
        width, known = tf.shape(ids)[1], tf.not_equal(ids, 0)
        missing = tf.maximum(width - tf.shape(values)[1], 0)
        values = tf.pad(values[:, :width], [[0, 0], [0, missing]])
        if not self.are_gaps:
            known &= values > 0
            # Whole numbers, as float32 tells neighbouring seconds of our time no longer apart.
            values = latest[:, tf.newaxis] - values
        ages = tf.cast(values, tf.float32) * self.seconds
        ages = tf.where(known & (ages >= 0), ages, UNKNOWN_AGE)  # NaN is not known either.
        return tf.ensure_shape(ages, ids.shape)


def find_item_times(
    config: SequenceConfig, manifest: Manifest, sequence: FeatureSpec
) -> ItemTimes | None:
    if not isinstance(config, HSTUConfig) or config.times is None:
        return None
    spec = bound_list(manifest, find_feature(manifest, config.times))
    _require_times("model.times", spec, is_list=True)
    if list_length(spec) != list_length(sequence):
        raise ConfigError(
            "times and items of a sequence stand in lists of one length",
            received=f"{spec.name}: {list_length(spec)}, {sequence.name}: {list_length(sequence)}",
            fix="build both with one max_len",
        )
    are_gaps = spec.dtype == "float32"
    request = None if are_gaps else config.request_time  # Gaps count back from the row's event.
    if request is not None:
        _require_times("model.request_time", find_feature(manifest, request), is_list=False)
    unit = _find_unit(spec.name, manifest, are_gaps)
    return ItemTimes(spec.name, request, _SECONDS[unit], are_gaps)


def _require_times(key: str, spec: FeatureSpec, *, is_list: bool) -> None:
    is_number = spec.dtype == "int64" or (is_list and spec.dtype == "float32")
    is_plain = spec.vocabulary_size is None and spec.encoding == "identity"
    if not (is_number and is_plain and spec.is_list == is_list and spec.role == "user"):
        raise ConfigError(
            f"{key} names no times",
            received=f"{spec.name}: {spec.dtype} of shape {spec.shape}, role {spec.role}, encoding "
            f"{spec.encoding}",
            allowed="of role user, encoding identity: "
            + ("a list of gaps (float32) or times (int64)" if is_list else "a whole number"),
        )


def _find_event_unit(config: Mapping[str, Any]) -> str:
    events = config.get("events") or {}
    source = (config.get("sources") or {}).get(events.get("source")) or {}
    columns = {column["name"]: column for column in source.get("columns") or ()}
    column = columns.get(events.get("time")) or {}
    return "ms" if column.get("type") == "timestamp" else str(column.get("unit") or "s")


def _find_unit(name: str, manifest: Manifest, are_gaps: bool) -> str:
    """Returns the unit that a build wrote times in; seconds where no build says it."""
    config = manifest.source.config
    if not are_gaps:
        return _find_event_unit(config)
    features = {feature["name"]: feature for feature in config.get("features") or []}
    column = features.get(name, {}).get("column", name)
    made = {f"{one['name']}_age": one.get("gaps") for one in config.get("histories") or ()}
    return made.get(column) or "s"
