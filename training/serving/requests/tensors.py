"""JSON and tensors, as TensorFlow Serving's REST API maps them.

    {"instances": [row, …]}  →  {"predictions": [row, …]}     the row form
    {"inputs": columns}      →  {"outputs": columns}          the column form

A row is an object with a value for each input, or the value itself where there is one input;
outputs alike. Inputs may have the names of the source's columns. Bytes are `{"b64": "…"}`; text is
UTF-8; null is a missing value, and of a list the empty one. What is no finite number is refused
wherever a number is asked for, in serialized Examples too; so are times of another unit.
"""

from __future__ import annotations

import base64
import json
import sys
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from conf.artefacts.export import DEFAULT_SIGNATURE
from training.raw_inputs.converter import FINITE, find_bad_number
from training.raw_inputs.inputs import SourceNames
from training.raw_inputs.json_columns import show
from training.raw_inputs.requests import (
    build_inputs,
    check_names,
    check_times,
    gather_rows,
    read_names,
)
from training.serving.requests.errors import RequestError, refuse_values
from training.serving.requests.limits import RequestLimits, check_lists

Arrays = dict[str, np.ndarray]
Specs = Mapping[str, tf.TensorSpec]
Inputs = Mapping[str, Mapping[str, Any]]
"""What `export.json` says of each input."""
PARSED = {"string": tf.string, "int64": tf.int64, "float32": tf.float32, "float64": tf.float32}
"""Type of a list in an Example, by that of the input."""


def parse_json(body: bytes) -> dict[str, Any]:
    """Reads the object that a body holds.

    Raises:
        RequestError: It holds none, is not UTF-8, or a key stands twice in an object.
    """
    if body.startswith(BOM_UTF8):
        raise RequestError("JSON Parse error: the body begins with a byte order mark: leave it out")
    try:
        data = json.loads(body.decode(), object_pairs_hook=_read_object)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"JSON Parse error: {error}"[:300]) from error
    except ValueError as error:  # Python's own advice is for programmers.
        raise RequestError(
            f"JSON Parse error: a number may have {sys.get_int_max_str_digits()} digits"
        ) from error
    if not isinstance(data, dict):
        raise RequestError(f"Request body must be a JSON object; received {show(data)}")
    return data


def _read_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        twice = next(name for name, count in Counter(n for n, _ in pairs).items() if count > 1)
        raise RequestError(f"JSON Parse error: key {show(twice)} stands twice in an object")
    return content


def read_signature_name(data: Mapping[str, Any]) -> str:
    """Returns the signature that a request names.

    Raises:
        RequestError: The name is no text.
    """
    name = data.get("signature_name")
    if name is not None and not isinstance(name, str):
        raise RequestError(f"'signature_name' must be a string; received {show(name)}")
    return name or DEFAULT_SIGNATURE


@refuse_values()
def parse_predict(
    data: Mapping[str, Any],
    specs: Specs,
    about: Inputs | None = None,
    limits: RequestLimits | None = None,
) -> tuple[Arrays, bool]:
    """Reads the inputs of a `:predict` request.

    Args:
        data: Its body.
        specs: Shape and type of each input.
        about: What `export.json` says of them; None: nothing stands for a missing value.
        limits: How many rows there may be, and values of lists that are padded; None: the defaults.

    Returns:
        The inputs, and whether they came in the row form.

    Raises:
        RequestError: An input is missing, unknown, of another shape or type, or not finite; or
            there are too many rows.
    """
    is_row = "instances" in data
    if is_row == ("inputs" in data):
        raise RequestError("Request must hold either 'instances' or 'inputs', and not both")
    names, limits = read_names(about or {}), limits or RequestLimits()
    given = data["instances" if is_row else "inputs"]
    check_lists(given.values() if isinstance(given, dict) else (given,), limits.rows)
    read = _read_rows if is_row else _read_columns
    inputs = build_inputs(read(given, specs, names), specs, names, limits.values)
    if is_row and len({len(value) for value in inputs.values()}) > 1:
        raise RequestError("Inputs of the row form must have one batch size")
    return inputs, is_row


