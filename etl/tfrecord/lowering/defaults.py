"""What stands for a null: the policy's default as a value of the column's type."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa

from etl.tfrecord.lowering.floats import FLOAT32_MAX

_ZEROS: dict[str, int | float | str] = {"int64": 0, "float": 0.0, "bytes": ""}


def value_kind(data_type: pa.DataType) -> str:
    """Wire kind of a value type that the wire can carry: `int64`, `float` or `bytes`."""
    if pa.types.is_integer(data_type) or pa.types.is_boolean(data_type):
        return "int64"
    is_number = pa.types.is_floating(data_type) or pa.types.is_decimal(data_type)
    return "float" if is_number else "bytes"


def parse_default(default: int | float | str | None, data_type: pa.DataType) -> Any:
    """Turns a policy's default into a value of a column.

    Args:
        default: As the user gave it; numbers may be given as text.
        data_type: Type of the column's values.

    Raises:
        ValueError: It is no value of that type.
    """
    kind = value_kind(data_type)
    try:
        value = _parse(kind, _ZEROS[kind] if default is None else default)
        if pa.types.is_boolean(data_type):
            if value not in (0, 1):
                raise ValueError
            return bool(value)
        if pa.types.is_binary(data_type) or pa.types.is_large_binary(data_type):
            return value.encode()
        return pa.scalar(value, data_type).as_py()
    except (ValueError, TypeError, OverflowError, InvalidOperation, pa.ArrowException) as error:
        raise ValueError(f"default {default!r} is no {data_type}") from error


def _parse(kind: str, default: int | float | str) -> Any:
    if kind == "bytes":
        if not isinstance(default, str):
            raise TypeError
        return default
    if kind == "float":
        value = float(default)
        if FLOAT32_MAX < abs(value) < float("inf"):
            raise OverflowError
        return value
    number = Decimal(str(default))
    if number != number.to_integral_value():
        raise ValueError
    return int(number)
