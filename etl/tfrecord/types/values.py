"""Which values the encoder takes as they are, how others are converted, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.tfrecord.types.arrays import as_numbers, innermost, is_list, null_mask, split_lists
from etl.tfrecord.types.features import find_wire_kind
from etl.tfrecord.types.type_options import TypeOptions

Convert = Callable[[pa.Array], pa.Array]


class UnfitError(ValueError):
    """A type that the wire cannot carry; the message names an option that would help, if any."""


@dataclass
class RefusedError(ValueError):
    """A value that cannot be converted.

    Attributes:
        index: Where it stands among the values.
        what: What is wrong with it, after the words "column x has".
        received: The value.
        allowed: What would have been accepted.
        fix: What to do about it.
    """

    index: int
    what: str
    received: str
    allowed: str
    fix: str


@dataclass(frozen=True)
class ValueRule:
    """How values of a type become those of another.

    Attributes:
        target: Type of the result.
        convert: Converts values, nulls staying nulls; raises RefusedError. None: they stay.
    """

    target: pa.DataType
    convert: Convert | None = None


def plan_values(data_type: pa.DataType, options: TypeOptions) -> ValueRule:
    """Picks the conversion of values that are no lists, structs or maps.

    Raises:
        UnfitError: The encoder takes no such type, and no option was given that makes it fit.
    """
    t = pa.types
    if t.is_dictionary(data_type):
        return _plan_dictionary(data_type, options)
    if options.float64 == "cast" and (t.is_float64(data_type) or t.is_decimal(data_type)):
        return ValueRule(pa.float32(), narrow_doubles)
    if find_wire_kind(data_type) is not None:
        return ValueRule(data_type)  # the encoder refuses doubles by itself
    if t.is_uint64(data_type):
        return ValueRule(pa.int64(), narrow_unsigned)
    if t.is_date(data_type):
        return _plan_dates(options)
    if t.is_timestamp(data_type):
        return _plan_timestamps(options)
    for matches, target in _LAYOUTS:
        if matches(data_type):
            return ValueRule(target, partial(pc.cast, target_type=target))
    raise UnfitError


_LAYOUTS = (
    (pa.types.is_string_view, pa.large_string()),
    (pa.types.is_binary_view, pa.large_binary()),
    (pa.types.is_fixed_size_binary, pa.binary()),
)


def _plan_dictionary(data_type: pa.DictionaryType, options: TypeOptions) -> ValueRule:
    rule = plan_values(data_type.value_type, options)
    if rule.convert is None:
        return ValueRule(data_type)
    return ValueRule(rule.target, partial(_convert_dictionary, rule.convert))


def _convert_dictionary(convert: Convert, values: pa.Array) -> pa.Array:
    return convert(values.dictionary_decode())


def _plan_dates(options: TypeOptions) -> ValueRule:
    if options.dates == "error":
        raise UnfitError("option dates=days or iso")
    if options.dates == "days":
        return ValueRule(pa.int32(), dates_to_days)
    return ValueRule(pa.string(), dates_to_text)


def _plan_timestamps(options: TypeOptions) -> ValueRule:
    if options.timestamps == "error":
        raise UnfitError("option timestamps=s, ms, us or iso")
    if options.timestamps == "iso":
        return ValueRule(pa.string(), timestamps_to_text)
    return ValueRule(pa.int64(), partial(timestamps_to_integers, options.timestamps))


def plan_lists(data_type: pa.DataType, options: TypeOptions, depth: int) -> ValueRule:
    """Picks the conversion of values, or of lists of them, `depth` deep at most.

    Raises:
        UnfitError: They do not fit.
    """
    if not is_list(data_type):
        if pa.types.is_nested(data_type) and not pa.types.is_dictionary(data_type):
            raise UnfitError
        return plan_values(data_type, options)
    if not depth:
        raise UnfitError("recordType=SequenceExample, for arrays in arrays")
    rule = plan_lists(data_type.value_type, options, depth - 1)
    if rule.convert is None:
        return ValueRule(data_type)
    target = with_values(data_type, rule.target)
    return ValueRule(target, partial(_convert_lists, rule.convert, target))


def with_values(lists: pa.DataType, values: pa.DataType) -> pa.DataType:
    """Lists of the same layout that hold other values."""
    if pa.types.is_fixed_size_list(lists) and lists.list_size:
        return pa.list_(values, lists.list_size)
    return pa.large_list(values) if pa.types.is_large_list(lists) else pa.list_(values)


def _convert_lists(convert: Convert, target: pa.DataType, column: pa.Array) -> pa.Array:
    values, rows = split_lists(column)
    try:
        return rows.build(convert(values), target)
    except RefusedError as refused:
        refused.index = rows.row_of(refused.index)
        raise


def narrow_doubles(values: pa.Array) -> pa.Array:
    """Doubles, or decimals by way of doubles, to the nearest float32; infinite beyond its range."""
    return values.cast(pa.float64()).cast(pa.float32(), safe=False)


_INT64_MAX = np.iinfo(np.int64).max


def narrow_unsigned(values: pa.Array) -> pa.Array:
    """uint64 to int64."""
    wide = as_numbers(values)
    _refuse_first(
        wide > _INT64_MAX,
        values,
        "an unsigned integer beyond int64",
        f"at most {_INT64_MAX}",
        "cast the column to text or floats before the write",
    )
    return pa.array(wide.view(np.int64), mask=null_mask(values))


_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_DAY_MS = 86_400_000
# 0001-01-01 and 9999-12-31: what ISO 8601 writes with four digits.
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896


def dates_to_days(values: pa.Array) -> pa.Array:
    """Dates to days since 1970-01-01."""
    if pa.types.is_date32(values.type):
        return values.cast(pa.int32())
    days = np.floor_divide(as_numbers(values.cast(pa.int64())), _DAY_MS)
    return pa.array(days.astype(np.int32), mask=null_mask(values))


def dates_to_text(values: pa.Array) -> pa.Array:
    """Dates to text such as `2026-01-02`."""
    days = dates_to_days(values)
    _refuse_years(as_numbers(days), _FIRST_DAY, _LAST_DAY, values, "dates=days")
    return days.cast(pa.date32()).cast(pa.string())


def timestamps_to_integers(unit: str, values: pa.Array) -> pa.Array:
    """Timestamps to a number of units since 1970 UTC, rounded down."""
    ticks = values.cast(pa.int64())
    source, wanted = _NANOSECONDS[values.type.unit], _NANOSECONDS[unit]
    if source == wanted:
        return ticks
    if source < wanted:
        return pa.array(as_numbers(ticks) // (wanted // source), mask=null_mask(values))
    counts, factor = as_numbers(ticks), source // wanted
    limit = np.iinfo(np.int64).max // factor
    _refuse_first(
        (counts > limit) | (counts < -limit),
        values,
        f"a timestamp beyond int64 in {unit}",
        f"at most {limit} {values.type.unit} from 1970",
        "option timestamps with a coarser unit",
    )
    return pa.array(counts * factor, mask=null_mask(values))


def timestamps_to_text(values: pa.Array) -> pa.Array:
    """Timestamps to text such as `2026-01-02T03:04:05.678901Z`; without a zone there is no Z."""
    ticks = as_numbers(values.cast(pa.int64()))
    per_day = _NANOSECONDS["s"] * 86_400 // _NANOSECONDS[values.type.unit]
    int64 = np.iinfo(np.int64)
    first, last = max(_FIRST_DAY * per_day, int64.min), (_LAST_DAY + 1) * per_day - 1
    _refuse_years(ticks, first, min(last, int64.max), values, "timestamps=us")
    local = pa.array(ticks, mask=null_mask(values)).cast(pa.timestamp(values.type.unit))
    text = pc.replace_substring(local.cast(pa.string()), " ", "T")
    return text if values.type.tz is None else pc.binary_join_element_wise(text, "Z", "")


def _refuse_years(ticks: np.ndarray, first: int, last: int, values: pa.Array, option: str) -> None:
    _refuse_first(
        (ticks < first) | (ticks > last),
        values,
        "a date outside what ISO text holds",
        "years 1 to 9999",
        f"write them as numbers ({option}), or filter the rows",
    )


def _refuse_first(bad: np.ndarray, values: pa.Array, what: str, allowed: str, fix: str) -> None:
    """Refuses the first value of a bool mask `[values]`."""
    if bad.any():
        index = int(bad.argmax())
        raise RefusedError(index, what, _show(values.slice(index, 1)), allowed, fix)


def _show(one: pa.Array) -> str:
    """A value as text; Python's own dates hold less than Arrow's."""
    if pa.types.is_timestamp(one.type):
        return f"{one.cast(pa.int64())[0]} {one.type.unit} since 1970"
    return str(one.cast(pa.string())[0])


_SQL = (
    (pa.types.is_date, "unix_date({})"),
    (pa.types.is_timestamp, "unix_millis(timestamp({}))"),
    (pa.types.is_nested, "to_json({})"),
)


def suggest_cast(path: str, column: pa.Field) -> str:
    """What to write for a column that does not fit: in Spark's SQL where it comes from Spark."""
    values = innermost(column.type)
    if pa.types.is_struct(values):
        listed = is_list(column.type)
        return f"{path}.<field> for each field" if listed else f"{path} with fields, or drop it"
    if b"sluice.spark_type" in (column.metadata or {}):
        return _suggest_sql(path, column.type, values)
    if pa.types.is_nested(values):
        return f"arrays of {path}'s keys and values"
    if is_list(column.type) and is_list(column.type.value_type):
        return f"{path} as lists of plain values"
    target = f"pa.{_arrow_target(values)}"
    return f"{path}.cast({f'pa.list_({target})' if is_list(column.type) else target})"


def _suggest_sql(path: str, data_type: pa.DataType, values: pa.DataType) -> str:
    if pa.types.is_map(data_type):
        return f"map_keys({path}) and map_values({path})"
    if is_list(data_type) and is_list(data_type.value_type):
        return f"flatten({path})"
    sql = next((sql for matches, sql in _SQL if matches(values)), "cast({} as string)")
    return f"transform({path}, x -> {sql.format('x')})" if is_list(data_type) else sql.format(path)


def _arrow_target(values: pa.DataType) -> str:
    t = pa.types
    if t.is_null(values) or t.is_interval(values):
        return "string()"
    return "int32()" if t.is_date32(values) or t.is_time32(values) else "int64()"


def describe_unfit(path: str, column: pa.Field, error: UnfitError) -> str:
    """One sentence on a column or field that does not fit, and what to write instead."""
    spark_type = (column.metadata or {}).get(b"sluice.spark_type")
    shown = spark_type.decode() if spark_type else column.type
    option = f", or give {error}" if str(error) else ""
    return f"{path} ({shown}): write {suggest_cast(path, column)}{option}"
