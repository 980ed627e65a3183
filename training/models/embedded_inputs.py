"""Features of a batch as the named inputs of a network: looked up, pooled, weighted.

ids, one a row            <feature>        [batch, dim]
ids, a list               <feature>        [batch, dim], pooled
the same, combiner none   <feature>        [batch, length, dim]
                          <feature>_mask   [batch, length], bool: where a token stands
numbers                   <feature>        [batch, 1], [batch, n]
numbers, a list           <feature>        [batch, 1], pooled; combiner none as of ids
bytes of numbers          <feature>        [batch, n]
with biases               <feature>_bias   [batch, 1], of lists the weighted sum
elements as fields        <feature>_field_sum      [batch, dim], Σ x v
                          <feature>_field_squares  [batch, dim], Σ (x v)²
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from conf.errors import ConfigError, InputDataError
from conf.schema import PAD_ID, FeatureSpec
from conf.training.models import PoolingConfig, VectorConfig
from training.embedding.distinct_rows import BatchRows
from training.embedding.static_table import EmbeddingTable
from training.input.batches import Features
from training.networks.layers import (
    PositionWeights,
    combine_positions,
    gather_positions,
    may_cut,
    pool_rows,
    sum_elements,
    sum_squared_norms,
)
from training.networks.network import NetworkInputs, StepContext
from training.reader.feature_columns import list_length

MEAN = PoolingConfig(combiner="mean")
MASK_SUFFIX, BIAS_SUFFIX = "_mask", "_bias"
FIELD_SUFFIXES = ("_field_sum", "_field_squares")
_WRONG_VECTOR = re.compile(r"feature (\S+) holds vectors of (.*); found:\] \[(\d+)\]")


@dataclass(frozen=True)
class InputFeature:
    """How a feature enters a network.

    Of a list that is cut the network computes the positions at the width of the batch, and leaves
    out the padding that all rows have; else a list has its longest length.
    """

    spec: FeatureSpec
    dim: int | None  # Length of its rows; None: its values are numbers.
    pooling: PoolingConfig = MEAN
    has_bias: bool = False  # Each id has a weight of its own as well.
    has_vector: bool = True  # A linear model has biases alone.
    pools_numbers: bool = False  # The numbers of a list become one; else they are a vector.
    vector: VectorConfig | None = None  # How its bytes are read as numbers.
    elements: str | None = None  # Combiner of a list's elements, where these are fields.
    has_order: bool = True  # The network reads the order of positions.
    is_cut: bool = False

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def keeps_positions(self) -> bool:
        is_read = self.pools_numbers or (self.dim is not None and self.has_vector)
        return is_read and self.spec.is_list and self.combiner == "none"

    @property
    def cut_length(self) -> int | None:
        """Longest length of a list that is computed at the width of the batch; None: it is not."""
        return list_length(self.spec) if self.is_cut and self.keeps_positions else None

    @property
    def field_names(self) -> tuple[str, ...]:
        """Names of the inputs that sum over its elements, and over their squares."""
        if self.elements is None or self.dim is None or not (self.spec.is_list and self.has_vector):
            return ()
        return tuple(self.name + suffix for suffix in FIELD_SUFFIXES)

    @property
    def reads_order(self) -> bool:
        return self.combiner == "last" or (self.keeps_positions and self.has_order)

    @property
    def combiner(self) -> str:
        return self.pooling.combiner or "mean"

    @property
    def reads(self) -> tuple[str, ...]:
        weights = self.pooling.weights
        return (self.name,) if weights is None else (self.name, weights)

    @property
    def shapes(self) -> dict[str, tuple[int | None, ...]]:
        """Shapes of its inputs of a network, the batch aside, by name."""
        if self.dim is None and not self.pools_numbers:
            return {self.name: (self._count_numbers(),)}
        shapes: dict[str, tuple[int | None, ...]] = {}
        if self.keeps_positions:
            length = list_length(self.spec) if self.cut_length is None else None
            shapes = {self.name: (length, self.dim or 1), self.name + MASK_SUFFIX: (length,)}
        elif self.has_vector or self.pools_numbers:
            shapes[self.name] = (self.dim or 1,)
            shapes |= dict.fromkeys(self.field_names, (self.dim,))
        if self.has_bias:
            shapes[self.name + BIAS_SUFFIX] = (1,)
        return shapes

    def _count_numbers(self) -> int:
        spec = self.spec
        if self.vector is not None:
            return self.vector.length
        if spec.dtype == "bytes" or spec.is_ragged:
            raise ConfigError(
                f"the model cannot read feature {spec.name!r}",
                received=f"{spec.dtype}, shape {spec.shape}, without a vocabulary",
                allowed="ids with a vocabulary, numbers (scalar or list), bytes of numbers",
                fix="encode it with a vocabulary, or leave it out of the model's features; keys of "
                "64 bits need model.embeddings, bytes of numbers model.vectors",
            )
        return int(spec.shape[0] or 1) if spec.shape else 1


class EmbeddedInputs(tf.Module):
    """Turns the features of a batch into the inputs of a network.

    By feature there are tables of ids and of their biases, and learned weights of positions.
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
        return tuple(dict.fromkeys(name for f in self.features for name in f.reads))

    @property
    def lookups(self) -> list[tuple[str, tf.Variable]]:
        """Features whose ids are looked up as a batch holds them, and the tables."""
        names = [one.name for one in self.features if one.name not in self.position_weights]
        both = (self.tables, self.biases)
        return [(n, tables[n].variable) for n in names for tables in both if n in tables]

    def build_keras_inputs(self) -> NetworkInputs:
        return build_keras_inputs(self.features)

    def __call__(
        self,
        batch: Features,
        context: StepContext | None = None,
        features: Sequence[InputFeature] | None = None,
    ) -> dict[str, tf.Tensor]:
        """Returns the inputs of features by name; None: all.

        The batch has scalars `[batch]`, lists `[batch, length]` padded with 0, ragged, or sparse
        with their weights as values.
        """
        inputs: dict[str, tf.Tensor] = {}
        rows = None if context is None else context.rows
        asked = self.features if features is None else features
        width = self._find_width(batch, asked)
        for feature in asked:
            inputs |= self._embed(feature, batch, width, rows)
        return inputs

    def _find_width(self, batch: Features, asked: Sequence[InputFeature]) -> tf.Tensor | None:
        """Returns the width of the batch, int32 scalar; None where lists have their longest length.

        Lists of one network need one width. It has a position behind the longest list where there
        is one, as sequences read their beginning there.
        """
        cut = [feature for feature in self.features if feature.cut_length is not None]
        if not cut or not may_cut() or any(feature not in asked for feature in cut):
            return None
        longest = [find_longest(_read_list(feature, batch)[1]) for feature in cut]
        return tf.reduce_max(tf.stack(longest)) + 1

    def _embed(
        self,
        feature: InputFeature,
        batch: Features,
        width: tf.Tensor | None,
        rows: BatchRows | None,
    ) -> dict[str, tf.Tensor]:
        name = feature.name
        if feature.vector is not None:
            return {name: decode_vectors(name, batch[name], feature.vector)}
        if feature.dim is None and not feature.pools_numbers:
            numbers = tf.cast(batch[name], tf.float32)
            return {name: numbers if feature.spec.is_list else numbers[:, tf.newaxis]}
        if feature.spec.is_list:
            return self._embed_list(feature, batch, width, rows)
        inputs = {}
        if name in self.tables:
            inputs[name] = self.tables[name].lookup(batch[name], rows)
        if name in self.biases:
            inputs[name + BIAS_SUFFIX] = self.biases[name].lookup(batch[name], rows)
        return inputs

    def _embed_list(
        self,
        feature: InputFeature,
        batch: Features,
        width: tf.Tensor | None,
        rows: BatchRows | None,
    ) -> dict[str, tf.Tensor]:
        name, positions = feature.name, self.position_weights.get(feature.name)
        values, ids, weights = _read_list(feature, batch, width)
        is_plain = feature.combiner == "mean" and weights is None and not feature.field_names
        inputs = {}
        if name in self.tables and (is_plain or positions is not None):
            counts = None if positions is None else positions(tf.shape(ids)[1])
            inputs[name] = pool_rows(self.tables[name], ids, counts, rows)
        elif name in self.tables or feature.pools_numbers:
            source = None if feature.cut_length is None else batch[name]
            if feature.pools_numbers:
                each = tf.cast(values, tf.float32)[..., tf.newaxis]
            else:
                each = gather_positions(self.tables[name], ids, source, rows)
            inputs[name] = combine_positions(each, ids, weights, feature.combiner)
            if feature.field_names:
                sums = sum_elements(each, ids, weights, str(feature.elements))
                inputs |= dict(zip(feature.field_names, sums, strict=True))
        if feature.keeps_positions:
            inputs[name + MASK_SUFFIX] = tf.not_equal(ids, PAD_ID)
        if name in self.biases:
            each = gather_positions(self.biases[name], ids, rows=rows)
            inputs[name + BIAS_SUFFIX] = combine_positions(each, ids, weights, "sum")
        return inputs

    def read_ids(self, name: str, batch: Features) -> tf.Tensor:
        """Returns the ids of a list as its positions are read, int `[batch, length]`, 0 padding."""
        feature = next(feature for feature in self.features if feature.name == name)
        return _read_list(feature, batch, self._find_width(batch, self.features))[1]

    def penalize_rows(self, batch: Features, context: StepContext | None = None) -> list[tf.Tensor]:
        """Returns the weighted squared norms of rows that a batch looks up, summed over it."""
        terms, rows = [], None if context is None else context.rows
        for feature in self.features:
            name = feature.name
            for table in [own[name] for own in (self.tables, self.biases) if name in own]:
                updates = table.updates
                if updates.l2 is not None and not updates.are_dense:
                    ids = _read_list(feature, batch)[1] if feature.spec.is_list else batch[name]
                    terms.append(updates.l2 * sum_squared_norms(table, ids, rows))
        return terms


