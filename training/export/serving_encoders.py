"""Serving encoders: raw values to features as part of a TensorFlow graph, and its raw inputs.

The same `EncoderPlan` that the ETL executes on Arrow batches is executed here on tensors, so a
served model sees what it was trained on:

    token in the vocabulary      its id
    any other token              1 (OOV), or one of its buckets
    null token                   what the ETL makes of null
    padding of a list            0, at the positions that hold the input's pad token
    list longer than `max_len`   its first `max_len` values; a shorter one is padded with 0
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tensorflow as tf

from conf.encoders import ColumnEncoding, EncoderPlan, RawColumn
from conf.encoders.bags import VectorBytes, Weights
from conf.encoders.dates import Cyclical, DatePart
from conf.encoders.hashing import Cross
from conf.errors import InputDataError
from conf.paths import ReadablePath
from conf.schema import OOV_ID, PAD_ID, FeatureSpec
from training.encoders.bags import scale_weights
from training.encoders.execution import RawValues, Resources, apply_operation
from training.encoders.hashing import hash_text
from training.encoders.vocabularies import Vocabulary, read_statistics, read_vocabulary
from training.export.source_facts import SourceFacts
from training.raw_inputs.inputs import InputColumn

TENSOR_DTYPES = {
    "int64": tf.int64,
    "float32": tf.float32,
    "float64": tf.float64,
    "string": tf.string,
    "bytes": tf.string,
}
# Values that no source produces: the ETL encodes -1 or "" as OOV where they are no tokens, and a
# pad token is read as nothing at all. All integers survive JSON readers that know doubles only.
INT_PAD_TOKENS = (-(2**63), -(2**62))
STRING_PAD_TOKENS = ("<sluice:pad>", "<sluice:pad:2>")
FLOAT_PAD_TOKEN = -(2.0**127) * (2.0 - 2.0**-23)
"""The least float32: what pads lists of floats."""
FLOAT_NULL_TOKEN = -(2.0**127) * (2.0 - 2.0**-22)
"""The next one: a missing float. NaN is one too in the graph, as it is to the ETL."""
# The token of a missing value.
INT_NULL_TOKENS = (-(2**61), -(2**60))
STRING_NULL_TOKENS = ("<sluice:null>", "<sluice:null:2>")


NO_FACTS = SourceFacts()


@dataclass(frozen=True)
class RawInput(InputColumn):
    """One input of the raw signature."""

    @property
    def tensor_spec(self) -> tf.TensorSpec:
        """Shape and type of the input."""
        shape = [None, self.length] if self.is_list else [None]
        return tf.TensorSpec(shape, TENSOR_DTYPES[self.dtype], name=self.name)

    def read(self, values: tf.Tensor) -> RawValues:
        """Marks what is missing and what pads."""
        nothing = tf.zeros_like(values, tf.bool)
        is_null = nothing if self.null_token is None else tf.equal(values, self.null_token)
        is_pad = None
        if self.is_list:
            is_pad = nothing if self.pad_token is None else tf.equal(values, self.pad_token)
        return RawValues(values, is_null, is_pad, self.max_len if self.is_list else None)


def build_inputs(
    plan: EncoderPlan,
    spec: FeatureSpec,
    name: str,
    vocabulary: Vocabulary | None,
    facts: SourceFacts = NO_FACTS,
) -> tuple[RawInput, ...]:
    """Builds the inputs of a feature.

    Args:
        plan: The plan of the dataset version.
        spec: The feature.
        name: Name of its first input; further ones have their column's name behind it.
        vocabulary: The vocabulary that its tokens are looked up in, or None.
        facts: What is known of the source.

    Returns:
        One input per column that is there when a model is served.
    """
    column = plan.column(spec.name)
    if column.operation is None:
        return (facts.complete(_plain_input(column, spec, name, vocabulary)),)
    served = [raw for raw in column.inputs if raw.is_served]
    names = [name, *(f"{name}_{raw.name}" for raw in served[1:])]
    units = _time_units(column)
    if isinstance(column.operation, VectorBytes):
        # A vector that lacks a number is none: what reads it would be refused.
        raw_list = _operand(served[0], spec, name, None)
        fixed = replace(raw_list, length=column.operation.length, max_len=None,
                        null_token=None, is_required=True)  # fmt: skip
        return (facts.complete(fixed),)
    return tuple(
        # Tokens stand in the first column; weights beside them have none.
        facts.complete(
            _operand(raw, spec, own, None if number else vocabulary), units.get(raw.name)
        )
        for number, (raw, own) in enumerate(zip(served, names, strict=True))
    )


def _time_units(column: ColumnEncoding) -> dict[str, str]:
    """The unit of each raw column that a date is made of."""
    operation = column.operation
    if isinstance(operation, DatePart | Cyclical):
        return {raw.name: operation.unit for raw in column.inputs}
    if not isinstance(operation, Cross):
        return {}
    prepared = {raw.name: operation.preparation(n) for n, raw in enumerate(column.inputs)}
    return {name: part.unit for name, part in prepared.items() if isinstance(part, DatePart)}


def _plain_input(
    column: ColumnEncoding, spec: FeatureSpec, name: str, vocabulary: Vocabulary | None
) -> RawInput:
    padding: int | float | str | None = None
    if spec.is_list:
        padding = spec.pad_value if vocabulary is None else pad_token(vocabulary)
    missing = _plain_null(column, spec) if vocabulary is None else null_token(vocabulary)
    return RawInput(
        name=name,
        feature=spec.name,
        column=column.column,
        dtype=_dtype(column.raw_dtype),
        is_list=spec.is_list,
        length=spec.shape[0] if spec.is_list else None,
        max_len=spec.max_len if spec.is_ragged else None,
        pad_token=padding,
        null_token=missing,
        is_required=vocabulary is None and missing is None,
    )


def _plain_null(column: ColumnEncoding, spec: FeatureSpec) -> int | float | str | None:
    """Returns what stands for a missing value that is read as it is; None: it must be there."""
    if spec.is_list:
        return None
    value = spec.pad_value if spec.vocabulary_size is None else OOV_ID
    if value is None or isinstance(value, str):
        return value if _dtype(column.raw_dtype) == "string" else None
    if column.raw_dtype == "int64":
        return int(value) if float(value).is_integer() else None
    return float(value) if column.raw_dtype in ("float32", "float64") else None


def _operand(
    raw: RawColumn, spec: FeatureSpec, name: str, vocabulary: Vocabulary | None
) -> RawInput:
    dtype = _dtype(raw.dtype)
    padding: int | float | str = FLOAT_PAD_TOKEN
    missing: int | float | str = FLOAT_NULL_TOKEN
    if vocabulary is not None:
        padding, missing = pad_token(vocabulary), null_token(vocabulary)
    elif dtype == "int64":
        padding, missing = INT_PAD_TOKENS[0], INT_NULL_TOKENS[0]
    elif dtype == "string":
        padding, missing = STRING_PAD_TOKENS[0], STRING_NULL_TOKENS[0]
    keeps_shape = raw.is_list and spec.is_list and not spec.is_ragged
    return RawInput(
        name=name,
        feature=spec.name,
        column=raw.name,
        dtype=dtype,
        is_list=raw.is_list,
        length=spec.shape[0] if keeps_shape and vocabulary is None else None,
        max_len=spec.max_len if raw.is_list else None,
        pad_token=padding if raw.is_list else None,
        null_token=missing,
    )


def _dtype(raw_dtype: str) -> str:
    return "string" if raw_dtype == "bytes" else raw_dtype


def name_inputs(features: Iterable[str]) -> dict[str, str]:
    """Returns an input name for each feature that TensorFlow takes in a signature.

    Letters, digits and underscores stay; names stay distinct.
    """
    names: dict[str, str] = {}
    for feature in features:
        name = re.sub(r"[^A-Za-z0-9_]", "_", feature)
        if not name[:1].isalpha() or name == "self":
            name = f"input_{name}"
        while name in names.values():
            name += "_"
        names[feature] = name
    return names


def pad_token(vocabulary: Vocabulary) -> int | str:
    """Returns what pads lists of raw tokens: what pads them in the raw data, where something does.

    Else the first pad token that is not itself a token: the least int64 for integers,
    `<sluice:pad>` for strings; each has a stand-in.

    Raises:
        InputDataError: All of them are tokens.
    """
    if vocabulary.pad_token is not None:
        return vocabulary.pad_token
    return _unused(vocabulary, "padding", INT_PAD_TOKENS, STRING_PAD_TOKENS)


def null_token(vocabulary: Vocabulary) -> int | str:
    """Returns the first null token that is not itself a token.

    Raises:
        InputDataError: All of them are tokens.
    """
    return _unused(vocabulary, "null", INT_NULL_TOKENS, STRING_NULL_TOKENS)


def _unused(
    vocabulary: Vocabulary, what: str, integers: Iterable[int], strings: Iterable[str]
) -> int | str:
    is_integer = pa.types.is_integer(vocabulary.tokens.type)
    candidates: tuple[int | str, ...] = tuple(integers if is_integer else strings)
    for candidate in candidates:
        if not _holds(vocabulary.tokens, candidate):
            return candidate
    raise InputDataError(
        f"vocabulary {vocabulary.name!r} holds every token that could stand for {what}",
        received=", ".join(repr(candidate) for candidate in candidates),
        fix="clean these tokens out of the source column and build again",
    )


def _holds(tokens: pa.Array, value: int | str) -> bool:
    return bool(pc.any(pc.equal(tokens, pa.scalar(value, tokens.type))).as_py())


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
        facts: What is known of the source.

    Attributes:
        inputs: The raw inputs, feature by feature.
    """

    def __init__(
        self,
        plan: EncoderPlan,
        features: Iterable[str],
        vocabularies: Mapping[str, Vocabulary],
        statistics: Mapping[str, np.ndarray] | None = None,
        facts: SourceFacts = NO_FACTS,
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
                    facts,
                ),
            )
            for spec in specs
        )
        self.inputs = tuple(raw for feature in self._features for raw in feature.inputs)
        self._resources = Resources(
            {name: self._token_encoder(name, vocabularies[name]) for name in needed},
            {name: tf.constant(values) for name, values in (statistics or {}).items()},
        )

    def encode(
        self, raw: Mapping[str, tf.Tensor], features: Collection[str] | None = None
    ) -> dict[str, tf.Tensor]:
        """Encodes a batch.

        Args:
            raw: By input name, `[batch]` or `[batch, length]` in the raw type.
            features: Features to encode, from their inputs alone; None: all.

        Returns:
            By feature name, `[batch]` or `[batch, length]`: int64 ids, or plain values.
        """
        return {
            feature.spec.name: self._encode_one(
                feature, [own.read(raw[own.name]) for own in feature.inputs]
            )
            for feature in self._features
            if features is None or feature.spec.name in features
        }

    def _encode_one(self, feature: _Feature, inputs: list[RawValues]) -> tf.Tensor:
        spec, operation = feature.spec, feature.column.operation
        if operation is not None:
            encoded = fit_length(apply_operation(operation, inputs, self._resources), spec)
            if isinstance(operation, Weights) and operation.scaled:
                encoded = scale_weights(encoded)
            return tf.cast(encoded, TENSOR_DTYPES[spec.dtype])
        if feature.column.vocabulary is None:
            values = inputs[0].values
            if spec.vocabulary_size is not None:  # Ids as they are; others are unknown.
                is_known = (values >= 0) & (values < spec.vocabulary_size)
                values = tf.where(is_known, values, tf.cast(OOV_ID, values.dtype))
            return fit_length(tf.cast(values, TENSOR_DTYPES[spec.dtype]), spec)
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
    version_dir: ReadablePath,
    plan: EncoderPlan,
    features: Iterable[str],
    facts: SourceFacts = NO_FACTS,
) -> ServingEncoders:
    """Reads what the named features need and builds their encoders.

    Args:
        version_dir: Directory of the dataset version.
        plan: Its encoders.
        features: Names of the features.
        facts: What is known of the source.

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
    return ServingEncoders(plan, features, vocabularies, statistics, facts)


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
