"""Signatures of a SavedModel: in which form features come in, and what is computed of them.

Forms of the same features:

    raw values           encoded inside the graph, as the ETL encodes them
    encoded features     what the records hold
    `examples`           serialized `tf.Example`s of raw values, under the names of the raw inputs

Lists of the raw forms are padded with `pad_token` on the right, missing values are `null_token`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
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
    name_inputs,
)

EXAMPLES = "examples"
EXAMPLE_DTYPES = {"int64": tf.int64, "float32": tf.float32, "float64": tf.float32,
                  "string": tf.string}  # fmt: skip

Tensors = Mapping[str, tf.Tensor]
ReadFeatures = Callable[[Tensors], dict[str, tf.Tensor]]
Compute = Callable[[dict[str, tf.Tensor], Tensors], Tensors]
"""From encoded features, and everything that was given, to the named outputs."""


@dataclass(frozen=True)
class InputForm:
    """A form in which features come in.

    Attributes:
        takes: What it takes, in words.
        specs: Shape and type of each input.
        read: From the inputs to encoded features.
        inputs: What `export.json` says of each input.
    """

    takes: str
    specs: dict[str, tf.TensorSpec]
    read: ReadFeatures
    inputs: list[dict[str, Any]]

    def add(self, specs: Iterable[tf.TensorSpec], means: Mapping[str, str]) -> InputForm:
        """Returns the form with inputs that are no features, under names that are free."""
        added = {spec.name: spec for spec in specs}
        about = [{"name": n, "dtype": s.dtype.name, "means": means[n]} for n, s in added.items()]
        return replace(self, specs={**self.specs, **added}, inputs=[*self.inputs, *about])


@dataclass(frozen=True)
class Signature:
    """A function of a SavedModel.

    Attributes:
        form: What it takes.
        compute: What it computes of the features.
        outputs: What each output means, by name.
        method: How TensorFlow Serving calls it: `predict`, `classify` or `regress`.
    """

    form: InputForm
    compute: Compute
    outputs: Mapping[str, str] = field(default_factory=dict)
    method: str = "predict"

    def to_json(self) -> dict[str, Any]:
        """Returns what `export.json` says of it."""
        outputs = [{"name": name, "means": means} for name, means in self.outputs.items()]
        return {
            "method": self.method,
            "takes": self.form.takes,
            "inputs": self.form.inputs,
            "outputs": outputs,
        }


class FormBuilder:
    """Builds the forms in which some features come in.

    Args:
        encoders: Encoders of all features.
        specs: The features by name.
    """

    def __init__(self, encoders: ServingEncoders, specs: Mapping[str, FeatureSpec]) -> None:
        self.encoders = encoders
        self._specs = dict(specs)
        self._names = name_inputs(specs)

    def find_inputs(self, names: Collection[str]) -> list[RawInput]:
        """Returns the raw inputs of features."""
        return [item for item in self.encoders.inputs if item.feature in names]

    def build_raw(self, names: Collection[str]) -> InputForm:
        """Builds the form of raw values."""
        inputs = self.find_inputs(names)
        return InputForm(
            "raw values; lists padded with pad_token on the right",
            {item.name: item.tensor_spec for item in inputs},
            lambda raw: self.encoders.encode(raw, names),
            [item.to_json() for item in inputs],
        )

    def build_encoded(self, names: Collection[str]) -> InputForm:
        """Builds the form of what the records hold."""
        specs = {name: spec for name, spec in self._specs.items() if name in names}

        def read(given: Tensors) -> dict[str, tf.Tensor]:
            return {n: fit_length(given[self._names[n]], spec) for n, spec in specs.items()}

        return InputForm(
            "what the records hold: numbers, and ids: 0 pad, 1 unknown or null, tokens from 2; "
            "of dynamic tables keys",
            {self._names[n]: _encoded_spec(spec, self._names[n]) for n, spec in specs.items()},
            read,
            [
                {"name": self._names[n], "feature": n, "dtype": s.dtype, "is_list": s.is_list}
                for n, s in specs.items()
            ],
        )

    def build_row_features(self, names: Collection[str]) -> Signature:
        """Builds the signature that gives features as `build_encoded` takes them, of raw values."""
        own = {self._names[name]: name for name in self._specs if name in names}

        def compute(features: dict[str, tf.Tensor], _: Tensors) -> Tensors:
            return {name: features[feature] for name, feature in own.items()}

        means = {name: f"{feature}, as the records hold it" for name, feature in own.items()}
        return Signature(self.build_raw(names), compute, means)

    def build_examples(self, names: Collection[str], name: str = EXAMPLES) -> InputForm:
        """Builds the form of serialized `tf.Example`s.

        Args:
            names: The features.
            name: Name of the only input.
        """
        inputs = self.find_inputs(names)

        def read(given: Tensors) -> dict[str, tf.Tensor]:
            return self.encoders.encode(self._parse(given[name], inputs), names)

        return InputForm(
            "serialized tf.Examples of raw values; lists of any length, missing values left out",
            {name: tf.TensorSpec([None], tf.string, name=name)},
            read,
            [{"name": name, "dtype": "string",
              "holds": [item.to_json() for item in inputs]}],
        )  # fmt: skip

    def build_candidates(self, names: Collection[str], of_items: Collection[str]) -> InputForm:
        """Builds the form of raw values of rows and of the items to score for each.

        Features are read from rows, those of `of_items` from all pairs of a row and one of its
        items, flat: `[rows * items]`.

        Args:
            names: The features.
            of_items: Raw inputs of the items.
        """
        inputs = self.find_inputs(names)
        pairs = {item.feature for item in inputs if item.name in of_items}

        def read(raw: Tensors) -> dict[str, tf.Tensor]:
            count = count_candidates(raw[next(iter(of_items))])
            flat = {}
            for item in inputs:
                value = raw[item.name]
                if item.name in of_items:
                    flat[item.name] = _merge_axes(value)
                elif item.feature in pairs:
                    flat[item.name] = tf.repeat(value, count, axis=0)
                else:
                    flat[item.name] = value
            return self.encoders.encode(flat, names)

        form = self.build_raw(names)
        lifted = {
            name: tf.TensorSpec([None, None, *spec.shape[1:]], spec.dtype, name=name)
            if name in of_items else spec
            for name, spec in form.specs.items()
        }  # fmt: skip
        about = [{**item, "per": "candidate" if item["name"] in of_items else "row"}
                 for item in form.inputs]  # fmt: skip
        takes = "raw values of each row, and of the items to score for it, [rows, items]"
        return InputForm(takes, lifted, read, about)

    def _parse(self, serialized: tf.Tensor, inputs: Collection[RawInput]) -> Tensors:
        features = {item.name: self._plan_parse(item) for item in inputs}
        parsed = tf.io.parse_example(serialized, features)
        return {item.name: _finish_parsed(item, parsed[item.name]) for item in inputs}

    def _plan_parse(self, item: RawInput) -> Any:
        dtype = EXAMPLE_DTYPES[item.dtype]
        if item.is_list and item.length is None:
            return tf.io.RaggedFeature(dtype)
        shape = [item.length or 0] if item.is_list else []
        missing = self._find_default(item)
        if missing is None:
            return tf.io.FixedLenFeature(shape, dtype)
        return tf.io.FixedLenFeature(shape, dtype, default_value=np.full(shape, missing).tolist())

    def _find_default(self, item: RawInput) -> Any:
        """Returns what stands for a value that an Example leaves out; None: it must be there."""
        token = item.pad_token if item.is_list else item.null_token
        if token is not None:
            return token
        is_number = item.dtype in ("float32", "float64")
        return float("nan") if is_number and not item.is_required else None


def _finish_parsed(item: RawInput, values: Any) -> tf.Tensor:
    if isinstance(values, tf.RaggedTensor):
        padding = item.pad_token if item.pad_token is not None else fill_value(values.dtype)
        values = values.to_tensor(tf.cast(padding, values.dtype))
    return tf.cast(values, TENSOR_DTYPES[item.dtype])


def fill_value(dtype: tf.DType) -> str | int:
    """Returns the empty value of a type."""
    return "" if dtype == tf.string else 0


def count_candidates(value: tf.Tensor) -> tf.Tensor:
    """Returns the number of items of each row, of a tensor `[rows, items, …]`."""
    return tf.shape(value)[1]


def _merge_axes(value: tf.Tensor) -> tf.Tensor:
    shape = tf.shape(value)
    return tf.reshape(value, tf.concat([[shape[0] * shape[1]], shape[2:]], axis=0))


def _encoded_spec(spec: FeatureSpec, name: str) -> tf.TensorSpec:
    shape = [None, spec.shape[0]] if spec.is_list else [None]
    return tf.TensorSpec(shape, TENSOR_DTYPES[spec.dtype], name=name)


def save_signatures(
    directory: str, signatures: Mapping[str, Signature], encoders: ServingEncoders
) -> None:
    """Saves functions as the signatures of one SavedModel.

    Only the variables that they read are saved: no optimizer state. Keys of dynamic tables are
    looked up inside the graph.

    Args:
        directory: Where the SavedModel goes.
        signatures: By name.
        encoders: Encoders that they use.
    """
    lookups = ServingLookups()
    with translating(lookups):
        functions = {name: _trace(signature) for name, signature in signatures.items()}
    module = tf.Module(name="served")
    module.encoders = encoders
    module.lookups = lookups.tables
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


class ServingLookups:
    """Tables from keys to rows for the graphs that are traced with it.

    Attributes:
        tables: One per key space that a graph reads, by the name of its table.
    """

    def __init__(self) -> None:
        self.tables: dict[str, tf.lookup.experimental.MutableHashTable] = {}

    def __call__(self, space: KeySpace, keys: tf.Tensor) -> tf.Tensor:
        """Returns the rows of keys, of the same shape."""
        if space.label not in self.tables:
            with tf.init_scope():  # Outside of the graph that is being traced.
                self.tables[space.label] = space.build_lookup()
        rows = self.tables[space.label].lookup(tf.cast(keys, tf.int64))
        return tf.ensure_shape(rows, keys.shape)  # A lookup forgets it.
