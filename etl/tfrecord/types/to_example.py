"""The plan that turns the columns of any schema into features of records, made before any task.

Every column that does not fit is named in one error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pyarrow as pa

from conf.errors import ConfigError, InputDataError, did_you_mean
from etl.tfrecord.types.column_nodes import (
    DENSE_LISTS,
    ColumnBranch,
    ColumnLeaf,
    ColumnNode,
    FeatureColumn,
    is_vector,
    join_feature_columns,
    split_dense_vectors,
    split_map_entries,
    split_map_keys,
    split_sparse_vectors,
    split_struct,
    split_vector_bytes,
)
from etl.tfrecord.types.column_policies import ColumnPolicy, TypeOptions, option_name
from etl.tfrecord.types.conversion_rules import (
    UnfitError,
    is_binary,
    parse_default,
    plan_value,
    value_options,
)
from etl.tfrecord.types.conversions import ConvertLists, ValueConversion, holds_same, is_list


def write_description(options: TypeOptions) -> dict[str, Any]:
    """Describes options as JSON; see `read_description`."""
    return {
        "struct_separator": options.struct_separator,
        "name_collisions": options.name_collisions,
        "policy": _describe_policy(options.default),
        "columns": {n: _describe_policy(p) for n, p in sorted(options.columns.items())},
    }


def _describe_policy(policy: ColumnPolicy) -> dict[str, Any]:
    values = {f.name: getattr(policy, f.name) for f in fields(ColumnPolicy)}
    default = ColumnPolicy()
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value != getattr(default, name)
    }


def read_description(description: Mapping[str, Any]) -> TypeOptions:
    """Reads what `write_description` wrote; an empty one is that of the defaults.

    Raises:
        InputDataError: It is not of that form.
    """
    try:
        return TypeOptions(
            default=_read_policy(description.get("policy", {})),
            columns={n: _read_policy(p) for n, p in description.get("columns", {}).items()},
            struct_separator=description.get("struct_separator", "."),
            name_collisions=description.get("name_collisions", "error"),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _damaged(error) from error


def read_renames(description: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Reads what `nameCollisions=rename` did; see `ToExample.renames`.

    Raises:
        InputDataError: It is not of that form.
    """
    try:
        return {
            str(column): {str(given): str(name) for given, name in names.items()}
            for column, names in description.get("renamed", {}).items()
        }
    except AttributeError as error:
        raise _damaged(error) from error


def _damaged(error: Exception) -> InputDataError:
    return InputDataError(
        "the manifest's account of the columns is damaged",
        received=repr(error),
        fix="write the directory again, or read it with a schema and options of your own",
    )


def _read_policy(given: Mapping[str, Any]) -> ColumnPolicy:
    values: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in given.items()}
    return ColumnPolicy(**values)


_NULLS = {"nulls", "default"}
MAP_KEYS, MAP_VALUES = "keys", "values"
VECTOR_INDICES, VECTOR_VALUES, VECTOR_SIZE = "indices", "values", "size"


