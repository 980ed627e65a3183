"""Warm-up requests of a SavedModel, which TensorFlow Serving replays before a version is served.

`assets.extra/tf_serving_warmup_requests` is a TFRecord file of `PredictionLog`s: every signature
is called with rows of missing values, so that a first request finds all graphs built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow_serving.apis import (
    classification_pb2,
    predict_pb2,
    prediction_log_pb2,
    regression_pb2,
)

from conf.artefacts.export import WARMUP_FILE
from training.export.serving_encoders import RawInput
from training.export.signatures import Signature

BATCH_SIZES = (1, 32)
CANDIDATES = 100
"""Values of each further axis of no fixed length."""
LIST_LENGTH, MOST_VALUES = 10, 100
"""Values of a list that nothing bounds, and of any."""


def write_warmup(directory: Path, name: str, signatures: Mapping[str, Signature]) -> int:
    """Writes the requests of a SavedModel; returns how many.

    Args:
        directory: The SavedModel.
        name: Name of the model.
        signatures: Its signatures.
    """
    file = directory / WARMUP_FILE
    file.parent.mkdir(exist_ok=True)
    count = 0
    with tf.io.TFRecordWriter(str(file)) as writer:
        for log in _build_logs(name, signatures):
            writer.write(log.SerializeToString())
            count += 1
    return count


def _build_logs(name: str, signatures: Mapping[str, Signature]) -> Iterator[Any]:
    for signature_name, signature in signatures.items():
        spec = {"name": name, "signature_name": signature_name}
        for rows in BATCH_SIZES:
            yield _build_log(spec, signature, rows)


def _build_log(spec: dict[str, str], signature: Signature, rows: int) -> Any:
    log = prediction_log_pb2.PredictionLog
    if signature.method == "predict":
        tensors = {
            name: tf.make_tensor_proto(values)
            for name, values in fill_inputs(signature, rows).items()
        }
        request = predict_pb2.PredictRequest(model_spec=spec, inputs=tensors)
        return log(predict_log=prediction_log_pb2.PredictLog(request=request))
    examples = [tf.train.Example.FromString(text) for text in _fill_examples(signature, rows)]
    given = {"model_spec": spec, "input": {"example_list": {"examples": examples}}}
    if signature.method == "regress":
        request = regression_pb2.RegressionRequest(**given)
        return log(regress_log=prediction_log_pb2.RegressLog(request=request))
    request = classification_pb2.ClassificationRequest(**given)
    return log(classify_log=prediction_log_pb2.ClassifyLog(request=request))


def fill_inputs(signature: Signature, rows: int) -> dict[str, np.ndarray]:
    """Returns inputs of missing values for a signature."""
    about = {item["name"]: item for item in signature.form.inputs}
    return {
        name: np.array(_fill_examples(signature, rows), object)
        if "holds" in about[name]
        else _fill(spec, about[name], rows)
        for name, spec in signature.form.specs.items()
    }


def _fill(spec: tf.TensorSpec, about: Mapping[str, Any], rows: int) -> np.ndarray:
    width = min(about.get("max_len") or LIST_LENGTH, MOST_VALUES)
    free = [CANDIDATES, width] if about.get("per") == "candidate" else [width, width]
    shape = [rows]
    for size in spec.shape[1:]:
        shape.append(free.pop(0) if size is None else size)
    return np.full(shape, _find_filler(about, spec.dtype), spec.dtype.as_numpy_dtype)


def _find_filler(about: Mapping[str, Any], dtype: tf.DType) -> Any:
    token = about.get("null_token")
    if token is None:
        token = about.get("pad_token")
    if token is None:
        return b"" if dtype == tf.string else 1
    return token.encode() if isinstance(token, str) else token


def _fill_examples(signature: Signature, rows: int) -> list[bytes]:
    """Returns Examples that hold one value of each input."""
    [holds] = [item["holds"] for item in signature.form.inputs if "holds" in item]
    features = {}
    for item in holds:
        raw = RawInput(**item)
        value = [_find_filler(item, raw.tensor_spec.dtype)] * (raw.length or 1)
        features[raw.name] = _build_feature(raw.dtype, value)
    example = tf.train.Example(features=tf.train.Features(feature=features))
    return [example.SerializeToString()] * rows


def _build_feature(dtype: str, values: list[Any]) -> tf.train.Feature:
    if dtype == "string":
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if dtype == "int64":
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))
    return tf.train.Feature(float_list=tf.train.FloatList(value=values))
