"""Features of a batch as the named inputs of a network: looked up, pooled, weighted.

ids, one a row            <feature>        [batch, dim]
ids, a list               <feature>        [batch, dim], pooled
the same, combiner none   <feature>        [batch, length, dim]
                          <feature>_mask   [batch, length], bool: where a token stands
numbers                   <feature>        [batch, 1], [batch, n]
with biases               <feature>_bias   [batch, 1], of lists the weighted sum
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf

from conf.errors import ConfigError
from conf.schema import PAD_ID, FeatureSpec
from conf.training.models import PoolingConfig
from training.embedding.static_table import EmbeddingTable
from training.input.batches import Features
from training.input.feature_columns import list_length
from training.networks.layers import (
    PositionWeights,
    combine_positions,
    gather_positions,
    normalize_weights,
    pool_rows,
)
from training.networks.network import NetworkInputs

MEAN = PoolingConfig()
MASK_SUFFIX, BIAS_SUFFIX = "_mask", "_bias"


@dataclass(frozen=True)
class InputFeature:
    """How a feature enters a network.

    Attributes:
        spec: The feature.
        dim: Length of its rows; None: its values are numbers.
        pooling: How a list becomes one vector.
        has_bias: Whether each id has a weight of its own as well.
        has_vector: Whether each id has a vector; a linear model has biases alone.
    """

    spec: FeatureSpec
    dim: int | None
    pooling: PoolingConfig = MEAN
    has_bias: bool = False
    has_vector: bool = True

    @property
    def name(self) -> str:
        """Name of the feature."""
        return self.spec.name

    @property
    def keeps_positions(self) -> bool:
        """Whether a network reads each position of a list."""
        is_read = self.dim is not None and self.has_vector
        return is_read and self.spec.is_list and self.pooling.combiner == "none"

    @property
    def reads(self) -> tuple[str, ...]:
        """Features of a batch that are read for it."""
        weights = self.pooling.weights
        return (self.name,) if weights is None else (self.name, weights)

    @property
    def shapes(self) -> dict[str, tuple[int | None, ...]]:
        """Shapes of its inputs of a network, the batch aside, by name.

        Raises:
            ConfigError: The feature is neither ids nor numbers.
        """
        if self.dim is None:
            return {self.name: (self._count_numbers(),)}
        shapes: dict[str, tuple[int | None, ...]] = {}
        if self.keeps_positions:
            length = list_length(self.spec)
            shapes = {self.name: (length, self.dim), self.name + MASK_SUFFIX: (length,)}
        elif self.has_vector:
            shapes[self.name] = (self.dim,)
        if self.has_bias:
            shapes[self.name + BIAS_SUFFIX] = (1,)
        return shapes

    def _count_numbers(self) -> int:
        spec = self.spec
        if spec.dtype == "bytes" or spec.is_ragged:
            raise ConfigError(
                f"the model cannot read feature {spec.name!r}",
                received=f"{spec.dtype}, shape {spec.shape}, without a vocabulary",
                allowed="ids with a vocabulary (scalar or list), numbers (scalar or fixed length)",
                fix="encode it with a vocabulary, or leave it out of the model's features; keys of "
                "64 bits need model.embeddings",
            )
        return int(spec.shape[0] or 1) if spec.shape else 1


class EmbeddedInputs(tf.Module):
    """Turns the features of a batch into the inputs of a network.

    Args:
        features: The features.
        tables: Table of each feature that holds ids, by feature.
        biases: Table of the weights of each feature's ids, of dimension 1, by feature.
        position_weights: Learned weights of a list's positions, by feature.
    """

    def __init__(
        self,
        features: Sequence[InputFeature],
        tables: Mapping[str, EmbeddingTable],
        biases: Mapping[str, EmbeddingTable] | None = None,
        position_weights: Mapping[str, PositionWeights] | None = None,
    ) -> None:
        super().__init__(name="embedded_inputs")
        self.features = tuple(features)
        self.tables, self.biases = dict(tables), dict(biases or {})
        self.position_weights = dict(position_weights or {})

    @property
    def names(self) -> tuple[str, ...]:
        """Features of a batch that are read."""
        return tuple(dict.fromkeys(name for f in self.features for name in f.reads))

    @property
    def lookups(self) -> list[tuple[str, tf.Variable]]:
        """Features whose ids are looked up as a batch holds them, and the tables."""
        found = []
        for feature in self.features:
            name = feature.name
            if name in self.position_weights:
                continue
            found += [(name, t[name].variable) for t in (self.tables, self.biases) if name in t]
        return found

    @property
    def scalar_tables(self) -> dict[str, EmbeddingTable]:
        """Table of each feature with one id a row."""
        scalars = [feature.name for feature in self.features if not feature.spec.is_list]
        return {name: self.tables[name] for name in scalars if name in self.tables}

    def build_keras_inputs(self) -> NetworkInputs:
        """Returns the inputs of a network, by name."""
        return build_keras_inputs(self.features)

    def __call__(self, batch: Features) -> dict[str, tf.Tensor]:
        """Returns the inputs by name.

        Args:
            batch: Features by name: scalars `[batch]`, lists `[batch, length]` padded with 0,
                ragged, or sparse with their weights as values.
        """
        inputs: dict[str, tf.Tensor] = {}
        for feature in self.features:
            inputs |= self._embed(feature, batch)
        return inputs

    def _embed(self, feature: InputFeature, batch: Features) -> dict[str, tf.Tensor]:
        name, spec = feature.name, feature.spec
        if feature.dim is None:
            numbers = tf.cast(batch[name], tf.float32)
            return {name: numbers if spec.is_list else numbers[:, tf.newaxis]}
        if spec.is_list:
            return self._embed_list(feature, batch)
        inputs = {}
        if name in self.tables:
            inputs[name] = self.tables[name].lookup(batch[name])
        if name in self.biases:
            inputs[name + BIAS_SUFFIX] = self.biases[name].lookup(batch[name])
        return inputs

    def _embed_list(self, feature: InputFeature, batch: Features) -> dict[str, tf.Tensor]:
        name = feature.name
        ids, weights = self._read_list(feature, batch)
        inputs = {}
        if name in self.tables:
            inputs[name] = self._pool(feature, self.tables[name], ids, weights)
        if feature.keeps_positions:
            inputs[name + MASK_SUFFIX] = tf.not_equal(ids, PAD_ID)
        if name in self.biases:
            each = gather_positions(self.biases[name], ids)
            inputs[name + BIAS_SUFFIX] = combine_positions(each, ids, weights, "sum")
        return inputs

    def _pool(
        self,
        feature: InputFeature,
        table: EmbeddingTable,
        ids: tf.Tensor,
        weights: tf.Tensor | None,
    ) -> tf.Tensor:
        positions = self.position_weights.get(feature.name)
        if positions is not None:
            ids = ids[:, : positions.max_len]
            return pool_rows(table, ids, positions(tf.shape(ids)[1]))
        if feature.pooling.combiner == "mean" and weights is None:
            return pool_rows(table, ids)
        return combine_positions(
            gather_positions(table, ids), ids, weights, feature.pooling.combiner
        )

    def _read_list(
        self, feature: InputFeature, batch: Features
    ) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Returns a list's ids `[batch, length]` and the weights of its positions, if any."""
        values, weights = batch[feature.name], None
        if isinstance(values, tf.SparseTensor):  # Of ids as columns, weights as values.
            rows, shape = values.indices[:, 0], values.dense_shape
            weights = _ragged(values.values, rows, shape)
            values = _ragged(values.indices[:, 1], rows, shape)
        elif feature.pooling.weights is not None:
            weights = batch[feature.pooling.weights]
        length = list_length(feature.spec) if feature.keeps_positions else None
        ids = _pad(values, length)
        if weights is None:
            return ids, None
        weights = _fit_width(tf.cast(_pad(weights, length), tf.float32), tf.shape(ids)[1])
        return ids, normalize_weights(weights, ids) if feature.pooling.softmax else weights


