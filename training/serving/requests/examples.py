"""`tf.Example`s of requests: built of JSON, and counted before a model pads their lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from training.raw_inputs.export_inputs import find_source_names, name_items
from training.raw_inputs.json_values import build_array, read_times, read_written
from training.raw_inputs.raw_value_errors import show
from training.raw_inputs.source_names import name_inputs
from training.serving.requests.errors import RequestError, refuse_values
from training.serving.requests.limits import (
    RequestLimits,
    check_context,
    check_count,
    check_example_bytes,
    check_text,
)
from training.serving.requests.tensors import parse_serialized

PARSED = {"string": tf.string, "int64": tf.int64, "float32": tf.float32, "float64": tf.float32}
"""Type of a list in an Example, by that of the input."""


@refuse_values()
def parse_examples(
    data: Mapping[str, Any], holds: Sequence[Mapping[str, Any]], limits: RequestLimits
) -> np.ndarray:
    """Reads the examples of a `:classify` or `:regress` request.

    Args:
        data: Its body: `examples`, and `context`, features that all of them have.
        holds: What `export.json` says of the raw inputs.
        limits: What they may take.

    Returns:
        Serialized `tf.Example`s, `[rows]` of bytes.

    Raises:
        RequestError: A feature is unknown, or not of its type; or they take too much.
    """
    examples, context = data.get("examples"), data.get("context", {})
    if not isinstance(examples, list) or not examples or not isinstance(context, dict):
        raise RequestError("Request must hold 'examples', a list of at least one object")
    check_context(examples, context, limits)
    reader = _FeatureReader(holds, context, limits)
    built = np.empty(len(examples), object)
    longest = values = 0
    for number, example in enumerate(examples):
        if not isinstance(example, dict):
            raise RequestError(f"example {number} is no object: {show(example)}")
        features = reader.read({**context, **example})
        # A text of a few bytes may hold any number of values, and each Example has the context's.
        values = max(values, sum(map(_count_values, features.values())))
        check_count("values of an Example, times examples", values * len(examples), limits.values)
        message = tf.train.Example(features=tf.train.Features(feature=features))
        built[number] = message.SerializeToString()
        longest = max(longest, len(built[number]))
        check_example_bytes(len(examples), longest, limits)
    return built


@refuse_values()
def serialize_examples(found: Any, holds: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Returns the Examples of a message, each with the features that all of them have.

    Args:
        found: `examples`, and perhaps a `context` that all of them have.
        holds: What `export.json` says of the raw inputs.

    Returns:
        Serialized `tf.Example`s, `[rows]` of bytes, whose features have the names of the inputs.

    Raises:
        RequestError: A feature is unknown.
    """
    about = name_items(holds)
    context = getattr(found, "context", None)
    shared = {} if context is None else context.features.feature
    start = b"" if context is None else context.SerializeToString()
    built = np.empty(len(found.examples), object)
    for number, example in enumerate(found.examples):
        given = {**shared, **example.features.feature}
        if given.keys() == about.keys():
            built[number] = start + example.SerializeToString()
            continue
        named = name_inputs(given, about, find_source_names(about))
        if (unknown := next((name for name in named if name not in about), None)) is not None:
            raise _refuse_unknown(unknown, about)
        message = tf.train.Example(features=tf.train.Features(feature=named))
        built[number] = message.SerializeToString()
    return built


def _refuse_unknown(name: str, about: Mapping[str, Any]) -> RequestError:
    return RequestError(f"unknown feature {name[:100]}; allowed: {', '.join(about)}")


class _FeatureReader:
    """Builds the features of examples, those of the context once.

    Args:
        holds: What `export.json` says of the raw inputs.
        context: Values that all examples have.
        limits: What they may take.
    """

    def __init__(
        self,
        holds: Sequence[Mapping[str, Any]],
        context: Mapping[str, Any],
        limits: RequestLimits,
    ) -> None:
        self._about, self._limits = name_items(holds), limits
        self._sources = find_source_names(self._about)
        self._shared = set(map(id, context.values()))
        self._built: dict[tuple[str, int], tf.train.Feature] = {}

    def read(self, values: Mapping[str, Any]) -> dict[str, tf.train.Feature]:
        """Builds the features of one example; what is null is missing.

        Raises:
            RequestError: One is unknown, not of its type, or too long.
        """
        named = name_inputs(values, self._about, self._sources)
        return {name: self._build(name, one) for name, one in named.items() if one is not None}

    def _build(self, name: str, value: Any) -> tf.train.Feature:
        key = name, id(value)
        if key in self._built:
            return self._built[key]
        feature = self._make(name, value)
        if id(value) in self._shared:
            self._built[key] = feature
        return feature

    def _make(self, name: str, value: Any) -> tf.train.Feature:
        if name not in self._about:
            raise _refuse_unknown(name, self._about)
        about, most = self._about[name], self._limits.values
        value = read_written(value, 0, about, most)
        values = value if isinstance(value, list) else [value]
        spec = tf.TensorSpec([None], tf.as_dtype(about["dtype"]))
        array = build_array(name, values, spec, most=most)
        array = read_times(name, array, about)
        items = array.tolist()
        if spec.dtype == tf.string:
            check_text(name, max(map(len, items), default=0), self._limits)
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=items))
        if spec.dtype == tf.int64:
            return tf.train.Feature(int64_list=tf.train.Int64List(value=items))
        return tf.train.Feature(float_list=tf.train.FloatList(value=items))


def _count_values(feature: tf.train.Feature) -> int:
    return len(getattr(feature, feature.WhichOneof("kind")).value)


def count_lists(serialized: np.ndarray, holds: Sequence[Mapping[str, Any]]) -> int:
    """Returns the values that each row has once all lists are padded to the longest one.

    Args:
        serialized: Examples, `[rows]` of bytes.
        holds: What `export.json` says of the raw inputs.

    Raises:
        RequestError: A list is of another type, or these are no Examples.
    """
    wanted = {
        item["name"]: tf.io.RaggedFeature(PARSED[item["dtype"]])
        for item in holds
        if item["is_list"] and item.get("length") is None
    }
    if not wanted:
        return 0
    parsed = parse_serialized(serialized, wanted)
    return sum(int(np.diff(one.row_splits.numpy()).max(initial=0)) for one in parsed.values())
