"""The plan that turns decoded features back into the columns of a schema.

Names may differ in case, or have been changed by the write: the manifest says by which rules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pyarrow as pa

from conf.errors import ConfigError, InputDataError
from etl.tfrecord.types.column_nodes import is_vector
from etl.tfrecord.types.column_policies import ColumnPolicy, TypeOptions
from etl.tfrecord.types.conversion_rules import UnfitError
from etl.tfrecord.types.conversions import is_list
from etl.tfrecord.types.features import Kind, WireFeature
from etl.tfrecord.types.from_example_nodes import (
    DecodedBranch,
    DecodedLeaf,
    DecodedNode,
    join_map_entries,
    join_map_keys,
    join_struct,
    join_vector,
    join_vector_bytes,
)
from etl.tfrecord.types.to_example import (
    MAP_KEYS,
    MAP_VALUES,
    VECTOR_INDICES,
    VECTOR_SIZE,
    VECTOR_VALUES,
    read_description,
    read_renames,
)


def find_name(name: str, known: Iterable[str]) -> tuple[str, ...]:
    """Finds what a name stands for where upper and lower case do not matter, as in Spark.

    Args:
        name: As someone wrote it.
        known: What there is.

    Returns:
        The name itself if it is known, else those that differ from it in case alone, sorted.
    """
    same = {other for other in known if other.lower() == name.lower()}
    return (name,) if name in same else tuple(sorted(same))


@dataclass(frozen=True)
class FeatureNames:
    """What the features of the files are called.

    Attributes:
        known: All features; empty where no manifest lists them.
        renames: By column, the names that its features got, see `ToExample.renames`.
        separator: Between a struct's name and its field's.
    """

    known: tuple[str, ...] = ()
    renames: Mapping[str, Mapping[str, str]] = field(default_factory=dict, hash=False)
    separator: str = "."

    @cached_property
    def _paths(self) -> dict[str, set[str]]:
        """All features and the structs around them, by their names in lower case."""
        changed = [name for renamed in self.renames.values() for name in renamed]
        paths: dict[str, set[str]] = {}
        for name in (*self.known, *changed):
            parts = name.split(self.separator)
            for count in range(1, len(parts) + 1):
                path = self.separator.join(parts[:count])
                paths.setdefault(path.lower(), set()).add(path)
        return paths

    def find(self, path: str) -> str:
        """Finds the column or field that a path stands for; the path itself where there is none.

        Raises:
            UnfitError: Several differ from it in case alone.
        """
        spellings = find_name(path, self._paths.get(path.lower(), ()))
        if len(spellings) > 1:
            raise UnfitError(
                f"which of {', '.join(spellings)} is meant? Spell it as it was written"
            )
        return spellings[0] if spellings else path

    def resolve(self, column: str, path: str) -> str:
        """Name of the feature that a path within a column ended up under."""
        return self.renames.get(column, {}).get(path, path)


def read_names(type_options: Mapping[str, Any], features: Iterable[WireFeature]) -> FeatureNames:
    """What a manifest calls its features.

    Args:
        type_options: Its account of the columns.
        features: Its features.

    Raises:
        InputDataError: The account is damaged.
    """
    separator = read_description(type_options).struct_separator
    names = tuple(feature.name for feature in features)
    return FeatureNames(names, read_renames(type_options), separator)


@dataclass
class FromExamplePlanner:
    """Plans columns one by one.

    Attributes:
        record_type: Record type to be read.
        options: How columns became features.
        names: What the features are called.
        features: What is to be decoded so far, by name.
        problems: What cannot be read, one sentence each.
    """

    record_type: str
    options: TypeOptions
    names: FeatureNames
    features: dict[str, WireFeature] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _column: str = ""

    def plan_column(self, column: pa.Field) -> DecodedNode | None:
        """Plans a column; None, with a problem noted, where it cannot be read."""
        self._column = column.name
        with contextlib.suppress(UnfitError):  # told below
            self._column = self.names.find(column.name)
        return self.plan(column.name, column)

    def plan(self, path: str, column: pa.Field) -> DecodedNode | None:
        """Plans a column or a field; None, with a problem noted, where it cannot be read."""
        try:
            return self._plan(self.names.find(path), column)
        except UnfitError as error:
            self.problems.append(error.describe(path, column))
            return None

    def _plan(self, path: str, column: pa.Field) -> DecodedNode:
        policy = self.options.policy(path)
        if is_vector(column):
            return self._plan_vector(path, column.type, policy)
        if pa.types.is_struct(column.type):
            children = [self.plan(self.options.join(path, f.name), f) for f in column.type]
            nodes = tuple(child for child in children if child is not None)
            return DecodedBranch(column.type, nodes, join_struct, (path,))
        if pa.types.is_map(column.type):
            return self._plan_map(path, column.type, policy)
        return self._plan_leaf(path, column.type, policy)

    def _plan_leaf(self, path: str, target: pa.DataType, policy: ColumnPolicy) -> DecodedLeaf:
        values, depth = target, 0
        while is_list(values):
            values, depth = values.value_type, depth + 1
        if depth > 2 or (depth == 2 and self.record_type != "SequenceExample"):
            raise UnfitError("arrays of arrays are feature lists of record type SequenceExample")
        kind, form = _wire_kind(values, policy)
        name = self.names.resolve(self._column, path)
        feature = WireFeature(name, kind, depth == 1, depth == 2)
        if self.features.setdefault(feature.name, feature) != feature:
            raise UnfitError(f"feature {feature.name} is also wanted in another form")
        return DecodedLeaf(feature.name, target, form, path)

    def _plan_map(self, path: str, target: pa.MapType, policy: ColumnPolicy) -> DecodedNode:
        if policy.maps == "error":
            raise UnfitError("option maps=entries, or maps=keys with mapKeys")
        if policy.maps == "keys":
            if not policy.map_keys:
                raise UnfitError("maps=keys needs the keys: option mapKeys")
            names = [self.options.join(path, key) for key in policy.map_keys]
            children = [self._plan(name, target.item_field) for name in names]
            return DecodedBranch(target, tuple(children), join_map_keys, (policy.map_keys,))
        keys, values = self.options.join(path, MAP_KEYS), self.options.join(path, MAP_VALUES)
        parts = (
            self._plan_leaf(keys, pa.list_(target.key_type), self.options.policy(keys)),
            self._plan_leaf(values, pa.list_(target.item_type), self.options.policy(values)),
        )
        return DecodedBranch(target, parts, join_map_entries, (path,))

    def _plan_vector(self, path: str, target: pa.StructType, policy: ColumnPolicy) -> DecodedNode:
        _, size, indices, values = (f.type for f in target)
        if policy.vectors == "bytes":
            leaf = self._plan_leaf(path, pa.binary(), policy)
            return DecodedBranch(target, (leaf,), join_vector_bytes, (path,))
        parts: tuple[tuple[str, pa.DataType], ...] = ((path, values),)
        if policy.vectors == "sparse":
            names = (VECTOR_INDICES, VECTOR_VALUES, VECTOR_SIZE)
            types = (indices, values, size)
            parts = tuple(zip((self.options.join(path, n) for n in names), types, strict=True))
        leaves = tuple(self._plan_leaf(name, part, policy) for name, part in parts)
        return DecodedBranch(target, leaves, join_vector)


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


@dataclass(frozen=True)
class FromExample:
    """Turns decoded batches into batches of one schema; picklable.

    Attributes:
        target: That schema, without metadata.
        features: What to decode, in this order.
        nodes: One per column.
    """

    target: pa.Schema
    features: tuple[WireFeature, ...]
    nodes: tuple[DecodedNode, ...]

    def apply(self, batch: pa.RecordBatch, name: str = "<buffer>") -> pa.RecordBatch:
        """Turns a decoded batch into columns.

        Args:
            batch: One column per feature, in the order of `features`.
            name: What to call its origin in an error.

        Returns:
            As many rows, in `target`.

        Raises:
            InputDataError: A value does not fit its column, or is missing where the column is not
                nullable; names the origin and the feature.
        """
        columns = [node.build(batch, name) for node in self.nodes]
        for target_field, column in zip(self.target, columns, strict=True):
            if column.null_count and not target_field.nullable:
                raise InputDataError(
                    f"{name}: feature {target_field.name!r} is missing in "
                    f"{column.null_count} record(s), but its column is not nullable",
                    fix="make the column nullable in the schema",
                )
        if not columns:
            rows = pa.StructArray.from_buffers(pa.struct([]), batch.num_rows, [None])
            return pa.RecordBatch.from_struct_array(rows)
        return pa.RecordBatch.from_arrays(columns, schema=self.target)


def plan_from_example(
    target: pa.Schema,
    record_type: str,
    options: TypeOptions | None = None,
    names: FeatureNames | None = None,
) -> FromExample:
    """Plans how features become the columns of a schema.

    Args:
        target: The schema; see `etl.tfrecord.spark.schema.to_arrow_schema`.
        record_type: `"Example"` or `"SequenceExample"`.
        options: How dates, timestamps, maps, vectors and structs were written; None for the
            defaults.
        names: What the features are called; None where every column goes by its own name.

    Raises:
        ConfigError: Columns that cannot be read, all of them in one message.
    """
    options = options or TypeOptions()
    planner = FromExamplePlanner(record_type, options, names or FeatureNames())
    nodes = [planner.plan_column(field) for field in target]
    if planner.problems:
        raise ConfigError(
            f"{len(planner.problems)} column(s) cannot be read from tf.train.{record_type}",
            received="; ".join(planner.problems),
            allowed="boolean, integers, float, double, decimal, string, binary, arrays of these; "
            "structs of these; by option dates, timestamps, maps, vectors",
            fix="give the options named above, or read the column as another type",
        )
    fields = [pa.field(field.name, field.type, field.nullable) for field in target]
    built = tuple(node for node in nodes if node is not None)
    return FromExample(pa.schema(fields), tuple(planner.features.values()), built)
