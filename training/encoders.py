"""The serving half of the encoders: raw values to features, as part of a TensorFlow graph.

The same `EncoderPlan` that the ETL executes on Arrow batches is executed here on tensors, so a
served model sees what it was trained on:

    token in the vocabulary      its id
    any other token              1 (OOV), or one of its buckets
    null token                   what the ETL makes of null
    padding of a list            0, at the positions that hold the input's pad token
    list longer than `max_len`   its first `max_len` values; a shorter one is padded with 0
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf

from conf.encoders import ColumnEncoding, EncoderPlan
from conf.errors import InputDataError
from conf.operations import Weights
from conf.place import Place
from conf.schema import OOV_ID, PAD_ID, FeatureSpec
from training.operations import RawValues, Resources, apply_operation, hash_text, scale_weights
from training.raw_inputs import (
    TENSOR_DTYPES,
    RawInput,
    build_inputs,
    name_inputs,
    pad_token,
)
from training.vocabularies import Vocabulary, read_statistics, read_vocabulary


@dataclass(frozen=True)
class _Feature:
    """One feature: what it is, how it is made, and from which inputs."""

    spec: FeatureSpec
    column: ColumnEncoding
    inputs: tuple[RawInput, ...]


class ServingEncoders(tf.Module):
    """Encodes raw features inside a graph; one lookup table per vocabulary.

    Args:
        plan: The plan of the dataset version.
        features: Features to encode.
        vocabularies: Every vocabulary that they need, by name.
        statistics: Every table of statistics that they need, float32 `[vocabulary_size]`.
    """

    def __init__(
        self,
        plan: EncoderPlan,
        features: Iterable[str],
        vocabularies: Mapping[str, Vocabulary],
        statistics: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        super().__init__(name="serving_encoders")
        specs = [plan.schema[name] for name in features]
        columns = {spec.name: plan.column(spec.name) for spec in specs}
        needed = sorted({column.vocabulary for column in columns.values() if column.vocabulary})
        self.tables = {name: build_lookup(vocabularies[name]) for name in needed}
        names = name_inputs(spec.name for spec in specs)
        self._features = tuple(
            _Feature(
                spec,
                columns[spec.name],
                build_inputs(
                    plan,
                    spec,
                    names[spec.name],
                    vocabularies.get(columns[spec.name].vocabulary or ""),
                ),
            )
            for spec in specs
        )
        self.inputs = tuple(raw for feature in self._features for raw in feature.inputs)
        self._resources = Resources(
            {name: self._token_encoder(name, vocabularies[name]) for name in needed},
            {name: tf.constant(values) for name, values in (statistics or {}).items()},
        )

    def encode(self, raw: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Encodes a batch.

        Args:
            raw: By input name, `[batch]` or `[batch, length]` in the raw type.

        Returns:
            By feature name, `[batch]` or `[batch, length]`: int64 ids, or plain values.
        """
        return {
            feature.spec.name: self._encode_one(
                feature, [own.read(raw[own.name]) for own in feature.inputs]
            )
            for feature in self._features
        }

    def _encode_one(self, feature: _Feature, inputs: list[RawValues]) -> tf.Tensor:
        spec, operation = feature.spec, feature.column.operation
        if operation is not None:
            encoded = fit_length(apply_operation(operation, inputs, self._resources), spec)
            if isinstance(operation, Weights) and operation.scaled:
                encoded = scale_weights(encoded)
            return tf.cast(encoded, TENSOR_DTYPES[spec.dtype])
        if feature.column.vocabulary is None:
            return fit_length(tf.cast(inputs[0].values, TENSOR_DTYPES[spec.dtype]), spec)
        return fit_length(self._resources.ids[feature.column.vocabulary](inputs[0]), spec)

    def _token_encoder(self, name: str, vocabulary: Vocabulary) -> Any:
        def encode(raw: RawValues) -> tf.Tensor:
            ids = self.tables[name].lookup(raw.values)
            if vocabulary.oov_buckets is not None:
                hashed = hash_text(raw.text, vocabulary.oov_buckets)
                ids = tf.where(tf.equal(ids, OOV_ID), hashed, ids)
            return raw.finish(ids, OOV_ID)

        return encode


def fit_length(values: tf.Tensor, spec: FeatureSpec) -> tf.Tensor:
    """Cuts or pads lists to the feature's `max_len`, the shape that the model was trained on.

    Args:
        values: `[batch]`, or `[batch, length]` for a list.
        spec: The feature; anything but a ragged list with a `max_len` passes as it is.
    """
    if not spec.is_ragged or spec.max_len is None:
        return values
    values = values[:, : spec.max_len]
    missing = spec.max_len - tf.shape(values)[1]
    padding = spec.pad_value if spec.vocabulary_size is None else PAD_ID
    fill = tf.cast(padding or 0, values.dtype)
    padded = tf.pad(values, [[0, 0], [0, missing]], constant_values=fill)
    return tf.ensure_shape(padded, [None, spec.max_len])


def build_serving_encoders(
    version_dir: Place, plan: EncoderPlan, features: Iterable[str]
) -> ServingEncoders:
    """Reads what the named features need and builds their encoders.

    Raises:
        InputDataError: The plan does not make a feature, or what was fitted is damaged.
    """
    features = tuple(features)
    try:
        columns = [plan.column(name) for name in features]
        names = {column.vocabulary for column in columns} - {None}
        specs = [plan.vocabulary(name) for name in sorted(filter(None, names))]
    except KeyError as error:
        raise InputDataError(
            "the encoder plan does not make a feature that the model reads",
            received=str(error),
            allowed=", ".join(column.feature for column in plan.columns),
            fix="train on this dataset version, or export with the version of the training run",
        ) from error
    vocabularies = {spec.name: read_vocabulary(version_dir, spec) for spec in specs}
    wanted = {getattr(column.operation, "table", None) for column in columns}
    statistics = {
        spec.name: read_statistics(version_dir, spec) for spec in plan.tables if spec.name in wanted
    }
    return ServingEncoders(plan, features, vocabularies, statistics)


def build_lookup(vocabulary: Vocabulary) -> tf.lookup.StaticHashTable:
    """Builds the table from tokens to ids; everything else, and what is retired, is OOV."""
    tokens, first = vocabulary.tokens, vocabulary.first_id
    ids = np.arange(first, first + len(tokens), dtype=np.int64)
    if vocabulary.retired is not None:
        ids[vocabulary.retired] = OOV_ID
    if not len(tokens):
        # TensorFlow refuses an empty table; any key will do that maps to OOV as well.
        tokens = pa.array([pad_token(vocabulary)], tokens.type)
        ids = np.array([OOV_ID], np.int64)
    keys: Any = tokens.to_numpy(zero_copy_only=False)
    initializer = tf.lookup.KeyValueTensorInitializer(
        tf.constant(keys, dtype=TENSOR_DTYPES[vocabulary.token_dtype]), tf.constant(ids)
    )
    return tf.lookup.StaticHashTable(initializer, default_value=OOV_ID)