@dataclass
class ToExamplePlanner:
    """Plans columns one by one.

    Attributes:
        record_type: Record type to be written.
        options: Policies and names.
        problems: What does not fit, one sentence each.
        meanings: By path of column or field, the fields of `ColumnPolicy` that mean something.
    """

    record_type: str
    options: TypeOptions
    problems: list[str] = field(default_factory=list)
    meanings: dict[str, set[str]] = field(default_factory=dict)

    def plan(self, path: str, column: pa.Field) -> ColumnNode | None:
        """Plans a column or a field; None, with a problem noted, where it does not fit."""
        try:
            return self._plan(path, column, self.options.policy(path))
        except UnfitError as error:
            self.problems.append(error.describe(path, column))
            return None

    def _plan(self, path: str, column: pa.Field, policy: ColumnPolicy) -> ColumnNode:
        if is_vector(column):
            return self._plan_vector(path, policy)
        if pa.types.is_struct(column.type):
            self.meanings.setdefault(path, set())
            if not column.type.num_fields:
                raise UnfitError("a struct without fields holds nothing: drop it")
            children = [self.plan(self.options.join(path, f.name), f) for f in column.type]
            return ColumnBranch(
                tuple(child for child in children if child is not None), split_struct
            )
        if pa.types.is_map(column.type):
            return self._plan_map(path, column.type, policy)
        return self._plan_leaf(path, column.type, policy)

    def _plan_leaf(self, path: str, data_type: pa.DataType, policy: ColumnPolicy) -> ColumnLeaf:
        meanings = _NULLS | value_options(data_type)
        if is_list(data_type):
            meanings |= {"null_elements"}
        self.meanings.setdefault(path, set()).update(meanings)
        rule = self._plan_rule(data_type, policy, depth=0)
        default = None
        if policy.nulls == "default":
            default = _checked_default(policy, _default_type(rule.target))
        return ColumnLeaf(path, rule, policy.nulls, default)

    def _plan_rule(
        self, data_type: pa.DataType, policy: ColumnPolicy, depth: int
    ) -> ValueConversion:
        """Rule of values or lists, `depth` lists deep."""
        if not is_list(data_type):
            return self._plan_element(data_type, policy, policy.nulls == "default" and depth == 0)
        if depth == 1 and self.record_type != "SequenceExample":
            raise UnfitError("arrays of arrays need record type SequenceExample")
        if depth == 2:
            raise UnfitError("arrays are nested twice at most: flatten it")
        inner, fixed = data_type.value_type, pa.types.is_fixed_size_list(data_type)
        if is_list(inner):
            return ConvertLists(data_type, self._plan_rule(inner, policy, depth + 1),
                                policy.null_elements)  # fmt: skip
        in_place = policy.null_elements == "default"
        in_place |= fixed and policy.nulls == "default"
        element = self._plan_element(inner, policy, in_place)
        default = None
        if policy.null_elements == "default":
            default = _checked_default(policy, element.target)
        return ConvertLists(data_type, element, policy.null_elements, default)

    def _plan_element(
        self, data_type: pa.DataType, policy: ColumnPolicy, in_place: bool
    ) -> ValueConversion:
        if pa.types.is_struct(data_type):
            raise UnfitError("select its fields as arrays of their own (array_of_structs.field)")
        if pa.types.is_map(data_type):
            raise UnfitError("a map inside an array: select keys or values as arrays")
        return plan_value(data_type, policy, in_place)

    def _plan_vector(self, path: str, policy: ColumnPolicy) -> ColumnNode:
        self.meanings.setdefault(path, set()).update(_NULLS, {"vectors", "float64"})
        if policy.vectors == "dense":
            leaf = self._plan_leaf(path, DENSE_LISTS, policy)
            return ColumnBranch((leaf,), split_dense_vectors)
        if policy.vectors == "bytes":
            leaf = self._plan_leaf(path, pa.large_binary(), policy)
            return ColumnBranch((leaf,), split_vector_bytes)
        parts = (
            self._plan_part(self.options.join(path, VECTOR_INDICES), pa.list_(pa.int32())),
            self._plan_part(self.options.join(path, VECTOR_VALUES), pa.list_(pa.float64())),
            self._plan_part(self.options.join(path, VECTOR_SIZE), pa.int32()),
        )
        return ColumnBranch(parts, split_sparse_vectors)

    def _plan_part(self, name: str, data_type: pa.DataType, has_nulls: bool = False) -> ColumnLeaf:
        """Leaf of a part of a column, with no null elements but where so stated."""
        policy = self.options.policy(name)
        if not has_nulls:
            policy = replace(policy, null_elements="error")
        return self._plan_leaf(name, data_type, policy)

    def _plan_map(self, path: str, data_type: pa.DataType, policy: ColumnPolicy) -> ColumnNode:
        self.meanings.setdefault(path, set()).update(_NULLS, {"maps", "map_keys"})
        if policy.maps == "error":
            raise UnfitError("option maps=entries, or maps=keys with mapKeys")
        if policy.maps == "keys":
            return self._plan_map_keys(path, data_type, policy)
        key_lists, value_lists = pa.list_(data_type.key_type), pa.list_(data_type.item_type)
        join = self.options.join
        key_name, value_name = join(path, MAP_KEYS), join(path, MAP_VALUES)
        keys = self._plan_part(key_name, key_lists)
        values = self._plan_part(value_name, value_lists, has_nulls=True)
        drops = self.options.policy(value_name).null_elements == "drop"
        return ColumnBranch((keys, values), split_map_entries, (key_lists, value_lists, drops))

    def _plan_map_keys(self, path: str, data_type: pa.DataType, policy: ColumnPolicy) -> ColumnNode:
        if not policy.map_keys:
            raise UnfitError("maps=keys needs option mapKeys, the keys")
        key_type = data_type.key_type
        if pa.types.is_dictionary(key_type):
            key_type = key_type.value_type
        try:
            keys = tuple(pa.scalar(k).cast(key_type).as_py() for k in policy.map_keys)
        except pa.ArrowException as error:
            raise UnfitError(f"mapKeys are no {key_type}: {error}") from error
        names = [self.options.join(path, key) for key in policy.map_keys]
        children = [self._plan(n, data_type.item_field, self.options.policy(n)) for n in names]
        return ColumnBranch(tuple(children), split_map_keys, (keys, key_type))


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


