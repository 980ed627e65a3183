"""The trainings that are timed, Sluice's and stock Keras', on batches with Zipf ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from conf.schema import FIRST_TOKEN_ID, FeatureSpec
from conf.training.optimizer import OptimizerConfig
from conf.training.tables import DynamicTableConfig
from training.distribution.strategy import build_run_steps
from training.embedding.distinct_rows import add_distinct_ids, plan_lookups
from training.embedding.dynamic_table import DynamicTable
from training.embedding.key_mapping import map_keys, plan_keyed_features
from training.embedding.key_space import KeySpace
from training.embedding.static_table import EmbeddingTable
from training.input.batches import Features
from training.loop.optimizers import Optimizers
from training.loop.step import StepOptions, TrainStep
from training.models.embedded_inputs import EmbeddedInputs, InputFeature
from training.models.model import Model
from training.models.retrieval import RetrievalModel
from training.networks.network import Network, StepContext, build_keras_model, building_layers
from training.networks.tower import HiddenLayers, concatenate
from training.objectives.objective import BinaryCrossEntropy, Objective


@dataclass(frozen=True)
class BatchShape:
    """Size of a batch, and what its ids look like.

    Attributes:
        rows: Rows per batch.
        length: Items per history.
        vocabulary_size: Ids are below it.
        exponent: Of Zipf's law; the k-th most frequent item has a weight of `k ** -exponent`.
        distinct: Batches that are made; they are repeated.
        seed: Seed of the draws.
    """

    rows: int
    length: int
    vocabulary_size: int
    exponent: float = 1.0
    distinct: int = 16
    seed: int = 0

    def build(self, spread: int = 1) -> tf.data.Dataset:
        """Returns the batches over and over: `history`, `item`, `label`.

        Args:
            spread: What ids are multiplied by, to reach all over a larger table.
        """
        rng = np.random.default_rng(self.seed)
        tokens = self.vocabulary_size - FIRST_TOKEN_ID
        share = np.cumsum(np.arange(1, tokens + 1, dtype=np.float64) ** -self.exponent)
        # Frequent items lie all over the table, as where ids are hashed or came over time.
        id_of_rank = FIRST_TOKEN_ID + rng.permutation(tokens)
        draws = rng.random((self.distinct, self.rows, self.length + 1)) * share[-1]
        ids = id_of_rank[np.minimum(np.searchsorted(share, draws), tokens - 1)] * spread
        columns = {
            "history": ids[:, :, 1:].astype(np.int64),
            "item": ids[:, :, 0].astype(np.int64),
            "label": rng.integers(0, 2, ids.shape[:2]).astype(np.float32),
        }
        return tf.data.Dataset.from_tensor_slices(columns).repeat().prefetch(2)

    def build_arriving(self, share: float) -> tf.data.Dataset:
        """Returns the batches over and over, with new ids in place of some items of histories.

        Args:
            share: Of the items, how many are ids that no batch has had before.
        """

        def replace(number: tf.Tensor, batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            history = batch["history"]
            cells = tf.reshape(tf.range(tf.size(history, tf.int64)), tf.shape(history))
            first = (number + 1) * tf.size(history, tf.int64) + self.vocabulary_size
            every = round(1 / share)
            return {**batch, "history": tf.where(cells % every == 0, first + cells, history)}

        return self.build().enumerate().map(replace).prefetch(2)

    def count_unique(self) -> float:
        """Distinct ids per batch, in the mean."""
        counts = [
            len(np.unique(np.append(batch["history"], batch["item"])))
            for batch in self.build().take(self.distinct).as_numpy_iterator()
        ]
        return float(np.mean(counts))


HIDDEN_UNITS = 64
TOTAL_STEPS = 1_000_000


class HistoryModel(RetrievalModel):
    """A user is the pooled history through a hidden layer; history and item share one table.

    Args:
        table: The table.
        length: Items per history.
    """

    def __init__(self, table: EmbeddingTable, length: int) -> None:
        super().__init__(name="history_model")
        self.user_inputs, self.item_inputs, self.temperature = ("history",), ("item",), 1.0
        dim = table.dim
        self.tables = {"item": table}
        history = FeatureSpec("history", "int64", "user", (length,))
        item = FeatureSpec("item", "int64", "item")
        self._users = EmbeddedInputs([InputFeature(history, dim)], {"history": table})
        self._items = EmbeddedInputs([InputFeature(item, dim)], {"item": table})
        with building_layers("history_model", 1):
            tensors = self._users.build_keras_inputs()
            hidden = HiddenLayers().stack(concatenate(list(tensors.values())), [HIDDEN_UNITS])
            output = keras.layers.Dense(dim)(hidden)
            self.network = Network(build_keras_model("user_tower", tensors, output))

    @property
    def embedded_inputs(self) -> Sequence[EmbeddedInputs]:
        """History and item."""
        return self._users, self._items

    @property
    def networks(self) -> Sequence[Network]:
        """The user tower."""
        return (self.network,)

    def embed_users(self, features: Features, training: StepContext | None = None) -> tf.Tensor:
        """Returns user vectors `[batch, dim]`."""
        return self.network(self._users(features, training), training)

    def embed_items(self, features: Features, training: StepContext | None = None) -> tf.Tensor:
        """Returns item vectors `[batch, dim]`."""
        return self._items(features, training)["item"]


def build_static_table(rows: int, dim: int) -> EmbeddingTable:
    """Returns a table with a row for each id below a number."""
    return EmbeddingTable("item", rows, dim, seed=1)


def build_dynamic_table(dim: int, capacity: int) -> DynamicTable:
    """Returns a table without keys, and memory for some."""
    return DynamicTable(
        "item", KeySpace("item", DynamicTableConfig(capacity=capacity)), dim, seed=1
    )


_OPTIONS = StepOptions(seed=1)


class ModelTraining:
    """A model in training, that reads its batches where it left off.

    Attributes:
        iterator: Where its next batches come from.

    Args:
        model: The model.
        objective: What it learns.
        dataset: Its batches.
        sparse: Kind of the tables' optimizer.
        options: How a step is computed.
    """

    def __init__(
        self,
        model: Model,
        objective: Objective,
        dataset: tf.data.Dataset,
        sparse: str,
        options: StepOptions = _OPTIONS,
    ) -> None:
        config = OptimizerConfig.model_validate({"sparse": {"kind": sparse}})
        self._optimizers = Optimizers(config, model, TOTAL_STEPS)
        self._lookups = plan_lookups(model.lookups)
        self._keyed = plan_keyed_features(model.embedded_features, model.tables)
        step = TrainStep(model, objective, self._optimizers, options, self._lookups, self._keyed)
        self._run_steps = build_run_steps(tf.distribute.get_strategy(), step)
        self.read(dataset)

    def read(self, dataset: tf.data.Dataset) -> None:
        """Takes the next batches from a dataset, from its first one on."""
        if self._keyed:
            dataset = map_keys(dataset, self._keyed)
        self.iterator = iter(add_distinct_ids(dataset, self._lookups))

    def __call__(self, steps: int) -> None:
        """Runs steps, all in one compiled loop."""
        losses = self._run_steps(self.iterator, tf.constant(steps)).losses
        if len(losses) < steps or not bool(tf.math.is_finite(losses[-1])):
            raise ArithmeticError("the loss is not finite: the figures would mean nothing")


class SluiceTraining(ModelTraining):
    """A history model in training.

    Args:
        table: Its table.
        dataset: Its batches.
        sparse: Kind of the table's optimizer.
    """

    def __init__(
        self, table: EmbeddingTable, dataset: tf.data.Dataset, sparse: str = "adam"
    ) -> None:
        self._table = table
        model = HistoryModel(table, int(dataset.element_spec["history"].shape[1]))
        super().__init__(model, BinaryCrossEntropy("label"), dataset, sparse)

    @property
    def table_bytes(self) -> int:
        """Bytes of the table and its optimizer's state."""
        state = [
            slots[0] for slots in self._optimizers.sparse.slots.values() if slots[0] is not None
        ]
        return sum(4 * v.shape.num_elements() for v in (self._table.rows, *state))

    @property
    def table_rows(self) -> int:
        """Rows of the table."""
        return self._table.vocabulary_size


