"""JSON and tensors, as TensorFlow Serving's REST API maps them.

    {"instances": [row, …]}  →  {"predictions": [row, …]}     the row form
    {"inputs": columns}      →  {"outputs": columns}          the column form

A row is an object with a value for each input, or the value itself where there is one input;
outputs alike. Bytes are `{"b64": "…"}`. Numbers that are not finite are refused, and times of
another unit, in serialized Examples too.
"""

from __future__ import annotations

import base64
import json
import sys
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import orjson
import tensorflow as tf

from conf.artefacts.export import DEFAULT_SIGNATURE
from training.raw_inputs.converter import FINITE, find_bad_number, show
from training.raw_inputs.inputs import SourceNames
from training.raw_inputs.requests import (
    build_inputs,
    check_names,
    check_times,
    gather_rows,
    read_names,
)
from training.serving.errors import RequestError
from training.serving.limits import Cost, RequestLimits, SignatureCost, check_count, check_json

Arrays = dict[str, np.ndarray]
Specs = Mapping[str, tf.TensorSpec]
Inputs = Mapping[str, Mapping[str, Any]]
PARSED = {"string": tf.string, "int64": tf.int64, "float32": tf.float32, "float64": tf.float32}
"""Type of a feature of an Example, by that of the input."""


@dataclass(frozen=True)
class Signature:
    """What a signature takes: by `saved_model.pb`, by `export.json`, and what makes it costly."""

    specs: Specs
    about: Inputs
    cost: SignatureCost

    @cached_property
    def names(self) -> SourceNames:
        return read_names(self.about.values())


def parse_json(body: bytes, values: int) -> dict[str, Any]:
    """Reads the object that a body holds, of so many values at most."""
    check_json(body, values)
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
    name = data.get("signature_name")
    if name is not None and not isinstance(name, str):
        raise RequestError(f"'signature_name' must be a string; received {show(name)}")
    return name or DEFAULT_SIGNATURE


def parse_predict(
    data: Mapping[str, Any],
    specs: Specs,
    names: SourceNames | None = None,
    limits: RequestLimits | None = None,
) -> tuple[Arrays, bool]:
    """Returns the inputs of a `:predict` request, and whether they came in the row form."""
    is_row = "instances" in data
    if is_row == ("inputs" in data):
        raise RequestError("Request must hold either 'instances' or 'inputs', and not both")
    names, limits = names or SourceNames(()), limits or RequestLimits()
    given = data["instances" if is_row else "inputs"]
    for rows in given.values() if isinstance(given, dict) else (given,):
        if isinstance(rows, list):  # Before anything is built of them.
            check_count("rows", len(rows), limits.rows)
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


def measure_inputs(inputs: Arrays, signature: Signature, limits: RequestLimits) -> Cost:
    """Returns what a call takes, within the limits; serialized Examples are looked into."""
    found = signature.cost.measure(inputs, limits)
    for name in signature.cost.examples:
        lists = check_examples(inputs[name], signature.about[name]["holds"])
        what = "values of lists in Examples, padded to the longest"
        check_count(what, found.rows * lists, limits.values)
        found = replace(found, width=max(found.width, lists))
    return found


def check_examples(serialized: np.ndarray, holds: Sequence[Mapping[str, Any]]) -> int:
    """Refuses numbers and times in serialized `tf.Example`s `[rows]` that no model reads.

    Returns the values of a row once all lists without a fixed length are padded to the longest one.
    """
    wanted = {
        item["name"]: tf.io.RaggedFeature(PARSED[item["dtype"]])
        for item in holds
        if _is_open(item) or item["dtype"].startswith("float") or item.get("time_unit") is not None
    }
    try:
        parsed = tf.io.parse_example(serialized, wanted) if wanted else {}
    except tf.errors.InvalidArgumentError as error:
        raise RequestError(str(error.message).partition("\n")[0][:300]) from error
    except UnicodeDecodeError as error:  # TensorFlow's message quotes bytes that are no text.
        raise RequestError("Could not parse the inputs: they hold a broken Example") from error
    for item in holds:
        if item["name"] in parsed:
            _check_feature(item, parsed[item["name"]])
    open_lists = [parsed[item["name"]] for item in holds if _is_open(item)]
    return sum(int(np.diff(one.row_splits.numpy()).max(initial=0)) for one in open_lists)


def _is_open(item: Mapping[str, Any]) -> bool:
    return bool(item["is_list"] and item.get("length") is None)


def _check_feature(item: Mapping[str, Any], feature: tf.RaggedTensor) -> None:
    values = feature.values.numpy()
    if values.dtype.kind == "i":
        check_times(item["name"], values, item)
    elif values.dtype.kind == "f" and (bad := find_bad_number(values)) is not None:
        row = int(feature.value_rowids()[bad])
        raise RequestError(
            f"feature {item['name']} must be {FINITE}; received {values[bad]} in row {row} "
            "(from 0); a missing value is left out"
        )


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


def encode_json(body: Mapping[str, Any]) -> bytes:
    """Returns JSON; arrays become lists, floats as short as they can be."""
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


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