def check_byte_array(schema: pa.Schema, outputs: list[FeatureColumn]) -> list[str]:
    """What a schema has that payloads of their own cannot hold."""
    if len(schema) == 1 and [_is_bytes(output.type) for output in outputs] in ([True], []):
        return []
    shown = ", ".join(f"{field.name} ({field.type})" for field in schema) or "no column"
    return [f"{shown}: one binary or string column is wanted"]


def _is_bytes(data_type: pa.DataType) -> bool:
    t = pa.types
    return bool(t.is_binary(data_type) or t.is_large_binary(data_type) or t.is_string(data_type)
                or t.is_large_string(data_type))  # fmt: skip


def resolve_names(
    outputs: list[FeatureColumn], options: TypeOptions
) -> tuple[list[str], list[str]]:
    """Names of the features, and what is wrong with them."""
    given = [output.name for output in outputs]
    if options.name_collisions == "error":
        counts = Counter(given)
        problems = [
            f"{name}: {count} columns end up under this name (name occurs twice): rename one, or "
            "option nameCollisions=rename"
            for name, count in counts.items()
            if count > 1
        ]
        return given, problems
    names: dict[str, None] = {}
    taken = set(given)
    for name in given:
        number, free = 1, name
        while free in names or (free != name and free in taken):
            number += 1
            free = f"{name}_{number}"
        names[free] = None
    return list(names), []


def check_policies(options: TypeOptions, meanings: Mapping[str, set[str]]) -> list[str]:
    """What is wrong with the policies.

    Args:
        options: All policies.
        meanings: By path of column or field, the fields of `ColumnPolicy` that mean something.

    Returns:
        Policies of columns that are not there or mean nothing for them, and contradictions.
    """
    by_name: dict[str, set[str]] = {}
    for path, meaning in meanings.items():
        name = options.policy_name(path)
        if name is not None:
            by_name.setdefault(name, set()).update(meaning)
    problems = []
    for name, policy in options.columns.items():
        if name not in by_name:
            problems.append(f"{name}: option columns names no such column, "
                            + did_you_mean(name, meanings))  # fmt: skip
            continue
        without = [
            f"{option_name(f.name)}={getattr(policy, f.name)}"
            for f in fields(ColumnPolicy)
            if getattr(policy, f.name) not in (f.default, getattr(options.default, f.name))
            and f.name not in by_name[name]
        ]
        if without:
            problems.append(f"{name}: {', '.join(without)} means nothing for its type")
    problems += [
        f"{name or 'all columns'}: {text}"
        for name, policy in [("", options.default), *options.columns.items()]
        for text in _contradictions(policy)
    ]
    return problems


def _contradictions(policy: ColumnPolicy) -> list[str]:
    texts = []
    if policy.default is not None and "default" not in (policy.nulls, policy.null_elements):
        texts.append("option default needs nulls=default or nullElements=default")
    if policy.map_keys and policy.maps != "keys":
        texts.append("option mapKeys needs maps=keys")
    return texts


