"""Values of JSON as Arrow arrays: JSON has types of its own, and a column may mix them."""

from __future__ import annotations

import base64
import binascii
import reprlib
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from training.raw_inputs.inputs import TYPES, InputColumn

EXACT = 1 << 53
"""Below it a float64 holds every whole number; one that is not below may have been another one."""
Column: TypeAlias = pa.Array | Sequence[Any]
"""Values of a column: of Arrow, or as JSON has them."""
_MISSING = type(None)


def to_arrow(values: Sequence[Any], item: InputColumn, *, texts_only: bool) -> list[pa.Array]:
    """Returns the values of a column of JSON for an input: text that is parsed, and all others.

    Each array has all rows, null where the other one has a value. Text that is parsed is a string
    array, the others are of the input's type, floats of float64.

    Raises:
        pa.ArrowException, TypeError, ValueError or OverflowError: A value is of another type.
    """
    if item.epoch_unit is not None:  # A fraction is read to the digit.
        values = [repr(v) if type(v) is float and not v.is_integer() else v for v in values]
    kinds, texts = set(map(type, values)), []
    if str in kinds and (item.is_parsed or item.is_list or item.dtype != "string"):
        if not item.is_parsed:
            raise TypeError("text")
        texts = [pa.array([v if type(v) is str else None for v in values], pa.string())]
        values = [None if type(v) is str else v for v in values]
    if texts_only or (texts and kinds <= {str, _MISSING}):
        return texts
    build = _build_lists if item.is_list else _build_leaves
    return [*texts, build(values, item.dtype)]


def _build_lists(values: Sequence[Any], dtype: str) -> pa.Array:
    kinds = set(map(type, values))
    if not kinds <= {list, _MISSING}:
        raise TypeError(kinds)
    lengths = [0 if value is None else len(value) for value in values]
    flat = _build_leaves(list(chain.from_iterable(filter(None, values))), dtype)
    offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))), pa.int32())
    mask = pa.array([value is None for value in values]) if _MISSING in kinds else None
    return pa.ListArray.from_arrays(offsets, flat, mask=mask)


def _build_leaves(values: Sequence[Any], dtype: str) -> pa.Array:
    kinds = set(map(type, values))
    if dtype == "string":
        return _build_texts(values if kinds <= {str, bytes, _MISSING} else map(_to_text, values))
    if not kinds <= {int, float, _MISSING}:  # Arrow takes true for 1.
        raise TypeError(kinds)
    if dtype in ("float32", "float64"):  # Arrow refuses whole numbers that a float rounds.
        values = [float(v) if type(v) is int else v for v in values] if int in kinds else values
        return pa.array(values, pa.float64())
    values = [_to_whole(v) if type(v) is float else v for v in values] if float in kinds else values
    return pa.array(values, TYPES[dtype])


def _build_texts(values: Any) -> pa.Array:
    try:
        return pa.array(values, pa.binary())
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise ValueError(f"text holds half of a character, \\u{half:x}") from error


def _to_text(value: Any) -> str | bytes | None:
    """Returns text as a build reads it of whole numbers and booleans, bytes of `{"b64": …}`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, dict) and set(value) == {"b64"} and isinstance(value["b64"], str):
        try:
            return base64.b64decode(value["b64"], validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"b64 does not decode: {error}") from error
    if value is None or isinstance(value, str | bytes):
        return value
    raise TypeError(type(value))


def _to_whole(value: float) -> int:
    """Returns a float that is a whole number as one, where it cannot have been another one."""
    if not value.is_integer() or abs(value) >= EXACT:
        raise ValueError(f"{value} is no whole number below 2^53")
    return int(value)


class _Short(reprlib.Repr):
    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 100
_SHORT.maxlist, _SHORT.maxdict, _SHORT.maxlevel = 20, 10, 4


def show(value: Any) -> str:
    """Returns the beginning of a value as Python writes it, whatever its length."""
    text = _SHORT.repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
