"""Plans how each column is lowered, collecting what does not fit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pyarrow as pa

from etl.tfrecord.lowering.defaults import parse_default
from etl.tfrecord.lowering.lists import ConvertLists, is_list
from etl.tfrecord.lowering.maps import MapEntries, MapKeys
from etl.tfrecord.lowering.nodes import Leaf, Node
from etl.tfrecord.lowering.structs import FlattenStruct
from etl.tfrecord.lowering.types import UnfitError, plan_value, value_options
from etl.tfrecord.lowering.values import ValueRule
from etl.tfrecord.lowering.vectors import DENSE_LISTS, DenseVectors, SparseVectors, is_vector
from etl.tfrecord.policies import ColumnPolicy, LoweringOptions

_NULLS = {"nulls", "default"}
MAP_KEYS, MAP_VALUES = "keys", "values"
VECTOR_INDICES, VECTOR_VALUES, VECTOR_SIZE = "indices", "values", "size"


@dataclass
class Planner:
    """Plans columns one by one.

    Attributes:
        record_type: Record type to be written.
        options: Policies and layout.
        problems: What does not fit, one sentence each.
        meanings: By path of column or field, the fields of `ColumnPolicy` that mean something.
    """

    record_type: str
    options: LoweringOptions
    problems: list[str] = field(default_factory=list)
    meanings: dict[str, set[str]] = field(default_factory=dict)

    def plan(self, path: str, column: pa.Field) -> Node | None:
        """Plans a column or a field; None, with a problem noted, where it does not fit."""
        try:
            return self._plan(path, column, self.options.policy(path))
        except UnfitError as error:
            self.problems.append(error.describe(path, column))
            return None

    def join(self, path: str, name: str) -> str:
        """Name of a part of a column."""
        return f"{path}{self.options.struct_separator}{name}"

    def _plan(self, path: str, column: pa.Field, policy: ColumnPolicy) -> Node:
        if is_vector(column):
            return self._plan_vector(path, policy)
        if pa.types.is_struct(column.type):
            self.meanings.setdefault(path, set())
            if not column.type.num_fields:
                raise UnfitError("a struct without fields holds nothing: drop it")
            children = [self.plan(self.join(path, f.name), f) for f in column.type]
            return FlattenStruct(tuple(child for child in children if child is not None))
        if pa.types.is_map(column.type):
            return self._plan_map(path, column.type, policy)
        return self._plan_leaf(path, column.type, policy)

    def _plan_leaf(self, path: str, data_type: pa.DataType, policy: ColumnPolicy) -> Leaf:
        meanings = _NULLS | value_options(data_type)
        if is_list(data_type):
            meanings |= {"null_elements"}
        self.meanings.setdefault(path, set()).update(meanings)
        rule = self._plan_rule(data_type, policy, depth=0)
        default = None
        if policy.nulls == "default":
            default = _checked_default(policy, _default_type(rule.target))
        return Leaf(path, rule, policy.nulls, default)

    def _plan_rule(self, data_type: pa.DataType, policy: ColumnPolicy, depth: int) -> ValueRule:
        """Rule of values or lists, `depth` lists deep."""
        if not is_list(data_type):
            packed = self.options.layout == "packed" and depth == 0
            in_place = packed or (policy.nulls == "default" and depth == 0)
            return self._plan_element(data_type, policy, in_place)
        if depth == 1 and self.record_type != "SequenceExample":
            raise UnfitError("arrays of arrays need record type SequenceExample")
        if depth == 2:
            raise UnfitError("arrays are nested twice at most: flatten it")
        inner, fixed = data_type.value_type, pa.types.is_fixed_size_list(data_type)
        packed = self.options.layout == "packed" and fixed and depth == 0
        if is_list(inner):
            return ConvertLists(data_type, self._plan_rule(inner, policy, depth + 1),
                                policy.null_elements)  # fmt: skip
        in_place = packed or policy.null_elements == "default"
        in_place |= fixed and policy.nulls == "default"
        element = self._plan_element(inner, policy, in_place)
        default = None
        if policy.null_elements == "default":
            default = _checked_default(policy, element.target)
        return ConvertLists(data_type, element, policy.null_elements, default)

    def _plan_element(
        self, data_type: pa.DataType, policy: ColumnPolicy, in_place: bool
    ) -> ValueRule:
        if pa.types.is_struct(data_type):
            raise UnfitError("select its fields as arrays of their own (array_of_structs.field)")
        if pa.types.is_map(data_type):
            raise UnfitError("a map inside an array: select keys or values as arrays")
        return plan_value(data_type, policy, in_place)

    def _plan_vector(self, path: str, policy: ColumnPolicy) -> Node:
        self.meanings.setdefault(path, set()).update(_NULLS, {"vectors", "float64"})
        if policy.vectors == "dense":
            return DenseVectors(self._plan_leaf(path, DENSE_LISTS, policy))
        return SparseVectors(
            self._plan_part(self.join(path, VECTOR_INDICES), pa.list_(pa.int32())),
            self._plan_part(self.join(path, VECTOR_VALUES), pa.list_(pa.float64())),
            self._plan_part(self.join(path, VECTOR_SIZE), pa.int32()),
        )

    def _plan_part(self, name: str, data_type: pa.DataType, has_nulls: bool = False) -> Leaf:
        """Leaf of a part of a column, with no null elements but where so stated."""
        policy = self.options.policy(name)
        if not has_nulls:
            policy = replace(policy, null_elements="error")
        return self._plan_leaf(name, data_type, policy)

    def _plan_map(self, path: str, data_type: pa.DataType, policy: ColumnPolicy) -> Node:
        self.meanings.setdefault(path, set()).update(_NULLS, {"maps", "map_keys"})
        if policy.maps == "error":
            raise UnfitError("option maps=entries, or maps=keys with mapKeys")
        if policy.maps == "keys":
            return self._plan_map_keys(path, data_type, policy)
        key_lists, value_lists = pa.list_(data_type.key_type), pa.list_(data_type.item_type)
        key_name, value_name = self.join(path, MAP_KEYS), self.join(path, MAP_VALUES)
        keys = self._plan_part(key_name, key_lists)
        values = self._plan_part(value_name, value_lists, has_nulls=True)
        drops = self.options.policy(value_name).null_elements == "drop"
        return MapEntries(keys, values, key_lists, value_lists, drops)

    def _plan_map_keys(self, path: str, data_type: pa.DataType, policy: ColumnPolicy) -> Node:
        if not policy.map_keys:
            raise UnfitError("maps=keys needs option mapKeys, the keys")
        key_type = data_type.key_type
        if pa.types.is_dictionary(key_type):
            key_type = key_type.value_type
        try:
            keys = tuple(pa.scalar(k).cast(key_type).as_py() for k in policy.map_keys)
        except pa.ArrowException as error:
            raise UnfitError(f"mapKeys are no {key_type}: {error}") from error
        names = [self.join(path, key) for key in policy.map_keys]
        children = [self._plan(n, data_type.item_field, self.options.policy(n)) for n in names]
        return MapKeys(keys, key_type, tuple(children))


def _default_type(data_type: pa.DataType) -> pa.DataType | None:
    """Type of what stands for a null row; None where that is an empty list."""
    if not is_list(data_type):
        return data_type
    return data_type.value_type if pa.types.is_fixed_size_list(data_type) else None


def _checked_default(policy: ColumnPolicy, data_type: pa.DataType | None) -> object:
    if data_type is None or is_list(data_type):
        return None
    try:
        return parse_default(policy.default, data_type)
    except ValueError as error:
        raise UnfitError(str(error)) from error
