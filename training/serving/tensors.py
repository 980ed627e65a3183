"""JSON and tensors, as TensorFlow Serving's REST API maps them.

    {"instances": [row, …]}  →  {"predictions": [row, …]}     the row form
    {"inputs": columns}      →  {"outputs": columns}          the column form

A row is an object with a value for each input, or the value itself where there is one input;
outputs alike. Bytes are `{"b64": "…"}`; text is UTF-8.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import tensorflow as tf

from training.serving.errors import RequestError

Arrays = dict[str, np.ndarray]
Specs = Mapping[str, tf.TensorSpec]
_KINDS = {"i": "whole numbers", "f": "numbers", "O": "text"}


def parse_json(body: bytes) -> dict[str, Any]:
    """Reads the object that a body holds.

    Raises:
        RequestError: It holds none.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"JSON Parse error: {error}"[:300]) from error
    if not isinstance(data, dict):
        raise RequestError(f"Request body must be a JSON object; received {_show(data)}")
    return data


def read_signature_name(data: Mapping[str, Any]) -> str:
    """Returns the signature that a request names; `serving_default` where it names none.

    Raises:
        RequestError: The name is no text.
    """
    name = data.get("signature_name") or "serving_default"
    if not isinstance(name, str):
        raise RequestError(f"'signature_name' must be a string; received {_show(name)}")
    return name


def parse_predict(data: Mapping[str, Any], specs: Specs) -> tuple[Arrays, bool]:
    """Reads the inputs of a `:predict` request.

    Args:
        data: Its body.
        specs: Shape and type of each input.

    Returns:
        The inputs, and whether they came in the row form.

    Raises:
        RequestError: An input is missing, unknown, or of another shape or type.
    """
    is_row = "instances" in data
    if is_row == ("inputs" in data):
        raise RequestError("Request must hold either 'instances' or 'inputs', and not both")
    unknown = sorted(set(data) - {"instances", "inputs", "signature_name"})
    if unknown:
        raise RequestError(
            f"Request holds unknown keys {unknown}; allowed: instances, inputs, signature_name"
        )
    columns = _read_rows(data["instances"], specs) if is_row else _read_columns(data, specs)
    inputs = {name: build_array(name, columns[name], spec) for name, spec in specs.items()}
    if is_row and len({len(value) for value in inputs.values()}) > 1:
        raise RequestError("Inputs of the row form must have one batch size")
    return inputs, is_row


def _read_columns(data: Mapping[str, Any], specs: Specs) -> Mapping[str, Any]:
    columns = data["inputs"]
    if not isinstance(columns, dict) or set(columns) == {"b64"}:
        columns = {_find_only(specs): columns}
    check_names(columns, specs)
    return columns


def _read_rows(rows: Any, specs: Specs) -> Mapping[str, Any]:
    if not isinstance(rows, list) or not rows:
        raise RequestError("'instances' must be a list of at least one row")
    if not isinstance(rows[0], dict) or set(rows[0]) == {"b64"}:
        return {_find_only(specs): rows}
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise RequestError(f"instance {number} is no object, as others are: {_show(row)}")
        check_names(row, specs, f"instance {number}: ")
    return {name: [row[name] for row in rows] for name in specs}


def _find_only(specs: Specs) -> str:
    if len(specs) != 1:
        raise RequestError(
            f"A value without a name needs a signature with one input; it has {', '.join(specs)}"
        )
    return next(iter(specs))


def check_names(given: Collection[str], specs: Specs, where: str = "") -> None:
    """Refuses names of inputs that are not those of the signature.

    Raises:
        RequestError: An input is missing, or unknown.
    """
    missing, unknown = sorted(set(specs) - set(given)), sorted(set(given) - set(specs))
    if missing or unknown:
        raise RequestError(
            f"{where}inputs do not match the signature; missing: {', '.join(missing) or 'none'}; "
            f"unknown: {', '.join(unknown)[:200] or 'none'}"
        )


def build_array(name: str, value: Any, spec: tf.TensorSpec) -> np.ndarray:
    """Returns JSON values as an array.

    Args:
        name: Name of the input.
        value: Nested lists.
        spec: Shape and type that they must have.

    Raises:
        RequestError: They have another one.
    """
    dtype = spec.dtype
    try:
        array = _build_text(name, value) if dtype == tf.string else np.array(value)
    except (ValueError, OverflowError, TypeError, RecursionError):
        _refuse(name, value, spec)
    if array.size and dtype != tf.string and not _is_number(array, dtype):
        _refuse(name, value, spec)
    if array.ndim < spec.shape.rank and not array.size:
        shape = [*array.shape, *[0] * (spec.shape.rank - array.ndim)]
        array = array.reshape(shape)
    if not spec.shape.is_compatible_with(array.shape):
        _refuse(name, value, spec, f"shape {list(array.shape)}")
    if dtype == tf.string:
        return array
    with np.errstate(over="ignore"):
        return array.astype(dtype.as_numpy_dtype)