def _read_columns(columns: Any, specs: Specs, names: SourceNames) -> Mapping[str, Any]:
    if not isinstance(columns, dict) or set(columns) == {"b64"}:
        columns = {_find_only(specs): columns}
    check_names(columns, specs, names)
    return columns


def _read_rows(rows: Any, specs: Specs, names: SourceNames) -> Mapping[str, Any]:
    if not isinstance(rows, list) or not rows:
        raise RequestError("'instances' must be a list of at least one row")
    if not isinstance(rows[0], dict) or set(rows[0]) == {"b64"}:
        return {_find_only(specs): rows}
    return gather_rows(rows, specs, names)


def _find_only(specs: Specs) -> str:
    if len(specs) != 1:
        raise RequestError(
            f"A value without a name needs a signature with one input; it has {', '.join(specs)}"
        )
    return next(iter(specs))


@refuse_values()
def check_examples(serialized: np.ndarray, holds: Sequence[Mapping[str, Any]]) -> None:
    """Refuses numbers in serialized `tf.Example`s as `build_inputs` does.

    Args:
        serialized: `[rows]` of bytes.
        holds: What `export.json` says of the raw inputs.

    Raises:
        RequestError: There is one, or these are no Examples.
    """
    is_float = {item["name"]: item["dtype"] in ("float32", "float64") for item in holds}
    names = [name for name, found in is_float.items() if found]
    names = names if _may_hold_bad_floats(serialized) else []
    timed = {item["name"]: item for item in holds if item.get("time_unit") is not None}
    wanted = {
        name: tf.io.VarLenFeature(tf.float32 if is_float[name] else tf.int64)
        for name in (*names, *timed)
    }
    if not wanted:
        return
    found = parse_serialized(serialized, wanted)
    for name in names:
        values = found[name].values.numpy()
        if (bad := find_bad_number(values)) is not None:
            row = int(found[name].indices[bad, 0])
            raise RequestError(
                f"feature {name} must be {FINITE}; received {values[bad]} in row {row} (from 0); "
                "a missing value is left out"
            )
    for name, item in timed.items():
        check_times(name, found[name].values.numpy(), item)


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


def parse_serialized(serialized: np.ndarray, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns features of serialized `tf.Example`s.

    Args:
        serialized: `[rows]` of bytes.
        wanted: How each is parsed, by name.

    Raises:
        RequestError: A feature is of another type, or these are no Examples.
    """
    try:
        parsed: dict[str, Any] = tf.io.parse_example(serialized, wanted)
    except tf.errors.InvalidArgumentError as error:
        raise RequestError(str(error.message).partition("\n")[0][:300]) from error
    except UnicodeDecodeError as error:  # TensorFlow's message quotes bytes that are no text.
        raise RequestError("Could not parse the inputs: they hold a broken Example") from error
    return parsed


def _may_hold_bad_floats(serialized: np.ndarray) -> bool:
    """Whether bytes hold, anywhere, the exponent of a float32 that is not finite.

    It is all ones: the highest bit of the third byte, and the lower seven of the fourth. Parsing
    costs a hundred times as much, and there is hardly ever something to find.
    """
    data = np.frombuffer(b"".join(serialized.ravel().tolist()), np.uint8)
    return bool((((data[1:] & 0x7F) == 0x7F) & (data[:-1] >= 0x80)).any())


def format_predict(outputs: Mapping[str, np.ndarray], *, is_row: bool) -> dict[str, Any]:
    """Returns the body of the answer to a `:predict` request; numbers stay arrays."""
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
    return np.ascontiguousarray(value) if value.ndim else value.item()


def _map_nested(value: Any, as_bytes: bool) -> Any:
    if isinstance(value, list):
        return [_map_nested(item, as_bytes) for item in value]
    if not as_bytes:
        try:
            return value.decode()
        except UnicodeDecodeError:
            pass
    return {"b64": base64.b64encode(value).decode()}
