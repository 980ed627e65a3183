"""Small models: two towers for evaluation and export, a shared table with an exact loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from conf.manifest import Manifest
from conf.schema import FeatureSpec
from conf.training.tables import NormalConfig
from training.embedding.static_table import EmbeddingTable, RowUpdates
from training.input.batches import Batch, Features
from training.models.embedded_inputs import EmbeddedInputs, InputFeature
from training.models.retrieval import RetrievalModel
from training.networks.network import Network, StepContext, build_keras_model, building_layers


class TinyTowers(RetrievalModel):
    """Sums of embeddings; lists are mean-pooled over their non-padded positions."""

    def __init__(self, manifest: Manifest, dim: int = 6, seed: int = 3) -> None:
        super().__init__()
        schema = manifest.schema
        self.user_inputs = ("user_id", "gender", "history")
        self.item_inputs = ("movie_id", "genres")
        rng = tf.random.Generator.from_seed(seed)
        self.tables = {
            spec.table: EmbeddingTable(spec.table, spec.vocabulary_size, dim, seed=seed)
            for spec in schema.features
            if spec.vocabulary_size
        }
        for table in self.tables.values():
            table.rows.assign(rng.normal((table.vocabulary_size, dim)))
        self.table_of = {spec.name: spec.table for spec in schema.features}

    def embed_users(self, features: Features, training: StepContext | None = None) -> tf.Tensor:
        return self._sum(features, self.user_inputs)

    def embed_items(self, features: Features, training: StepContext | None = None) -> tf.Tensor:
        return self._sum(features, self.item_inputs)

    def _sum(self, features: dict[str, tf.Tensor], names: tuple[str, ...]) -> tf.Tensor:
        return tf.add_n([self._pool(features[name], self.table_of[name]) for name in names])

    def _pool(self, ids: tf.Tensor, table: str) -> tf.Tensor:
        vectors = tf.gather(self.tables[table].rows, ids)
        if len(ids.shape) == 1:
            return vectors
        mask = tf.cast(ids != 0, tf.float32)[..., None]
        return tf.reduce_sum(vectors * mask, 1) / tf.maximum(tf.reduce_sum(mask, 1), 1.0)


VOCABULARY, DIM, LENGTH = 23, 4, 3


def _spec(name: str, table: str, shape: tuple[int, ...] = ()) -> FeatureSpec:
    return FeatureSpec(
        name, "int64", "user", shape, vocabulary_size=VOCABULARY, shared_embedding=table
    )


class ToyModel(RetrievalModel):
    """A pooled list through a hidden layer; list and item share a table, users have their own.

    Args:
        seed: Seed of the first weights.
        tables: The tables `items` and `users`; None: static ones.
        dtype: Type that the network computes in.
        layers: Further layers of the network, between its two.
        l2: Weight of the squared norms of the rows that a batch looks up, or None.
    """

    def __init__(
        self,
        seed: int = 1,
        tables: dict[str, EmbeddingTable] | None = None,
        dtype: tf.DType = tf.float32,
        layers: Callable[[], list[keras.layers.Layer]] = list,
        l2: float | None = None,
    ) -> None:
        super().__init__(name="toy_model")
        self.user_inputs, self.item_inputs, self.temperature = ("user", "list"), ("item",), 1.0
        self.tables = tables or {
            name: EmbeddingTable(
                name, VOCABULARY, DIM, seed=seed, initializer=NormalConfig(stddev=0.5)
            )
            for name in ("items", "users")
        }
        for table in self.tables.values():
            table.updates = RowUpdates(l2=l2)
        items, users = self.tables["items"], self.tables["users"]
        of_users = [
            InputFeature(_spec("user", "users"), DIM),
            InputFeature(_spec("list", "items", (LENGTH,)), DIM),
        ]
        of_items = [InputFeature(_spec("item", "items"), DIM)]
        self.parts = (
            EmbeddedInputs(of_users, {"user": users, "list": items}),
            EmbeddedInputs(of_items, {"item": items}),
        )
        with building_layers("toy", seed, dtype):
            tensors = {"list": keras.Input((DIM,), name="list")}
            hidden = keras.layers.Dense(5, activation="relu")(tensors["list"])
            for layer in layers():
                hidden = layer(hidden)
            output = keras.layers.Dense(DIM)(hidden)
            self.network = Network(build_keras_model("toy", tensors, output))

    @property
    def embedded_inputs(self) -> Sequence[EmbeddedInputs]:
        """Users and items."""
        return self.parts

    @property
    def networks(self) -> Sequence[Network]:
        """That of users."""
        return (self.network,)

    def embed_users(self, features: Features, training: StepContext | None = None) -> tf.Tensor:
        """Returns user vectors `[batch, DIM]`."""
        inputs = self.parts[0](features, training)
        return self.network(inputs, training) + inputs["user"]

    def embed_items(self, features: Features, training: StepContext | None = None) -> tf.Tensor:
        """Returns item vectors `[batch, DIM]`."""
        return self.parts[1](features, training)["item"]


def squared_error(model: RetrievalModel, batch: Batch, training: StepContext) -> tf.Tensor:
    """Squared error of the dot product against the label, `[local_batch]`."""
    users, items = model.embed_users(batch, training), model.embed_items(batch, training)
    return tf.square(tf.reduce_sum(users * items, axis=1) - batch["label"])


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


def build_own_network(inputs: dict, units: int, tasks: Sequence[str]) -> dict:
    """A ranking network of one's own: reads the positions of `history` and every other vector."""
    mask = keras.ops.cast(inputs["history_mask"], "float32")[..., None]
    target = inputs["movie_id"][:, None, :]
    attended = keras.ops.sum(inputs["history"] * keras.ops.tanh(target) * mask, axis=1)
    others = [inputs[name] for name in ("user_id", "gender", "movie_id", "genres")]
    first = keras.layers.Dense(units, activation="tanh", bias_constraint="non_neg")
    hidden = keras.layers.SpectralNormalization(first)(
        keras.ops.concatenate([attended, *others], axis=-1)
    )
    hidden = keras.layers.BatchNormalization()(keras.layers.Dropout(0.5)(hidden))
    return {name: keras.layers.Dense(1)(hidden) for name in tasks}


def build_own_tower(inputs: dict, output_dim: int, units: int = 8) -> keras.KerasTensor:
    """A user tower of one's own: reads the positions of `history` and every other vector."""
    mask = keras.ops.cast(inputs["history_mask"], "float32")[..., None]
    latest = keras.layers.GlobalMaxPooling1D()(inputs["history"] * mask)
    joined = keras.layers.Concatenate()([latest, inputs["user_id"], inputs["gender"]])
    hidden = keras.layers.Dropout(0.5)(keras.layers.Dense(units, activation="tanh")(joined))
    return keras.layers.Dense(output_dim)(hidden)
