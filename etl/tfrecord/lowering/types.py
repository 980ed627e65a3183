"""Which rule converts values of a type: the type mapping of the wire."""

from __future__ import annotations

import pyarrow as pa

from etl.tfrecord.lowering.dates import (
    DatesToDays,
    DatesToText,
    TimestampsToIntegers,
    TimestampsToText,
)
from etl.tfrecord.lowering.floats import NarrowDecimals, NarrowDoubles
from etl.tfrecord.lowering.integers import NarrowUnsigned
from etl.tfrecord.lowering.lists import is_list
from etl.tfrecord.lowering.values import Cast, Decode, Keep, ValueRule, chain
from etl.tfrecord.policies import ColumnPolicy


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
            where they are packed with others, or defaults stand for some of them.

    Raises:
        UnfitError: No policy, or none that was given, makes the type fit.
    """
    t = pa.types
    if t.is_dictionary(data_type):
        rule = plan_value(data_type.value_type, policy, in_place)
        if rule.is_identity and not in_place:
            return Keep(data_type)
        return chain(Decode(data_type.value_type), rule)
    if t.is_float64(data_type):
        return _plan_double(policy, in_place)
    if t.is_decimal(data_type):
        return _plan_decimal(data_type, policy, in_place)
    if t.is_uint64(data_type):
        return NarrowUnsigned(policy.integers)
    if t.is_date(data_type) or t.is_timestamp(data_type):
        return _plan_date(data_type, policy)
    if (t.is_integer(data_type) or t.is_boolean(data_type) or t.is_floating(data_type)
            or t.is_string(data_type) or t.is_large_string(data_type) or t.is_binary(data_type)
            or t.is_large_binary(data_type)):  # fmt: skip
        return Keep(data_type)
    if t.is_string_view(data_type):
        return Cast(pa.large_string())
    if t.is_binary_view(data_type):
        return Cast(pa.large_binary())
    if t.is_fixed_size_binary(data_type):
        return Cast(pa.binary())
    raise UnfitError(_advise(data_type))


def _plan_double(policy: ColumnPolicy, in_place: bool) -> ValueRule:
    if policy.float64 == "error" and not in_place:
        return Keep(pa.float64())  # the encoder refuses by the same rule
    return NarrowDoubles(policy.float64)


def _plan_decimal(data_type: pa.DataType, policy: ColumnPolicy, in_place: bool) -> ValueRule:
    if policy.float64 == "exact":
        return NarrowDecimals()
    if policy.float64 == "error" and not in_place:
        return Keep(data_type)
    return chain(Cast(pa.float64()), NarrowDoubles(policy.float64))


def _plan_date(data_type: pa.DataType, policy: ColumnPolicy) -> ValueRule:
    if pa.types.is_date(data_type):
        if policy.dates == "error":
            raise UnfitError("option dates=days or iso")
        return DatesToDays() if policy.dates == "days" else DatesToText()
    if policy.timestamps == "error":
        raise UnfitError("option timestamps=s, ms, us or iso")
    if policy.timestamps == "iso":
        return TimestampsToText(data_type)
    return TimestampsToIntegers(policy.timestamps, data_type.unit)


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