def build_keras_inputs(features: Sequence[InputFeature]) -> NetworkInputs:
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
        masks={f.name: f.name + MASK_SUFFIX for f in features if f.keeps_positions},
        elements={f.name: f.field_names for f in features if f.field_names},
        lengths={f.name: length for f in features if (length := f.cut_length) is not None},
    )


def find_longest(tokens: tf.Tensor) -> tf.Tensor:
    """Returns how far the longest list of int `[batch, length]` reaches, int32 scalar."""
    is_met = tf.reduce_any(tf.not_equal(tokens, PAD_ID), axis=0)
    ends = tf.where(is_met, tf.range(1, tf.size(is_met) + 1), 0)
    return tf.reduce_max(tf.concat([[0], ends], axis=0))


def _read_list(
    feature: InputFeature, batch: Features, width: tf.Tensor | None = None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]:
    """Returns a list's values, what is 0 where none stands, and the weights of its positions.

    `[batch, length]` each. Of ids both are the ids.
    """
    values, weights = _bound(batch[feature.name], feature), None
    if isinstance(values, tf.SparseTensor):  # Of ids as columns, weights as values.
        rows, shape = values.indices[:, 0], values.dense_shape
        weights = _ragged(values.values, rows, shape)
        values = _ragged(values.indices[:, 1], rows, shape)
    elif feature.pooling.weights is not None:
        weights = _bound(batch[feature.pooling.weights], feature)
    length = list_length(feature.spec) if feature.keeps_positions else None
    if width is not None and feature.cut_length is not None:
        length = tf.minimum(width, feature.cut_length)
    pad = float(feature.spec.pad_value or 0) if feature.pools_numbers else PAD_ID
    tokens = values = _pad(values, length, pad)
    if feature.pools_numbers:
        tokens = _find_values(feature, values, pad)
    if weights is not None:
        weights = _fit_width(tf.cast(_pad(weights, length), tf.float32), tf.shape(tokens)[1])
    return values, tokens, weights


