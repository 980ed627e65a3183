"""Casts of raw columns that either keep the value or refuse it."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

_INFINITY_TEXT = r"^[+-]?(?i:inf|infinity)$"


def cast_values(values: pa.Array, target: pa.DataType) -> pa.Array:
    """Casts values without losing them.

    Numbers are rounded to the nearest float32, as anywhere in training; nothing else is lost:
    an integer out of range, a fraction, a finite number beyond float32, text that is no number
    and bytes that are no UTF-8 are refused. Null stays null.

    Args:
        values: Integers, booleans, floats, decimals, strings or binaries `[rows]`.
        target: int64, float32, float64, string or binary.

    Returns:
        The values as `target`, `[rows]`.

    Raises:
        pa.ArrowInvalid: A value would be lost, or no value of that type has a meaning there.
    """
    source = values.type
    if source == target:
        return values
    if pt.is_dictionary(source):
        return cast_values(values.dictionary_decode(), target)
    if not _is_allowed(source, target):
        raise pa.ArrowInvalid(f"values of type {source} cannot become {target}")
    if target == pa.float32():
        return _cast_to_float32(values)
    # An integer beyond 2**53 becomes the nearest float64, as one beyond 2**24 the nearest float32.
    return pc.cast(values, target, safe=not (target == pa.float64() and pt.is_integer(source)))


def _is_text(source: pa.DataType) -> bool:
    return pt.is_string(source) or pt.is_large_string(source) or pt.is_string_view(source)


def _is_bytes(source: pa.DataType) -> bool:
    return (
        pt.is_binary(source)
        or pt.is_large_binary(source)
        or pt.is_binary_view(source)
        or pt.is_fixed_size_binary(source)
    )


def _is_allowed(source: pa.DataType, target: pa.DataType) -> bool:
    exact = pt.is_null(source) or pt.is_integer(source) or pt.is_boolean(source)
    if target in (pa.int64(), pa.float32(), pa.float64()):
        return exact or pt.is_floating(source) or pt.is_decimal(source) or _is_text(source)
    if target == pa.string():  # a float has no text that every engine agrees on
        return exact or _is_text(source) or _is_bytes(source)
    return target == pa.binary() and (pt.is_null(source) or _is_text(source) or _is_bytes(source))


def _cast_to_float32(values: pa.Array) -> pa.Array:
    # A safe cast would refuse integers above 2**24, which rounding serves well.
    result = pc.cast(values, pa.float32(), safe=not pt.is_integer(values.type))
    infinite = pc.is_inf(result)
    if not pc.any(infinite, min_count=0).as_py():
        return result
    if pt.is_floating(values.type):
        meant = pc.is_inf(pc.cast(values, pa.float64()))
    elif _is_text(values.type):
        meant = pc.match_substring_regex(values, _INFINITY_TEXT)
    else:
        meant = pa.array([False] * len(values))
    overflowed = values.filter(pc.and_not(infinite, meant))
    if len(overflowed):
        raise pa.ArrowInvalid(f"{overflowed[0].as_py()!r} is beyond the range of float32")
    return result