def build_keras_inputs(features: Sequence[InputFeature]) -> NetworkInputs:
    """Returns the inputs of a network over features, by name.

    Raises:
        ConfigError: A feature is neither ids nor numbers, or two inputs have one name.
    """
    tensors: dict[str, keras.KerasTensor] = {}
    for feature in features:
        for name, shape in feature.shapes.items():
            if name in tensors:
                raise ConfigError(
                    "two inputs of the network have the same name",
                    received=f"{name}, of {feature.name} and of another feature",
                    fix="give the feature another name in the build",
                )
            is_mask = name == feature.name + MASK_SUFFIX
            tensors[name] = keras.Input(shape, name=name, dtype="bool" if is_mask else "float32")
    embedded = [feature for feature in features if feature.dim is not None]
    return NetworkInputs(
        tensors,
        vectors=[feature.name for feature in embedded if feature.has_vector],
        numbers=[feature.name for feature in features if feature.dim is None],
        biases=[feature.name + BIAS_SUFFIX for feature in embedded if feature.has_bias],
        masks={f.name: f.name + MASK_SUFFIX for f in embedded if f.keeps_positions},
    )


def _ragged(values: tf.Tensor, rows: tf.Tensor, shape: tf.Tensor) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_value_rowids(values, rows, nrows=shape[0], validate=False)


def _pad(values: tf.Tensor | tf.RaggedTensor, length: int | None) -> tf.Tensor:
    """Returns a list as `[batch, length]`; None: as long as the longest of the batch."""
    if isinstance(values, tf.RaggedTensor):
        return values.to_tensor(shape=[None, length])
    if length is None or values.shape[1] == length:
        return values
    return tf.ensure_shape(_fit_width(values, length), [None, length])


def _fit_width(values: tf.Tensor, width: tf.Tensor | int) -> tf.Tensor:
    missing = tf.maximum(width - tf.shape(values)[1], 0)
    return tf.pad(values, [[0, 0], [0, missing]])[:, :width]
