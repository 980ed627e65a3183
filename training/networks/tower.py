"""Tower of a two-tower model: the features of one side in, one vector out.

The user tower and the item tower are built in `training/models/dssm.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tensorflow as tf

from conf.errors import ConfigError
from conf.schema import FeatureSpec
from training.embedding.static_table import EmbeddingTable
from training.input.feature_columns import list_length
from training.networks.layers import MLP, PositionWeights, normalize_rows, pool_rows

Features = Mapping[str, tf.Tensor]


@dataclass(frozen=True)
class TowerConfig:
    """Shape of a tower.

    Attributes:
        name: Name of the tower.
        hidden_units: Lengths of the hidden layers.
        output_dim: Length of the vector.
        dropout: Share of hidden units dropped in training, or None.
        position_weighted: List feature whose positions have learned weights, or None.
    """

    name: str
    hidden_units: tuple[int, ...]
    output_dim: int
    dropout: float | None
    position_weighted: str | None = None


class Tower(tf.Module):
    """Embeds and pools features, concatenates them, and maps them to a unit vector.

    A single embedded scalar without hidden layers is the vector itself: an item tower over the
    item id alone stays a plain table.

    Args:
        config: Shape of the tower.
        specs: Features that it reads.
        tables: Table by feature, for every feature that holds ids.
        seed: Seed of the first weights.

    Raises:
        ConfigError: There is no feature, or one that is neither a number nor an id.
    """

    def __init__(
        self,
        config: TowerConfig,
        specs: Sequence[FeatureSpec],
        tables: Mapping[str, EmbeddingTable],
        seed: int,
    ) -> None:
        super().__init__(name=config.name)
        if not specs:
            raise ConfigError(
                f"the {config.name} has no input feature",
                allowed="one or more features of the dataset",
            )
        self._config = config
        self._specs = tuple(specs)
        self.tables = {spec.name: tables[spec.name] for spec in specs if spec.name in tables}
        self.position_weights = {
            spec.name: PositionWeights(f"{config.name}/{spec.name}", length)
            for spec in specs
            if spec.name == config.position_weighted and (length := list_length(spec)) is not None
        }
        width = sum(self._width(spec) for spec in self._specs)
        alone = len(specs) == 1 and not specs[0].is_list and width == config.output_dim
        self.mlp = None
        if config.hidden_units or not alone:
            self.mlp = MLP(
                config.name,
                width,
                config.hidden_units,
                config.output_dim,
                seed=seed,
                dropout=config.dropout,
            )

    @property
    def scalar_tables(self) -> dict[str, EmbeddingTable]:
        """Table of each scalar feature with a vocabulary."""
        return {
            s.name: self.tables[s.name]
            for s in self._specs
            if s.name in self.tables and not s.is_list
        }

    @property
    def pooled_tables(self) -> dict[str, EmbeddingTable]:
        """Table of each list feature whose positions count alike."""
        return {
            s.name: self.tables[s.name]
            for s in self._specs
            if s.name in self.tables and s.is_list and s.name not in self.position_weights
        }

    def __call__(self, features: Features, dropout_seed: tf.Tensor | None = None) -> tf.Tensor:
        """Returns unit vectors `[batch, output_dim]`."""
        parts = [self._embed(spec, features[spec.name]) for spec in self._specs]
        vector = parts[0] if len(parts) == 1 else tf.concat(parts, axis=1)
        if self.mlp is not None:
            vector = self.mlp(vector, dropout_seed)
        return normalize_rows(vector)

    def _width(self, spec: FeatureSpec) -> int:
        if spec.name in self.tables:
            return self.tables[spec.name].dim
        if spec.dtype == "bytes" or spec.is_ragged:
            raise ConfigError(
                f"the {self.name} cannot read feature {spec.name!r}",
                received=f"{spec.dtype}, shape {spec.shape}, without a vocabulary",
                allowed="ids with a vocabulary (scalar or list), numbers (scalar or fixed length)",
                fix="encode it with a vocabulary, or leave it out of the model's features; keys of "
                "64 bits need model.embeddings",
            )
        return int(spec.shape[0] or 1) if spec.shape else 1

    def _embed(self, spec: FeatureSpec, values: tf.Tensor) -> tf.Tensor:
        """Turns one feature into a block of the tower's input, `[batch, width]`."""
        if spec.name not in self.tables:
            numbers = tf.cast(values, tf.float32)
            return numbers if spec.is_list else numbers[:, tf.newaxis]
        table = self.tables[spec.name]
        if not spec.is_list:
            return table.lookup(values)
        ids = values.to_tensor() if isinstance(values, tf.RaggedTensor) else values
        if spec.name not in self.position_weights:
            return pool_rows(table, ids)
        positions = self.position_weights[spec.name]
        ids = ids[:, : positions.max_len]
        return pool_rows(table, ids, positions(tf.shape(ids)[1]))