@dataclass(frozen=True)
class ToExample:
    """Turns batches of one schema into batches that the encoder takes; picklable.

    Attributes:
        source: Schema of the batches that come in.
        schema: Schema of those that go out.
        options: Policies and names.
        nodes: One per column.
    """

    source: pa.Schema
    schema: pa.Schema
    options: TypeOptions
    nodes: tuple[ColumnNode, ...]

    @property
    def _outputs(self) -> list[FeatureColumn]:
        """What the columns become, under the names it has in the end."""
        outputs = list(join_feature_columns(self.nodes))
        names, _ = resolve_names(outputs, self.options)
        return [
            FeatureColumn(name, output.type) for name, output in zip(names, outputs, strict=True)
        ]

    @property
    def renames(self) -> dict[str, dict[str, str]] | None:
        """By column, the names that its features got by `nameCollisions=rename`.

        Each by the name that it would have had; None where two parts of one column had the same,
        so that none could tell which is which.
        """
        names, seen = iter(self._outputs), set()
        renames: dict[str, dict[str, str]] = {}
        for column, node in zip(self.source.names, self.nodes, strict=True):
            for given in (output.name for output in node.outputs):
                if (column, given) in seen:
                    return None
                seen.add((column, given))
                name = next(names).name
                if name != given:
                    renames.setdefault(column, {})[given] = name
        return renames

    @property
    def is_identity(self) -> bool:
        """Whether batches go out as they come in."""
        return self.source is self.schema

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Turns a batch into features.

        Args:
            batch: Rows in the planned schema, sliced or not.

        Returns:
            As many rows, in `schema`.

        Raises:
            InputDataError: A value that the policies refuse, or another schema than planned; names
                the column and the row.
        """
        if self.is_identity and batch.schema.types == self.source.types:
            return batch
        columns = self._conform(batch)
        pairs = zip(self.nodes, columns, strict=True)
        arrays = [array for node, column in pairs for array in node.apply(column)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _conform(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """The columns in the planned types, which may differ in zones, nullability and width."""
        try:
            types = self.source.types
            if batch.schema.names == self.source.names and all(
                holds_same(given, planned)
                for given, planned in zip(batch.schema.types, types, strict=True)
            ):
                pairs = zip(batch.columns, types, strict=True)
                return [c if c.type == planned else c.cast(planned) for c, planned in pairs]
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
            pass
        raise InputDataError(
            "a batch has another schema than the write was planned for",
            received=str(batch.schema),
            allowed=str(self.source),
        )

    def describe(self) -> dict[str, Any]:
        """What reading back needs, as JSON; see `read_description`."""
        binary = [output.name for output in self._outputs if is_binary(output.type)]
        extras = {"binary": binary, "renamed": self.renames}
        description = write_description(self.options)
        return {**description, **{name: value for name, value in extras.items() if value}}


def plan_to_example(
    schema: pa.Schema, record_type: str, options: TypeOptions | None = None
) -> ToExample:
    """Plans how the columns of a schema become features.

    Args:
        schema: Schema of the batches to come.
        record_type: `"Example"`, `"SequenceExample"` or `"ByteArray"`.
        options: Policies and names; None for the defaults.

    Raises:
        ConfigError: Columns that do not fit, all of them in one message with what would make each
            fit.
    """
    options = options or TypeOptions()
    planner = ToExamplePlanner(record_type, options)
    nodes = [planner.plan(field.name, field) for field in schema]
    outputs = list(join_feature_columns(node for node in nodes if node is not None))
    planner.problems += check_policies(options, planner.meanings)
    if record_type == "ByteArray":
        planner.problems += check_byte_array(schema, outputs)
    names, collisions = resolve_names(outputs, options)
    planner.problems += collisions
    if planner.problems:
        message = _MESSAGES.get(record_type, record_type)
        raise ConfigError(
            f"{len(planner.problems)} column(s) cannot be written as {message}",
            received="; ".join(planner.problems),
            allowed="booleans, integers, floats, decimals, strings, binary, lists of these; by "
            "option dates, timestamps, maps, structs' fields, vectors",
            fix="give the options named above for all columns, or for one by option columns",
        )
    outputs = [
        FeatureColumn(name, output.type) for name, output in zip(names, outputs, strict=True)
    ]
    return _assemble(schema, options, tuple(node for node in nodes if node is not None), outputs)


_MESSAGES = {
    "Example": "tf.train.Example",
    "SequenceExample": "tf.train.SequenceExample",
    "ByteArray": "ByteArray records",
}


def _assemble(
    schema: pa.Schema,
    options: TypeOptions,
    nodes: tuple[ColumnNode, ...],
    outputs: list[FeatureColumn],
) -> ToExample:
    if [o.name for o in outputs] == schema.names and all(node.is_identity for node in nodes):
        return ToExample(schema, schema, options, nodes)
    features = pa.schema([pa.field(output.name, output.type) for output in outputs])
    return ToExample(schema, features, options, nodes)
