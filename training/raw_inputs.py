"""The inputs of the raw signature: one per raw column that a feature is made from."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import tensorflow as tf

from conf.encoders import ColumnEncoding, EncoderPlan, RawColumn
from conf.errors import InputDataError
from conf.schema import FeatureSpec
from training.operations import RawValues
from training.vocabularies import Vocabulary

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
# What stands for a missing value; of floats it is NaN.
INT_NULL_TOKENS = (-(2**61), -(2**60))
STRING_NULL_TOKENS = ("<sluice:null>", "<sluice:null:2>")


@dataclass(frozen=True)
class RawInput:
    """One input of the raw signature.

    Attributes:
        name: Name of the input: the feature's, where TensorFlow allows it in a signature.
        feature: Name of the feature.
        column: Raw column that the feature was made from.
        dtype: `int64`, `float32`, `float64` or `string`.
        is_list: Whether it is `[batch, length]` rather than `[batch]`.
        length: The fixed length of a list, None where any length will do.
        max_len: Values that are read of a longer list, None for all.
        pad_token: What fills a list that is shorter than others in the batch.
        null_token: What stands for a missing value; of floats, NaN does as well.
    """

    name: str
    feature: str
    column: str
    dtype: str
    is_list: bool
    length: int | None
    max_len: int | None
    pad_token: int | float | str | None
    null_token: int | str | None = None

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

    def to_json(self) -> dict[str, Any]:
        """Returns the input as a JSON object."""
        return asdict(self)


def build_inputs(
    plan: EncoderPlan, spec: FeatureSpec, name: str, vocabulary: Vocabulary | None
) -> tuple[RawInput, ...]:
    """Builds the inputs of a feature.

    Args:
        plan: The plan of the dataset version.
        spec: The feature.
        name: Name of its first input; further ones have their column's name behind it.
        vocabulary: The vocabulary that its tokens are looked up in, or None.

    Returns:
        One input per column that is there when a model is served.
    """
    column = plan.column(spec.name)
    if column.operation is None:
        return (_plain_input(column, spec, name, vocabulary),)
    served = [raw for raw in column.inputs if raw.is_served]
    names = [name, *(f"{name}_{raw.name}" for raw in served[1:])]
    return tuple(
        # Tokens stand in the first column; weights beside them have none.
        _operand(raw, spec, own, None if place else vocabulary)
        for place, (raw, own) in enumerate(zip(served, names, strict=True))
    )


def _plain_input(
    column: ColumnEncoding, spec: FeatureSpec, name: str, vocabulary: Vocabulary | None
) -> RawInput:
    padding: int | float | str | None = None
    if spec.is_list:
        padding = spec.pad_value if vocabulary is None else pad_token(vocabulary)
    return RawInput(
        name=name,
        feature=spec.name,
        column=column.column,
        dtype=_dtype(column.raw_dtype),
        is_list=spec.is_list,
        length=spec.shape[0] if spec.is_list else None,
        max_len=spec.max_len if spec.is_ragged else None,
        pad_token=padding,
        null_token=null_token(vocabulary) if vocabulary and vocabulary.oov_buckets else None,
    )


def _operand(
    raw: RawColumn, spec: FeatureSpec, name: str, vocabulary: Vocabulary | None
) -> RawInput:
    dtype = _dtype(raw.dtype)
    padding: int | float | str = FLOAT_PAD_TOKEN
    missing: int | str | None = None
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
    """Returns the first pad token that is not itself a token.

    The least int64 for integers, `<sluice:pad>` for strings; each has a stand-in.

    Raises:
        InputDataError: All of them are tokens.
    """
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
