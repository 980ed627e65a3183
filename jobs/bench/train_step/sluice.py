"""The step that is measured: pooled history, hidden layer, dot product with the item."""

from __future__ import annotations

import tensorflow as tf

from conf.training import OptimizerConfig
from training.embedding.distinct_rows import add_distinct_ids, plan_lookups
from training.embedding.dynamic_table import DynamicTable
from training.embedding.key_mapping import map_keys, plan_keyed_features
from training.embedding.key_space import KeySpace
from training.embedding.table import EmbeddingTable
from training.layers.mlp import MLP
from training.layers.pooling import pool_rows
from training.models.base import Features, RetrievalModel
from training.objective import BinaryCrossEntropy
from training.optimizers import Optimizers
from training.step import StepOptions, TrainStep, build_run_steps

HIDDEN_UNITS = 64
TOTAL_STEPS = 1_000_000


class HistoryModel(RetrievalModel):
    """A user is the pooled history through a hidden layer; history and item share one table.

    Args:
        table: The table.
    """

    def __init__(self, table: EmbeddingTable) -> None:
        super().__init__(name="history_model")
        self.user_inputs, self.item_inputs, self.temperature = ("history",), ("item",), 1.0
        self.table, dim = table, table.dim
        self.tables = {"item": self.table}
        self.mlp = MLP("user", dim, [HIDDEN_UNITS], dim, seed=1)

    def embed_users(self, features: Features, dropout_seed: tf.Tensor | None = None) -> tf.Tensor:
        """Returns user vectors `[batch, dim]`."""
        ids = features["history"]
        return self.mlp(pool_rows(self.table, ids))

    def embed_items(self, features: Features, dropout_seed: tf.Tensor | None = None) -> tf.Tensor:
        """Returns item vectors `[batch, dim]`."""
        return self.table.lookup(features["item"])

    @property
    def lookups(self) -> list[tuple[str, tf.Variable]]:
        """History and item."""
        return [("history", self.table.variable), ("item", self.table.variable)]

    @property
    def embedded_features(self) -> dict[str, EmbeddingTable]:
        """History and item."""
        return {"history": self.table, "item": self.table}

    @property
    def _scalar_tables(self) -> dict[str, EmbeddingTable]:
        return {"item": self.table}


def build_static_table(rows: int, dim: int) -> EmbeddingTable:
    """Returns a table with a row for each id below a number."""
    return EmbeddingTable("item", rows, dim, seed=1)


def build_dynamic_table(dim: int, capacity: int) -> DynamicTable:
    """Returns a table without keys, and memory for some."""
    return DynamicTable("item", KeySpace("item", capacity=capacity), dim, seed=1)


class SluiceTraining:
    """A model in training, that reads its batches where it left off.

    Attributes:
        iterator: Where its next batches come from.

    Args:
        table: Its table.
        dataset: Its batches.
        sparse: Kind of the table's optimizer.
    """

    def __init__(
        self, table: EmbeddingTable, dataset: tf.data.Dataset, sparse: str = "adam"
    ) -> None:
        self._model = HistoryModel(table)
        config = OptimizerConfig.model_validate({"sparse": {"kind": sparse}})
        self._optimizers = Optimizers(config, self._model, TOTAL_STEPS)
        self._lookups = plan_lookups(self._model.lookups)
        self._keyed = plan_keyed_features(self._model.embedded_features, self._model.tables)
        step = TrainStep(
            self._model,
            BinaryCrossEntropy("label"),
            self._optimizers,
            StepOptions(seed=1),
            self._lookups,
            self._keyed,
        )
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

    @property
    def table_bytes(self) -> int:
        """Bytes of the table and its optimizer's state."""
        state = [variables[0] for variables in self._optimizers.sparse.slots.values()]
        return sum(4 * v.shape.num_elements() for v in (self._model.table.rows, *state))

    @property
    def table_rows(self) -> int:
        """Rows of the table."""
        return self._model.table.vocabulary_size
