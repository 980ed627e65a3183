"""The plan that turns the columns of any schema into features of records, made before any task.

Every column that does not fit is named in one error, with the cast that makes it fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.types.features import (
    TypeOptions,
    find_wire_kind,
    innermost,
    is_bytes,
    is_list,
    is_text,
)
from etl.tfrecord.types.parts import Split, as_numbers, find_parts, null_mask, split_lists
from etl.tfrecord.types.refusals import RefusedError, UnfitError, describe_unfit

Convert = Callable[[pa.Array], pa.Array]


class ValueRule(NamedTuple):
    """How values of a type become those of another; `convert` leaves nulls, None: all stay."""

    target: pa.DataType
    convert: Convert | None = None


def plan_values(data_type: pa.DataType, options: TypeOptions) -> ValueRule:
    """Picks the conversion of values that are no lists, structs or maps, or raises UnfitError."""
    t = pa.types
    if t.is_dictionary(data_type):
        rule = plan_values(data_type.value_type, options)
        if rule.convert is None:
            return ValueRule(data_type)
        return ValueRule(rule.target, partial(_convert_dictionary, rule.convert))
    if options.float64 == "cast" and (t.is_float64(data_type) or t.is_decimal(data_type)):
        return ValueRule(pa.float32(), narrow_doubles)
    if find_wire_kind(data_type) is not None:
        return ValueRule(data_type)  # the encoder refuses doubles by itself
    for found in (rule for matches, rule in _CONVERSIONS if matches(data_type)):
        return found
    for matches, name, forms in _TIMES:
        if matches(data_type):
            form = getattr(options, name)
            if form not in forms:
                *first, last = forms
                raise UnfitError(f"option {name}={', '.join(first)} or {last}")
            return forms[form]
    raise UnfitError


def _convert_dictionary(convert: Convert, values: pa.DictionaryArray) -> pa.Array:
    return convert(values.dictionary_decode())


def plan_lists(data_type: pa.DataType, options: TypeOptions, depth: int) -> ValueRule:
    """Picks the conversion of values, or of lists of them, `depth` deep at most."""
    if not is_list(data_type):
        if pa.types.is_nested(data_type) and not pa.types.is_dictionary(data_type):
            raise UnfitError
        return plan_values(data_type, options)
    if not depth:
        raise UnfitError("recordType=SequenceExample, for arrays in arrays")
    rule = plan_lists(data_type.value_type, options, depth - 1)
    if rule.convert is None:
        return ValueRule(data_type)
    target = _with_values(data_type, rule.target)
    return ValueRule(target, partial(_convert_lists, rule.convert, target))


def _with_values(lists: pa.DataType, values: pa.DataType) -> pa.DataType:
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


_INT64 = np.iinfo(np.int64)


def narrow_unsigned(values: pa.Array) -> pa.Array:
    wide = as_numbers(values)
    _refuse_first(
        wide > _INT64.max,
        values,
        "an unsigned integer beyond int64",
        f"at most {_INT64.max}",
        "cast the column to text or floats before the write",
    )
    return pa.array(wide.view(np.int64), mask=null_mask(values))


_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
_DAY_MS = 86_400_000
# 0001-01-01 and 9999-12-31: what ISO 8601 writes with four digits.
_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896


def dates_to_days(values: pa.Array) -> pa.Array:
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
    counts = as_numbers(ticks)
    if source < wanted:
        return pa.array(counts // (wanted // source), mask=null_mask(values))
    factor = source // wanted
    limit = _INT64.max // factor
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
    first, last = max(_FIRST_DAY * per_day, _INT64.min), (_LAST_DAY + 1) * per_day - 1
    _refuse_years(ticks, first, min(last, _INT64.max), values, "timestamps=us")
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


def _cast_rule(target: pa.DataType) -> ValueRule:
    return ValueRule(target, partial(pc.cast, target_type=target))


_CONVERSIONS = (
    (pa.types.is_uint64, ValueRule(pa.int64(), narrow_unsigned)),
    (pa.types.is_string_view, _cast_rule(pa.large_string())),
    (pa.types.is_binary_view, _cast_rule(pa.large_binary())),
    (pa.types.is_fixed_size_binary, _cast_rule(pa.binary())),
)
_DATES = {
    "days": ValueRule(pa.int32(), dates_to_days),
    "iso": ValueRule(pa.string(), dates_to_text),
}
_TIMESTAMPS = {
    **{u: ValueRule(pa.int64(), partial(timestamps_to_integers, u)) for u in ("s", "ms", "us")},
    "iso": ValueRule(pa.string(), timestamps_to_text),
}
_TIMES = (
    (pa.types.is_date, "dates", _DATES),
    (pa.types.is_timestamp, "timestamps", _TIMESTAMPS),
)

Outputs = tuple[tuple[str, pa.DataType], ...]


class ColumnPlan(NamedTuple):
    """How a column, or a part of one, becomes features; without `split` it is itself one."""

    outputs: Outputs
    split: Split | None = None

    def apply(self, column: pa.Array) -> list[pa.Array]:
        """Features of a column; raises InputDataError for a value that is refused."""
        return [column] if self.split is None else self.split(column)


def _convert(name: str, convert: Convert, column: pa.Array) -> list[pa.Array]:
    try:
        return [convert(column)]
    except RefusedError as refused:
        raise InputDataError(
            f"column {name!r} has {refused.what}",
            received=f"{refused.received} in row {refused.index} of the batch",
            allowed=refused.allowed,
            fix=refused.fix,
        ) from None


def _split_parts(split: Split, plans: list[ColumnPlan], column: pa.Array) -> list[pa.Array]:
    pairs = zip(plans, split(column), strict=True)
    return [feature for plan, part in pairs for feature in plan.apply(part)]


@dataclass
class _Planner:
    """Plans columns one by one; `problems` says what does not fit, one sentence each."""

    record_type: str
    options: TypeOptions
    problems: list[str] = field(default_factory=list)

    def plan(self, column: pa.Field) -> ColumnPlan:
        """Plans a column or a field, named by its path; notes a problem where it does not fit."""
        try:
            return self._plan(column)
        except UnfitError as error:
            self.problems.append(describe_unfit(column, error))
            return ColumnPlan(())

    def _plan(self, column: pa.Field) -> ColumnPlan:
        parts = find_parts(column, self.options)
        if parts is None:
            return self._plan_leaf(column)
        if not parts.fields:
            raise UnfitError
        plans = [*map(self.plan if parts.is_struct else self._plan_leaf, parts.fields)]
        outputs = tuple(output for plan in plans for output in plan.outputs)
        return ColumnPlan(outputs, partial(_split_parts, parts.split, plans))

    def _plan_leaf(self, column: pa.Field) -> ColumnPlan:
        depth = 2 if self.record_type == "SequenceExample" else 1
        rule = plan_lists(column.type, self.options, depth)
        split = rule.convert and partial(_convert, column.name, rule.convert)
        return ColumnPlan(((column.name, rule.target),), split)


def _check_byte_array(schema: pa.Schema, outputs: Outputs) -> list[str]:
    """What a schema has that payloads of their own cannot hold."""
    if len(schema) == 1 and all(is_bytes(kind) or is_text(kind) for _, kind in outputs):
        return []
    shown = ", ".join(f"{field.name} ({field.type})" for field in schema) or "no column"
    return [f"{shown}: one binary or string column is wanted"]


def _check_names(outputs: Outputs) -> list[str]:
    counts = Counter(name for name, _ in outputs)
    return [
        f"{name}: {count} columns end up under this name: rename one"
        for name, count in counts.items()
        if count > 1
    ]


@dataclass(frozen=True)
class ToExample:
    """Turns batches of `source` into those of `schema`, which the encoder takes; picklable."""

    source: pa.Schema
    schema: pa.Schema
    options: TypeOptions
    plans: tuple[ColumnPlan, ...]

    @property
    def is_identity(self) -> bool:
        return all(plan.split is None for plan in self.plans)

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Turns a batch `[rows]` in the planned schema into one in `schema`.

        Raises InputDataError for a value that is refused, or another schema than planned.
        """
        given, planned = batch.schema, self.source
        if (given.names, given.types) != (planned.names, planned.types):
            raise InputDataError(
                "a batch has another schema than the write was planned for",
                received=str(given.remove_metadata()),
                allowed=str(planned.remove_metadata()),
                fix="cast it: batch.cast(schema)",
            )
        if self.is_identity:
            return batch
        pairs = zip(self.plans, batch.columns, strict=True)
        arrays = [array for plan, column in pairs for array in plan.apply(column)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def describe(self) -> dict[str, Any]:
        """What reading back needs, as JSON; see `read_type_options`."""
        binary = [f.name for f in self.schema if is_bytes(innermost(f.type))]
        return {**self.options.chosen(), **({"binary": binary} if binary else {})}


def plan_to_example(
    schema: pa.Schema, record_type: str, options: TypeOptions | None = None
) -> ToExample:
    """Plans how the columns of a schema become features; refuses all that do not fit at once."""
    planner = _Planner(record_type, options or TypeOptions())
    plans = tuple(map(planner.plan, schema))
    outputs = tuple(output for plan in plans for output in plan.outputs)
    payload = _check_byte_array(schema, outputs) if record_type == "ByteArray" else []
    problems = [*planner.problems, *payload, *_check_names(outputs)]
    if problems:
        kind = "ByteArray records" if record_type == "ByteArray" else f"tf.train.{record_type}"
        raise ConfigError(
            f"{len(problems)} column(s) cannot be written as {kind}",
            received="; ".join(problems),
            allowed="booleans, integers, floats, decimals, strings, binary, lists of these; by "
            "option dates, timestamps, maps, structs' fields, vectors",
            fix="write the casts named above, or give the options for the whole job",
        )
    is_same = all(plan.split is None for plan in plans)
    return ToExample(schema, schema if is_same else pa.schema(outputs), planner.options, plans)