def _ragged(values: tf.Tensor, rows: tf.Tensor, shape: tf.Tensor) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_value_rowids(values, rows, nrows=shape[0], validate=False)


def _bound(values: Any, feature: InputFeature) -> Any:
    """Cuts a list to `max_len`: what masks items, requests and files hold longer ones."""
    most = list_length(feature.spec)
    if most is None or isinstance(values, tf.SparseTensor):
        return values
    width = None if isinstance(values, tf.RaggedTensor) else values.shape[1]
    return values if width is not None and width <= most else values[:, :most]


def _pad(
    values: tf.Tensor | tf.RaggedTensor, length: int | tf.Tensor | None, pad: float = PAD_ID
) -> tf.Tensor:
    """Returns a list as `[batch, length]`; None: as long as the longest of the batch."""
    if isinstance(length, tf.Tensor):
        return _fit_width(_pad(values, None, pad), length, pad)
    if isinstance(values, tf.RaggedTensor):
        return values.to_tensor(tf.cast(pad, values.dtype), shape=[None, length])
    if length is None or values.shape[1] == length:
        return values
    return tf.ensure_shape(_fit_width(values, length, pad), [None, length])


def _fit_width(values: tf.Tensor, width: tf.Tensor | int, pad: float = PAD_ID) -> tf.Tensor:
    rows, length = tf.unstack(tf.shape(values))
    # Not `tf.pad`: for int64 it has no kernel on GPUs.
    fill = tf.fill([rows, tf.maximum(width - length, 0)], tf.cast(pad, values.dtype))
    return tf.concat([values, fill], axis=1)[:, :width]


