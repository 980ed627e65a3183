"""JSON and tensors, as TensorFlow Serving's REST API maps them.

    {"instances": [row, …]}  →  {"predictions": [row, …]}     the row form
    {"inputs": columns}      →  {"outputs": columns}          the column form

A row is an object with a value for each input, or the value itself where there is one input;
outputs alike. Inputs may have the names of the source's columns. Bytes are `{"b64": "…"}`; text is
UTF-8; null is a missing value, and of a list the empty one. What is no finite number is refused
wherever a number is asked for, in tensors of gRPC and serialized Examples too; so are times of
another unit.
"""

from __future__ import annotations

import base64
import binascii
import json
import reprlib
import sys
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from training.raw_inputs.column_values import EXACT, to_text, to_whole
from training.raw_inputs.input_columns import (
    FINITE,
    find_bad_number,
    find_missing,
    find_wrong_times,
)
from training.raw_inputs.written_values import scale_epochs
from training.serving.requests.errors import RequestError
from training.serving.requests.limits import RequestLimits, check_lists
from training.serving.requests.written_json import (
    SourceNames,
    build_filler,
    check_padding,
    find_source_names,
    name_inputs,
    read_column,
    read_written,
)

Arrays = dict[str, np.ndarray]
Specs = Mapping[str, tf.TensorSpec]
Inputs = Mapping[str, Mapping[str, Any]]
"""What `export.json` says of each input."""


class _Short(reprlib.Repr):
    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 100
_SHORT.maxlist, _SHORT.maxdict, _SHORT.maxlevel = 20, 10, 4
_LEAVES = {int, float, type(None), list}
_KINDS = {"i": "whole numbers", "f": "numbers", "O": "text"}


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
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(n for n, _ in pairs).items() if count > 1)
        raise RequestError(f"JSON Parse error: key {show(twice)} stands twice in an object")
    return found


def read_signature_name(data: Mapping[str, Any], default: str = "serving_default") -> str:
    """Returns the signature that a request names.

    Args:
        data: The body.
        default: What is returned where it names none.

    Raises:
        RequestError: The name is no text.
    """
    name = data.get("signature_name")
    if name is not None and not isinstance(name, str):
        raise RequestError(f"'signature_name' must be a string; received {show(name)}")
    return name or default


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
    allowed = ("instances", "inputs", "signature_name")
    if (unknown := next((key for key in data if key not in allowed), None)) is not None:
        raise RequestError(f"Request holds unknown keys {[unknown]}; allowed: {', '.join(allowed)}")
    about, limits = about or {}, limits or RequestLimits()
    given = data["instances" if is_row else "inputs"]
    check_lists(given.values() if isinstance(given, dict) else (given,), limits.rows)
    read = _read_rows if is_row else _read_columns
    columns = read(given, specs, find_source_names(about))
    inputs = {
        name: build_array(name, columns[name], spec, about.get(name), limits.values)
        for name, spec in specs.items()
    }
    if is_row and len({len(value) for value in inputs.values()}) > 1:
        raise RequestError("Inputs of the row form must have one batch size")
    return inputs, is_row


def _read_columns(columns: Any, specs: Specs, sources: SourceNames) -> Mapping[str, Any]:
    if not isinstance(columns, dict) or set(columns) == {"b64"}:
        columns = {_find_only(specs): columns}
    columns = name_inputs(columns, specs, sources)
    check_names(columns, specs)
    return columns


def _read_rows(rows: Any, specs: Specs, sources: SourceNames) -> Mapping[str, Any]:
    if not isinstance(rows, list) or not rows:
        raise RequestError("'instances' must be a list of at least one row")
    if not isinstance(rows[0], dict) or set(rows[0]) == {"b64"}:
        return {_find_only(specs): rows}
    named = []
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise RequestError(f"instance {number} is no object, as others are: {show(row)}")
        named.append(name_inputs(row, specs, sources, f"instance {number}: "))
        check_names(named[-1], specs, f"instance {number}: ")
    return {name: [row[name] for row in named] for name in specs}


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
    missing = sorted(name for name in specs if name not in given)
    unknown = next((name for name in given if name not in specs), None)
    if missing or unknown is not None:
        raise RequestError(
            f"{where}inputs do not match the signature; missing: "
            f"{', '.join(missing)[:300] or 'none'}; unknown: {(unknown or 'none')[:100]}"
        )


