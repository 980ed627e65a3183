"""Signatures of a SavedModel: in which form features come in, and what is computed of them.

Forms of the same features:

    raw values           encoded inside the graph, as the ETL encodes them
    encoded features     what the records hold
    `examples`           serialized `tf.Example`s of raw values, under the names of the raw inputs
    candidates           raw values of rows, and of several items for each

Lists of the raw forms are padded with `pad_token` on the right, missing values are `null_token`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from conf.schema import FeatureSpec
from training.embedding.key_space import KeySpace, translating
from training.export.serving_encoders import (
    TENSOR_DTYPES,
    RawInput,
    ServingEncoders,
    fit_length,
)

EXAMPLES = "examples"
Tensors = Mapping[str, tf.Tensor]
Features = dict[str, tf.Tensor]
Compute = Callable[[Features, Tensors], Tensors]
"""From encoded features, and everything that was given, to the named outputs."""


@dataclass(frozen=True)
class InputForm:
    """A form in which features come in; `inputs` is what `export.json` says of each."""

    takes: str
    specs: dict[str, tf.TensorSpec]
    read: Callable[[Tensors], Features]
    inputs: list[dict[str, Any]]

    def add(self, *inputs: tuple[tf.TensorSpec, str]) -> InputForm:
        """Returns the form with inputs that are no features, and what they mean."""
        specs = {spec.name: spec for spec, _ in inputs}
        about = [{"name": s.name, "dtype": s.dtype.name, "means": means} for s, means in inputs]
        return replace(self, specs=self.specs | specs, inputs=[*self.inputs, *about])


@dataclass(frozen=True)
class Signature:
    """A function of a SavedModel: what it takes, computes and means.

    TensorFlow Serving calls it by the method `predict`, `classify` or `regress`.
    """

    form: InputForm
    compute: Compute
    outputs: Mapping[str, str] = field(default_factory=dict)
    method: str = "predict"

    def to_json(self) -> dict[str, Any]:
        """Returns what `export.json` says of it."""
        outputs = [{"name": name, "means": means} for name, means in self.outputs.items()]
        form = {"takes": self.form.takes, "inputs": self.form.inputs}
        return {"method": self.method, **form, "outputs": outputs}


def build_raw_form(encoders: ServingEncoders, names: Collection[str]) -> InputForm:
    inputs = encoders.find_inputs(names)
    return InputForm(
        "raw values; lists padded with pad_token on the right",
        {item.name: item.tensor_spec for item in inputs},
        lambda raw: encoders.encode(raw, names),
        [item.to_json() for item in inputs],
    )


def build_encoded_form(encoders: ServingEncoders, names: Collection[str]) -> InputForm:
    own = {encoders.names[n]: spec for n, spec in encoders.specs.items() if n in names}

    def read(given: Tensors) -> Features:
        return {spec.name: fit_length(given[name], spec) for name, spec in own.items()}

    return InputForm(
        "what the records hold: numbers, and ids: 0 pad, 1 unknown or null, tokens from 2; "
        "of dynamic tables keys",
        {name: _encoded_spec(name, spec) for name, spec in own.items()},
        read,
        [
            {"name": name, "feature": spec.name, "dtype": spec.dtype, "is_list": spec.is_list}
            for name, spec in own.items()
        ],
    )


def _encoded_spec(name: str, spec: FeatureSpec) -> tf.TensorSpec:
    shape = [None, spec.shape[0]] if spec.is_list else [None]
    return tf.TensorSpec(shape, TENSOR_DTYPES[spec.dtype], name=name)


def build_row_features(encoders: ServingEncoders, names: Collection[str]) -> Signature:
    """Builds the signature from raw values to what the encoded form takes."""
    own = {encoders.names[name]: name for name in encoders.specs if name in names}

    def compute(features: Features, _: Tensors) -> Tensors:
        return {name: features[feature] for name, feature in own.items()}

    means = {name: f"{feature}, as the records hold it" for name, feature in own.items()}
    return Signature(build_raw_form(encoders, names), compute, means)


def build_examples_form(
    encoders: ServingEncoders, names: Collection[str], name: str = EXAMPLES
) -> InputForm:
    """Builds the form of serialized Examples, in a single input of the given name."""
    inputs = encoders.find_inputs(names)
    return InputForm(
        "serialized tf.Examples of raw values; lists of any length, missing values left out",
        {name: tf.TensorSpec([None], tf.string, name=name)},
        lambda given: encoders.encode(_parse_examples(given[name], inputs), names),
        [{"name": name, "dtype": "string", "holds": [item.to_json() for item in inputs]}],
    )


def _parse_examples(serialized: tf.Tensor, inputs: Collection[RawInput]) -> Tensors:
    parsed = tf.io.parse_example(serialized, {item.name: _plan_parse(item) for item in inputs})
    return {item.name: _finish_parsed(item, parsed[item.name]) for item in inputs}


def _plan_parse(item: RawInput) -> Any:
    """Returns how an input is parsed; Examples hold float32 alone."""
    dtype = tf.float32 if item.dtype == "float64" else TENSOR_DTYPES[item.dtype]
    if item.is_list and item.length is None:
        return tf.io.RaggedFeature(dtype)
    shape = [item.length or 0] if item.is_list else []
    missing: Any = item.pad_token if item.is_list else item.null_token
    if missing is None and dtype == tf.float32 and not item.is_required:
        missing = float("nan")
    if missing is None:
        return tf.io.FixedLenFeature(shape, dtype)
    return tf.io.FixedLenFeature(shape, dtype, default_value=np.full(shape, missing).tolist())


def _finish_parsed(item: RawInput, values: Any) -> tf.Tensor:
    if isinstance(values, tf.RaggedTensor):
        padding: Any = item.pad_token
        if padding is None:
            padding = "" if values.dtype == tf.string else 0
        values = values.to_tensor(tf.cast(padding, values.dtype))
    return tf.cast(values, TENSOR_DTYPES[item.dtype])


def build_candidates_form(
    encoders: ServingEncoders, names: Collection[str], of_items: Collection[str]
) -> InputForm:
    """Builds the form of raw values of rows, and of the items to score for each.

    The raw inputs `of_items` are `[rows, items, …]`. Their features are encoded flat, one for each
    pair of a row and an item: `[rows * items]`.
    """
    inputs = encoders.find_inputs(names)
    pairs = {item.feature for item in inputs if item.name in of_items}

    def read(raw: Tensors) -> Features:
        count = tf.shape(raw[next(iter(of_items))])[1]
        flat = dict(raw)
        for item in inputs:
            if item.name in of_items:
                flat[item.name] = _merge_axes(raw[item.name])
            elif item.feature in pairs:
                flat[item.name] = tf.repeat(raw[item.name], count, axis=0)
        return encoders.encode(flat, names)

    specs = {item.name: item.tensor_spec for item in inputs}
    for name in of_items:
        shape, dtype = [None, *specs[name].shape], specs[name].dtype
        specs[name] = tf.TensorSpec(shape, dtype, name=name)
    per = ("row", "candidate")
    return InputForm(
        "raw values of each row, and of the items to score for it, [rows, items]",
        specs,
        read,
        [{**item.to_json(), "per": per[item.name in of_items]} for item in inputs],
    )


def _merge_axes(value: tf.Tensor) -> tf.Tensor:
    shape = tf.shape(value)
    return tf.reshape(value, tf.concat([[shape[0] * shape[1]], shape[2:]], axis=0))


def save_signatures(
    directory: str, signatures: Mapping[str, Signature], encoders: ServingEncoders
) -> None:
    """Saves functions as the signatures of one SavedModel.

    Only the variables that they read are saved: no optimizer state. Keys of dynamic tables are
    looked up inside the graph.
    """
    lookups: dict[str, Any] = {}
    with translating(partial(_look_up, lookups)):
        functions = {name: _trace(signature) for name, signature in signatures.items()}
    module = tf.Module(name="served")
    module.encoders, module.lookups = encoders, lookups
    read = [v for function in functions.values() for v in function.graph.variables]
    variables = {id(variable): variable for variable in read}.values()
    module.weights = sorted(variables, key=lambda variable: variable.name)
    tf.saved_model.save(module, directory, signatures=functions)


def _trace(signature: Signature) -> Any:
    form = signature.form

    @tf.function
    def serve(**given: tf.Tensor) -> Tensors:
        return signature.compute(form.read(given), given)

    return serve.get_concrete_function(**form.specs)


def _look_up(tables: dict[str, Any], space: KeySpace, keys: tf.Tensor) -> tf.Tensor:
    """Returns the rows of keys, of the same shape; adds the table of their space where it lacks."""
    if space.label not in tables:
        with tf.init_scope():  # Outside of the graph that is being traced.
            tables[space.label] = space.build_lookup()
    rows = tables[space.label].lookup(tf.cast(keys, tf.int64))
    return tf.ensure_shape(rows, keys.shape)  # A lookup forgets it.
