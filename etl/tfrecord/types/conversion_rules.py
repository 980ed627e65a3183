"""The rule of conversion for each type of value: integers, floats, decimals, dates, timestamps."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.tfrecord.types.column_policies import ColumnPolicy
from etl.tfrecord.types.conversions import (
    Converted,
    Refusal,
    ValueRule,
    as_numbers,
    cast_values,
    chain_rules,
    decode_dictionary,
    is_list,
    null_mask,
    refuse_first,
)
from etl.tfrecord.types.wire_kinds import find_wire_kind

FLOAT32_MAX = float(np.finfo(np.float32).max)
# Whole numbers up to here are exact in float32; larger ones that change are ids or times.
_EXACT_INTEGERS = 2.0**24

_FIX_FLOATS = "policy float64=cast or clip, or cast the column before the write"


def narrow_doubles(values: pa.Array, mode: Literal["error", "exact", "cast", "clip"]) -> Converted:
    """float64 to the nearest float32; `mode` is policy `float64`, see `ColumnPolicy`."""
    wide = as_numbers(values)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        narrow = wide.astype(np.float32)
        refusal = None
        if mode == "clip":
            beyond = np.isinf(narrow) & np.isfinite(wide)
            if beyond.any():
                narrow[beyond] = np.copysign(np.float32(FLOAT32_MAX), narrow[beyond])
        elif mode != "cast":
            changed = (narrow != wide) & ~np.isnan(wide)
            if mode == "error":
                changed = changed & _is_gross(wide, narrow)
            refusal = refuse_first(
                changed,
                values,
                "a double that float32 cannot hold",
                _ALLOWED_FLOATS[mode],
                _FIX_FLOATS,
            )
    return pa.array(narrow, mask=null_mask(values)), refusal


_ALLOWED_FLOATS = {
    "error": "up to 3.4028235e38 in magnitude, no whole number that would become another",
    "exact": "values that float32 holds exactly",
}


def _is_gross(wide: np.ndarray, narrow: np.ndarray) -> np.ndarray:
    """Which of the changed values change by more than rounding, bool `[values]`."""
    beyond = np.isinf(narrow) | (narrow == 0)
    return beyond | ((np.abs(wide) > _EXACT_INTEGERS) & (np.trunc(wide) == wide))


def narrow_decimals(values: pa.Array) -> Converted:
    """Decimals to float32 where it holds them exactly, which 0.5 is and 0.1 is not."""
    wide = as_numbers(values.cast(pa.float64()))
    with np.errstate(over="ignore"):
        narrow = wide.astype(np.float32)
    bad = narrow != wide
    # A double may itself be a rounded decimal, so what it stands for is compared too.
    back = pa.array(np.where(bad, 0, narrow).astype(np.float64)).cast(values.type, safe=False)
    same = as_numbers(pc.equal(back, values.fill_null(0) if values.null_count else values))
    refusal = refuse_first(
        bad | ~same,
        values,
        "a decimal that float32 cannot hold",
        _ALLOWED_FLOATS["exact"],
        _FIX_FLOATS,
    )
    return pa.array(narrow, mask=null_mask(values)), refusal


_INT64_MAX = np.iinfo(np.int64).max


def narrow_unsigned(values: pa.Array, mode: Literal["error", "clip"]) -> Converted:
    """uint64 to int64; `mode` is policy `integers`, see `ColumnPolicy`."""
    wide, refusal = as_numbers(values), None
    if mode == "clip":
        wide = np.minimum(wide, np.uint64(_INT64_MAX))
    else:
        refusal = refuse_first(
            wide > _INT64_MAX,
            values,
            "an unsigned integer beyond int64",
            f"at most {_INT64_MAX}",
            "policy integers=clip, or cast the column before the write",
        )
    return pa.array(wide.view(np.int64), mask=null_mask(values)), refusal


_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_DAY_MS = 86_400_000
# 0001-01-01 and 9999-12-31: what ISO 8601 writes with four digits.
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
_ISO_YEARS = "years 1 to 9999"
_AS_NUMBERS = "write them as numbers ({}), or filter the rows"


def dates_to_days(values: pa.Array) -> Converted:
    """Dates to days since 1970-01-01."""
    if pa.types.is_date32(values.type):
        return values.cast(pa.int32()), None
    days = np.floor_divide(as_numbers(values.cast(pa.int64())), _DAY_MS)
    return pa.array(days.astype(np.int32), mask=null_mask(values)), None


def dates_to_text(values: pa.Array) -> Converted:
    """Dates to text such as `2026-01-02`."""
    days = dates_to_days(values)[0]
    refusal = _refuse_years(as_numbers(days), _FIRST_DAY, _LAST_DAY, values, "dates=days")
    return days.cast(pa.date32()).cast(pa.string()), refusal


def timestamps_to_integers(values: pa.Array, unit: Literal["s", "ms", "us"]) -> Converted:
    """Timestamps to a number of units since 1970 UTC, rounded down."""
    ticks = values.cast(pa.int64())
    source, wanted = _NANOSECONDS[values.type.unit], _NANOSECONDS[unit]
    if source == wanted:
        return ticks, None
    if source < wanted:
        return pa.array(as_numbers(ticks) // (wanted // source), mask=null_mask(values)), None
    counts, factor = as_numbers(ticks), source // wanted
    limit = np.iinfo(np.int64).max // factor
    refusal = refuse_first(
        (counts > limit) | (counts < -limit),
        values,
        f"a timestamp beyond int64 in {unit}",
        f"at most {limit} {values.type.unit} from 1970",
        "policy timestamps with a coarser unit",
    )
    with np.errstate(over="ignore"):
        return pa.array(counts * factor, mask=null_mask(values)), refusal


def timestamps_to_text(values: pa.Array) -> Converted:
    """Timestamps to text such as `2026-01-02T03:04:05.678901Z`; without a zone there is no Z."""
    ticks = as_numbers(values.cast(pa.int64()))
    per_day = _NANOSECONDS["s"] * 86_400 // _NANOSECONDS[values.type.unit]
    int64 = np.iinfo(np.int64)
    limits = max(_FIRST_DAY * per_day, int64.min), min((_LAST_DAY + 1) * per_day - 1, int64.max)
    refusal = _refuse_years(ticks, limits[0], limits[1], values, "timestamps=us")
    if refusal is not None:
        return values, refusal
    local = pa.array(ticks, mask=null_mask(values)).cast(pa.timestamp(values.type.unit))
    text = pc.replace_substring(local.cast(pa.string()), " ", "T")
    if values.type.tz is None:
        return text, None
    return pc.binary_join_element_wise(text, "Z", ""), None


def _refuse_years(
    ticks: np.ndarray, first: int, last: int, values: pa.Array, option: str
) -> Refusal | None:
    bad = (ticks < first) | (ticks > last)
    return refuse_first(
        bad, values, "a date outside what ISO text holds", _ISO_YEARS, _AS_NUMBERS.format(option)
    )


_ZEROS: dict[str, int | float | str] = {"int64": 0, "float": 0.0, "bytes": ""}


def parse_default(default: int | float | str | None, data_type: pa.DataType) -> Any:
    """Turns a policy's default into a value of a column.

    Args:
        default: As the user gave it; numbers may be given as text.
        data_type: Type of the column's values.

    Raises:
        ValueError: It is no value of that type.
    """
    wire_kind = find_wire_kind(data_type)
    if wire_kind is None:
        raise ValueError(f"default {default!r} is no {data_type}")
    kind = wire_kind.feature
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


def is_binary(data_type: pa.DataType) -> bool:
    """Whether a type is bytes that need not be text, or lists of such."""
    while is_list(data_type):
        data_type = data_type.value_type
    return pa.types.is_binary(data_type) or pa.types.is_large_binary(data_type)


class UnfitError(ValueError):
    """A type that the wire cannot carry under the policies; the message says what would mend it."""

    def describe(self, path: str, column: pa.Field) -> str:
        """One sentence on a column or field, which is named by its Spark type where that is known.

        Args:
            path: Its name, with those of the structs around it.
            column: Its Arrow form.
        """
        spark_type = (column.metadata or {}).get(b"sluice.spark_type")
        return f"{path} ({spark_type.decode() if spark_type else column.type}): {self}"


def plan_value(data_type: pa.DataType, policy: ColumnPolicy, in_place: bool) -> ValueRule:
    """Picks the conversion of values that are no lists, structs or maps.

    Args:
        data_type: Their type.
        policy: The column's policies.
        in_place: Whether the values must be of their final type, with no help of the encoder:
            where defaults stand for some of them.

    Raises:
        UnfitError: No policy, or none that was given, makes the type fit.
    """
    t = pa.types
    if t.is_dictionary(data_type):
        rule = plan_value(data_type.value_type, policy, in_place)
        if rule.is_identity and not in_place:
            return ValueRule(data_type)
        return chain_rules(ValueRule(data_type.value_type, decode_dictionary), rule)
    if t.is_float64(data_type):
        return _plan_double(policy, in_place)
    if t.is_decimal(data_type):
        return _plan_decimal(data_type, policy, in_place)
    if t.is_uint64(data_type):
        return ValueRule(pa.int64(), narrow_unsigned, (policy.integers,))
    if t.is_date(data_type) or t.is_timestamp(data_type):
        return _plan_date(data_type, policy)
    if (t.is_integer(data_type) or t.is_boolean(data_type) or t.is_floating(data_type)
            or t.is_string(data_type) or t.is_large_string(data_type) or t.is_binary(data_type)
            or t.is_large_binary(data_type)):  # fmt: skip
        return ValueRule(data_type)
    if t.is_string_view(data_type):
        return _cast_to(pa.large_string())
    if t.is_binary_view(data_type):
        return _cast_to(pa.large_binary())
    if t.is_fixed_size_binary(data_type):
        return _cast_to(pa.binary())
    raise UnfitError(_advise(data_type))


def _cast_to(target: pa.DataType) -> ValueRule:
    return ValueRule(target, cast_values, (target,))


def _narrow(policy: ColumnPolicy) -> ValueRule:
    return ValueRule(pa.float32(), narrow_doubles, (policy.float64,))


def _plan_double(policy: ColumnPolicy, in_place: bool) -> ValueRule:
    if policy.float64 == "error" and not in_place:
        return ValueRule(pa.float64())  # the encoder refuses by the same rule
    return _narrow(policy)


def _plan_decimal(data_type: pa.DataType, policy: ColumnPolicy, in_place: bool) -> ValueRule:
    if policy.float64 == "exact":
        return ValueRule(pa.float32(), narrow_decimals)
    if policy.float64 == "error" and not in_place:
        return ValueRule(data_type)
    return chain_rules(_cast_to(pa.float64()), _narrow(policy))


def _plan_date(data_type: pa.DataType, policy: ColumnPolicy) -> ValueRule:
    if pa.types.is_date(data_type):
        if policy.dates == "error":
            raise UnfitError("option dates=days or iso")
        if policy.dates == "days":
            return ValueRule(pa.int32(), dates_to_days)
        return ValueRule(pa.string(), dates_to_text)
    if policy.timestamps == "error":
        raise UnfitError("option timestamps=s, ms, us or iso")
    if policy.timestamps == "iso":
        return ValueRule(pa.string(), timestamps_to_text)
    return ValueRule(pa.int64(), timestamps_to_integers, (policy.timestamps,))


def _advise(data_type: pa.DataType) -> str:
    if pa.types.is_null(data_type):
        return "no Arrow form: cast it to a number or to text, or drop it"
    if pa.types.is_duration(data_type) or pa.types.is_interval(data_type):
        return "cast it to a number of days, months or seconds"
    if pa.types.is_time(data_type):
        return "cast it to a number or to text"
    return "cast it to a number, text or binary"


def value_options(data_type: pa.DataType) -> set[str]:
    """Fields of `ColumnPolicy` that have a meaning for values of a type."""
    if pa.types.is_dictionary(data_type) or is_list(data_type):
        return value_options(data_type.value_type)
    if pa.types.is_float64(data_type) or pa.types.is_decimal(data_type):
        return {"float64"}
    if pa.types.is_uint64(data_type):
        return {"integers"}
    if pa.types.is_date(data_type):
        return {"dates"}
    return {"timestamps"} if pa.types.is_timestamp(data_type) else set()