def build_array(
    name: str,
    value: Any,
    spec: tf.TensorSpec,
    about: Mapping[str, Any] | None = None,
    most: int = RequestLimits.values,
) -> np.ndarray:
    """Returns JSON values as an array.

    Args:
        name: Name of the input.
        value: Nested lists; null where a value is missing.
        spec: Shape and type that they must have.
        about: What `export.json` says of the input; None: nothing stands for a missing value.
        most: Values that lists may have in place of which null or text stands.

    Raises:
        RequestError: They have another one, a number is not finite, or nothing stands for null.
    """
    is_text = spec.dtype == tf.string
    is_list = bool(about and about.get("is_list"))
    value = read_written(value, spec.shape.rank - is_list, about, most)
    if about and is_list:
        value = _fill_lists(value, spec.shape.rank - 1, about, most)
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
    written = (about or {}).get("written") or {}
    if array.dtype == np.int64 and "time" in written:
        array = scale_epochs(array, written["time"], "ms")
    check_times(name, array, about)
    return array


def _fill_lists(value: Any, depth: int, about: Mapping[str, Any], most: int) -> Any:
    """Returns nested lists with padding for null, which means the empty list.

    Args:
        value: The lists stand in it `depth` lists deep.
        depth: 1 for `[rows, length]`.
        about: What `export.json` says of the input; encoded ids are padded with 0.
        most: Values that all lists may have.
    """
    if not isinstance(value, list):
        return value
    if depth > 1:
        return [_fill_lists(one, depth - 1, about, most) for one in value]
    if all(one is not None for one in value):
        return value
    widths = [len(one) for one in value if isinstance(one, list)]
    width = about.get("length") or max(widths, default=1)
    check_padding(about["name"], width, len(value), most)
    filler = build_filler(about["dtype"], about.get("pad_token"))
    return [[filler] * width if one is None else one for one in value]


def check_times(name: str, values: np.ndarray, about: Mapping[str, Any] | None) -> None:
    """Refuses times in another unit than the model reads.

    Args:
        name: Name of the input.
        values: Of any shape, missing ones and padding as tokens.
        about: What `export.json` says of the input; encoded features are no times.

    Raises:
        RequestError: There is one.
    """
    if not about or about.get("time_unit") is None:
        return
    if (fault := find_wrong_times(read_column(about), values)) is not None:
        raise RequestError(
            f"input {name} {fault.problem}; received {fault.received}; allowed: {fault.allowed}"
        )


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
    """Refuses numbers in serialized `tf.Example`s as `check_finite` and `check_times` do.

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


def parse_serialized(serialized: np.ndarray, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Returns features of serialized `tf.Example`s.

    Args:
        serialized: `[rows]` of bytes.
        wanted: How each is parsed, by name.

    Raises:
        RequestError: A feature is of another type, or these are no Examples.
    """
    try:
        found: dict[str, Any] = tf.io.parse_example(serialized, wanted)
    except tf.errors.InvalidArgumentError as error:
        raise RequestError(str(error.message).partition("\n")[0][:300]) from error
    except UnicodeDecodeError as error:  # TensorFlow's message quotes bytes that are no text.
        raise RequestError("Could not parse the inputs: they hold a broken Example") from error
    return found


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
    wanted = dtype.as_numpy_dtype
    if array.dtype == wanted:
        return True
    if array.dtype.kind == "f":  # A whole number may be written 10.0, where it is exact.
        if not ((np.abs(array) < EXACT) & (array == np.floor(array))).all():
            return False
    elif array.dtype.kind != "i":
        return False
    bounds = np.iinfo(wanted)
    return bool(array.min() >= bounds.min and array.max() <= bounds.max)


def _read_numbers(value: Any, dtype: tf.DType) -> tuple[np.ndarray, np.ndarray | None]:
    """Returns numbers as an array, 0 for null, and which of them are null; None: none of them.

    Raises:
        TypeError, ValueError or OverflowError: They are none, or lists differ in length.
    """
    _check_leaves(value)
    array = np.array(value)
    if array.dtype != object:
        return array, None
    is_null = _find_nulls(array)
    numbers = np.where(is_null, 0, array)
    if not dtype.is_floating:
        flat = (to_whole(one) if type(one) is float else one for one in numbers.ravel())
        return np.fromiter(flat, np.int64, numbers.size).reshape(numbers.shape), is_null
    return numbers.astype(np.float64), is_null


def _check_leaves(value: Any) -> None:
    """Refuses what is no number, and not null, before NumPy makes anything of it.

    NumPy takes true for 1 beside numbers, and gives all texts the room of the longest one.

    Raises:
        TypeError: There is such a value.
    """
    kinds = set(map(type, value)) if isinstance(value, list) else {type(value)}
    if not kinds <= _LEAVES:
        raise TypeError(kinds)
    if list in kinds:
        for one in value:
            _check_leaves(one)


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
    item = to_text(item)
    if isinstance(item, str):
        try:
            return item.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(item[error.start]):x}"
            raise RequestError(f"input {name}: text holds half of a character, {half}") from error
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
        f"received {received or show(value)}"
    )


def show(value: Any) -> str:
    """Returns the beginning of a value as Python writes it, whatever its length."""
    text = _SHORT.repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


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