def fill_missing(item: Mapping[str, Any], value: Any) -> Any:
    """Returns a raw value, or what stands for a missing one.

    Args:
        item: What `export.json` says of the input.
        value: None: it is missing.

    Raises:
        RequestError: Nothing stands for a missing value of this input.
    """
    if value is not None:
        return value
    if item["is_list"]:
        return [item["pad_token"]] * (item["length"] or 1)
    if item["null_token"] is not None:
        return item["null_token"]
    if item["dtype"] in ("float32", "float64"):
        return float("nan")
    raise RequestError(f"feature {item['name']} has no value for 'missing': give it")


def _is_number(array: np.ndarray, dtype: tf.DType) -> bool:
    if dtype.is_floating:
        return array.dtype.kind in "iuf"
    if array.dtype.kind != "i":
        return False
    return bool(array.min() >= dtype.min and array.max() <= dtype.max)


def _build_text(name: str, value: Any) -> np.ndarray:
    array = np.array(value, dtype=object)
    flat = np.empty(array.size, dtype=object)
    flat[:] = [_encode_text(name, item) for item in array.ravel()]
    return flat.reshape(array.shape)


def _encode_text(name: str, item: Any) -> bytes:
    if isinstance(item, str):
        return item.encode("utf-8", "surrogatepass")
    if isinstance(item, dict) and set(item) == {"b64"} and isinstance(item["b64"], str):
        try:
            return base64.b64decode(item["b64"], validate=True)
        except (binascii.Error, ValueError) as error:
            raise RequestError(f"input {name}: b64 does not decode: {error}") from error
    raise TypeError(item)


def _refuse(name: str, value: Any, spec: tf.TensorSpec, received: str | None = None) -> NoReturn:
    kind = _KINDS["O" if spec.dtype == tf.string else "f" if spec.dtype.is_floating else "i"]
    shape = [-1 if size is None else size for size in spec.shape]
    raise RequestError(
        f"input {name} must be {kind} ({spec.dtype.name}) of shape {shape}, lists of one length; "
        f"received {received or _show(value)}"
    )


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def format_predict(outputs: Mapping[str, np.ndarray], *, is_row: bool) -> dict[str, Any]:
    """Returns the body of the answer to a `:predict` request.

    Raises:
        RequestError: A number is not finite, which JSON does not know.
    """
    values = {name: _to_json(name, value) for name, value in outputs.items()}
    only = next(iter(values.values())) if len(values) == 1 else None
    if not is_row:
        return {"outputs": values if only is None else only}
    if only is not None:
        return {"predictions": only}
    names = list(values)
    rows = zip(*values.values(), strict=True)
    return {"predictions": [dict(zip(names, row, strict=True)) for row in rows]}


def _to_json(name: str, value: np.ndarray) -> Any:
    if value.dtype == object:
        return _map_nested(value.tolist(), name.endswith("_bytes"))
    if value.dtype.kind == "f" and not np.isfinite(value).all():
        raise RequestError(f"output {name} is not finite: look for NaN or infinity in the inputs")
    if value.dtype == np.float32:
        return _shorten(value)
    return value.tolist()


def _shorten(value: np.ndarray) -> Any:
    """Returns the shortest decimals that read back as the same float32."""
    texts = pa.array(value.ravel()).cast(pa.string())
    return texts.cast(pa.float64()).to_numpy().reshape(value.shape).tolist()


def _map_nested(value: Any, as_bytes: bool) -> Any:
    if isinstance(value, list):
        return [_map_nested(item, as_bytes) for item in value]
    if not as_bytes:
        try:
            return value.decode()
        except UnicodeDecodeError:
            pass
    return {"b64": base64.b64encode(value).decode()}


def parse_examples(data: Mapping[str, Any], holds: Sequence[Mapping[str, Any]]) -> list[bytes]:
    """Reads the examples of a `:classify` or `:regress` request.

    Args:
        data: Its body: `examples`, and `context`, features that all of them have.
        holds: What `export.json` says of the raw inputs.

    Returns:
        Serialized `tf.Example`s.

    Raises:
        RequestError: A feature is unknown, or not of its type.
    """
    examples, context = data.get("examples"), data.get("context", {})
    if not isinstance(examples, list) or not examples or not isinstance(context, dict):
        raise RequestError("Request must hold 'examples', a list of at least one object")
    dtypes = {item["name"]: item["dtype"] for item in holds}
    built = []
    for number, example in enumerate(examples):
        if not isinstance(example, dict):
            raise RequestError(f"example {number} is no object: {_show(example)}")
        features = {
            name: _build_feature(name, value, dtypes)
            for name, value in {**context, **example}.items()
        }
        message = tf.train.Example(features=tf.train.Features(feature=features))
        built.append(message.SerializeToString())
    return built


def _build_feature(name: str, value: Any, dtypes: Mapping[str, str]) -> tf.train.Feature:
    if name not in dtypes:
        raise RequestError(f"unknown feature {name[:100]}; allowed: {', '.join(dtypes)}")
    values = value if isinstance(value, list) else [value]
    spec = tf.TensorSpec([None], tf.as_dtype(dtypes[name]))
    array = build_array(name, values, spec)
    if spec.dtype == tf.string:
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=array.tolist()))
    if spec.dtype == tf.int64:
        return tf.train.Feature(int64_list=tf.train.Int64List(value=array.tolist()))
    if any(math.isinf(number) for number in array.tolist()):
        raise RequestError(f"feature {name} is not finite")
    return tf.train.Feature(float_list=tf.train.FloatList(value=array.tolist()))