class KerasTraining:
    """A compiled Keras model in training.

    Args:
        vocabulary_size: Rows of the table.
        dim: Length of a row.
        dataset: Its batches.
        compile_arguments: Further arguments of `compile`.
    """

    def __init__(
        self, vocabulary_size: int, dim: int, dataset: tf.data.Dataset, **compile_arguments: Any
    ) -> None:
        history = keras.Input([None], dtype="int64", name="history")
        item = keras.Input([], dtype="int64", name="item")
        table = keras.layers.Embedding(vocabulary_size, dim, mask_zero=True)
        pooled = keras.layers.GlobalAveragePooling1D()(table(history))
        hidden = keras.layers.Dense(HIDDEN_UNITS, activation="relu")(pooled)
        user = keras.layers.Dense(dim)(hidden)
        logits = keras.layers.Dot(axes=1)([user, table(item)])
        self._model = keras.Model({"history": history, "item": item}, logits)
        self._model.compile(
            optimizer=keras.optimizers.Adam(),
            loss=keras.losses.BinaryCrossentropy(from_logits=True),
            **compile_arguments,
        )
        self._dataset = dataset.map(
            lambda batch: ({"history": batch["history"], "item": batch["item"]}, batch["label"])
        ).prefetch(2)

    def __call__(self, steps: int) -> None:
        """Runs steps by `fit`."""
        self._model.fit(self._dataset, steps_per_epoch=steps, epochs=1, verbose=0)
