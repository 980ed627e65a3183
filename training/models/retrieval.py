"""Retrieval models: users and items as vectors of one space, compared by dot product."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import tensorflow as tf

from conf.errors import ConfigError, did_you_mean
from conf.manifest import Manifest
from conf.schema import FeatureSpec
from training.embedding.static_table import EmbeddingTable, list_variables
from training.networks.tower import Features


class RetrievalModel(tf.Module):
    """Maps users and items to vectors; the score of a pair is their dot product.

    Variables are made in the constructor, so that a checkpoint restores into a fresh model and a
    SavedModel needs no build call.

    Attributes:
        user_inputs: Names of the features that `embed_users` reads.
        item_inputs: Names of the features that `embed_items` reads.
        temperature: Divisor of the scores in the loss.
        tables: Embedding tables by name; updated lazily.
    """

    user_inputs: tuple[str, ...]
    item_inputs: tuple[str, ...]
    temperature: float
    tables: dict[str, EmbeddingTable]

    @abstractmethod
    def embed_users(self, features: Features, dropout_seed: tf.Tensor | None = None) -> tf.Tensor:
        """Returns user vectors `[batch, dim]`.

        Args:
            features: At least `user_inputs`: scalars `[batch]`, lists `[batch, length]` padded
                with 0 or ragged.
            dropout_seed: int32 `[2]` in training; None elsewhere: nothing drops out.
        """

    @abstractmethod
    def embed_items(self, features: Features, dropout_seed: tf.Tensor | None = None) -> tf.Tensor:
        """Returns item vectors `[batch, dim]`; arguments as in `embed_users`."""

    @property
    def table_variables(self) -> list[tf.Variable]:
        """Variables of the embedding tables, by table name; several where a table is split."""
        return [v for name in sorted(self.tables) for v in list_variables(self.tables[name].rows)]

    @property
    def id_spaces(self) -> dict[str, str]:
        """For each table, the feature table whose ids number its rows: itself, but for biases."""
        return {name: name for name in self.tables}

    @property
    def dense_variables(self) -> list[tf.Variable]:
        """All other trainable variables, in a fixed order."""
        rows = {id(variable) for variable in self.table_variables}
        return [variable for variable in self.trainable_variables if id(variable) not in rows]

    @property
    def parameter_count(self) -> int:
        """Number of trainable numbers; of a table that grows, those of its rows so far."""
        dense = sum(variable.shape.num_elements() for variable in self.dense_variables)
        return dense + sum(t.vocabulary_size * t.dim for t in self.tables.values())

    @property
    def lookups(self) -> list[tuple[str, tf.Variable]]:
        """Features whose ids are looked up as a batch holds them, and the tables; in any order."""
        return [(name, table.variable) for name, table in self._scalar_tables.items()]

    @property
    def embedded_features(self) -> Mapping[str, EmbeddingTable]:
        """Table of each feature that the model looks up, scalar or list."""
        return self._scalar_tables

    def sum_squared_rows(self, features: Features) -> tf.Tensor:
        """Squared norms of the rows that the scalar features of a batch look up, `[batch]`."""
        total: tf.Tensor = 0.0
        for name, table in self._scalar_tables.items():
            total += tf.reduce_sum(tf.square(table.lookup(features[name])), axis=1)
        return total

    @property
    @abstractmethod
    def _scalar_tables(self) -> dict[str, EmbeddingTable]:
        """Table of each scalar feature that the model looks up."""


def find_feature(manifest: Manifest, name: str) -> FeatureSpec:
    """Returns a feature that a model's config names.

    Raises:
        ConfigError: The dataset has no such feature.
    """
    if name not in manifest.schema:
        raise ConfigError(
            "the model names a feature that the dataset does not have",
            received=name,
            allowed=", ".join(manifest.schema.names),
            fix=did_you_mean(name, manifest.schema.names),
        )
    return manifest.schema[name]


def table_size(manifest: Manifest, spec: FeatureSpec) -> int:
    """Returns the number of ids of the table that a feature reads.

    Raises:
        ConfigError: The feature has no vocabulary, or shares its table with a feature that has
            another one.
    """
    sizes = {
        other.name: other.vocabulary_size
        for other in manifest.schema.features
        if other.table == spec.table and other.vocabulary_size is not None
    }
    if spec.name not in sizes or len(set(sizes.values())) != 1:
        raise ConfigError(
            f"feature {spec.name!r} cannot be embedded from table {spec.table!r}",
            received=f"vocabulary sizes {sizes}",
            allowed="one vocabulary per embedding table",
            fix="encode the feature with a vocabulary, the same for all that share its table; or, "
            f"for keys of any value, set model.embeddings.{spec.table}.kind=dynamic",
        )
    return int(sizes[spec.name] or 0)
