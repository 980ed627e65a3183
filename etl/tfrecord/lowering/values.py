"""How values of one Arrow type become values of another, and what refuses to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa


@dataclass(frozen=True)
class Refusal:
    """A value that cannot be converted.

    Attributes:
        index: Where it stands among the values converted.
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


Converted = tuple[pa.Array, Refusal | None]


class ValueRule(Protocol):
    """Conversion of values of one type; picklable."""

    @property
    def target(self) -> pa.DataType:
        """Type of the result."""

    @property
    def is_identity(self) -> bool:
        """Whether nothing is converted."""

    def convert(self, values: pa.Array) -> Converted:
        """Converts values, nulls remaining nulls; also returns the first that is refused."""


@dataclass(frozen=True)
class Keep:
    """Leaves values as they are."""

    target: pa.DataType
    is_identity: bool = True

    def convert(self, values: pa.Array) -> Converted:
        """See `ValueRule`."""
        return values, None


@dataclass(frozen=True)
class Cast:
    """Casts to a type that holds all values of the source type."""

    target: pa.DataType
    is_identity: bool = False

    def convert(self, values: pa.Array) -> Converted:
        """See `ValueRule`."""
        return values.cast(self.target), None


@dataclass(frozen=True)
class Decode:
    """Replaces dictionary indices by what they stand for."""

    target: pa.DataType
    is_identity: bool = False

    def convert(self, values: pa.Array) -> Converted:
        """See `ValueRule`."""
        return values.dictionary_decode(), None


@dataclass(frozen=True)
class Chain:
    """One rule after another; each keeps the number of values."""

    first: ValueRule
    second: ValueRule
    is_identity: bool = False

    @property
    def target(self) -> pa.DataType:
        """Type of the result."""
        return self.second.target

    def convert(self, values: pa.Array) -> Converted:
        """See `ValueRule`."""
        values, refusal = self.first.convert(values)
        return self.second.convert(values) if refusal is None else (values, refusal)


def chain(first: ValueRule, second: ValueRule) -> ValueRule:
    """Both rules in turn, without what does nothing."""
    if first.is_identity:
        return second
    return first if second.is_identity else Chain(first, second)


def numbers(values: pa.Array) -> np.ndarray:
    """Numbers `[values]`, with zeros where they are null."""
    if values.null_count:
        values = values.fill_null(False if pa.types.is_boolean(values.type) else 0)
    return values.to_numpy(zero_copy_only=False)


def nulls(values: pa.Array) -> np.ndarray | None:
    """Which values are null, bool `[values]`, or None where none is."""
    return values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None


def refuse_first(
    bad: np.ndarray, values: pa.Array, what: str, allowed: str, fix: str
) -> Refusal | None:
    """Refusal of the first value of a bool mask `[values]`, or None where the mask is empty."""
    if not bad.any():
        return None
    index = int(bad.argmax())
    return Refusal(index, what, _show(values, index), allowed, fix)


def _show(values: pa.Array, index: int) -> str:
    """A value as text; Python's own dates hold less than Arrow's."""
    one = values.slice(index, 1)
    if pa.types.is_timestamp(values.type):
        return f"{one.cast(pa.int64())[0]} {values.type.unit} since 1970"
    if pa.types.is_date(values.type):
        return str(one.cast(pa.string())[0])
    return repr(one[0].as_py())


def holds_same(given: pa.DataType, planned: pa.DataType) -> bool:
    """Whether two types hold the same values: apart from zones, nullability and 64-bit offsets."""
    return bool(_canonical(given) == _canonical(planned))


def _canonical(data_type: pa.DataType) -> pa.DataType:
    t = pa.types
    if t.is_timestamp(data_type):
        return pa.timestamp(data_type.unit, None if data_type.tz is None else "UTC")
    if t.is_large_string(data_type):
        return pa.string()
    if t.is_large_binary(data_type):
        return pa.binary()
    if t.is_list(data_type) or t.is_large_list(data_type):
        return pa.list_(_canonical(data_type.value_type))
    if t.is_fixed_size_list(data_type):
        return pa.list_(_canonical(data_type.value_type), data_type.list_size)
    if t.is_struct(data_type):
        return pa.struct([(field.name, _canonical(field.type)) for field in data_type])
    if t.is_map(data_type):
        return pa.map_(_canonical(data_type.key_type), _canonical(data_type.item_type))
    return data_type
