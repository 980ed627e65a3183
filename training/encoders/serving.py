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
from functools import partial
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
from conf.manifest import Manifest
from conf.paths import ReadablePath
from conf.schema import OOV_ID, PAD_ID, FeatureSpec
from training.encoders.operations import (
    RawValues,
    Resources,
    apply_operation,
    hash_text,
    scale_weights,
)
from training.encoders.source import SourceFacts, read_source_facts
from training.encoders.vocabularies import (
    Vocabulary,
    find_column,
    read_plan,
    read_statistics,
    read_vocabulary,
)
from training.raw_inputs.inputs import InputColumn

TENSOR_DTYPES = {
    "int64": tf.int64,
    "float32": tf.float32,
    "float64": tf.float64,
    "string": tf.string,
    "bytes": tf.string,
}
# Values that no source produces, to pad lists and for missing values, each with a stand-in; all
# integers survive JSON readers that know doubles only. Floats are the two least float32, and NaN is
# missing too in the graph, as it is to the ETL.
INT_PAD_TOKENS, INT_NULL_TOKENS = (-(2**63), -(2**62)), (-(2**61), -(2**60))
STRING_PAD_TOKENS = ("<sluice:pad>", "<sluice:pad:2>")
STRING_NULL_TOKENS = ("<sluice:null>", "<sluice:null:2>")
FLOAT_PAD_TOKEN, FLOAT_NULL_TOKEN = (-(2.0**127) * (2.0 - 2.0**e) for e in (-23, -22))
_UNUSED: Mapping[str, tuple[int | float | str, int | float | str]] = {
    "int64": (INT_PAD_TOKENS[0], INT_NULL_TOKENS[0]),
    "string": (STRING_PAD_TOKENS[0], STRING_NULL_TOKENS[0]),
}
NO_FACTS = SourceFacts()


@dataclass(frozen=True)
class RawInput(InputColumn):
    """One input of the raw signature, `[batch]` or `[batch, length]`."""

    @property
    def tensor_spec(self) -> tf.TensorSpec:
        shape = [None, self.length] if self.is_list else [None]
        return tf.TensorSpec(shape, TENSOR_DTYPES[self.dtype], name=self.name)

    def read(self, values: tf.Tensor) -> RawValues:
        nothing = tf.zeros_like(values, tf.bool)
        is_null = nothing if self.null_token is None else tf.equal(values, self.null_token)
        is_pad = None
        if self.is_list:
            is_pad = nothing if self.pad_token is None else tf.equal(values, self.pad_token)
        return RawValues(values, is_null, is_pad, self.max_len if self.is_list else None)


def build_inputs(
    column: ColumnEncoding,
    spec: FeatureSpec,
    name: str,
    vocabulary: Vocabulary | None,
    facts: SourceFacts = NO_FACTS,
) -> tuple[RawInput, ...]:
    """Builds the inputs of a feature: one per column that is there when a model is served.

    The first one has the name that is given, further ones their column's behind it.
    """
    if column.operation is None:
        return (facts.complete(_plain_input(column, spec, name, vocabulary)),)
    served = [raw for raw in column.inputs if raw.is_served]
    first = _operand(served[0], spec, name, vocabulary)
    if isinstance(column.operation, VectorBytes):
        # A vector that lacks a number is none: what reads it would be refused.
        first = replace(first, length=column.operation.length, max_len=None, null_token=None)
        return (facts.complete(replace(first, is_required=True)),)
    # Tokens stand in the first column; weights beside them have none.
    others = [_operand(raw, spec, f"{name}_{raw.name}", None) for raw in served[1:]]
    units = _time_units(column)
    return tuple(facts.complete(item, units.get(item.column)) for item in (first, *others))