def _find_values(feature: InputFeature, values: tf.Tensor, pad: float) -> tf.Tensor:
    """Returns 1 where a list of numbers holds a value and 0 behind its end, int32."""
    if not feature.spec.is_ragged:
        return tf.ones_like(values, tf.int32)
    is_value = tf.cast(tf.not_equal(values, tf.cast(pad, values.dtype)), tf.int32)
    return tf.minimum(tf.cumsum(is_value, axis=1, reverse=True), 1)


def decode_vectors(name: str, values: tf.Tensor, vector: VectorConfig) -> tf.Tensor:
    """Reads vectors from bytes, as numpy's `tobytes` writes them.

    float32 `[batch, length]` of strings `[batch]`; zeros where a string is empty.
    """
    dtype = tf.as_dtype(vector.decode)
    size, found = vector.length * dtype.size, tf.strings.length(values)
    wrong = tf.boolean_mask(found, tf.not_equal(found, size) & tf.not_equal(found, 0))
    text = f"feature {name} holds vectors of {size} bytes ({vector.length} {vector.decode}); found:"
    is_right = tf.debugging.Assert(tf.equal(tf.size(wrong), 0), [text, wrong[:1]])
    with tf.control_dependencies([] if is_right is None else [is_right]):
        numbers = tf.io.decode_raw(values, dtype, little_endian=True, fixed_length=size)
    return tf.ensure_shape(tf.cast(numbers, tf.float32), [None, vector.length])


@contextmanager
def vector_errors() -> Iterator[None]:
    """Says in words what `decode_vectors` refuses while a compiled function runs in the block."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = _WRONG_VECTOR.search(error.message)
        if found is None:
            raise
        name, wanted, received = found.groups()
        raise InputDataError(
            f"feature {name!r} holds a vector of another length than model.vectors says",
            received=f"{received} bytes",
            allowed=f"{wanted}, or none",
            fix=f"set model.vectors.{name} to the type and length of the vectors",
        ) from error
