"""JSON values as arrays of an input: types, missing values, lists, text as the build reads it.

What `training.raw_inputs.raw_columns` reads of columns is read here alike, of values that may stand
in lists of lists: those of the candidates of each row.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from training.raw_inputs.column_values import (
    EXACT,
    ColumnReader,
    text_of_fraction,
    to_text,
    to_whole,
)
from training.raw_inputs.export_inputs import read_column
from training.raw_inputs.input_columns import InputColumn, find_missing, find_padding
from training.raw_inputs.raw_value_errors import RawValueError, show
from training.raw_inputs.value_checks import FINITE, find_bad_number, find_wrong_times
from training.raw_inputs.written_values import parse_entries, parse_entry, parse_time, scale_epochs

_LEAVES = {int, float, type(None), list}
_KINDS = {"i": "whole numbers", "f": "numbers", "O": "text"}


def build_array(
    name: str,
    value: Any,
    spec: tf.TensorSpec,
    about: Mapping[str, Any] | None = None,
    most: int | None = None,
) -> np.ndarray:
    """Returns JSON values as an array.

    Args:
        name: Name of the input.
        value: Nested lists; null where a value is missing.
        spec: Shape and type that they must have.
        about: What `export.json` says of the input; None: nothing stands for a missing value.
        most: Values that lists may have in place of which null or text stands; None: any number.

    Raises:
        RawValueError: They have another one, a number is not finite, or nothing stands for null.
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
    return read_times(name, array, about)


def read_times(name: str, values: np.ndarray, about: Mapping[str, Any] | None) -> np.ndarray:
    """Returns numbers of the source's unit in milliseconds, checked; other values as they are.

    Arguments and what is raised are those of `check_times`.
    """
    written = (about or {}).get("written") or {}
    if values.dtype == np.int64 and "time" in written:
        values = scale_epochs(values, written["time"], "ms")
    check_times(name, values, about)
    return values


def check_times(name: str, values: np.ndarray, about: Mapping[str, Any] | None) -> None:
    """Refuses times in another unit than the model reads.

    Args:
        name: Name of the input.
        values: Of any shape, missing ones and padding as tokens.
        about: What `export.json` says of the input; encoded features are no times.

    Raises:
        RawValueError: There is one.
    """
    if not about or about.get("time_unit") is None:
        return
    if (fault := find_wrong_times(read_column(about), values)) is not None:
        raise RawValueError(
            f"input {name} {fault.problem}; received {fault.received}; allowed: {fault.allowed}"
        )


def check_finite(name: str, values: np.ndarray) -> None:
    """Refuses numbers that no model can read: NaN, infinities, what overflows float32.

    Args:
        name: Name of the input.
        values: `[rows, …]`.

    Raises:
        RawValueError: There is one; names its row.
    """
    if values.dtype.kind != "f" or (bad := find_bad_number(values)) is None:
        return
    row, *rest = np.unravel_index(bad, values.shape) if values.ndim else (0,)
    place = f"row {row} (from 0)" + (f", position {[int(n) for n in rest]}" if rest else "")
    raise RawValueError(
        f"input {name} must be {FINITE}; received {values.flat[bad]} in {place}; "
        "a missing value is null, in tensors its null_token"
    )


def read_written(value: Any, depth: int, about: Mapping[str, Any] | None, most: int | None) -> Any:
    """Returns JSON values of which text is read as the build reads it.

    Args:
        value: The values of rows stand in it `depth` lists deep.
        depth: 1 for `[rows]` and `[rows, length]`, 0 for the value of one row.
        about: What `export.json` says of the input; None: it is of no source.
        most: Values that lists of text may have, padded; None: any number.

    Raises:
        RawValueError: Text is not what the build reads, or holds more values.
    """
    if not about or "column" not in about:
        return value
    item = read_column(about)
    form = item.written
    if item.is_list:
        has_form = form is not None and form.separator is not None
        return _read_lists(value, depth, item, most) if has_form else value
    if item.read_unit is None and (form is None or form.pair_separator is None):
        return value
    return _map_rows(value, depth, lambda one: _read_scalar(one, item))


def _read_scalar(value: Any, item: InputColumn) -> Any:
    form, unit = item.written, item.read_unit
    if unit is not None:
        value = text_of_fraction(value, item.time_form)
    if not isinstance(value, str):
        return value
    try:
        if form is not None and form.pair_separator is not None:
            return parse_entry(value, form, item.dtype) if value else None
        return parse_time(value, item.time_form, unit) if value and unit is not None else None
    except (ValueError, OverflowError) as error:
        raise _refuse_text(value, item) from error


