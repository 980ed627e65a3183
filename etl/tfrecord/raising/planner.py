"""Plans which features each wanted column is read from, collecting what cannot be read."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import pyarrow as pa

from etl.tfrecord.features import Kind, WireFeature
from etl.tfrecord.lowering.lists import is_list
from etl.tfrecord.lowering.packing import PACKED_PREFIX, Slot
from etl.tfrecord.lowering.tree import (
    MAP_KEYS,
    MAP_VALUES,
    VECTOR_INDICES,
    VECTOR_SIZE,
    VECTOR_VALUES,
)
from etl.tfrecord.lowering.types import UnfitError
from etl.tfrecord.lowering.vectors import is_vector
from etl.tfrecord.policies import ColumnPolicy, LoweringOptions
from etl.tfrecord.raising.names import FeatureNames
from etl.tfrecord.raising.nodes import (
    Cut,
    Node,
    RaisedEntries,
    RaisedKeys,
    RaisedLeaf,
    RaisedStruct,
    RaisedVector,
)

_PACKED_KINDS: Mapping[str, Kind] = {
    PACKED_PREFIX + "int64": "int64",
    PACKED_PREFIX + "float": "float32",
    PACKED_PREFIX + "bytes": "bytes",
}


@dataclass
class Planner:
    """Plans columns one by one.

    Attributes:
        record_type: Record type to be read.
        options: How columns were lowered.
        slots: What lies where in packed features.
        names: What the features are called.
        features: What is to be decoded so far, by name.
        problems: What cannot be read, one sentence each.
    """

    record_type: str
    options: LoweringOptions
    slots: Mapping[str, tuple[Slot, ...]]
    names: FeatureNames
    features: dict[str, WireFeature] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _column: str = ""

    @cached_property
    def _places(self) -> dict[str, tuple[str, Cut]]:
        """Packed feature of each slot, and its place there."""
        places = {}
        for packed, slots in self.slots.items():
            total, start = sum(slot.width for slot in slots), 0
            for slot in slots:
                places[slot.name] = packed, Cut(start, slot.width, total, is_list=True)
                start += slot.width
        return places

    def plan_column(self, column: pa.Field) -> Node | None:
        """Plans a column; None, with a problem noted, where it cannot be read."""
        self._column = column.name
        with contextlib.suppress(UnfitError):  # told below
            self._column = self.names.find(column.name)
        return self.plan(column.name, column)

    def plan(self, path: str, column: pa.Field) -> Node | None:
        """Plans a column or a field; None, with a problem noted, where it cannot be read."""
        try:
            return self._plan(self.names.find(path), column)
        except UnfitError as error:
            self.problems.append(error.describe(path, column))
            return None

    def _join(self, path: str, name: str) -> str:
        return f"{path}{self.options.struct_separator}{name}"

    def _plan(self, path: str, column: pa.Field) -> Node:
        policy = self.options.policy(path)
        if is_vector(column):
            return self._plan_vector(path, column.type, policy)
        if pa.types.is_struct(column.type):
            children = [self.plan(self._join(path, f.name), f) for f in column.type]
            return RaisedStruct(column.type, tuple(c for c in children if c is not None), path)
        if pa.types.is_map(column.type):
            return self._plan_map(path, column.type, policy)
        return self._plan_leaf(path, column.type, policy)

    def _plan_leaf(self, path: str, target: pa.DataType, policy: ColumnPolicy) -> RaisedLeaf:
        values, depth = target, 0
        while is_list(values):
            values, depth = values.value_type, depth + 1
        if depth > 2 or (depth == 2 and self.record_type != "SequenceExample"):
            raise UnfitError("arrays of arrays are feature lists of record type SequenceExample")
        kind, form = _wire_kind(values, policy)
        name = self.names.resolve(self._column, path)
        cut, feature = None, WireFeature(name, kind, depth == 1, depth == 2)
        if name in self._places:
            packed, place = self._places[name]
            cut = _plan_cut(place, depth)
            if _PACKED_KINDS.get(packed, kind) != kind:
                raise UnfitError(f"it was packed into {packed}")
            feature = WireFeature(packed, kind, True)
        if self.features.setdefault(feature.name, feature) != feature:
            raise UnfitError(f"feature {feature.name} is also wanted in another form")
        return RaisedLeaf(feature.name, target, form, cut, path)

    def _plan_map(self, path: str, target: pa.MapType, policy: ColumnPolicy) -> Node:
        if policy.maps == "error":
            raise UnfitError("option maps=entries, or maps=keys with mapKeys")
        if policy.maps == "keys":
            if not policy.map_keys:
                raise UnfitError("maps=keys needs the keys: option mapKeys")
            names = [self._join(path, key) for key in policy.map_keys]
            children = [self._plan(name, target.item_field) for name in names]
            return RaisedKeys(target, policy.map_keys, tuple(children))
        keys, values = self._join(path, MAP_KEYS), self._join(path, MAP_VALUES)
        return RaisedEntries(
            target,
            self._plan_leaf(keys, pa.list_(target.key_type), self.options.policy(keys)),
            self._plan_leaf(values, pa.list_(target.item_type), self.options.policy(values)),
            path,
        )

    def _plan_vector(self, path: str, target: pa.StructType, policy: ColumnPolicy) -> Node:
        _, size, indices, values = (f.type for f in target)
        parts: tuple[tuple[str, pa.DataType], ...] = ((path, values),)
        if policy.vectors == "sparse":
            names = (VECTOR_INDICES, VECTOR_VALUES, VECTOR_SIZE)
            types = (indices, values, size)
            parts = tuple(zip((self._join(path, n) for n in names), types, strict=True))
        leaves = tuple(self._plan_leaf(name, part, policy) for name, part in parts)
        return RaisedVector(target, leaves)


def _plan_cut(place: Cut, depth: int) -> Cut:
    if depth > 1 or (depth == 0 and place.width != 1):
        raise UnfitError(f"its slot holds {place.width} value(s): read it as an array of values")
    return replace(place, is_list=depth == 1)


def _wire_kind(data_type: pa.DataType, policy: ColumnPolicy) -> tuple[Kind, str]:
    """Kind of the feature that holds values of a type, and the form of dates and timestamps."""
    t = pa.types
    if t.is_boolean(data_type) or t.is_integer(data_type):
        return "int64", ""
    if t.is_floating(data_type) or t.is_decimal(data_type):
        return "float32", ""
    if (t.is_string(data_type) or t.is_large_string(data_type) or t.is_binary(data_type)
            or t.is_large_binary(data_type)):  # fmt: skip
        return "bytes", ""
    if t.is_date(data_type):
        if policy.dates == "error":
            raise UnfitError("option dates=days or iso, as it was written")
        return ("bytes" if policy.dates == "iso" else "int64"), policy.dates
    if t.is_timestamp(data_type):
        if policy.timestamps == "error":
            raise UnfitError("option timestamps=s, ms, us or iso, as it was written")
        return ("bytes" if policy.timestamps == "iso" else "int64"), policy.timestamps
    raise UnfitError("no feature is read as this type")