def _time_units(column: ColumnEncoding) -> dict[str, str]:
    """Returns the unit of each raw column that a date is made of."""
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
    about = (name, spec.name, column.column, _dtype(column.raw_dtype), spec.is_list)
    length = spec.shape[0] if spec.is_list else None
    max_len = spec.max_len if spec.is_ragged else None
    is_required = vocabulary is None and missing is None
    return RawInput(*about, length, max_len, padding, missing, is_required)


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
    padding, missing = _UNUSED.get(dtype, (FLOAT_PAD_TOKEN, FLOAT_NULL_TOKEN))
    if vocabulary is not None:
        padding, missing = pad_token(vocabulary), null_token(vocabulary)
    keeps_shape = raw.is_list and spec.is_list and not spec.is_ragged and vocabulary is None
    about = (name, spec.name, raw.name, dtype, raw.is_list)
    length = spec.shape[0] if keeps_shape else None
    max_len = spec.max_len if raw.is_list else None
    return RawInput(*about, length, max_len, padding if raw.is_list else None, missing)


def _dtype(raw_dtype: str) -> str:
    return "string" if raw_dtype == "bytes" else raw_dtype


def name_inputs(features: Iterable[str]) -> dict[str, str]:
    """Returns an input name for each feature: distinct, and of a form that TensorFlow takes."""
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
    """Returns what pads lists of raw tokens: what does in the raw data, else what is no token."""
    if vocabulary.pad_token is not None:
        return vocabulary.pad_token
    return _unused(vocabulary.tokens, INT_PAD_TOKENS, STRING_PAD_TOKENS)


def null_token(vocabulary: Vocabulary) -> int | str:
    return _unused(vocabulary.tokens, INT_NULL_TOKENS, STRING_NULL_TOKENS)


def _unused(tokens: pa.Array, integers: tuple[int, ...], strings: tuple[str, ...]) -> int | str:
    """Returns the first value that is not itself a token."""
    candidates = integers if pa.types.is_integer(tokens.type) else strings
    for candidate in candidates:
        if not pc.any(pc.equal(tokens, pa.scalar(candidate, tokens.type))).as_py():
            return candidate
    raise InputDataError(
        "a vocabulary holds all tokens that could pad or stand for a missing value",
        received=candidates,
        fix="clean these tokens out of the source column and build again",
    )


