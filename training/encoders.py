"""The serving half of the encoders: raw tokens to ids, as part of a TensorFlow graph.

The same `EncoderPlan` that the ETL executes on Arrow batches is executed here on tensors, so a
served model sees what it was trained on:

    token in the vocabulary      its id, from 2
    any other token              1 (OOV)
    padding of a list            0, at the positions that hold the feature's pad token
    list longer than `max_len`   its first `max_len` tokens; a shorter one is padded with 0
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import tensorflow as tf

from conf.encoders import IDENTITY, EncoderPlan
from conf.errors import InputDataError
from conf.schema import FIRST_TOKEN_ID, OOV_ID, PAD_ID, FeatureSpec
from training.vocabularies import Vocabulary, read_vocabulary

TENSOR_DTYPES = {
    "int64": tf.int64,
    "float32": tf.float32,
    "string": tf.string,
    "bytes": tf.string,
}
# Values that no source produces: the ETL encodes -1 or "" as OOV where they are no tokens, and a
# pad token is read as nothing at all. Both integers survive JSON readers that know doubles only.
INT_PAD_TOKENS = (-(2**63), -(2**62))
STRING_PAD_TOKENS = ("<sluice:pad>", "<sluice:pad:2>")


@dataclass(frozen=True)
class RawInput:
    """One input of the raw signature.

    Attributes:
        name: Name of the input: the feature's, where TensorFlow allows it in a signature.
        feature: Name of the feature.
        column: Raw column that the feature was made from.
        dtype: `int64`, `float32` or `string`.
        is_list: Whether it is `[batch, length]` rather than `[batch]`.
        length: The fixed length of a list, None where any length will do.
        max_len: Values that are read of a longer list, None for all.
        pad_token: What fills a list that is shorter than others in the batch.
    """

    name: str
    feature: str
    column: str
    dtype: str
    is_list: bool
    length: int | None
    max_len: int | None
    pad_token: int | float | str | None

    @property
    def tensor_spec(self) -> tf.TensorSpec:
        """Shape and type of the input."""
        shape = [None, self.length] if self.is_list else [None]
        return tf.TensorSpec(shape, TENSOR_DTYPES[self.dtype], name=self.name)

    def to_json(self) -> dict[str, Any]:
        """Returns the input as a JSON object."""
        return asdict(self)


class ServingEncoders(tf.Module):
    """Encodes raw features inside a graph; one lookup table per vocabulary.

    Args:
        plan: The plan of the dataset version.
        features: Features to encode.
        vocabularies: Every vocabulary that they need, by name.
    """

    def __init__(
        self, plan: EncoderPlan, features: Iterable[str], vocabularies: Mapping[str, Vocabulary]
    ) -> None:
        super().__init__(name="serving_encoders")
        self._specs = tuple(plan.schema[name] for name in features)
        self._encoder_of = {spec.name: plan.column(spec.name).encoder for spec in self._specs}
        needed = sorted(set(self._encoder_of.values()) - {IDENTITY})
        self.tables = {name: build_lookup(vocabularies[name]) for name in needed}
        names = name_inputs(spec.name for spec in self._specs)
        self.inputs = tuple(
            _raw_input(plan, spec, names[spec.name], vocabularies.get(self._encoder_of[spec.name]))
            for spec in self._specs
        )

    def encode(self, raw: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Encodes a batch.

        Args:
            raw: By input name, `[batch]` or `[batch, length]` in the raw type.

        Returns:
            By feature name, `[batch]` or `[batch, length]`: int64 ids, or plain values.
        """
        return {
            spec.name: self._encode_one(spec, raw_input, raw[raw_input.name])
            for spec, raw_input in zip(self._specs, self.inputs, strict=True)
        }

    def _encode_one(self, spec: FeatureSpec, raw: RawInput, values: tf.Tensor) -> tf.Tensor:
        encoder = self._encoder_of[spec.name]
        if encoder == IDENTITY:
            dtype = TENSOR_DTYPES[spec.dtype]
            return fit_length(tf.cast(values, dtype), spec)
        ids = self.tables[encoder].lookup(values)
        if not raw.is_list:
            return ids
        is_pad = tf.equal(values, tf.constant(raw.pad_token, values.dtype))
        return fit_length(tf.where(is_pad, tf.constant(PAD_ID, tf.int64), ids), spec)


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
    version_dir: Path, plan: EncoderPlan, features: Iterable[str]
) -> ServingEncoders:
    """Reads what the named features need and builds their encoders.

    Raises:
        InputDataError: The plan does not make a feature, or a vocabulary is damaged.
    """
    features = tuple(features)
    try:
        encoders = {plan.column(name).encoder for name in features} - {IDENTITY}
        specs = [plan.vocabulary(name) for name in sorted(encoders)]
    except KeyError as error:
        raise InputDataError(
            "the encoder plan does not make a feature that the model reads",
            received=str(error),
            allowed=", ".join(column.feature for column in plan.columns),
            fix="train on this dataset version, or export with the version of the training run",
        ) from error
    vocabularies = {spec.name: read_vocabulary(version_dir, spec) for spec in specs}
    return ServingEncoders(plan, features, vocabularies)


def build_lookup(vocabulary: Vocabulary) -> tf.lookup.StaticHashTable:
    """Builds the table from tokens to ids; everything else is OOV."""
    tokens, first = vocabulary.tokens, FIRST_TOKEN_ID
    if not len(tokens):
        # TensorFlow refuses an empty table; any key will do that maps to OOV as well.
        tokens, first = pa.array([pad_token(vocabulary)], tokens.type), OOV_ID
    keys: Any = tokens.to_numpy(zero_copy_only=False)
    initializer = tf.lookup.KeyValueTensorInitializer(
        tf.constant(keys, dtype=TENSOR_DTYPES[vocabulary.token_dtype]),
        tf.range(first, first + len(keys), dtype=tf.int64),
    )
    return tf.lookup.StaticHashTable(initializer, default_value=OOV_ID)


def pad_token(vocabulary: Vocabulary) -> int | str:
    """Returns the first pad token that is not itself a token.

    The least int64 for integers, `<sluice:pad>` for strings; each has a stand-in.

    Raises:
        InputDataError: All of them are tokens.
    """
    is_integer = pa.types.is_integer(vocabulary.tokens.type)
    candidates = INT_PAD_TOKENS if is_integer else STRING_PAD_TOKENS
    for candidate in candidates:
        if not _holds(vocabulary.tokens, candidate):
            return candidate
    raise InputDataError(
        f"vocabulary {vocabulary.name!r} holds every token that could stand for padding",
        received=", ".join(repr(candidate) for candidate in candidates),
        fix="clean these tokens out of the source column and build again",
    )


def _holds(tokens: pa.Array, value: int | str) -> bool:
    return bool(pc.any(pc.equal(tokens, pa.scalar(value, tokens.type))).as_py())


def _raw_input(
    plan: EncoderPlan, spec: FeatureSpec, name: str, vocabulary: Vocabulary | None
) -> RawInput:
    column = plan.column(spec.name)
    padding: int | float | str | None = None
    if spec.is_list:
        padding = spec.pad_value if vocabulary is None else pad_token(vocabulary)
    return RawInput(
        name=name,
        feature=spec.name,
        column=column.column,
        dtype="string" if column.raw_dtype == "bytes" else column.raw_dtype,
        is_list=spec.is_list,
        length=spec.shape[0] if spec.is_list else None,
        max_len=spec.max_len if spec.is_ragged else None,
        pad_token=padding,
    )
