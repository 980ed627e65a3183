"""JSON and tensors, as TensorFlow Serving's REST API maps them.

    {"instances": [row, …]}  →  {"predictions": [row, …]}     the row form
    {"inputs": columns}      →  {"outputs": columns}          the column form

A row is an object with a value for each input, or the value itself where there is one input;
outputs alike. Bytes are `{"b64": "…"}`; text is UTF-8; null is a missing value. What is no finite
number is refused wherever a number is asked for, in tensors of gRPC and serialized Examples too.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import tensorflow as tf

from training.scoring.raw_inputs import FINITE, find_bad_number, find_missing
from training.serving.errors import RequestError

Arrays = dict[str, np.ndarray]
Specs = Mapping[str, tf.TensorSpec]
Inputs = Mapping[str, Mapping[str, Any]]
"""What `export.json` says of each input."""
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


def parse_predict(
    data: Mapping[str, Any], specs: Specs, about: Inputs | None = None
) -> tuple[Arrays, bool]:
    """Reads the inputs of a `:predict` request.

    Args:
        data: Its body.
        specs: Shape and type of each input.
        about: What `export.json` says of them; None: nothing stands for a missing value.

    Returns:
        The inputs, and whether they came in the row form.

    Raises:
        RequestError: An input is missing, unknown, of another shape or type, or not finite.
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
    about = about or {}
    inputs = {
        name: build_array(name, columns[name], spec, about.get(name))
        for name, spec in specs.items()
    }
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


def build_array(
    name: str, value: Any, spec: tf.TensorSpec, about: Mapping[str, Any] | None = None
) -> np.ndarray:
    """Returns JSON values as an array.

    Args:
        name: Name of the input.
        value: Nested lists; null where a value is missing.
        spec: Shape and type that they must have.
        about: What `export.json` says of the input; None: nothing stands for a missing value.

    Raises:
        RequestError: They have another one, a number is not finite, or nothing stands for null.
    """
    is_text = spec.dtype == tf.string
    try:
        array, is_null = _read_text(name, value) if is_text else _read_numbers(value, spec.dtype)
    except (ValueError, OverflowError, TypeError, RecursionError):
        _refuse(name, value, spec)
    if array.size and not is_text and not _is_number(array, spec.dtype):
        _refuse(name, value, spec)
    if array.ndim < spec.shape.rank and not array.size:
        shape = [*array.shape, *[0] * (spec.shape.rank - array.ndim)]
        array = array.reshape(shape)
    if not spec.shape.is_compatible_with(array.shape):
        _refuse(name, value, spec, f"shape {list(array.shape)}")
    if not is_text:
        check_finite(name, array)
        array = array.astype(spec.dtype.as_numpy_dtype)
    if is_null is not None and is_null.any():
        array[is_null] = _find_missing(name, about or {})
    return array


def check_finite(name: str, values: np.ndarray) -> None:
    """Refuses numbers that no model can read: NaN, infinities, what overflows float32.

    Args:
        name: Name of the input.
        values: `[rows, …]`.

    Raises:
        RequestError: There is one; names its row.
    """
    if values.dtype.kind != "f" or (bad := find_bad_number(values)) is None:
        return
    row, *rest = np.unravel_index(bad, values.shape) if values.ndim else (0,)
    place = f"row {row} (from 0)" + (f", position {[int(n) for n in rest]}" if rest else "")
    raise RequestError(
        f"input {name} must be {FINITE}; received {values.flat[bad]} in {place}; "
        "a missing value is null, in tensors its null_token"
    )


def check_examples(serialized: np.ndarray, holds: Sequence[Mapping[str, Any]]) -> None:
    """Refuses numbers in serialized `tf.Example`s as `check_finite` does.

    Args:
        serialized: `[rows]` of bytes.
        holds: What `export.json` says of the raw inputs.

    Raises:
        RequestError: There is one, or these are no Examples.
    """
    names = [item["name"] for item in holds if item["dtype"] in ("float32", "float64")]
    if not names or not _may_hold_bad_floats(serialized):
        return
    try:
        found = tf.io.parse_example(serialized, {n: tf.io.VarLenFeature(tf.float32) for n in names})
    except tf.errors.InvalidArgumentError as error:
        raise RequestError(str(error.message).partition("\n")[0][:300]) from error
    for name, sparse in found.items():
        values = sparse.values.numpy()
        if (bad := find_bad_number(values)) is not None:
            row = int(sparse.indices[bad, 0])
            raise RequestError(
                f"feature {name} must be {FINITE}; received {values[bad]} in row {row} (from 0); "
                "a missing value is left out"
            )


def _may_hold_bad_floats(serialized: np.ndarray) -> bool:
    """Whether bytes hold, anywhere, the exponent of a float32 that is not finite.

    It is all ones: the highest bit of the third byte, and the lower seven of the fourth. Parsing
    costs a hundred times as much, and there is hardly ever something to find.
    """
    found = np.frombuffer(b"".join(serialized.ravel().tolist()), np.uint8)
    return bool((((found[1:] & 0x7F) == 0x7F) & (found[:-1] >= 0x80)).any())


def _find_missing(name: str, about: Mapping[str, Any]) -> int | float | bytes:
    """Returns what stands for a missing value of an input.

    Raises:
        RequestError: Nothing does.
    """
    missing = None
    if "null_token" in about:  # Encoded features, keys of items and Examples have none.
        required = about.get("is_required", False)
        missing = find_missing(about["dtype"], about["null_token"], required)
    if missing is None:
        raise RequestError(f"input {name} has no value for a missing one: give it")
    return missing


def _is_number(array: np.ndarray, dtype: tf.DType) -> bool:
    if dtype.is_floating:
        return array.dtype.kind in "iuf"
    if array.dtype.kind != "i":
        return False
    return bool(array.min() >= dtype.min and array.max() <= dtype.max)


def _read_numbers(value: Any, dtype: tf.DType) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns numbers as an array, 0 for null, and which of them are null; None: none of them.

    Raises:
        TypeError, ValueError or OverflowError: They are none, or lists differ in length.
    """
    array = np.array(value)
    if array.dtype != object:
        if array.dtype.kind in "iuf" and _has_booleans(value):
            raise TypeError("NumPy takes true for 1 beside numbers")
        return array, None
    known: set[type] = {int, type(None), *([float] if dtype.is_floating else [])}
    if not set(map(type, array.ravel())) <= known:
        raise TypeError(array.dtype)
    is_null = _find_nulls(array)
    numbers = np.where(is_null, 0, array)
    return numbers.astype(np.float64 if dtype.is_floating else np.int64), is_null


def _has_booleans(value: Any) -> bool:
    if not isinstance(value, list):
        return isinstance(value, bool)
    kinds = set(map(type, value))
    return bool in kinds or (list in kinds and any(map(_has_booleans, value)))


def _read_text(name: str, value: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns text as an array of bytes, and which of it is null."""
    array = np.array(value, dtype=object)
    flat = np.empty(array.size, dtype=object)
    flat[:] = [b"" if item is None else _encode_text(name, item) for item in array.ravel()]
    return flat.reshape(array.shape), _find_nulls(array)


def _find_nulls(array: np.ndarray) -> np.ndarray:
    """Returns which values are null, bool of the same shape."""
    found = np.fromiter((item is None for item in array.ravel()), bool, array.size)
    return found.reshape(array.shape)


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
    """Returns the body of the answer to a `:predict` request."""
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
            if value is not None  # It is missing.
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
    return tf.train.Feature(float_list=tf.train.FloatList(value=array.tolist()))