class ServingEncoders(tf.Module):
    """Encodes raw features inside a graph; one lookup table per vocabulary.

    Statistics are float32 `[vocabulary_size]`. By feature there are `specs`, and `names` of the
    first input; `inputs` are all, in their order.
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
        self.plan = plan
        self.specs = {name: plan.schema[name] for name in features}
        self.names = name_inputs(self.specs)
        columns = {name: plan.column(name) for name in self.specs}
        needed = sorted({column.vocabulary for column in columns.values() if column.vocabulary})
        self.tables = {name: build_lookup(vocabularies[name]) for name in needed}
        self.inputs = tuple(
            item
            for name, column in columns.items()
            for item in build_inputs(column, self.specs[name], self.names[name],
                                     vocabularies.get(column.vocabulary or ""), facts)
        )  # fmt: skip
        self._resources = Resources(
            {name: partial(self._encode_tokens, vocabularies[name]) for name in needed},
            {name: tf.constant(values) for name, values in (statistics or {}).items()},
        )

    def find_inputs(self, features: Collection[str]) -> list[RawInput]:
        return [item for item in self.inputs if item.feature in features]

    def encode(
        self, raw: Mapping[str, tf.Tensor], features: Collection[str] | None = None
    ) -> dict[str, tf.Tensor]:
        """Encodes raw inputs by name, `[batch]` or `[batch, length]`, to features of these shapes.

        Features are int64 ids, or plain values; each needs its own inputs alone. None: all.
        """
        wanted = [name for name in self.specs if features is None or name in features]
        return {name: self._encode_one(name, raw) for name in wanted}

    def _encode_one(self, name: str, raw: Mapping[str, tf.Tensor]) -> tf.Tensor:
        spec, column = self.specs[name], self.plan.column(name)
        inputs = [item.read(raw[item.name]) for item in self.find_inputs((name,))]
        if column.operation is not None:
            encoded = fit_length(apply_operation(column.operation, inputs, self._resources), spec)
            if isinstance(column.operation, Weights) and column.operation.scaled:
                encoded = scale_weights(encoded)
            return tf.cast(encoded, TENSOR_DTYPES[spec.dtype])
        if column.vocabulary is None:
            values = inputs[0].values
            if spec.vocabulary_size is not None:  # Ids as they are; others are unknown.
                is_known = (values >= 0) & (values < spec.vocabulary_size)
                values = tf.where(is_known, values, tf.cast(OOV_ID, values.dtype))
            return fit_length(tf.cast(values, TENSOR_DTYPES[spec.dtype]), spec)
        return fit_length(self._resources.ids[column.vocabulary](inputs[0]), spec)

    def _encode_tokens(self, vocabulary: Vocabulary, raw: RawValues) -> tf.Tensor:
        ids = self.tables[vocabulary.name].lookup(raw.values)
        if vocabulary.oov_buckets is not None:
            hashed = hash_text(raw.text, vocabulary.oov_buckets)
            ids = tf.where(tf.equal(ids, OOV_ID), hashed, ids)
        return raw.finish(ids, OOV_ID)


def fit_length(values: tf.Tensor, spec: FeatureSpec) -> tf.Tensor:
    """Cuts or pads ragged lists `[batch, length]` to the `max_len` of training."""
    if not spec.is_ragged or spec.max_len is None:
        return values
    values = values[:, : spec.max_len]
    missing = spec.max_len - tf.shape(values)[1]
    padding = spec.pad_value if spec.vocabulary_size is None else PAD_ID
    fill = tf.cast(padding or 0, values.dtype)
    padded = tf.pad(values, [[0, 0], [0, missing]], constant_values=fill)
    return tf.ensure_shape(padded, [None, spec.max_len])


def read_serving_encoders(
    version_dir: ReadablePath, manifest: Manifest, features: Iterable[str]
) -> ServingEncoders:
    """Reads the encoders of some features, whose inputs say how the source writes their columns."""
    plan, facts = read_plan(version_dir, manifest), read_source_facts(manifest)
    return build_serving_encoders(version_dir, plan, features, facts)


def build_serving_encoders(
    version_dir: ReadablePath,
    plan: EncoderPlan,
    features: Iterable[str],
    facts: SourceFacts = NO_FACTS,
) -> ServingEncoders:
    features = tuple(features)
    columns = [find_column(plan, name) for name in features]
    names = {column.vocabulary for column in columns}
    specs = [spec for spec in plan.vocabularies if spec.name in names]
    wanted = {getattr(column.operation, "table", None) for column in columns}
    return ServingEncoders(
        plan,
        features,
        {spec.name: read_vocabulary(version_dir, spec) for spec in specs},
        {s.name: read_statistics(version_dir, s) for s in plan.tables if s.name in wanted},
        facts,
    )


def build_lookup(vocabulary: Vocabulary) -> tf.lookup.StaticHashTable:
    """Builds the table from tokens to ids; everything else, and what is retired, is OOV."""
    tokens, first = vocabulary.tokens, vocabulary.first_id
    ids = np.arange(first, first + len(tokens), dtype=np.int64)
    if vocabulary.retired is not None:
        ids[vocabulary.retired] = OOV_ID
    if not len(tokens):  # TensorFlow refuses an empty table: any key will do.
        tokens = pa.array([pad_token(vocabulary)], tokens.type)
        ids = np.array([OOV_ID], np.int64)
    keys: Any = tokens.to_numpy(zero_copy_only=False)
    initializer = tf.lookup.KeyValueTensorInitializer(
        tf.constant(keys, dtype=TENSOR_DTYPES[vocabulary.token_dtype]), tf.constant(ids)
    )
    return tf.lookup.StaticHashTable(initializer, default_value=OOV_ID)
