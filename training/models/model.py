"""What every model is: tables of rows, inputs that look them up, networks over these."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import keras
import tensorflow as tf

from training.embedding.dynamic_table import find_step_variable
from training.embedding.static_table import EmbeddingTable
from training.input.batches import Features
from training.models.embedded_inputs import BIAS_SUFFIX, EmbeddedInputs
from training.networks.network import Network, StepContext


class Model(tf.Module):
    """Tables, embedded inputs and networks; `RetrievalModel` and `RankingModel` say what comes out.

    Variables are made in the constructor, so that a checkpoint restores into a fresh model and a
    SavedModel needs no build call.
    """

    tables: dict[str, EmbeddingTable]
    notes: tuple[str, ...] = ()
    """What to tell those who train the model, a line each."""

    @property
    @abstractmethod
    def inputs(self) -> tuple[str, ...]:
        """Names of the features that the model reads."""

    @abstractmethod
    def describe_inputs(self) -> dict[str, list[str]]:
        """Returns these names by what reads them."""

    @property
    @abstractmethod
    def embedded_inputs(self) -> Sequence[EmbeddedInputs]:
        """What turns features into the inputs of the networks."""

    @property
    def networks(self) -> Sequence[Network]:
        return ()

    @property
    def trained_tables(self) -> dict[str, EmbeddingTable]:
        return {n: self.tables[n] for n in sorted(self.tables) if self.tables[n].updates.is_trained}

    @property
    def table_variables(self) -> list[tf.Variable]:
        """Variables of the trained tables, in the order of their names."""
        return [find_step_variable(table.rows) for table in self.trained_tables.values()]

    @property
    def id_spaces(self) -> dict[str, str]:
        """For each table, the feature table whose ids number its rows: itself, but for biases."""
        biases = {id(t) for part in self.embedded_inputs for t in part.biases.values()}
        return {
            name: name.removesuffix(BIAS_SUFFIX) if id(table) in biases else name
            for name, table in self.tables.items()
        }

    @property
    def dense_variables(self) -> list[tf.Variable]:
        return list(self.named_weights.values())

    @property
    def named_weights(self) -> dict[str, tf.Variable]:
        """The trainable variables outside tables by name, such as `user_tower/dense/kernel`."""
        found: dict[str, tf.Variable] = {}
        for part in self.embedded_inputs:
            for name, weights in sorted(part.position_weights.items()):
                found[f"{name}/position_logits"] = weights.logits
        trained = {id(v) for network in self.networks for v in network.trained_variables}
        return found | {n: v for n, v in self._name_weights().items() if id(v) in trained}

    def _name_weights(self) -> dict[str, tf.Variable]:
        """Returns all weights of networks, moving statistics too."""
        return {f"{one.label}/{n}": v for one in self.networks for n, v in one.weights.items()}

    @property
    def constrained_weights(self) -> list[keras.Variable]:
        return [weight for network in self.networks for weight in network.constrained_weights]

    @property
    def named_variables(self) -> dict[str, tf.Variable]:
        """All variables that a step may set, by name."""
        tables = {v.name.partition(":")[0]: v for v in self.table_variables}
        return {**tables, **self.named_weights, **self._name_weights()}

    @property
    def state_variables(self) -> list[tf.Variable]:
        """Variables that the passes of training set, such as moving statistics."""
        return [v for network in self.networks for v in network.state_variables]

    @property
    def parameter_count(self) -> int:
        """Trainable numbers; of a table that grows, those of its rows so far."""
        dense = sum(variable.shape.num_elements() for variable in self.dense_variables)
        return dense + sum(t.vocabulary_size * t.dim for t in self.trained_tables.values())

    @property
    def lookups(self) -> list[tuple[str, tf.Variable]]:
        """Features whose ids are looked up as a batch holds them, and the tables; in any order."""
        return [pair for part in self.embedded_inputs for pair in part.lookups]

    @property
    def embedded_features(self) -> Mapping[str, EmbeddingTable]:
        found: dict[str, EmbeddingTable] = {}
        for part in self.embedded_inputs:
            found |= {**part.biases, **part.tables}
        return found

    def penalize_rows(
        self, features: Features, context: StepContext | None = None
    ) -> tf.Tensor | None:
        """Weighted squared norms of the rows that a batch looks up, summed; None: no weights."""
        parts = self.embedded_inputs
        terms = [term for part in parts for term in part.penalize_rows(features, context)]
        return tf.add_n(terms) if terms else None