def _read_lists(value: Any, depth: int, item: InputColumn, most: int | None) -> Any:
    """Returns lists of one length, where some of them came as text."""
    rows = list(_list_rows(value, depth))
    if item.written is None or not any(isinstance(row, str) for row in rows):
        return value
    form, lists = item.written, []
    # Before it is taken apart: a text of a few bytes per entry becomes far more.
    longest = max(row.count(form.separator or "") + 1 for row in rows if isinstance(row, str))
    _check_padding(item.name, longest, len(rows), most)
    for row in rows:
        try:
            lists.append(parse_entries(row, form, item.dtype) if isinstance(row, str) else row)
        except (ValueError, OverflowError) as error:
            raise _refuse_text(row, item) from error
    width = item.length or max((len(one) for one in lists if isinstance(one, list)), default=1) or 1
    _check_padding(item.name, width, len(rows), most)
    filler = _build_filler(item.dtype, item.pad_token)
    filled = iter(lists)

    def fill(_: Any) -> Any:
        own = next(filled)
        own = [] if own is None else own
        return own + [filler] * (width - len(own)) if isinstance(own, list) else own

    return _map_rows(value, depth, fill)


def _fill_lists(value: Any, depth: int, about: Mapping[str, Any], most: int | None) -> Any:
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
    _check_padding(about["name"], width, len(value), most)
    filler = _build_filler(about["dtype"], about.get("pad_token"))
    return [[filler] * width if one is None else one for one in value]


def _find_missing(name: str, about: Mapping[str, Any]) -> int | float | bytes:
    """Returns what stands for a missing value of an input.

    Raises:
        RawValueError: Nothing does.
    """
    missing = None
    if "null_token" in about:  # Encoded features, keys of items and Examples have none.
        required = about.get("is_required", False)
        missing = find_missing(about["dtype"], about["null_token"], required)
    if missing is None:
        raise RawValueError(f"input {name} has no value for a missing one: give it")
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
    nulls = np.fromiter((item is None for item in array.ravel()), bool, array.size)
    return nulls.reshape(array.shape)


def _encode_text(name: str, item: Any) -> bytes:
    item = to_text(item)
    if isinstance(item, bytes):  # Not of JSON: what is stored of a user.
        return item
    if isinstance(item, str):
        try:
            return item.encode()
        except UnicodeEncodeError as error:
            half = f"\\u{ord(item[error.start]):x}"
            raise RawValueError(f"input {name}: text holds half of a character, {half}") from error
    if isinstance(item, dict) and set(item) == {"b64"} and isinstance(item["b64"], str):
        try:
            return base64.b64decode(item["b64"], validate=True)
        except (binascii.Error, ValueError) as error:
            raise RawValueError(f"input {name}: b64 does not decode: {error}") from error
    raise TypeError(item)


def _check_padding(name: str, width: int, rows: int, most: int | None) -> None:
    """Refuses lists in place of which null or text stands: a few bytes could ask for any number.

    Args:
        name: Name of the input.
        width: Values of the longest list, which all others are padded to.
        rows: Lists.
        most: Values that all of them may have; None: any number.

    Raises:
        RawValueError: They would have more.
    """
    if most is not None and width * rows > most:
        raise RawValueError(
            f"input {name} has null or text in place of a list beside lists of {width:,} values: "
            f"with {rows:,} rows more than {most:,} values; ask for fewer rows"
        )


def _build_filler(dtype: str, pad_token: int | float | str | None) -> Any:
    """Returns what pads a list of JSON."""
    padding = find_padding(dtype, pad_token)
    return {"b64": base64.b64encode(padding).decode()} if isinstance(padding, bytes) else padding


def _list_rows(value: Any, depth: int) -> Iterator[Any]:
    if depth and isinstance(value, list):
        for one in value:
            yield from _list_rows(one, depth - 1)
    else:
        yield value


def _map_rows(value: Any, depth: int, change: Any) -> Any:
    if depth and isinstance(value, list):
        return [_map_rows(one, depth - 1, change) for one in value]
    return change(value)


def _refuse(name: str, value: Any, spec: tf.TensorSpec, received: str | None = None) -> NoReturn:
    kind = _KINDS["O" if spec.dtype == tf.string else "f" if spec.dtype.is_floating else "i"]
    shape = [-1 if size is None else size for size in spec.shape]
    raise RawValueError(
        f"input {name} must be {kind} ({spec.dtype.name}) of shape {shape}, lists of one length; "
        f"received {received or show(value)}"
    )


def _refuse_text(value: str, item: InputColumn) -> RawValueError:
    allowed = ColumnReader(item, is_paired=bool(item.written and item.written.is_second)).describe()
    shown = repr(value) if len(value) <= 100 else f"{value[:100]!r}…"
    return RawValueError(f"input {item.name} must be {allowed}; received {shown}")
